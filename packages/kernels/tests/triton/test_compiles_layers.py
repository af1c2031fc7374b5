"""Kernels of transformer layers compile to machine code within shared memory, for GPUs that need not be there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from drivetrain_testkit.triton_compile import Case, Target, assert_compiles, targets


def _types(pointers: str, dtype: str, floats: str, integers: str) -> dict[str, str]:
    """Argument names to types: `pointers` to `dtype`, those in `floats` to float32 ("*name": a pointer), then int32."""
    types = dict.fromkeys(pointers.split(), f"*{dtype}")
    types |= {name.lstrip("*"): "*fp32" if name.startswith("*") else "fp32" for name in floats.split()}
    return types | dict.fromkeys(integers.split(), "i32")


def _norm_cases() -> list[Case]:
    integers = "rows hidden x_stride residual_stride grad_stride total_grad_stride h_stride"
    floats = "*mean *rstd *partials eps"
    pointers = "x residual weight bias y total grad total_grad h dh"
    half, single = (_types(pointers, dtype, floats, integers) for dtype in ("bf16", "fp32"))
    layer, rms = {"CENTRED": True}, {"CENTRED": False, "bias": None}
    back = {"CENTRED": True, "HAS_BIAS": True}
    cases: list[tuple[str, Mapping[str, str], Mapping[str, object], int]] = [
        ("norm_kernel", half, {**layer, "ROWS": 16, "BLOCK": 128}, 4),
        ("norm_kernel", single, {**rms, "residual": None, "total": None, "ROWS": 1, "BLOCK": 8192}, 16),
        ("norm_long_kernel", half, {**layer, "BLOCK": 4096}, 8),
        ("norm_long_kernel", half, {**rms, "BLOCK": 4096}, 8),
        ("norm_backward_kernel", half, {**back, "ROWS": 16, "BLOCK": 128, "STAGES": 2}, 4),
        ("norm_backward_kernel", single, {**back, "ROWS": 1, "BLOCK": 8192, "STAGES": 2}, 16),
        ("norm_long_backward_kernel", half, {**back, "ROWS": 4, "BLOCK": 2048}, 16),
    ]
    return [
        Case(module="norm", kernel=kernel, types=types, constants=constants, warps=warps)
        for kernel, types, constants, warps in cases
    ]


def _rotary_cases() -> list[Case]:
    strides = " ".join(f"{t}_{d}" for t in ("q", "k", "q_out", "k_out") for d in ("batch", "place", "head"))
    types = _types(
        "q k q_out k_out", "bf16", "*cos *sin", f"sequence rows q_heads k_heads dim pairs angle_stride {strides}"
    )
    shapes: list[Mapping[str, object]] = [
        {"INTERLEAVED": False, "INVERSE": False, "HEADS": 16, "PAIRS": 64, "REST": 0},
        {"INTERLEAVED": True, "INVERSE": True, "HEADS": 64, "PAIRS": 16, "REST": 32, "positions": None},
    ]
    return [
        Case(module="rotary", kernel="rotary_kernel", types={**types, "positions": "*i64"}, constants=constants)
        for constants in shapes
    ]


def _activation_cases() -> list[Case]:
    integers = "rows columns gate_stride up_stride grad_stride out_stride x_stride residual_stride key0 key1 threshold"
    pointers = "gate up y grad dgate dup x bias residual dx"
    half = {**_types(pointers, "bf16", "*partials scale", integers), "first_row": "i64"}
    tile, stripe = {"ROWS": 16, "BLOCK": 128}, {"ROWS": 2, "BLOCK": 1024}
    cases: list[tuple[str, Mapping[str, object]]] = [
        ("glu_kernel", {"KIND": "silu", **tile}),
        ("glu_backward_kernel", {"KIND": "none", **tile}),
        ("bias_gelu_kernel", {"KIND": "tanh", **tile}),
        ("bias_gelu_backward_kernel", {"KIND": "tanh", **stripe}),
        ("dropout_kernel", {"DROP": True, **tile}),
        ("dropout_backward_kernel", {"DROP": True, **stripe}),
        ("dropout_backward_kernel", {"DROP": False, "dx": None, **stripe}),
    ]
    return [Case(module="activation", kernel=kernel, types=half, constants=constants) for kernel, constants in cases]


def _softmax_cases() -> list[Case]:
    integers = "rows columns queries inners scores_stride mask_outer mask_inner mask_query mask_column grad_stride"
    types = {**_types("scores weights grad out", "bf16", "scale", integers), "mask": "*u8"}
    masked, causal = {"CAUSAL": False, "BOOLEAN": True}, {"CAUSAL": True, "BOOLEAN": False, "mask": None}
    cases: list[tuple[str, Mapping[str, str], Mapping[str, object], int]] = [
        ("softmax_kernel", types, {**masked, "ROWS": 16, "BLOCK": 128}, 4),
        ("softmax_kernel", types, {**causal, "ROWS": 1, "BLOCK": 8192}, 16),
        ("softmax_long_kernel", {**types, "mask": "*fp32"}, {"CAUSAL": True, "BOOLEAN": False, "BLOCK": 4096}, 8),
        ("softmax_backward_kernel", types, {"ROWS": 1, "BLOCK": 8192}, 16),
        ("softmax_long_backward_kernel", types, {"BLOCK": 4096}, 8),
    ]
    return [
        Case(module="softmax", kernel=kernel, types=types, constants=constants, warps=warps)
        for kernel, types, constants, warps in cases
    ]


def _cross_entropy_cases() -> list[Case]:
    integers = "vocabulary width logits_stride factor_stride ignore_index"
    floats = "*losses *log_totals *factors smoothing z_loss"
    types = {**_types("logits out", "bf16", floats, integers), "labels": "*i64"}
    cases: list[tuple[str, Mapping[str, object]]] = [
        ("cross_entropy_kernel", {"SMOOTHED": False, "GRADIENT": False, "factors": None, "BLOCK": 4096}),
        ("cross_entropy_kernel", {"SMOOTHED": True, "GRADIENT": True, "log_totals": None, "BLOCK": 4096}),
        ("cross_entropy_backward_kernel", {"BLOCK": 4096}),
    ]
    return [
        Case(module="cross_entropy", kernel=kernel, types=types, constants=constants, warps=8)
        for kernel, constants in cases
    ]


CASES: list[Case] = [
    *_norm_cases(),
    *_rotary_cases(),
    *_activation_cases(),
    *_softmax_cases(),
    *_cross_entropy_cases(),
    Case(
        module="partial_sums",
        kernel="sum_partials_kernel",
        types=_types("out", "bf16", "*partials", "programs columns"),
        constants={"ROWS": 32, "BLOCK": 64},
    ),
]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("module", sorted({case.module for case in CASES}))
def test_kernels_compile_to_machine_code(module: str, target: Target) -> None:
    assert_compiles([case for case in CASES if case.module == module], target)
