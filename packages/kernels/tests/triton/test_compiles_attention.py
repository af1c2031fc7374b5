"""Kernels of attention compile to machine code within shared memory, and do not spill, for GPUs that need not be there.

The tiles are those that the launchers would choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch

from drivetrain.kernels.triton_ops import evoformer_attention, paged_attention, sparse_attention
from drivetrain.kernels.triton_ops.attention_steps import padded
from drivetrain_testkit.triton_compile import Case, Target, assert_compiles, targets

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPILLED = 256  # a few registers are no harm; the compiler's failures are thousands of bytes


def attention_case(
    module: ModuleType,
    kernel: str,
    element: str,
    constants: Mapping[str, object],
    others: Mapping[str, str],
    tiles: Any = None,
) -> Case:
    """`others`: types of what is neither constant nor a pointer to `element`. Strides and lengths are aligned."""
    names = [name for name in getattr(module, kernel).arg_names if name not in constants]
    types = {name: others.get(name, f"*{element}") for name in names}
    strides = ("_token", "_head", "_block", "_row", "length")
    return Case(
        module=module.__name__.rpartition(".")[2],
        kernel=kernel,
        types=types,
        constants=constants,
        warps=4 if tiles is None else tiles.warps,
        stages=2 if tiles is None else tiles.stages,
        aligned=tuple(name for name in names if types[name].startswith("*") or name.endswith(strides)),
        stack=SPILLED,
    )


def paged_case(element: str, head_dim: int, *, group: int, decode: bool, split: bool, options: bool) -> Case:
    tiles = paged_attention.choose_tiles(group, head_dim, TORCH_TYPES[element], 1.0 if decode else 256.0)
    constants = {
        **{"BLOCK_SIZE": 16, "KV_HEADS": 8, "GROUP": group, "HEADS": tiles.heads},
        **{"SIZE": head_dim, "PADDED": padded(head_dim), "BLOCK_M": tiles.rows, "BLOCK_N": tiles.positions},
        **{"DECODE": decode, "CAUSAL": True, "WINDOWED": options, "CAPPED": options, "SPLIT": split},
        "PRECISION": "tf32x3",
    }
    strides = ("q_token", "q_head", "key_block", "key_token", "key_head", "value_block", "value_token", "value_head")
    others = dict.fromkeys((*strides, "table_row", "tokens", "sequences", "window"), "i32")
    others |= dict.fromkeys(("block_tables", "query_starts", "context_lengths"), "*i32")
    others |= {"scale": "fp32", "cap": "fp32", "lse": "*fp32"} | ({"out": "*fp32"} if split else {})
    return attention_case(paged_attention, "_attend", element, constants, others, tiles)


def cache_cases() -> list[Case]:
    size = {"SIZE": 80, "PADDED": 128}
    others = {"parts": "*fp32", "lse": "*fp32", "rows": "i32", "splits": "i32", "slots": "*i32"}
    numbers = [name for name in paged_attention._write.arg_names if "_" in name and "cache" not in name]
    return [
        attention_case(paged_attention, "_join", "bf16", size | {"SPLITS": 64}, others),
        attention_case(
            paged_attention, "_write", "bf16", size | {"BLOCK_H": 8}, others | dict.fromkeys(numbers, "i32")
        ),
    ]


def evoformer_case(kernel: str, element: str, head_dim: int) -> Case:
    forward = kernel == "_forward"
    choose = evoformer_attention.forward_tiles if forward else evoformer_attention.backward_tiles
    tiles = choose(head_dim, TORCH_TYPES[element])
    constants = {
        **{"SIZE": head_dim, "PADDED": padded(head_dim), "BLOCK_M": tiles.queries, "BLOCK_N": tiles.keys},
        **{"HAS_MASK": True, "HAS_PAIR": True, "PRECISION": "tf32x3"},
    }
    if kernel == "_backward_pair":
        del constants["HAS_PAIR"]
    others = dict.fromkeys(("n_rows", "length", "heads"), "i32") | dict.fromkeys(("lse", "delta", "d_mask"), "*fp32")
    return attention_case(evoformer_attention, kernel, element, constants, others | {"scale": "fp32"}, tiles)


def sparse_case(kernel: str, element: str, head_dim: int, block: int) -> Case:
    choose = sparse_attention.forward_tiles if kernel == "_forward" else sparse_attention.backward_tiles
    tiles = choose(block, head_dim, TORCH_TYPES[element])
    own, step = ("BLOCK_N", "BLOCK_M") if kernel == "_backward_kv" else ("BLOCK_M", "BLOCK_N")
    constants = {
        **{"BLOCK": block, "SIZE": head_dim, "PADDED": padded(head_dim), own: tiles.own, step: tiles.step},
        **{"CAUSAL": True, "HAS_KEEP": True, "PRECISION": "tf32x3"},
    }
    others = {"heads": "i32", "length": "i32", "scale": "fp32", "plain_scale": "fp32", "keep": "*u8"}
    others |= dict.fromkeys(("starts", "ends", "columns", "rows"), "*i32")
    others |= dict.fromkeys(("lse", "delta"), "*fp32")
    return attention_case(sparse_attention, kernel, element, constants, others, tiles)


CASES: list[Case] = [
    paged_case("bf16", 128, group=4, decode=True, split=True, options=False),
    paged_case("fp16", 96, group=71, decode=True, split=False, options=True),
    paged_case("bf16", 128, group=4, decode=False, split=False, options=False),
    paged_case("bf16", 256, group=1, decode=False, split=True, options=True),
    paged_case("fp32", 64, group=4, decode=False, split=False, options=False),
    *cache_cases(),
    *(evoformer_case(name, "bf16", 32) for name in ("_forward", "_backward_q", "_backward_kv", "_backward_pair")),
    *(evoformer_case(name, "fp32", 48) for name in ("_forward", "_backward_pair")),
    *(sparse_case(name, "bf16", 128, 64) for name in ("_forward", "_backward_q", "_backward_kv")),
    *(sparse_case(name, "fp16", 80, 16) for name in ("_forward", "_backward_kv")),
    sparse_case("_backward_kv", "fp32", 64, 128),
]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("module", sorted({case.module for case in CASES}))
def test_kernels_compile_to_machine_code(module: str, target: Target) -> None:
    assert_compiles([case for case in CASES if case.module == module], target)
