"""The engine with DeepCompile: what the configuration switches on, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import initialize
from drivetrain.engine.config import load
from drivetrain_testkit import run_ranks
from drivetrain_testkit.models import MLP

WIDTH = 8


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = MLP(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) - 0.1).square().mean()


def config(*, deepcompile: bool = True, **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": deepcompile, **section},
    }


def train(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in {
        "hooks": config(deepcompile=False),
        "compiled": config(sync_after_allgather=True, sync_after_reduce=True, sync_before_reduce=True),
    }.items():
        engine = initialize(WithLoss(), settings)
        generator = torch.Generator().manual_seed(rank)
        batches = iter([torch.randn(3, WIDTH, generator=generator) for _ in range(10)])
        if name == "compiled":
            assert engine.compile_report.state == "waiting"
            engine.compile(backend="eager", compile_kwargs={"dynamic": False})
        losses = [engine.train_batch(batches).item() for _ in range(3)]
        evaluated = engine.eval_batch(torch.ones(3, WIDTH)).item()
        losses += [engine.train_batch(batches).item() for _ in range(2)]
        found[name] = (losses, evaluated, engine.compile_report)
        found[name + " parameters"] = {key: value.clone() for key, value in engine.sharded.full_parameters()}
        with pytest.raises(
            RuntimeError, match="before the first forward pass" if name == "compiled" else "deepcompile"
        ):
            engine.compile()
    return found


def test_an_engine_compiles_where_it_is_asked_to() -> None:
    for found in run_ranks(train, 2, timeout=100):
        losses, evaluated, report = found["compiled"]
        assert (losses, evaluated) == found["hooks"][:2]
        assert found["hooks"][2] is None
        assert (report.state, report.reason, report.graphs) == ("planned", None, 2)
        assert len(report.kept) == 3  # two micro-batches a step: all of it is worth keeping, and there is room
        for name, value in found["hooks parameters"].items():
            assert torch.equal(found["compiled parameters"][name], value), name


def refusals(rank: int, world_size: int) -> None:
    engine = initialize(WithLoss(), config())
    with pytest.raises(ValueError, match='must be "inductor" or "eager", got \'cudagraphs\''):
        engine.compile(backend="cudagraphs")
    with pytest.raises(ValueError, match=r"takes only 'dynamic' .*, got mode"):
        engine.compile(compile_kwargs={"mode": "max-autotune"})
    engine.compile(backend="eager")
    assert engine.compile_report.state == "waiting"


def test_what_an_engine_does_not_compile_with() -> None:
    run_ranks(refusals, 1)


def test_keys_that_change_nothing_are_told_of() -> None:
    loaded = load({"train_batch_size": 2, **{"compile": {"deepcompile": True, "free_activation": True}}})
    (notice,) = loaded.notices
    assert notice.path == "compile.free_activation"
    assert notice.message == "has no effect: Graphs always free a value after its last use."
