"""Optimizers on shards against the same optimizers in plain torch, and loss scaling, at every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.kernels import Lamb, Lion
from drivetrain.zero import LossScalePolicy, LossScaler, NonFiniteGradientError, Policy, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

RANKS, STEPS = 2, 3


class Net(nn.Module):
    """Parameters of awkward sizes: of one element, fewer than the ranks' alignment, and large enough to be cut."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 31), nn.Linear(31, 31), nn.Linear(31, 3)])
        self.gain = nn.Parameter(torch.full((1,), 0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype))) * self.gain
        return (x.float() - 0.3).square().mean()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Lion": lambda p: Lion(p, lr=0.003, weight_decay=0.01),
    "Lamb": lambda p: Lamb(p, lr=0.02, weight_decay=0.01),
}


def groups_of(model: Net) -> list[dict[str, Any]]:
    """Two groups with their own weight decay, one of a single element."""
    rest = [p for p in model.parameters() if p is not model.gain]
    return [{"params": rest}, {"params": [model.gain], "weight_decay": 0.0}]


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def flat(parameters: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for _, p in sorted(parameters)])


def plain(name: str) -> torch.Tensor:
    model = Net()
    optimizer = MAKERS[name](groups_of(model))
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (model(inputs(step, rank)) / RANKS).backward()
        optimizer.step()
    return flat(model.named_parameters())


def sharded(rank: int, world_size: int) -> dict[tuple[str, int], torch.Tensor]:
    mesh, found = Mesh.create(init()), {}
    for name, make in MAKERS.items():
        for stage in range(4):
            model = Net()
            split = shard(model, mesh, Policy(stage=stage, persistence_numel=0))
            optimizer = ShardedOptimizer(split, make(groups_of(model)))
            for step in range(STEPS):
                model(inputs(step, rank)).backward()
                optimizer.step()
            found[name, stage] = flat(split.full_parameters())
    return found


def test_every_elementwise_optimizer_equals_plain_torch_at_every_stage() -> None:
    expected = {name: plain(name) for name in MAKERS}
    for found in run_ranks(sharded, RANKS):
        assert len(found) == 4 * len(MAKERS)
        for (name, stage), parameters in found.items():
            assert relative_error(parameters, expected[name]) < 2e-6, (name, stage)


def test_an_optimizer_that_needs_whole_tensors_works_whole_and_is_refused_in_slices() -> None:
    mesh, make = Mesh.create(init()), torch.optim.Adafactor
    for stage in (1, 2, 3):
        model = Net()
        split = shard(model, mesh, Policy(stage=stage))
        with pytest.raises(ValueError, match=rf"Adafactor is not known to .* ZeRO stage {stage} .*Use"):
            ShardedOptimizer(split, make(model.parameters()))
    model = Net()
    ShardedOptimizer(shard(model, mesh, Policy(stage=0)), make(model.parameters()))


# Loss scaling ---------------------------------------------------------------------------------------------------------


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
)
def test_the_loss_scale_follows_its_rule(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool
) -> None:
    policy = LossScalePolicy(
        initial=2.0**6, window=window, hysteresis=hysteresis, consecutive_hysteresis=consecutive, minimum=4.0
    )
    scaler = LossScaler(policy)
    scale, patience, good = 2.0**6, hysteresis, 0
    for overflow in overflows:
        if overflow:
            good = 0
            if patience > 1:
                patience -= 1
            else:
                scale = max(scale / 2, 4.0)
        else:
            good += 1
            patience = hysteresis if consecutive else patience
            if good % window == 0:
                scale *= 2
                patience = hysteresis
        scaler.update(overflow=overflow)
        assert scaler.scale == scale
    restored = LossScaler(policy)
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()


def scaled(rank: int, world_size: int) -> dict[str, Any]:
    mesh, found = Mesh.create(init()), {}
    for stage in range(4):
        for power in (0, 4, 10):
            model = Net()
            split = shard(model, mesh, Policy(stage=stage, param_dtype=torch.float16, persistence_numel=0))
            scaler = LossScaler(LossScalePolicy(initial=2.0**power))
            optimizer = ShardedOptimizer(
                split, torch.optim.SGD(model.parameters(), lr=0.5), scaler=scaler, max_norm=0.05
            )
            (model(inputs(0, rank)) * scaler.scale).backward()
            result = optimizer.step()
            found[f"{stage} {power}"] = (flat(split.full_parameters()), result.grad_norm, result.clip_coefficient)
        before = flat(split.full_parameters())
        (model(inputs(1, rank)) * (torch.inf if rank == 0 else scaler.scale)).backward()
        skipped = optimizer.step()
        found[f"{stage} skipped"] = (
            skipped.stepped,
            skipped.reason,
            torch.equal(before, flat(split.full_parameters())),
            scaler.state_dict()["hysteresis"],
        )
    return found


def test_fp16_updates_do_not_depend_on_the_loss_scale_or_the_stage() -> None:
    model = Net()
    for rank in range(RANKS):
        (model(inputs(0, rank)) / RANKS).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    before = flat(model.named_parameters())
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    expected = flat(model.named_parameters())
    assert float((expected - before).norm()) == pytest.approx(0.5 * min(norm, 0.05), rel=1e-4)
    for found in run_ranks(scaled, RANKS):
        for key, value in found.items():
            if key.endswith("skipped"):
                stepped, reason, same, hysteresis = value
                assert not stepped
                assert same, key
                assert "not finite" in reason
                assert hysteresis == 1
            else:
                parameters, found_norm, coefficient = value
                assert relative_error(parameters, expected) < 1e-3, key
                assert found_norm == pytest.approx(norm, rel=3e-3), key
                assert coefficient == pytest.approx(0.05 / norm, rel=3e-3), key


def test_gradients_that_stay_non_finite_raise_with_the_name_of_a_parameter() -> None:
    mesh, model = Mesh.create(init()), Net()
    split = shard(model, mesh, Policy(stage=2))
    optimizer = ShardedOptimizer(split, torch.optim.SGD(model.parameters(), lr=0.1), patience=3)

    def poisoned() -> torch.Tensor:
        return model.layers[2].weight.sum() * torch.nan

    for _ in range(2):
        poisoned().backward()
        assert not optimizer.step().stepped
    poisoned().backward()
    with pytest.raises(NonFiniteGradientError, match=r"3 steps in a row .* 'layers\.2\.weight'"):
        optimizer.step()


def reduced(rank: int, world_size: int) -> dict[tuple[str, float, int], float]:
    mesh, norms = Mesh.create(init()), {}
    for op in ("mean", "sum"):
        for factor in (1.0, 2.0):
            for stage in range(3):
                model = Net()
                split = shard(model, mesh, Policy(stage=stage, reduce_op=op, predivide_factor=factor))
                optimizer = ShardedOptimizer(split, torch.optim.SGD(model.parameters(), lr=0.1))
                model(inputs(0, rank)).backward()
                norms[op, factor, stage] = optimizer.step().grad_norm
    return norms


def test_predivided_and_summed_gradients() -> None:
    model = Net()
    for rank in range(RANKS):
        model(inputs(0, rank)).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))
    for found in run_ranks(reduced, RANKS):
        assert len(found) == 12
        for (op, factor, stage), value in found.items():
            expected = norm / (RANKS if op == "mean" else 1)
            assert value == pytest.approx(expected, rel=1e-5), (op, factor, stage)
