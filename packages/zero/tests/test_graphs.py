"""Random models used in random ways under random policies: always what plain torch computes.

A seed makes a case: which blocks there are and which of them are one and the same, what is tied and what is frozen,
and for every step a program that applies blocks to values in any order, some of them several times, some recomputed,
some never. A failure names the seed, and ``Case.of(seed)`` is all that it takes to see it again.
"""

from __future__ import annotations

import random
import traceback
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

WIDTH, BATCH, STEPS = 6, 3, 3
SEEDS = {1: range(0, 4), 2: range(12, 26), 3: range(62, 66)}
MORE_SEEDS = {1: range(4, 12), 2: range(100, 400), 3: range(400, 480)}
TOLERANCE = 5e-6


class Direct(nn.Module):
    """Reads its own parameters, and not through a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.gain


class Pair(nn.Module):
    """Takes two values where others take their sum, and keeps a loss of its own for whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.tanh(x @ self.left) + self.right(x if y is None else y)
        self.aside = (torch.sigmoid(x) @ self.left).square().mean()
        return out


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Direct(), nn.Linear(WIDTH, WIDTH)])
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return torch.sigmoid(self.linear(x)) + x


@dataclass(frozen=True, kw_only=True)
class Use:
    """One line of a program: a block applied to some of the values so far."""

    block: int
    values: tuple[int, ...]
    recompute: str = "none"


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    kinds: tuple[type[nn.Module], ...]
    shared: tuple[tuple[int, int], ...]  # block i is block j
    tied: tuple[tuple[int, int], ...]  # linear weights of blocks; -1 is the head
    frozen: tuple[int, ...]  # parameters by position
    programs: tuple[tuple[Use, ...], ...]  # one for each step
    micro_batches: int
    two_losses: bool
    evaluates: bool
    closes: bool  # the last micro-batch is announced, others do not reduce
    max_norm: float
    policy: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int) -> Case:
        dice = random.Random(seed)
        count = dice.randint(2, 5)
        kinds = tuple(dice.choice((Plain, Plain, Direct, Nested, Pair)) for _ in range(count))
        indices = range(count)
        return cls(
            seed=seed,
            kinds=kinds,
            shared=tuple((i, dice.randrange(i)) for i in indices if i and dice.random() < 0.2),
            tied=tuple((i, dice.randrange(-1, i)) for i in indices if dice.random() < 0.25),
            frozen=tuple(i for i in range(40) if dice.random() < dice.choice((0.0, 0.1, 0.5))),
            programs=tuple(_program(dice, count) for _ in range(STEPS)),
            micro_batches=dice.choice((1, 1, 2, 3)),
            two_losses=dice.random() < 0.3,
            evaluates=dice.random() < 0.3,
            closes=dice.random() < 0.7,
            max_norm=dice.choice((0.0, 0.0, 0.1)),
            policy={
                "bucket_numel": dice.choice((1, 40, 200, 10**6)),
                "persistence_numel": dice.choice((0, 0, 2, 20)),
                "prefetch_numel": dice.choice((None, 0, 100, 10**6)),
                "max_reuse_numel": dice.choice((-1, 0, 100, 10**6)),
                "max_live_numel": dice.choice((None, 0, 150)),
                "overlap": dice.random() < 0.8,
                "reduce_every_micro_batch": dice.choice((None, None, True, False)),
                "reduce_op": dice.choice(("mean", "mean", "sum")),
                "predivide_factor": dice.choice((1.0, 1.0, 2.0)),
            },
        )


