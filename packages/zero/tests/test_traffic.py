"""Bytes that a step moves, as the ledger counts them, against the theory.

In units of psi, the bytes of the model's parameters, a step moves 2 psi at stages 0 to 2 (an all-reduce, or a
reduce-scatter of gradients and an all-gather of parameters) and 3 psi at stage 3 (parameters are gathered in forward
and in backward), as in Rajbhandari et al., 2020, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedModule, ShardedOptimizer, shard
from drivetrain_testkit import run_ranks

WIDTH, DEPTH = 128, 40
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Tower(nn.Module):
    """Forty equal blocks; beside them next to nothing, for the root stays whole from forward to backward."""

    def __init__(self, *, block: Callable[[], nn.Module], depth: int = DEPTH, recompute: str = "none") -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        for block in self.blocks:
            if self.recompute == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.frozen(x) + self.b(self.a(x)))


class Handing(nn.Module):
    """Hands on an input that it only reads, and keeps the other: neither depends on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.kept = x
        return torch.tanh(self.inner(x)) + bias, bias


class HandingTower(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = bias = x * self.gain
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes of one step by operation, and what the model would take."""

    all_reduce: int
    reduce_scatter: int
    all_gather: int
    moved: int  # in the traffic units of the theory
    psi: int  # bytes of all parameters
    blocks: int  # bytes of all buckets of blocks, padding included
    root: int  # of the root's
    trained: int  # bytes of parameters that are trained


def count(mesh: Mesh, sharded: ShardedModule, act: Callable[[], None]) -> Moved:
    ledger = mesh.ledger
    ledger.reset()
    act()
    sharded.reducer.drain()
    parameters = [(p.numel() * p.element_size(), p.requires_grad) for p in sharded.module.parameters()]
    padded = [sum(b.numel * b.full.element_size() for b in unit.buckets) for unit in sharded.units]
    return Moved(
        **{op: ledger.total_bytes(op=op) for op in ("all_reduce", "reduce_scatter", "all_gather")},
        moved=ledger.total_moved_bytes(),
        psi=sum(size for size, _ in parameters),
        blocks=sum(padded[1:]),
        root=padded[0],
        trained=sum(size for size, trained in parameters if trained),
    )


def train(
    model: nn.Module, sharded: ShardedModule, optimizer: ShardedOptimizer, dtype: torch.dtype, accumulation: int
) -> None:
    for micro in range(accumulation):
        sharded.closes_step = micro == accumulation - 1
        model(torch.ones(2, WIDTH, dtype=dtype)).square().mean().backward()
    assert optimizer.step().stepped


@dataclass(frozen=True)
class Case:
    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    max_reuse_numel: int = 0
    reduce_dtype: torch.dtype | None = None
    block: Callable[[], nn.Module] = linear
    depth: int = DEPTH
    recompute: str = "none"
    evaluates: bool = False
    tower: type[Tower] = Tower


CASES = {
    **{f"stage {s}, {p}": Case(s, p) for s in range(4) for p in DTYPES},
    **{f"stage {s}, accumulated": Case(s, accumulation=3) for s in range(4)},
    "stage 3, no reuse": Case(3, max_reuse_numel=-1),
    "stage 3, evaluation": Case(3, evaluates=True),
    "inputs handed on": Case(3, block=Handing, depth=10, tower=HandingTower, max_reuse_numel=-1),
    "stage 2, fp32 on the wire": Case(2, "bf16", reduce_dtype=torch.float32),
    "stage 2, bf16 on the wire": Case(2, "fp32", reduce_dtype=torch.bfloat16),
    **{
        f"{name}, {recompute}": Case(3, block=block, depth=10, recompute=recompute, max_reuse_numel=-1)
        for name, block in (("blocks", linear), ("adapters", Adapted))
        for recompute in ("none", "non-reentrant", "reentrant")
    },
}


def run(mesh: Mesh, case: Case) -> Moved:
    dtype = DTYPES[case.precision]
    torch.manual_seed(0)
    model = case.tower(block=case.block, depth=case.depth, recompute=case.recompute)
    policy = Policy(
        stage=case.stage,
        param_dtype=dtype,
        reduce_dtype=case.reduce_dtype,
        max_reuse_numel=case.max_reuse_numel,
        persistence_numel=0,
    )
    sharded = shard(model, mesh, policy)
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=1e-3))
    train(model, sharded, optimizer, dtype, case.accumulation)  # the first step also agrees on the order of buckets
    if case.evaluates:
        with torch.no_grad():
            return count(mesh, sharded, lambda: model(torch.ones(2, WIDTH)))
    return count(mesh, sharded, lambda: train(model, sharded, optimizer, dtype, case.accumulation))


def run_all(rank: int, world_size: int) -> dict[str, Moved]:
    mesh = Mesh.create(init())
    return {name: run(mesh, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def moved() -> dict[str, Moved]:
    first, second = run_ranks(run_all, 2)
    assert first == second
    return first


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("stage", "units"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_step_moves_what_the_theory_says(moved: dict[str, Moved], precision: str, stage: int, units: int) -> None:
    step = moved[f"stage {stage}, {precision}"]
    assert step.moved == pytest.approx(units * step.psi, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "reduced", "gathered"),
    [(0, 1, 0), (1, 1, 1), (2, 3, 1), (3, 3, 6)],
    ids=["stage 0", "stage 1", "stage 2", "stage 3"],
)
def test_accumulation_over_three_micro_batches(
    moved: dict[str, Moved], stage: int, reduced: int, gathered: int
) -> None:
    """Stages that keep whole gradients reduce once per step; those that keep shards, in every backward pass."""
    step = moved[f"stage {stage}, accumulated"]
    sent = step.all_reduce if stage == 0 else step.reduce_scatter
    assert sent == pytest.approx(reduced * step.psi, rel=0.02)
    assert step.all_gather == pytest.approx(gathered * step.psi, rel=0.02)


def test_stage_three_moves_exactly_this_without_reuse(moved: dict[str, Moved]) -> None:
    """Blocks gathered twice and the root once; every gradient sent once; the rest is the survey before the step."""
    step = moved["stage 3, no reuse"]
    assert step.all_gather == 2 * step.blocks + step.root
    assert step.reduce_scatter == step.blocks + step.root
    parameters, buckets = 2 * DEPTH + 1, DEPTH + 1
    assert step.all_reduce == 8 * (2 + parameters + buckets)  # a norm, and whether untrained ones have gradients
    assert step.moved == step.all_gather + step.reduce_scatter + 2 * step.all_reduce


def test_reuse_saves_the_last_block_only(moved: dict[str, Moved]) -> None:
    saved = moved["stage 3, no reuse"].all_gather - moved["stage 3, fp32"].all_gather
    assert saved == moved["stage 3, no reuse"].blocks // DEPTH


def test_evaluation_gathers_once_and_reduces_nothing(moved: dict[str, Moved]) -> None:
    step = moved["stage 3, evaluation"]
    assert step.all_gather == step.blocks + step.root
    assert step.all_reduce == step.reduce_scatter == 0


@pytest.mark.parametrize(("name", "factor"), [("fp32", 2), ("bf16", 0.5)])
def test_the_wire_has_its_own_dtype(moved: dict[str, Moved], name: str, factor: float) -> None:
    step = moved[f"stage 2, {name} on the wire"]
    assert step.reduce_scatter == factor * (step.blocks + step.root)
    assert step.all_gather == step.blocks + step.root


def test_inputs_that_are_handed_on_bring_no_block_back(moved: dict[str, Moved]) -> None:
    step = moved["inputs handed on"]
    assert step.all_gather == 2 * step.blocks + step.root


@pytest.mark.parametrize("recompute", ["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["blocks", "adapters"])
def test_recomputation_gathers_no_block_a_third_time(moved: dict[str, Moved], name: str, recompute: str) -> None:
    """It runs inside backward, where the block is whole anyway. What is frozen is never reduced."""
    step = moved[f"{name}, {recompute}"]
    assert step.all_gather == 2 * step.blocks + step.root
    assert step.reduce_scatter == pytest.approx(step.trained, rel=0.02)
