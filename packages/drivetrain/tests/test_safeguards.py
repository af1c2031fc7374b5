"""The settings against hangs, from the configuration to the error; and what only one rank saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import CollectiveError, Mesh, Safeguards, init, shutdown
from drivetrain.engine import initialize
from drivetrain_testkit import run_ranks


def config(stage: int = 3, **safeguards: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "drivetrain": safeguards,
    }


def test_the_mesh_is_made_as_the_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        default = initialize(nn.Linear(3, 3), config()).mesh
        assert (default.timeout, default.safeguards.check) == (1800.0, False)
        asked = initialize(nn.Linear(3, 3), config(collective_timeout=60, check_collectives=True)).mesh
        assert (asked.timeout, asked.safeguards.check) == (60.0, True)
        monkeypatch.setenv("DRIVETRAIN_COLLECTIVE_TIMEOUT", "7")
        monkeypatch.setenv("DRIVETRAIN_CHECK_COLLECTIVES", "0")
        by_environment = initialize(nn.Linear(3, 3), config(collective_timeout=60, check_collectives=True)).mesh
        assert (by_environment.timeout, by_environment.safeguards.check) == (7.0, False)
    finally:
        shutdown()


@pytest.mark.parametrize(("key", "value"), [("collective_timeout", 60), ("check_collectives", True)])
def test_a_mesh_that_was_made_otherwise_is_refused(key: str, value: object) -> None:
    try:
        plain = Mesh.create(init())
        with pytest.raises(ValueError, match=rf"has drivetrain\.{key}={value}.*was made without it: pass safeguards="):
            initialize(nn.Linear(3, 3), config(**{key: value}), mesh=plain)
        fitting = Mesh.create(init(), safeguards=Safeguards(timeout=60, check=True))
        assert initialize(nn.Linear(3, 3), config(**{key: value}), mesh=fitting).mesh is fitting
    finally:
        shutdown()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def saving_alone(rank: int, ranks: int, folder: Path) -> str:
    engine = initialize(Net(), config(collective_timeout=3))

    def go_on(*, saves: bool) -> None:
        if saves:
            engine.save(folder / "checkpoints")
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()

    go_on(saves=False)
    with pytest.raises(CollectiveError) as info:
        go_on(saves=rank == 0)
    return str(info.value)


def test_a_save_on_one_rank_ends_in_an_error_that_says_so(tmp_path: Path) -> None:
    zero, one = run_ranks(saving_alone, 2, tmp_path)
    wanted = "optimizer state for a checkpoint"
    assert "all_gather on axis 'data+shard' failed on rank 0: " in zero
    assert wanted in zero
    assert "gather of unit 'blocks.0' (first parameter 'blocks.0.weight'), in forward" in zero
    assert "all_gather on axis 'shard' failed on rank 1: " in one
    assert f"axis 'data+shard' (channel 'checkpoint'), all_gather of 2 int64: {wanted}" in one
    assert ': engine.save(folder / "checkpoints")' in one
    assert not (tmp_path / "checkpoints").exists()