def _program(dice: random.Random, count: int) -> tuple[Use, ...]:
    length = dice.randint(1, 7)
    return tuple(
        Use(
            block=dice.randrange(count),
            values=tuple({line, dice.randint(0, line)}) if dice.random() < 0.8 else (dice.randint(0, line),),
            recompute=dice.choice(("none", "none", "non-reentrant", "reentrant")),
        )
        for line in range(length)
    )


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for kind in case.kinds)
        self.head = nn.Linear(WIDTH, WIDTH)
        for i, j in case.shared:
            self.blocks[i] = self.blocks[j]
        for i, j in case.tied:
            self._linear(i).weight = self._linear(j).weight
        for position, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(position not in case.frozen)
        self.head.bias.requires_grad_(True)  # something is always trained

    def _linear(self, index: int) -> nn.Module:
        block = self.head if index < 0 else self.blocks[index]
        if isinstance(block, (Direct, nn.Linear)):
            return block
        return block.right if isinstance(block, Pair) else block.linear

    def forward(self, x: torch.Tensor, program: tuple[Use, ...]) -> torch.Tensor:
        values = [self.enter(x)]
        for use in program:
            block = self.blocks[use.block]
            given = [values[i] for i in use.values]
            if not isinstance(block, Pair):
                given = [sum(given) / len(given)]
            if use.recompute == "none" or not (given[0].requires_grad and torch.is_grad_enabled()):
                values.append(block(*given))
            else:
                values.append(checkpoint(block, *given, use_reentrant=use.recompute == "reentrant"))
        out = self.head(values[-1] + 0.1 * values[len(values) // 2])
        kept = [self.blocks[use.block].aside for use in program if use.recompute == "none" and self._keeps(use)]
        return out + 0.1 * sum(kept)

    def _keeps(self, use: Use) -> bool:
        """Whether the block of ``use`` has a loss for us. (Recomputed ones are detached or go stale.)"""
        block = self.blocks[use.block]
        return isinstance(block, Pair) and block.aside is not None and block.aside.requires_grad


def losses(case: Case, model: nn.Module, step: int, micro: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 10 * micro + 100 * step + 1000 * case.seed)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    program = case.programs[step]
    found = [(model(x, program) - x).square().mean()]
    if case.two_losses:
        found.append(model(x.flip(1), program[: len(program) // 2 + 1]).abs().mean())
    return found


def evaluate(case: Case, model: nn.Module) -> None:
    if case.evaluates:
        with torch.no_grad():
            model(torch.ones(2, WIDTH), case.programs[-1])


def train_plain(case: Case, world_size: int) -> dict[str, torch.Tensor]:
    model = Model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    share = 1 / world_size if case.policy["reduce_op"] == "mean" else 1.0
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            for rank in range(world_size):
                for loss in losses(case, model, step, micro, rank):
                    (loss * share).backward()
        if case.max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def train_sharded(case: Case, stage: int, mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    model = Model(case)
    sharded = shard(model, mesh, Policy(stage=stage, **case.policy))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = ShardedOptimizer(sharded, inner, max_norm=case.max_norm)
    for step in range(STEPS):
        for micro in range(case.micro_batches):
            sharded.closes_step = not case.closes or micro == case.micro_batches - 1
            made = losses(case, model, step, micro, rank)
            evaluate(case, model)
            for loss in made:
                loss.backward()
        assert optimizer.step().stepped
        assert sharded.bytes().gathered == 0
        evaluate(case, model)
        assert sharded.bytes().gathered == 0
    return dict(sharded.full_parameters())


def difference(case: Case, stage: int, mesh: Mesh, rank: int, expected: dict[str, torch.Tensor]) -> str:
    try:
        found = train_sharded(case, stage, mesh, rank)
    except Exception:
        return traceback.format_exc()
    assert found.keys() == expected.keys()
    error = relative_error((found[name] for name in expected), expected.values())
    return "" if error < TOLERANCE else f"off by {error:.1e}"


def compare_all(rank: int, world_size: int, seeds: range) -> dict[int, str]:
    mesh = Mesh.create(init())
    wrong = {}
    for seed in seeds:
        case = Case.of(seed)
        expected = train_plain(case, world_size)
        stages = {3, seed % 4} if world_size > 1 else {seed % 4}
        found = {stage: difference(case, stage, mesh, rank, expected) for stage in stages}
        wrong[seed] = "".join(f"stage {stage}: {text}\n" for stage, text in found.items() if text)
    return {seed: text for seed, text in wrong.items() if text}


@pytest.mark.parametrize("world_size", SEEDS)
def test_random_graphs_equal_plain_torch(world_size: int) -> None:
    assert_equal(world_size, SEEDS[world_size], seconds=100)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", MORE_SEEDS)
def test_more_random_graphs_equal_plain_torch(world_size: int) -> None:
    assert_equal(world_size, MORE_SEEDS[world_size], seconds=1100)


def assert_equal(world_size: int, seeds: range, seconds: float) -> None:
    for wrong in run_ranks(compare_all, world_size, seeds, timeout=seconds):
        assert not wrong, "\n".join(f"{Case.of(seed)}\n{text}" for seed, text in list(wrong.items())[:2])
