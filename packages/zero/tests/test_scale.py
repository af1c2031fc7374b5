"""What one rank of a large job costs in Python, counted in a world that nobody runs.

Nothing here may grow with the number of ranks but the list of ranks that each communicator keeps, and nothing may grow
faster than the model: time is not measured, calls and bytes are. Large models are planned on the meta device; steps are
counted on the CPU with small ones, whose gathers bring nothing, so that values mean nothing either.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, dry_world
from drivetrain.kernels import Muon
from drivetrain.zero import (
    ParameterAccess,
    Policy,
    ShardedModule,
    ShardedOptimizer,
    gathered,
    shard,
)

FEW, MANY = 8, 1024
LISTS_OF_RANKS = 100_000
"""Bytes that the lists of 1,024 ranks may take in all: some 30 bytes per rank for each of a few communicators."""


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> Iterator[None]:
    """Collections look at what is made from here on only."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Layer(nn.Module):
    """The parameters of a Llama layer, in the order of their use."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm_mlp = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_attention(x)
        x = x + self.o(self.q(y) + self.k(y) + self.v(y))
        y = self.norm_mlp(x)
        out: torch.Tensor = x + self.down(self.gate(y) * self.up(y))
        return out


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int = 16, hidden: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@dataclass(frozen=True)
class Run:
    """A model as one of many ranks trains it."""

    mesh: Mesh
    model: nn.Module
    sharded: ShardedModule
    optimizer: ShardedOptimizer

    @classmethod
    def start(
        cls, make: Callable[[], nn.Module], ranks: int, policy: Policy, *, groups: int = 1, device: str = "cpu"
    ) -> Run:
        mesh = Mesh.create(dry_world(ranks, rank=ranks // 2, local_size=8, device=device), data=groups)
        with torch.device(device):
            model = make()
        sharded = shard(model, mesh, policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        return cls(mesh, model, sharded, ShardedOptimizer(sharded, optimizer, max_norm=1.0, skip_non_finite=False))

    def step(self) -> None:
        self.model(torch.zeros(2, 4, dtype=torch.int64, device=self.mesh.device)).backward()
        assert self.optimizer.step().stepped


def policy_of(stage: int, **changes: Any) -> Policy:
    """Budgets as an engine sets them."""
    usual = {"prefetch_numel": 50_000_000, "max_reuse_numel": 10**9, "max_live_numel": 10**9, "persistence_numel": 0}
    return Policy(stage=stage, param_dtype=torch.bfloat16, **{**usual, **changes})


def calls_in(work: Callable[[], object]) -> int:
    """How often functions of this project are called by ``work``, and C functions by them."""
    count = 0

    def see(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call") and "drivetrain" in frame.f_globals.get("__name__", "")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


SIZES = {
    "70B": (lambda: Decoder(80, width=8192, hidden=24576, vocabulary=32000), 70.3e9),
    "1T": (lambda: Decoder(128, width=25600, hidden=68096, vocabulary=32000), 1007e9),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", SIZES)
def test_a_model_of_any_size_is_planned_on_the_meta_device(size: str, stage: int) -> None:
    """The bytes per rank are those of the formulas: 2 for a parameter, 4 for its master, split as the stage says."""
    make, numel = SIZES[size]
    run = Run.start(make, MANY, policy_of(stage), device="meta")
    held = run.sharded.bytes()
    assert held.parameters / numel == pytest.approx(2 / MANY if stage == 3 else 2, rel=0.01)
    assert held.master / numel == pytest.approx(4 / MANY, rel=0.01)
    assert held.gradients == held.gathered == 0


def test_a_step_on_the_meta_device_is_complete() -> None:
    run = Run.start(lambda: Decoder(1), MANY, policy_of(3), device="meta")
    run.step()
    run.step()
    assert len(list(run.sharded.full_parameters())) == len(list(run.model.parameters()))


CASES = {
    "stage 1": (policy_of(1), False),
    "stage 3": (policy_of(3), False),
    "stage 3, released at once": (policy_of(3, max_reuse_numel=0, prefetch_numel=None), False),
    "replicas of groups of four": (policy_of(3), True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_costs_the_same_on_any_number_of_ranks(case: str) -> None:
    policy, hybrid = CASES[case]
    calls, collectives, memory, blocks = {}, {}, {}, {}
    for ranks in (FEW, FEW, MANY):  # the first one warms up caches that are nobody's
        gc.collect()
        tracemalloc.start()
        before = sys.getallocatedblocks()
        run = Run.start(lambda: Decoder(3), ranks, policy, groups=ranks // 4 if hybrid else 1)
        for _ in range(2):
            run.step()
        gc.collect()
        memory[ranks], _ = tracemalloc.get_traced_memory()
        blocks[ranks] = sys.getallocatedblocks() - before
        tracemalloc.stop()
        run.mesh.ledger.reset()
        calls[ranks] = calls_in(run.step)
        collectives[ranks] = [(entry.op, entry.calls) for entry in run.mesh.ledger.entries()]
        del run
    # On more ranks fewer parameters reach into a rank's shard, so that a step may take fewer calls.
    assert 0.8 * calls[FEW] < calls[MANY] < 1.05 * calls[FEW]
    assert collectives[MANY] == collectives[FEW]
    assert memory[MANY] - memory[FEW] < LISTS_OF_RANKS
    assert blocks[MANY] - blocks[FEW] < 4 * MANY


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_costs_in_proportion_to_the_layers(stage: int) -> None:
    calls = []
    for layers in (4, 8, 16):
        run = Run.start(lambda layers=layers: Decoder(layers), MANY, policy_of(stage))
        run.step()
        calls.append(calls_in(run.step))
    assert calls[2] - calls[1] == pytest.approx(2 * (calls[1] - calls[0]), rel=0.02)


def test_start_up_costs_in_proportion_to_the_layers() -> None:
    def start(layers: int) -> int:
        return calls_in(lambda: Run.start(lambda: Decoder(layers), MANY, policy_of(3)))

    four, eight, sixteen = start(4), start(8), start(16)
    assert sixteen - eight == pytest.approx(2 * (eight - four), rel=0.05)


def test_looking_at_a_parameter_costs_the_same_on_any_number_of_ranks() -> None:
    reads, edits = {}, {}
    for ranks in (FEW, MANY):
        run = Run.start(lambda: Decoder(2), ranks, policy_of(3))
        access = ParameterAccess(run.sharded, run.optimizer)
        parameters = list(run.model.parameters())

        def edit(run: Run = run, parameters: Any = parameters) -> None:
            with gathered(run.sharded, parameters):
                pass

        reads[ranks] = calls_in(lambda access=access, parameters=parameters: access.master.full_many(parameters))
        edits[ranks] = calls_in(edit)
    assert reads[MANY] < 1.05 * reads[FEW]
    assert edits[MANY] < 1.05 * edits[FEW]


def test_whole_matrices_are_brought_together_without_looking_at_every_rank() -> None:
    """Muon: where matrices meet is worked out once; a rank that owns none handles its own slices."""
    calls = {}
    for ranks in (FEW, MANY):
        mesh = Mesh.create(dry_world(ranks, rank=ranks - 1, device="cpu"))
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        sharded = shard(model, mesh, policy_of(2))
        optimizer = ShardedOptimizer(sharded, Muon(model.parameters(), lr=0.1), skip_non_finite=False)

        def step(model: nn.Module = model, optimizer: ShardedOptimizer = optimizer) -> None:
            model(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()

        step()
        calls[ranks] = calls_in(step)
    assert calls[MANY] < 1.05 * calls[FEW]
