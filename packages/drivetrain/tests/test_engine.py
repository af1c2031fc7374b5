"""The engine as a user drives it: every loop, against plain torch; what a step reports; resuming; exporting."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from drivetrain.engine import LoadParts, StepRecord, initialize
from drivetrain.engine.lr import WarmupLR
from drivetrain_testkit import relative_error, run_ranks
from drivetrain_testkit.transports import TRANSPORTS, refusal, setting

MICRO, ACCUMULATION, RANKS, STEPS = 3, 2, 2, 6


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(5, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        return (self.last(hidden).squeeze(-1).float() - y).square().mean()


def config(stage: int = 0, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02}},
        "gradient_clipping": 0.8,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def micro_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x = torch.randn(MICRO, 5, generator=generator)
    return x, x.sum(-1).sin()


def whole(engine: Any) -> torch.Tensor:
    return torch.cat([p.float().flatten() for _, p in sorted(engine.sharded.full_parameters())])


def plain(ranks: int = RANKS) -> tuple[torch.Tensor, list[float]]:
    """The oracle: one process, plain torch, the mean over micro-batches of all ranks."""
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    formula = WarmupLR(warmup_num_steps=4, warmup_max_lr=0.02)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            for rank in range(ranks):
                (model(*micro_batch(step, micro, rank)) / ACCUMULATION / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.8)))
        for group in optimizer.param_groups:
            group["lr"] = formula.lr(step, 0.02)
        optimizer.step()
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())]), norms


# The loops that people write ------------------------------------------------------------------------------------------


def managed(engine: Any, step: int) -> StepRecord:
    for micro in range(ACCUMULATION):
        engine.backward(engine(*micro_batch(step, micro, engine.rank)))
        record = engine.step()
        assert record.stepped == (micro == ACCUMULATION - 1)
    return record


def plain_backward(engine: Any, step: int) -> StepRecord:
    for micro in range(ACCUMULATION):
        (engine(*micro_batch(step, micro, engine.rank)) / ACCUMULATION).backward()
        record = engine.step()
    return record


def unmanaged(engine: Any, step: int) -> StepRecord:
    """Backward as often as one likes, then one step: the sum of all."""
    for micro in range(ACCUMULATION):
        engine.backward(engine(*micro_batch(step, micro, engine.rank)))
    return engine.step()


def with_no_sync(engine: Any, step: int) -> StepRecord:
    with engine.no_sync():
        engine.backward(engine(*micro_batch(step, 0, engine.rank)))
    engine.backward(engine(*micro_batch(step, 1, engine.rank)))
    return engine.step()


def one_call(engine: Any, step: int) -> StepRecord:
    engine.train_batch(iter([micro_batch(step, micro, engine.rank) for micro in range(ACCUMULATION)]))
    return engine.last_step


LOOPS = {
    "managed": (managed, {}),
    "plain backward": (plain_backward, {}),
    "unmanaged": (unmanaged, {"managed_gradient_accumulation": False}),
    "no_sync": (with_no_sync, {"managed_gradient_accumulation": False}),
    "train_batch": (one_call, {}),
}


def run_loops(rank: int, world_size: int) -> dict[tuple[str, int], tuple[torch.Tensor, list[StepRecord]]]:
    results = {}
    for name, (loop, changes) in LOOPS.items():
        for stage in range(4):
            engine = initialize(Regressor(), config(stage, **changes))
            records = [loop(engine, step) for step in range(STEPS)]
            results[name, stage] = whole(engine), records
    return results


def test_every_loop_at_every_stage_equals_plain_torch() -> None:
    """Also that the rate at step i is f(i), and that the reported norm is the one before clipping."""
    expected, norms = plain()
    formula = WarmupLR(warmup_num_steps=4, warmup_max_lr=0.02)
    for ranks in run_ranks(run_loops, RANKS):
        assert len(ranks) == 4 * len(LOOPS)
        for key, (parameters, records) in ranks.items():
            assert relative_error(parameters, expected) < 1e-6, key
            assert [r.lr for r in records] == [formula.lr(step, 0.02) for step in range(STEPS)], key
            assert [r.grad_norm for r in records] == pytest.approx(norms, rel=1e-5), key
            coefficients = [min(1.0, 0.8 / (norm + 1e-6)) for norm in norms]
            assert [r.clip_coefficient for r in records] == pytest.approx(coefficients, rel=1e-5), key
            assert all(r.stepped and r.reason is None for r in records), key


# Resuming -------------------------------------------------------------------------------------------------------------


HALF: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.02}}},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}}},
}
OTHERS = ((2, 3), (1, 1), (3, 2), (2, 0))
"""World sizes and stages on which a run of two ranks at stage 3 goes on."""

Ran = tuple[list[tuple[Any, ...]], torch.Tensor, Any]  # what each step told, the parameters, the client's state


def run_on(kind: str, stage: int, folder: Path, until: int) -> Ran:
    """Train on the data set until step ``until``, going on from a checkpoint if there is one, and save."""
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": 2}
    engine = initialize(Regressor(), config(stage, **sizes, **HALF[kind]), training_data=Samples())
    client = engine.load(folder).client_state if (folder / "latest").exists() else None
    told = []
    while engine.global_steps < until:
        loss = float(engine.train_batch())
        told.append((engine.global_steps, loss, engine.last_step.lr, engine.last_step.loss_scale))
    engine.save(folder, client_state={"history": told})
    return told, whole(engine), client


def begin_all(rank: int, world_size: int, folder: str) -> dict[str, tuple[Ran, Ran]]:
    """For each kind, a run of eight steps, and one that stops after four."""
    return {
        kind: (run_on(kind, 3, Path(folder, kind, "whole"), 8), run_on(kind, 3, Path(folder, kind, "first"), 4))
        for kind in HALF
    }


def go_on_all(rank: int, world_size: int, folder: str, stages: tuple[int, ...]) -> dict[tuple[str, int], Ran]:
    return {
        (kind, stage): run_on(kind, stage, Path(folder, kind, f"{world_size}-{stage}"), 8)
        for kind in HALF
        for stage in stages
    }


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[Any, Ran]]:
    """By kind: the run that was not stopped, the one that was, and those that went on from there. Of rank 0."""
    folder = tmp_path_factory.mktemp("runs")
    begun = run_ranks(begin_all, 2, str(folder))[0]
    found: dict[str, dict[Any, Ran]] = {
        kind: {"whole": through, "first": first} for kind, (through, first) in begun.items()
    }
    for kind in HALF:
        for world_size, stage in OTHERS:
            shutil.copytree(folder / kind / "first", folder / kind / f"{world_size}-{stage}")
    for world_size in sorted({world_size for world_size, _ in OTHERS}):
        stages = tuple(stage for size, stage in OTHERS if size == world_size)
        for (kind, stage), ran in run_ranks(go_on_all, world_size, str(folder), stages)[0].items():
            found[kind][world_size, stage] = ran
    return found


@pytest.mark.parametrize("kind", HALF)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(kind: str, resumed: dict[str, dict[Any, Ran]]) -> None:
    told, expected, _ = resumed[kind]["whole"]
    first, _, _ = resumed[kind]["first"]
    assert first == told[:4]
    for world_size, stage in OTHERS:
        rest, parameters, client = resumed[kind][world_size, stage]
        assert client == {"history": first}
        assert [row[0] for row in rest] == [5, 6, 7, 8]
        assert [row[2:] for row in rest] == [row[2:] for row in told[4:]], "learning rate and loss scale"
        if (world_size, stage) == (2, 3):
            assert [row[1] for row in rest] == [row[1] for row in told[4:]]
            assert torch.equal(parameters, expected)
        tolerance = 2e-2 if kind in ("bf16", "fp16") else 1e-5
        assert relative_error(parameters, expected) < tolerance, (world_size, stage)
        assert [row[1] for row in rest] == pytest.approx([row[1] for row in told[4:]], rel=max(1e-3, tolerance))


def load_parts(rank: int, world_size: int, folder: str) -> tuple[float, int, list[str]]:
    engine = initialize(Regressor(), config(1))
    for step in range(3):
        managed(engine, step)
    engine.save(folder)
    saved = whole(engine)
    fresh = initialize(Regressor(), config(3))
    loaded = fresh.load(folder, parts=LoadParts(optimizer=False, schedule=False))
    assert fresh.optimizer.state_bytes == 0
    return relative_error(whole(fresh), saved), fresh.global_steps, list(loaded.report.missing)


def test_parts_of_a_checkpoint_load_alone(tmp_path: Path) -> None:
    assert run_ranks(load_parts, 2, str(tmp_path))[0] == (0.0, 0, [])


# Reporting ------------------------------------------------------------------------------------------------------------


def watch(rank: int, world_size: int, folder: str) -> None:
    changes = {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}, "wall_clock_breakdown": True}
    engine = initialize(Regressor(), config(2, **changes))
    for step in range(3):
        managed(engine, step)
    engine.close()


def test_metrics_reach_the_csv_monitor_and_nothing_the_console(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(watch, 2, str(tmp_path))
    out, err = capfd.readouterr()
    lines = [line for line in (out + err).splitlines() if "step" in line]
    assert len(lines) == 0, lines
    files = {path.name: list(csv.reader(path.open())) for path in (tmp_path / "job").iterdir()}
    losses = files["Train_Samples_train_loss.csv"]
    assert [int(row[0]) for row in losses[1:]] == [12, 24, 36]
    assert all(float(row[1]) > 0 for row in losses[1:])
    rates = [float(row[1]) for row in files["Train_Samples_lr.csv"][1:]]
    assert rates == pytest.approx([WarmupLR(warmup_num_steps=4, warmup_max_lr=0.02).lr(i, 0.02) for i in range(3)])


# Exporting ------------------------------------------------------------------------------------------------------------


def train_llamas(rank: int, world_size: int, folder: str) -> dict[int, torch.Tensor]:
    return {stage: train_llama(stage, Path(folder, str(stage))) for stage in (0, 3)}


def train_llama(stage: int, folder: Path) -> torch.Tensor:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    engine = initialize(LlamaForCausalLM(shape), config(stage, bf16={"enabled": True}, scheduler=None))
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        engine.train_batch(iter([{"input_ids": tokens, "labels": tokens}] * ACCUMULATION))
    engine.export(folder)
    engine.eval()
    with torch.no_grad():
        return engine(input_ids=tokens).logits.float()


def test_transformers_loads_an_export_and_computes_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(5))
    for stage, expected in run_ranks(train_llamas, 2, str(tmp_path))[0].items():
        folder = tmp_path / str(stage)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == 61
        with torch.no_grad():
            assert torch.equal(model(input_ids=tokens).logits.float(), expected), f"stage {stage}"


def _muon(rank: int, ranks: int) -> None:
    """`Muon` in a file: matrices are orthogonalised, tables and vectors take AdamW's step, at every stage."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.embed_tokens = nn.Embedding(7, 12)
            self.inner = nn.Linear(12, 12)
            self.lm_head = nn.Linear(12, 7, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.lm_head(torch.tanh(self.inner(self.embed_tokens(tokens)))).logsumexp(-1).mean()

    params = {"lr": 0.01, "muon_lr": 0.05, "weight_decay": 0.0, "ns_method": "standard"}
    tokens = torch.arange(6).view(2, 3) + rank % 2
    for stage in (0, 1, 2, 3):
        section = {"optimizer": {"type": "Muon", "params": params}, "scheduler": None, "gradient_clipping": 0.0}
        engine = initialize(Model(), config(stage, gradient_accumulation_steps=1, **section))
        before = {name: p.clone() for name, p in engine.sharded.full_parameters()}
        engine.backward(engine(tokens))
        engine.step()
        moved = {name: p - before[name] for name, p in engine.sharded.full_parameters()}
        singular = torch.linalg.svdvals(moved["inner.weight"] / 0.05)
        assert singular.max() < 1.3, (stage, singular)
        assert singular.median() > 0.6, (stage, singular)
        for name in ("inner.bias", "lm_head.weight"):  # Adam's first step moves by the learning rate
            assert moved[name].abs().max() == pytest.approx(0.01, rel=1e-3), (stage, name)


def test_muon_in_a_file() -> None:
    run_ranks(_muon, 2)


def carrier(rank: int, world_size: int) -> str:
    return initialize(Regressor(), config()).mesh.axis("shard").carrier


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_of_one_host_share_memory_unless_told_otherwise(transport: str) -> None:
    if refusal(transport):
        pytest.skip(refusal(transport))
    assert run_ranks(carrier, RANKS, env=setting(transport)) == [transport] * RANKS
