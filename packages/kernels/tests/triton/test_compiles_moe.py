"""Kernels of mixtures of experts compile to machine code within shared memory, for GPUs that need not be there."""

from __future__ import annotations

import pytest

from drivetrain_testkit.triton_compile import Case, Target, assert_compiles, targets


def _types(integers: str, **rest: str) -> dict[str, str]:
    """Types of arguments: `integers` are names of 32-bit ones."""
    return {**dict.fromkeys(integers.split(), "i32"), **rest}


def _gating(dtype: str, experts: int, k: int, groups: int, biased: bool) -> list[Case]:
    shared = {"K": k, "SIGMOID": biased, "RENORMALIZE": True, "BLOCK_T": max(1, 2048 // experts)}
    forward = {"HAS_BIAS": biased, "GROUPS": groups, "SIZE": experts // groups, "TOP_GROUPS": (groups + 1) // 2}
    blocks = {"GROUP_BEST": 2, "BLOCK_G": groups, "BLOCK_S": experts // groups, "BLOCK_K": k}
    types = _types("tokens experts stride", logits=f"*{dtype}", chosen="*i64", scale="fp32")
    return [
        Case(
            module="gating",
            kernel="_gating_kernel",
            types={**types, "bias": "*fp32", "weights": "*fp32"},
            constants={**shared, **forward, **blocks},
            aligned=("logits", "bias", "weights", "chosen"),
        ),
        Case(
            module="gating",
            kernel="_gating_backward_kernel",
            types={**types, "grad_weights": "*fp32", "grad_logits": f"*{dtype}"},
            constants={**shared, "BLOCK_E": experts},
            aligned=("logits", "chosen", "grad_weights", "grad_logits"),
        ),
    ]


def _counting(experts: str, num_experts: int) -> list[Case]:
    types = {
        **_types("count num_experts blocks capacity alignment", experts=f"*{experts}"),
        **dict.fromkeys(("counts", "totals", "offsets", "before", "assignments", "destinations"), "*i32"),
    }
    constants: list[tuple[str, dict[str, object]]] = [
        ("_count_kernel", {"PER_PROGRAM": False, "BLOCK": 1024, "BINS": num_experts}),
        ("_count_kernel", {"PER_PROGRAM": True, "BLOCK": 128, "BINS": num_experts}),
        ("_sum_before_kernel", {"BLOCK_B": 128, "BLOCK_E": 16}),
        ("_offsets_kernel", {"BLOCK_E": num_experts}),
        ("_place_kernel", {"BLOCK": 128}),
    ]
    return [Case(module="token_permutation", kernel=name, types=types, constants=c) for name, c in constants]


def _moving(dtype: str, weighted: bool, dots: bool) -> list[Case]:
    types = {
        **_types("rows tokens hidden source_stride y_stride stride", weights="*fp32", dots="*fp32"),
        **dict.fromkeys(("assignments", "destinations"), "*i32"),
        **dict.fromkeys(("source", "y", "out"), f"*{dtype}"),
    }
    shared = {"K": 8, "HAS_WEIGHTS": weighted, "BLOCK_H": 1024}
    aligned = ("y", "out", "hidden")
    return [
        Case(
            module="token_permutation",
            kernel="_spread_kernel",
            types=types,
            constants={**shared, "HAS_DOTS": dots, "BLOCK_R": 4},
            aligned=(*aligned, "source", "source_stride", "y_stride"),
        ),
        Case(
            module="token_permutation",
            kernel="_combine_kernel",
            types=types,
            constants={**shared, "BLOCK_T": 4},
            aligned=(*aligned, "stride"),
        ),
    ]


def _grouped(dtype: str, precision: str, rows: int, depth: int, contiguous: str) -> list[Case]:
    """`contiguous`: the dimension of the weights whose stride is 1."""
    strides = ("weights_stride_e", "weights_stride_i", "weights_stride_o")
    types = {
        **_types("rows inner outer experts tiles_m x_stride width_m width_n left_stride right_stride width stride"),
        **dict.fromkeys(strides, "i32"),
        **dict.fromkeys(("x", "weights", "bias", "out", "left", "right", "values"), f"*{dtype}"),
        "offsets": "*i32",
    }
    tile = {"PRECISION": precision, "BLOCK_M": rows, "BLOCK_N": 128}
    constants = {**tile, "HAS_BIAS": True, "EVEN_K": True, "BLOCK_K": depth, "BLOCK_E": 256, "GROUP_M": 8}
    strided = tuple(stride for stride in strides if stride != contiguous)
    return [
        Case(
            module="grouped_matmul",
            kernel="_grouped_matmul_kernel",
            types=types,
            constants={**constants, contiguous: 1},
            aligned=("x", "weights", "bias", "out", "inner", "outer", "x_stride", *strided),
            warps=8 if rows == 128 else 4,
            stages=3,
        ),
        Case(
            module="grouped_matmul",
            kernel="_outer_kernel",
            types=types,
            constants={**tile, "BLOCK_R": depth},
            aligned=("left", "right", "out", "width_m", "width_n", "left_stride", "right_stride"),
            warps=8 if rows == 128 else 4,
            stages=3,
        ),
        Case(
            module="grouped_matmul",
            kernel="_segment_sums_kernel",
            types=types,
            constants={"BLOCK_R": 32, "BLOCK_N": 128},
            aligned=("values", "out", "width", "stride"),
        ),
    ]


CASES: list[Case] = [
    *_gating("fp32", experts=8, k=2, groups=1, biased=False),
    *_gating("bf16", experts=256, k=8, groups=8, biased=True),
    *_counting("i64", num_experts=16),
    *_counting("i32", num_experts=256),
    *_moving("fp32", weighted=False, dots=False),
    *_moving("bf16", weighted=True, dots=True),
    *_grouped("bf16", "ieee", rows=128, depth=64, contiguous="weights_stride_o"),
    *_grouped("fp16", "ieee", rows=16, depth=64, contiguous="weights_stride_i"),
    *_grouped("fp32", "tf32", rows=128, depth=32, contiguous="weights_stride_i"),
    *_grouped("fp32", "ieee", rows=64, depth=32, contiguous="weights_stride_o"),
]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("module", sorted({case.module for case in CASES}))
def test_kernels_compile_to_machine_code(module: str, target: Target) -> None:
    assert_compiles([case for case in CASES if case.module == module], target)
