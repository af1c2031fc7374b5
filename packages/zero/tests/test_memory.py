"""Bytes of model states on each rank, against the formulas of the ZeRO paper, and what is whole when.

With psi parameters on N ranks, mixed precision and Adam, a rank holds ``psi`` times (Rajbhandari et al., 2020)

    stage 0   2 + 2 + 12        stage 2   2 + (2 + 12)/N
    stage 1   2 + 2 + 12/N      stage 3   (2 + 2 + 12)/N

bytes of parameters, gradients, and optimizer state with master weights; in fp32 that is 4, 4 and 8.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedModule, ShardedOptimizer, shard
from drivetrain_testkit import run_ranks

WIDTH, DEPTH, VOCABULARY, TOKENS = 64, 8, 96, 32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class AdapterBlock(nn.Module):
    """A frozen block with a trained low-rank bypass, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Block().requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(self.a(x))


class Tower(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, *, recompute: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x if self.recompute == "none" else checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            x = block(x) if self.recompute == "none" else x
        return self.head(x)


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    nn.functional.cross_entropy(model(tokens).float(), tokens).backward()


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What one rank holds at one moment, in bytes per parameter of the model."""

    parameters: float
    gradients: float
    optimizer: float  # master weights and the optimizer's own state
    gathered: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def measure(sharded: ShardedModule, optimizer: ShardedOptimizer, numel: int) -> Bytes:
    sharded.reducer.drain()  # reductions under way have no gradients yet to count
    held = sharded.bytes()
    return Bytes(
        parameters=held.parameters / numel,
        gradients=held.gradients / numel,
        optimizer=(held.master + optimizer.state_bytes) / numel,
        gathered=held.gathered / numel,
    )


def forget_what_is_alive() -> None:
    """From here on `bytes_alive` counts only what is made anew."""
    gc.collect()
    gc.freeze()


def bytes_alive() -> int:
    """Bytes of every tensor storage that Python can reach."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    gradients = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in (*tensors, *gradients))}
    return sum(storages.values())


@dataclass(frozen=True, kw_only=True)
class Story:
    """One rank's bytes per parameter over a few steps."""

    numel: int
    accumulating: Bytes  # after the first of two backward passes of a step
    complete: Bytes  # after the second
    one_pass: Bytes  # after the only backward pass of a step
    stepped: Bytes
    evaluated: Bytes
    allocated: float  # by all tensors of the process, after the step


def tell(mesh: Mesh, rank: int, stage: int, dtype: torch.dtype) -> Story:
    forget_what_is_alive()
    model = Tower()
    numel = sum(p.numel() for p in model.parameters())
    sharded = shard(model, mesh, Policy(stage=stage, param_dtype=dtype, persistence_numel=0, bucket_numel=100_000))
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters()))
    look = partial(measure, sharded, optimizer, numel)

    backward(model, rank, 0)
    optimizer.step()  # from here on there is optimizer state
    with sharded.no_sync():
        backward(model, rank, 1)
    accumulating = look()
    backward(model, rank, 2)
    complete = look()
    optimizer.step()
    backward(model, rank, 3)
    one_pass = look()
    optimizer.step()
    stepped = look()
    allocated = bytes_alive() / numel
    model.eval()
    with torch.no_grad():
        model(torch.arange(TOKENS))
    return Story(
        numel=numel,
        accumulating=accumulating,
        complete=complete,
        one_pass=one_pass,
        stepped=stepped,
        evaluated=look(),
        allocated=allocated,
    )


def tell_all(rank: int, world_size: int) -> dict[tuple[str, int], Story]:
    mesh = Mesh.create(init())
    return {(name, stage): tell(mesh, rank, stage, dtype) for name, dtype in DTYPES.items() for stage in range(4)}


@pytest.fixture(scope="module", params=[2, 4])
def stories(request: pytest.FixtureRequest) -> list[dict[tuple[str, int], Story]]:
    return run_ranks(tell_all, request.param)


@dataclass(frozen=True, kw_only=True)
class Formula:
    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def formula(precision: str, stage: int, world_size: int) -> Formula:
    """Bytes per parameter as published."""
    parameters, gradients, optimizer = {"bf16": (2, 2, 12), "fp32": (4, 4, 8)}[precision]
    return Formula(
        parameters=parameters / (world_size if stage >= 3 else 1),
        gradients=gradients / (world_size if stage >= 2 else 1),
        optimizer=optimizer / (world_size if stage >= 1 else 1),
    )


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", DTYPES)
def test_states_take_what_the_formulas_say(
    stories: list[dict[tuple[str, int], Story]], precision: str, stage: int
) -> None:
    """Below stage 2 a rank holds whole gradients while it accumulates; from stage 2 on never more than its shard."""
    expected = formula(precision, stage, len(stories))
    for ranks in stories:
        story = ranks[precision, stage]
        at = story.accumulating if stage < 2 else story.complete
        assert at.parameters == pytest.approx(expected.parameters, rel=0.02)
        assert at.gradients == pytest.approx(expected.gradients, rel=0.02)
        assert at.optimizer == pytest.approx(expected.optimizer, rel=0.02)
        assert at.total == pytest.approx(expected.total, rel=0.02)


