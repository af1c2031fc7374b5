"""An engine takes over what was added to its module: schedule, checkpoints, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import init
from drivetrain.engine import Engine, initialize
from drivetrain_testkit import run_ranks

WIDTH, RANKS = 40, 2


class Net(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        return torch.stack([head(x).float().square().mean() for head in self.heads]).sum()


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **more,
    }


def train(engine: Engine, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
        engine.backward(engine(x))
        engine.step()


def state(engine: Engine) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    found = [q.full(p) for p in parameters for q in (engine.access.master, engine.access.state("exp_avg_sq"))]
    return [value for value in found if value is not None]


def resumed(rank: int, world_size: int, folder: Path, stage: int) -> bool:
    engine = initialize(Net(1), config(stage))
    train(engine, rank, 0, 2)
    module: Any = engine.module
    module.heads.append(nn.Linear(WIDTH, 3))
    engine.adopt()
    train(engine, rank, 2, 4)
    engine.save(folder)
    train(engine, rank, 4, 6)
    again = initialize(Net(2), config(stage))
    again.load(folder)
    train(again, rank, 4, 6)
    expected, found = state(engine), state(again)
    return len(expected) == 12 and all(map(torch.equal, found, expected))


def grouped(rank: int, world_size: int, stage: int) -> list[list[float]]:
    """The rates of a group with settings of its own move with the schedule."""
    engine = initialize(Net(1), config(stage))
    train(engine, rank, 0, 2)
    module: Any = engine.module
    module.heads.append(nn.Linear(WIDTH, 3))
    engine.adopt({"lr": 0.005})
    rates = []
    for step in range(2, 6):
        train(engine, rank, step, step + 1)
        rates.append(engine.learning_rates)
    return rates


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_goes_on_where_the_head_was_there_from_the_start(tmp_path: Path, stage: int) -> None:
    assert run_ranks(resumed, RANKS, tmp_path, stage) == [True, True]


def test_the_schedule_moves_new_groups() -> None:
    for rates in run_ranks(grouped, RANKS, 2):
        assert [len(rate) for rate in rates] == [2] * 4
        assert rates[-1][0] > rates[0][0] > 0
        assert all(new == pytest.approx(old / 2) for old, new in rates)


def test_refused() -> None:
    init()
    engine = initialize(
        Net(1),
        {**config(1), "scheduler": None},
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.01),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    )
    module: Any = engine.module
    module.heads.append(nn.Linear(WIDTH, 3))
    with pytest.raises(ValueError, match=r"a StepLR of torch moves the learning rates, and knows only"):
        engine.adopt({"lr": 0.1})
    assert engine.adopt() == ["heads.1.weight", "heads.1.bias"]
    train(engine, 0, 0, 2)
    engine = initialize(Net(1), config(3, compile={"deepcompile": True}))
    engine.module.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"adopt\(\) of a module that is compiled with its communication"):
        engine.adopt()
