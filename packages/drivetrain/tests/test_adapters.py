"""Fine-tuning with the adapters of ``peft`` on a Llama of ``transformers``, beside plain torch at every stage."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import Engine, initialize
from drivetrain_testkit import run_ranks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

RANKS, STEPS, VOCABULARY, HIDDEN = 2, 4, 96, 64
STAGES = (0, 1, 2, 3)
MOSTLY_THE_LAST = [*(pytest.param(stage, marks=pytest.mark.thorough) for stage in STAGES[:-1]), STAGES[-1]]
ADAPTED = ("q_proj", "v_proj", "up_proj")
MERGED = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def base() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    torch.manual_seed(11)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def adapted(model: nn.Module) -> Any:
    """``model`` with adapters in it; those start from noise, so that every gradient counts."""
    torch.manual_seed(12)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(ADAPTED), init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As adapters start out in a model of ``dtype``: peft makes them like the weights that they are for."""
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.to(dtype).float()
    return model


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def config(stage: int, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, **more},
    }


def train(engine: Engine, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        batch = tokens(step, rank)
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()


def plain(
    dtype: torch.dtype, first: int = 0, prepare: Callable[[nn.Module], nn.Module] = adapted
) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Plain torch over the data of all ranks: the model, and its adapters after every step from ``first`` on."""
    exact = prepare(base())
    model = copy.deepcopy(exact)
    for p in model.parameters():  # buffers keep their precision
        p.data = p.data.to(dtype)
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in exact.named_parameters() if p.requires_grad}
    optimizer = adam(masters.values())
    after = []
    for step in range(first, STEPS):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(RANKS):
            model.zero_grad()
            batch = tokens(step, rank)
            model(input_ids=batch, labels=batch).loss.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad.float() if rank else p.grad.float()
        for name, master in masters.items():
            master.grad = sums[name] / RANKS
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                model.get_parameter(name).copy_(master)
        after.append({name: master.detach().clone() for name, master in masters.items()})
    return model, after


def trained(engine: Engine, prefix: str = "") -> dict[str, torch.Tensor]:
    named = [(prefix + name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    found = engine.access.master.full_many([p for _, p in named])
    return {name: value for (name, _), value in zip(named, found, strict=True) if value is not None}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    wrong = sorted(found.keys() ^ expected.keys())
    return wrong + [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]


def lora(rank: int, world_size: int, dtype: torch.dtype) -> list[str]:
    _, expected = plain(dtype)
    wrong = []
    for stage in STAGES:
        model = adapted(base())
        engine = initialize(model, config(stage, dtype), optimizer=adam)
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for step in range(STEPS):
            engine.ledger.reset()
            batch = tokens(step, rank)
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.sharded.reducer.drain()
            reduced = engine.ledger.total_bytes(op="reduce_scatter" if stage else "all_reduce")
            if not 4 * numel <= reduced <= 4 * numel + 4 * 4096:
                wrong.append(f"stage {stage}: {reduced} bytes of gradients for {numel} parameters")
            engine.step()
            wrong += [f"stage {stage}, step {step}: {name}" for name in different(trained(engine), expected[step])]
        assert engine.optimizer is not None
        held, share = engine.optimizer.state_bytes, RANKS if stage else 1
        if held > 8 * numel / share + 8 * 4096:
            wrong.append(f"stage {stage}: {held} bytes of optimizer state for {numel} parameters")
    return wrong


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16])
def test_lora_is_that_of_plain_torch_and_only_adapters_travel(dtype: torch.dtype) -> None:
    for wrong in run_ranks(lora, RANKS, dtype, timeout=120):
        assert wrong == []


def around(rank: int, world_size: int, folder: Path, stage: int) -> dict[str, bool]:
    """What is done with adapters besides training them."""
    reference, expected = plain(torch.float32)
    model = adapted(base())
    engine = initialize(model, config(stage, torch.float32), optimizer=adam)
    train(engine, rank, 0, STEPS)
    same: dict[str, bool] = {}
    batch = tokens(20, 0)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = engine(input_ids=batch).logits
        return out

    with torch.no_grad():
        whole = reference(input_ids=batch).logits
        bare = base()(input_ids=batch).logits
    same["evaluated"] = torch.allclose(logits(), whole, atol=1e-5)
    with model.disable_adapter():
        same["disabled"] = torch.allclose(logits(), bare, atol=1e-5)
        engine(input_ids=batch)  # as if there were a backward pass to come: the adapters are frozen here
    same["enabled again"] = torch.allclose(logits(), whole, atol=1e-5)
    # Only the adapters, as files that peft reads.
    exported = engine.export(folder / f"adapters {stage}", trainable_only=True)
    same["exported"] = exported.tensors == len(expected[-1])
    adapters = trained(engine)
    if rank == 0:
        model.save_pretrained(folder / f"peft {stage}", state_dict=adapters)
        loaded = peft.PeftModel.from_pretrained(base(), folder / f"peft {stage}")
        with torch.no_grad():
            same["read by peft"] = torch.allclose(loaded(input_ids=batch).logits, whole, atol=1e-5)
    train(engine, rank, 0, 1)  # training goes on
    adapters = trained(engine)
    weight, before = model.get_parameter(MERGED), logits()
    exact = engine.access.master.full(weight)
    assert exact is not None
    for name, change in (("merged", model.merge_adapter), ("parted again", model.unmerge_adapter)):
        with engine.gathered(model), torch.no_grad():
            change()
        found = engine.access.master.full(weight)
        assert found is not None
        same[name] = torch.allclose(logits(), before, atol=1e-5)
        same[f"{name}, in the weights"] = torch.allclose(found, exact, atol=1e-5) == (name != "merged")
    same["adapters stay"] = not different(trained(engine), adapters)
    return same


@pytest.mark.parametrize("stage", MOSTLY_THE_LAST)
def test_what_is_done_with_adapters(tmp_path: Path, stage: int) -> None:
    for same in run_ranks(around, RANKS, tmp_path, stage, timeout=120):
        assert all(same.values()), same


def attached_late(rank: int, world_size: int, stage: int) -> list[str]:
    """Adapters that are attached to a model which has been trained, and what it was before is frozen then."""
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        _, expected = plain(dtype, 1, lambda model, dtype=dtype: rounded(adapted(model), dtype))
        model = base()
        engine = initialize(model, config(stage, dtype), optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0))
        train(engine, rank, 0, 1)
        adapted(model)
        joined = engine.adopt({"lr": 0.0})
        if len(joined) != sum(p.requires_grad for p in model.parameters()):
            wrong.append(f"{dtype}: adopted {joined}")
        engine.ledger.reset()
        train(engine, rank, 1, 2)
        numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
        reduced = engine.ledger.total_bytes(op="reduce_scatter")
        if stage and not 4 * numel <= reduced <= 4 * numel + 4 * 4096:
            wrong.append(f"{dtype}: {reduced} bytes of gradients for {numel} parameters")
        model = base()
        engine = initialize(model, config(stage, dtype), optimizer=adam)
        adapted(model)
        engine.adopt()
        train(engine, rank, 1, STEPS)
        found = trained(engine, "base_model.model.")
        wrong += [f"{dtype}: {name}" for name in different(found, expected[-1])]
    return wrong


@pytest.mark.parametrize("stage", MOSTLY_THE_LAST)
def test_adapters_that_come_late(stage: int) -> None:
    for wrong in run_ranks(attached_late, RANKS, stage, timeout=120):
        assert wrong == []


def over_int8(rank: int, world_size: int) -> dict[str, float]:
    """A frozen base in int8: the adapters train, and the loss is near that over the exact base."""
    losses = {}
    for name, quantised in (("exact", False), ("int8", True)):
        model = adapted(base())
        engine = initialize(
            model, config(3, torch.float32, zero_quantized_nontrainable_weights=quantised), optimizer=adam
        )
        train(engine, rank, 0, STEPS)
        losses[name] = float(engine.eval_batch({"input_ids": tokens(0, 0), "labels": tokens(0, 0)}))
        losses[f"{name}, bytes"] = engine.sharded.bytes().parameters
    return losses


def test_adapters_over_a_base_in_int8() -> None:
    for losses in run_ranks(over_int8, RANKS):
        assert losses["int8"] == pytest.approx(losses["exact"], abs=0.02)
        assert losses["int8, bytes"] < 0.6 * losses["exact, bytes"]
