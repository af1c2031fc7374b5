"""Engines whose states leave between phases: what is refused meanwhile, and what a host without a GPU does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import Engine, initialize
from drivetrain.zero import StateKind, move_states


def engine_of(stage: int) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    return initialize(model, config)


def train(engine: Engine) -> None:
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean())
    engine.step()


class Elsewhere(str, Enum):
    """As other libraries name devices."""

    cpu = "cpu"
    nvme = "nvme"


def test_on_the_host_it_does_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(1)
    train(engine)
    with caplog.at_level(logging.WARNING, "drivetrain.engine"):
        engine.offload_states()
        engine.offload_states([StateKind.OPTIM_STATES], device=Elsewhere.cpu, non_blocking=True)
    told = [record.getMessage() for record in caplog.records]
    assert told == ["rank 0: offload_states does nothing here: states are in host memory already, and stay usable"]
    train(engine)
    engine.reload_states()
    train(engine)
    with pytest.raises(
        ValueError, match="no states of kind 'gradients' to move; the kinds are optim_states, hp_params"
    ):
        engine.offload_states(["gradients"])
    with pytest.raises(ValueError, match="device must be 'cpu', got 'nvme'"):
        engine.offload_states(device=Elsewhere.nvme)
    with pytest.raises(ValueError, match="device must be 'cpu', got 'cuda:0'"):
        engine.offload_states(device=torch.device("cuda", 0))


def test_an_engine_whose_states_are_away_refuses_in_words(tmp_path: Path) -> None:
    engine = engine_of(2)
    train(engine)
    loss = engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean()
    move_states(engine.sharded, engine.optimizer)
    uses: dict[str, Callable[[], object]] = {
        "a forward pass needs lp_params": lambda: engine(torch.ones(2, 4, dtype=torch.bfloat16)),
        "a backward pass needs lp_params": lambda: engine.backward(loss),
        r"engine.step\(\) needs optim_states and hp_params and lp_params": engine.step,
        "saving or loading the model needs lp_params and hp_params": lambda: engine.save(tmp_path),
        "loading the model needs lp_params": lambda: engine.load(tmp_path),
        "the model needs lp_params": lambda: engine.export(tmp_path / "weights"),
    }
    for text, use in uses.items():
        with pytest.raises(RuntimeError, match=text):
            use()
    engine.reload_states()
    engine.backward(loss)
    engine.step()
    twin = engine_of(2)
    train(twin)
    train(twin)
    for mine, other in zip(engine.module.parameters(), twin.module.parameters(), strict=True):
        assert torch.equal(mine, other)
