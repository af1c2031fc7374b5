"""Freezing and unfreezing in training with an engine: checkpoints before and after, and compiled passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import Engine, initialize
from drivetrain_testkit import run_ranks

WIDTH, STEPS, RANKS = 72, 7, 2
SAVED_AT = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def change(model: Net, step: int) -> None:
    """The trunk is frozen first; then the first block is trained, and frozen again while the checkpoint is written."""
    model.blocks.requires_grad_(step >= 5)
    model.blocks[0].requires_grad_(step in (1, 2, 3) or step >= 5)


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        **more,
    }


def train(engine: Engine, rank: int, first: int, folder: Path | None = None) -> list[torch.Tensor]:
    """Train to the end. Returns master weights and moments of every parameter."""
    model: Any = engine.module
    for step in range(first, STEPS):
        change(model, step)
        if step == SAVED_AT and folder is not None:
            engine.save(folder)
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        engine.backward(engine(x))
        engine.step()
    found = []
    for parameter in model.parameters():
        found.append(engine.access.master.full(parameter))
        found += [engine.access.state(key).full(parameter) for key in ("exp_avg", "exp_avg_sq")]
    assert all(value is not None for value in found)
    return [value for value in found if value is not None]


def resume(rank: int, world_size: int, folder: Path, stage: int) -> dict[str, bool]:
    model = Net()
    change(model, 0)
    expected = train(initialize(model, config(stage)), rank, 0, folder)
    same = {}
    for name, load_at, other in (("before", SAVED_AT, stage), ("after", 1, stage), ("elsewhere", SAVED_AT, 3 - stage)):
        model = Net()
        change(model, load_at)
        engine = initialize(model, config(other))
        engine.load(folder)
        found = train(engine, rank, SAVED_AT)
        same[name] = all(map(torch.equal, found, expected))
    return same


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_goes_on_to_the_last_bit(tmp_path: Path, stage: int) -> None:
    """Whether what was frozen when it was saved is frozen before or after it is loaded, and at another stage."""
    for same in run_ranks(resume, RANKS, tmp_path, stage):
        assert same == {"before": True, "after": True, "elsewhere": True}


def compiled(rank: int, world_size: int, stage: int) -> bool:
    results = []
    for deep in (False, True):
        model = Net()
        change(model, 0)
        more = {"compile": {"deepcompile": True}} if deep else {}
        engine = initialize(model, config(stage, **more))
        if deep:
            engine.compile(backend="eager")
        results.append(train(engine, rank, 0))
        report = engine.compile_report
        assert not deep or (report is not None and report.reason is None), report
    return all(map(torch.equal, *results))


@pytest.mark.parametrize("stage", [1, 3])
def test_compiled_passes_follow(stage: int) -> None:
    assert run_ranks(compiled, RANKS, stage) == [True, True]
