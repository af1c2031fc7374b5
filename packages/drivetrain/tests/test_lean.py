"""What a configuration asks to be smaller: frozen weights held in int8, and gradients of embeddings as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import ConfigError, initialize
from drivetrain.kernels import QuantizationRule, dequantize, quantize
from drivetrain_testkit import run_ranks

WIDTH, VOCABULARY = 80, 600
RULE = QuantizationRule(format="int8", block_size=2048)
FROZEN = ("blocks.0.base.weight", "blocks.1.base.weight")


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x) + self.b(self.a(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def emptied() -> Model:
    model = Model()
    for name in FROZEN:
        nn.init.zeros_(model.get_parameter(name))
    return model


def coarse(value: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return dequantize(quantize(value.detach().flatten(), RULE), dtype=dtype).view(value.shape)


def config(stage: int, **changes: Any) -> dict[str, Any]:
    quantises = {"zero_quantized_nontrainable_weights": True} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **quantises},
        **changes,
    }


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(0, VOCABULARY, (6,), generator=torch.Generator().manual_seed(10 * step + engine.rank))
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    return dict(engine.sharded.full_parameters())


def _saves(rank: int, world_size: int, folder: Path) -> dict[str, torch.Tensor]:
    exact = dict(Model().named_parameters())
    engine = initialize(Model(), config(3))
    train(engine, range(2))
    engine.save(folder / "quantised")
    engine.export(folder / "export")
    going_on, found = train(engine, range(2, 4)), parameters(engine)
    assert all(torch.equal(found[name], coarse(exact[name], torch.bfloat16)) for name in FROZEN)

    again = initialize(emptied(), config(3))
    again.load(folder / "quantised")
    assert train(again, range(2, 4)) == going_on
    assert all(torch.equal(value, found[name]) for name, value in parameters(again).items())

    plain = initialize(Model(), config(1, bf16={"enabled": False}))
    plain.save(folder / "plain")
    again.load(folder / "plain")
    assert all(torch.equal(parameters(again)[name], found[name]) for name in FROZEN)
    return found


def _loads(rank: int, world_size: int, folder: Path) -> None:
    """Cut in another way, at another stage: the same values. From a plain checkpoint blocks arrive in parts."""
    exact = dict(Model().named_parameters())
    for stage, name in ((3, "quantised"), (3, "plain"), (1, "quantised")):
        engine = initialize(emptied(), config(stage))
        engine.load(folder / name)
        for frozen in FROZEN:
            assert torch.equal(parameters(engine)[frozen], coarse(exact[frozen], torch.bfloat16)), (stage, name)


def test_checkpoints_and_exports_hold_what_int8_weights_stand_for(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = run_ranks(_saves, 2, tmp_path)[0]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(exported[name], found[name]) for name in FROZEN)
    run_ranks(_loads, 3, tmp_path)


def test_frozen_weights_are_not_quantised_below_stage_3() -> None:
    with pytest.raises(ConfigError, match="stage 2 keeps parameters whole"):
        initialize(Model(), config(2, zero_optimization={"stage": 2, "zero_quantized_nontrainable_weights": True}))


def _rows(rank: int, world_size: int) -> None:
    for stage in range(4):
        moved, ends = [], []
        for rows in (False, True):
            engine = initialize(Model(), config(stage, sparse_gradients=rows, gradient_accumulation_steps=2))
            train(engine, range(2))
            engine.ledger.reset()
            train(engine, range(2, 4))
            moved.append(engine.ledger.total_bytes())
            ends.append(parameters(engine))
        assert moved[1] < moved[0]
        assert all(torch.equal(value, ends[0][name]) for name, value in ends[1].items()), stage


def test_gradients_of_embeddings_as_rows() -> None:
    run_ranks(_rows, 2)
