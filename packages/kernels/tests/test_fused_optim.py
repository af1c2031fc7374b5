"""`FusedSgd` beside torch's SGD, and what the fused optimizers share. Adam and Adagrad are tested by `test_cpu_optim`,
whose host variants are these classes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import FusedAdagrad, FusedAdam, FusedSgd

SHAPES = [(7, 3), (1,), (4097,), (0,), (5, 123)]
VARIANTS: list[dict[str, Any]] = [
    {"lr": 0.01, "weight_decay": 0.1},
    {"lr": 0.01, "momentum": 0.9, "dampening": 0.5},
    {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
variants = pytest.mark.parametrize("options", VARIANTS, ids=["plain", "dampened", "nesterov"])


def _params(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def _give_gradients(step: int, *sides: list[torch.nn.Parameter]) -> None:
    for side in sides:
        for param, grad in zip(side, _params(step, side[0].dtype), strict=True):
            param.grad = grad.detach()


@variants
def test_sgd_equals_torch_over_100_steps(options: dict[str, Any]) -> None:
    ours, theirs = _params(0), _params(0)
    mine, peer = FusedSgd(ours, **options), torch.optim.SGD(theirs, **options)
    for step in range(1, 101):
        _give_gradients(step, ours, theirs)
        mine.step()
        peer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
        assert mine.state[one].keys() == peer.state[two].keys()


@variants
def test_sgd_states_go_both_ways(options: dict[str, Any]) -> None:
    ours, theirs = _params(0), _params(0)
    mine, peer = FusedSgd(ours, **options), torch.optim.SGD(theirs, **options)
    _give_gradients(1, ours, theirs)
    mine.step()
    peer.step()
    swapped_mine, swapped_peer = FusedSgd(ours, **options), torch.optim.SGD(theirs, **options)
    swapped_mine.load_state_dict(peer.state_dict())
    swapped_peer.load_state_dict(mine.state_dict())
    for step in range(2, 6):
        _give_gradients(step, ours, theirs)
        swapped_mine.step()
        swapped_peer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)


def test_each_parameters_first_step_is_its_own() -> None:
    """With dampening, a buffer starts from the whole gradient whenever its parameter steps first."""
    ours: list[Tensor] = [torch.ones(3), torch.ones(3)]
    theirs = [param.clone() for param in ours]
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    mine, peer = FusedSgd(ours, **options), torch.optim.SGD(theirs, **options)
    for step in range(3):
        for side in (ours, theirs):
            side[0].grad = torch.full((3,), 1.0 + step)
            side[1].grad = None if step == 0 else torch.full((3,), 2.0 * step)
        mine.step()
        peer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two)


def test_factor_and_copies_equal_separate_passes() -> None:
    fused, apart = _params(0), _params(0)
    first, second = (FusedSgd(side, lr=0.01, momentum=0.9) for side in (fused, apart))
    copies = {param: torch.zeros_like(param, dtype=torch.bfloat16) for param in fused}
    for step in range(1, 4):
        _give_gradients(step, fused, apart)
        first.step(factor=0.25, copies=copies)
        for param in apart:
            assert param.grad is not None
            param.grad.mul_(0.25)
        second.step()
    for one, two in zip(fused, apart, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(copies[one], two.detach().bfloat16())


def test_momentum_of_a_low_precision_parameter_stays_precise_through_a_load() -> None:
    params = _params(0, torch.bfloat16)
    optimizer = FusedSgd(params, lr=0.01, momentum=0.9)
    for step in (1, 2):
        _give_gradients(step, params)
        optimizer.step()
    resumed = FusedSgd(_params(1, torch.bfloat16), momentum=0.9)
    resumed.load_state_dict(optimizer.state_dict())
    for param, loaded in zip(params, resumed.param_groups[0]["params"], strict=True):
        assert resumed.state[loaded]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(resumed.state[loaded]["momentum_buffer"], optimizer.state[param]["momentum_buffer"])


def test_momentum_switched_on_later() -> None:
    ours, theirs = torch.ones(3), torch.ones(3)
    mine, peer = FusedSgd([ours], lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    for step in range(3):
        for param, optimizer in ((ours, mine), (theirs, peer)):
            param.grad = torch.full((3,), 1.0 + step)
            optimizer.param_groups[0]["momentum"] = 0.9 if step else 0.0
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


MAKERS: dict[str, Any] = {"adam": FusedAdam, "adagrad": FusedAdagrad, "sgd": FusedSgd}


@pytest.mark.parametrize("kind", MAKERS)
def test_any_device_is_served_and_maximising_refused(kind: str) -> None:
    MAKERS[kind]([torch.ones(2, device="meta")])
    optimizer = MAKERS[kind]([torch.ones(2)])
    saved = optimizer.state_dict()
    saved["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match="only minimises"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("kind", MAKERS)
def test_pickled_optimizers_go_on(kind: str) -> None:
    params = _params(0)
    optimizer = MAKERS[kind](params, lr=0.01)
    _give_gradients(1, params)
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    _give_gradients(2, params, again.param_groups[0]["params"])
    optimizer.step()
    again.step()
    for one, two in zip(params, again.param_groups[0]["params"], strict=True):
        assert torch.equal(one, two)


def test_bad_hyperparameters_are_named() -> None:
    with pytest.raises(ValueError, match="nesterov needs momentum above 0"):
        FusedSgd([torch.ones(2)], nesterov=True)
