"""`mics_shard_size`: groups of ranks that hold replicas of each other, from the configuration to the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import initialize
from drivetrain_testkit import relative_error, run_ranks

RANKS, STEPS, MICRO = 4, 6, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.blocks = nn.ModuleList(nn.Linear(17, 17) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def config(stage: int, group: int, ranks: int) -> dict[str, Any]:
    return {
        "train_batch_size": RANKS * MICRO,
        "train_micro_batch_size_per_gpu": RANKS * MICRO // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.02}},
        "zero_optimization": {"stage": stage, "mics_shard_size": group, "stage3_param_persistence_threshold": 0},
    }


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    whole = torch.randn(RANKS * MICRO, 17, generator=torch.Generator().manual_seed(step))
    return whole.chunk(ranks)[rank]


def plain() -> torch.Tensor:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, 0, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def _run(
    rank: int, ranks: int, folder: Path, stage: int, group: int, steps: tuple[int, int]
) -> tuple[torch.Tensor, int, dict[str, int]]:
    engine = initialize(Net(), config(stage, group, ranks))
    if steps[0]:
        engine.load(folder)
    for step in range(*steps):
        engine.backward(engine(batch(step, rank, ranks)))
        engine.step()
    engine.save(folder)
    whole = torch.cat([p.flatten() for _, p in sorted(engine.sharded.full_parameters())])
    return whole, engine.counters.global_samples, engine.mesh.sizes


@pytest.mark.parametrize(("stage", "then"), [(3, (1, 4, 0)), (1, (3, 2, 1))])
def test_training_goes_on_from_groups_of_two_on_any_other_grid(
    stage: int, then: tuple[int, int, int], tmp_path: Path
) -> None:
    half = STEPS // 2
    first = run_ranks(_run, RANKS, tmp_path, stage, 2, (0, half))
    assert all(torch.equal(whole, first[0][0]) for whole, _, _ in first)
    assert (first[0][2]["data"], first[0][2]["shard"]) == (2, 2)
    stage, ranks, group = then
    second = run_ranks(_run, ranks, tmp_path, stage, group, (half, STEPS))
    assert second[0][1] == STEPS * RANKS * MICRO
    assert relative_error(second[0][0], plain()) < 1e-6


def _refused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"zero_optimization.mics_shard_size is 2, which does not divide the 3 ranks"):
        initialize(Net(), {**config(3, 2, 4), "train_batch_size": 6, "train_micro_batch_size_per_gpu": 2})


def test_a_group_that_does_not_fit_is_refused() -> None:
    run_ranks(_refused, 3)