@pytest.mark.parametrize("precision", DTYPES)
def test_accumulating_shards_takes_no_more_than_one_pass(
    stories: list[dict[tuple[str, int], Story]], precision: str
) -> None:
    for ranks in stories:
        for stage in (2, 3):
            story = ranks[precision, stage]
            assert story.accumulating.gradients == story.complete.gradients == story.one_pass.gradients


@pytest.mark.parametrize("precision", DTYPES)
def test_stage_one_keeps_less_than_its_formula_once_gradients_are_reduced(
    stories: list[dict[tuple[str, int], Story]], precision: str
) -> None:
    """A bucket that has been reduced is let go, so that what waits for the step is a shard, as at stage 2."""
    for ranks in stories:
        story, second = ranks[precision, 1], ranks[precision, 2]
        assert story.complete.gradients == story.one_pass.gradients == second.one_pass.gradients
        whole = formula(precision, 1, len(stories)).gradients
        assert story.one_pass.gradients == pytest.approx(whole / len(stories), rel=0.02)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", DTYPES)
def test_nothing_of_model_size_outlives_the_step(
    stories: list[dict[tuple[str, int], Story]], precision: str, stage: int
) -> None:
    """What torch really has allocated after a step is the formula without gradients, and no byte of a gathered
    parameter."""
    expected = formula(precision, stage, len(stories))
    for ranks in stories:
        story = ranks[precision, stage]
        assert story.stepped.gradients == 0
        assert story.stepped.gathered == story.evaluated.gathered == 0
        assert story.stepped == story.evaluated
        assert story.allocated == pytest.approx(expected.parameters + expected.optimizer, rel=0.03)


# What is whole at once ------------------------------------------------------------------------------------------------

TOWERS = {
    "plain": partial(Tower, Block),
    "recomputed": partial(Tower, Block, recompute="non-reentrant"),
    "recomputed, reentrant": partial(Tower, Block, recompute="reentrant"),
    "adapters": partial(Tower, AdapterBlock),
    "adapters, recomputed": partial(Tower, AdapterBlock, recompute="non-reentrant"),
    "adapters, recomputed, reentrant": partial(Tower, AdapterBlock, recompute="reentrant"),
}


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Gathered elements while the leaf modules compute, in units of one block after the root's are taken off."""

    forward: float
    backward: float
    evaluation: float


def watch(mesh: Mesh, rank: int, name: str) -> Peak:
    model = TOWERS[name]()
    sharded = shard(model, mesh, Policy(stage=3, persistence_numel=0))
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    root, *blocks = sharded.units
    seen: dict[str, list[int]] = {"forward": [], "backward": [], "evaluation": []}
    phase = "forward"

    def look(*_: object) -> None:
        seen[phase].append(sharded.bytes().gathered // 4)

    def after(module: nn.Module, args: object, output: torch.Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look)

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
            module.register_forward_hook(after)
    for step in range(3):  # the first without predictions
        phase = "forward"
        tokens = torch.arange(TOKENS)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        phase = "backward"
        loss.backward()
        optimizer.step()
        phase = "evaluation"
        with torch.no_grad():
            model(torch.arange(TOKENS) + step)
    unit = max(block.numel for block in blocks)
    return Peak(**{phase: (max(found) - root.numel) / unit for phase, found in seen.items()})


def watch_all(rank: int, world_size: int) -> dict[str, Peak]:
    mesh = Mesh.create(init())
    return {name: watch(mesh, rank, name) for name in TOWERS}


@pytest.fixture(scope="module")
def peaks() -> list[dict[str, Peak]]:
    return run_ranks(watch_all, 2)


@pytest.mark.parametrize("name", TOWERS)
def test_few_blocks_are_whole_at_once(peaks: list[dict[str, Peak]], name: str) -> None:
    """Beside the root: the block that computes and the next one; in backward for a moment also the one just done."""
    for ranks in peaks:
        peak = ranks[name]
        assert 1 <= peak.forward <= 2
        assert 1 <= peak.evaluation <= 2
        assert 1 <= peak.backward <= 3
        assert not math.isnan(peak.backward)
