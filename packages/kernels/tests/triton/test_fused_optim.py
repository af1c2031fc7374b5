"""The optimizers over the Triton ops beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.kernels import FusedAdagrad, FusedAdam, FusedSgd, Lamb, Lion, dispatch, implementation

SHAPES = [(7, 3), (1,), (0,), (1030,)]
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (FusedAdam, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "amsgrad": (FusedAdam, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.0, "amsgrad": True}),
    "adagrad": (FusedAdagrad, torch.optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (FusedSgd, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
}


@pytest.fixture(autouse=True)
def _through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "resolve", lambda op, _device: implementation(op, "triton"))


def _params(seed: int, device: str) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in SHAPES]


@pytest.mark.parametrize("pair", PAIRS)
def test_equal_to_torch_over_steps(pair: str, device: str) -> None:
    make_ours, make_theirs, options = PAIRS[pair]
    ours, theirs = _params(0, device), _params(0, device)
    mine, peer = make_ours(ours, **options), make_theirs(theirs, **options)
    for step in range(1, 9):
        for one, two, grad in zip(ours, theirs, _params(step, device), strict=True):
            one.grad, two.grad = grad.detach().clone(), grad.detach().clone()
        mine.step()
        peer.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
    peer.load_state_dict(mine.state_dict())


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_lion_and_lamb_equal_plain_torch(kind: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [_params(0, device), _params(0, device)]
    optimizers = [kind(side, lr=1e-2, weight_decay=0.1) for side in sides]
    for step in range(1, 4):
        for side, optimizer, room in zip(sides, optimizers, ("triton", "torch"), strict=True):
            monkeypatch.setattr(dispatch, "resolve", lambda op, _device, room=room: implementation(op, room))
            for param, grad in zip(side, _params(step, device), strict=True):
                param.grad = grad.detach()
            optimizer.step()
    for one, two in zip(*sides, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)
