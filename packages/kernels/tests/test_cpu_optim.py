"""The host optimizers beside torch's over 100 steps; states going both ways, fused factors and copies, rollback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import CpuAdagrad, CpuAdam, CpuLamb, CpuLion, Lamb, Lion

SHAPES = [(7, 3), (1,), (4097,), (0,), (5, 123)]


def _params(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def _give_gradients(step: int, *sides: list[torch.nn.Parameter]) -> None:
    for side in sides:
        for param, grad in zip(side, _params(step, side[0].dtype), strict=True):
            param.grad = grad.detach()


PAIRS: dict[str, tuple[Any, Any]] = {
    "adamw": (
        lambda p: CpuAdam(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    ),
    "adam": (
        lambda p: CpuAdam(p, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
        lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    ),
    "amsgrad": (
        lambda p: CpuAdam(p, lr=1e-2, betas=(0.8, 0.9), amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.9), amsgrad=True, weight_decay=0.0),
    ),
    "adagrad": (
        lambda p: CpuAdagrad(p, lr=1e-1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1),
        lambda p: torch.optim.Adagrad(p, lr=1e-1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.1),
    ),
}
pairs = pytest.mark.parametrize("pair", PAIRS)


@pairs
def test_equal_to_torch_over_100_steps(pair: str) -> None:
    make_ours, make_theirs = PAIRS[pair]
    ours, theirs = _params(0), _params(0)
    mine, peer = make_ours(ours), make_theirs(theirs)
    for step in range(1, 101):
        _give_gradients(step, ours, theirs)
        mine.step()
        peer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
        states = mine.state[one], peer.state[two]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            assert value.dtype == states[1][name].dtype
            torch.testing.assert_close(value, states[1][name], atol=1e-6, rtol=1e-5)


@pairs
def test_states_go_both_ways(pair: str) -> None:
    make_ours, make_theirs = PAIRS[pair]
    ours, theirs = _params(0), _params(0)
    mine, peer = make_ours(ours), make_theirs(theirs)
    _give_gradients(1, ours, theirs)
    mine.step()
    peer.step()
    mine_saved, peer_saved = mine.state_dict(), peer.state_dict()
    swapped_mine, swapped_peer = make_ours(ours), make_theirs(theirs)
    swapped_mine.load_state_dict(peer_saved)
    swapped_peer.load_state_dict(mine_saved)
    for step in range(2, 6):
        _give_gradients(step, ours, theirs)
        swapped_mine.step()
        swapped_peer.step()
    assert float(swapped_mine.state[ours[0]]["step"]) == 5.0
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)


def test_loaded_adam_keeps_torchs_kind_of_weight_decay() -> None:
    params = _params(0)
    saved = torch.optim.Adam(_params(0), weight_decay=0.1).state_dict()
    optimizer = CpuAdam(params)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is False
    saved["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match="only minimises"):
        CpuAdam(_params(0)).load_state_dict(saved)


MAKERS: dict[str, Any] = {"adam": CpuAdam, "adagrad": CpuAdagrad, "lion": CpuLion, "lamb": CpuLamb}


@pytest.mark.parametrize("kind", MAKERS)
def test_fused_factor_and_copies_equal_separate_passes(kind: str) -> None:
    fused, apart = _params(0), _params(0)
    first, second = MAKERS[kind](fused, lr=0.01), MAKERS[kind](apart, lr=0.01)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_low_precision_parameters_and_states(dtype: torch.dtype, state: torch.dtype) -> None:
    low, exact = _params(0, dtype), [torch.nn.Parameter(param.float()) for param in _params(0, dtype)]
    optimizer, peer = CpuAdam(low, lr=1e-2, state_dtype=state), torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.0)
    for step in range(1, 11):
        _give_gradients(step, low)
        for param, mirror in zip(low, exact, strict=True):
            assert param.grad is not None
            mirror.grad = param.grad.float()
        optimizer.step()
        peer.step()
    for param, mirror in zip(low, exact, strict=True):
        assert optimizer.state[param]["exp_avg_sq"].dtype == state
        torch.testing.assert_close(param.float(), mirror.float(), atol=0.05, rtol=0.05)
    resumed = CpuAdam(_params(1, dtype), state_dtype=state)
    resumed.load_state_dict(optimizer.state_dict())
    for param, loaded in zip(low, resumed.param_groups[0]["params"], strict=True):
        assert torch.equal(resumed.state[loaded]["exp_avg"], optimizer.state[param]["exp_avg"])
        assert resumed.state[loaded]["exp_avg"].dtype == state


def test_rollback_restores_parameters_moments_and_step() -> None:
    params = _params(0)
    optimizer = CpuAdam(params, lr=1e-2, weight_decay=0.1)
    for step in range(1, 4):
        _give_gradients(step, params)
        optimizer.step()
    before = [param.detach().clone() for param in params]
    moments = [{name: value.clone() for name, value in optimizer.state[param].items()} for param in params]
    _give_gradients(4, params)
    optimizer.step(factor=0.5)
    copies = {param: torch.zeros_like(param, dtype=torch.bfloat16) for param in params}
    optimizer.rollback(factor=0.5, copies=copies)
    for param, old, state in zip(params, before, moments, strict=True):
        torch.testing.assert_close(param.detach(), old, atol=1e-6, rtol=1e-6)
        assert torch.equal(copies[param], param.detach().bfloat16())
        for name, value in state.items():
            torch.testing.assert_close(optimizer.state[param][name], value, atol=1e-6, rtol=1e-5)
        assert float(optimizer.state[param]["step"]) == 3.0


def test_rollback_refuses_what_it_cannot_undo() -> None:
    params = _params(0)
    _give_gradients(1, params)
    with pytest.raises(ValueError, match="a maximum cannot be undone"):
        CpuAdam(params, amsgrad=True).rollback()
    with pytest.raises(ValueError, match="parameter 0 of a group has taken no step"):
        CpuAdam(params).rollback()
    optimizer = CpuAdam(params, weight_decay=0.1, adam_w_mode=False)
    optimizer.step()
    with pytest.raises(ValueError, match="cannot be solved backwards"):
        optimizer.rollback()


@pytest.mark.parametrize(("host", "plain"), [(CpuLion, Lion), (CpuLamb, Lamb)])
def test_host_variants_step_as_their_bases(host: Any, plain: Any) -> None:
    one, two = _params(0), _params(0)
    first, second = host(one, lr=0.01, weight_decay=0.1), plain(two, lr=0.01, weight_decay=0.1)
    for step in range(1, 4):
        _give_gradients(step, one, two)
        first.step()
        second.step()
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", MAKERS)
def test_parameters_off_the_host_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=r"parameter 0 of a group, of shape \(2,\), lies on meta"):
        MAKERS[kind]([torch.ones(2, device="meta")])


def test_missing_gradients_are_left_alone_and_steps_counted_apart() -> None:
    params: list[Tensor] = [torch.ones(3), torch.ones(3)]
    optimizer = CpuAdam(params, lr=0.1)
    params[0].grad = torch.ones(3)
    optimizer.step()
    assert params[1].tolist() == [1.0] * 3
    assert params[1] not in optimizer.state
    params[1].grad = torch.ones(3)
    optimizer.step()
    assert [float(optimizer.state[param]["step"]) for param in params] == [2.0, 1.0]
    assert params[1].tolist() == pytest.approx([0.9] * 3)
