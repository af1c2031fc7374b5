"""Kernels of optimizer steps, Muon, quantisation and quantised products compile within shared memory, without a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from drivetrain_testkit.triton_compile import Case, Target, assert_compiles, targets


def _step(kernel: str, streams: str, numbers: str, constants: Mapping[str, object], *, half: bool = False) -> Case:
    """A kernel of `steps`: its streams (in bfloat16 copies, on request everywhere) and its float32 numbers by name."""
    types = {"places": "*i32", "table": "*i64", "tensors": "i32", "partials": "*fp64", "spans": "*i32"}
    types |= {name: "*bf16" if half or name in ("grad", "copy") else "*fp32" for name in streams.split()}
    types |= dict.fromkeys(numbers.split(), "fp32") | {"ratios": "*fp32"}
    return Case(
        module="steps",
        kernel=kernel,
        types=types,
        constants={**constants, "BLOCK": 1024, "ALIGNED": not half},
    )


STEPS = [
    _step(
        "adam_kernel",
        "param grad exp_avg exp_avg_sq max_exp_avg_sq copy",
        "factor decay coupled_decay beta1 rest1 beta2 rest2 root2 eps rate",
        constants,
        half=half,
    )
    for half, constants in (
        (False, {"COUPLED": False, "max_exp_avg_sq": None}),
        (True, {"COUPLED": True}),
        (True, {"COUPLED": False, "max_exp_avg_sq": None, "copy": None}),
    )
]
STEPS += [
    _step(
        "adam_rollback_kernel",
        "param grad exp_avg exp_avg_sq copy",
        "factor decay beta1 rest1 beta2 rest2 root2 eps rate",
        {"FIRST": above, "SECOND": above},
    )
    for above in (True, False)
]
STEPS += [
    _step("lion_kernel", "param grad exp_avg copy", "factor decay beta1 rest1 beta2 rest2 rate", {}),
    _step(
        "lamb_moments_kernel",
        "param grad exp_avg exp_avg_sq",
        "factor beta1 rest1 beta2 rest2 correction1 correction2 eps weight_decay",
        {"INSIDE": False},
    ),
    _step(
        "lamb_apply_kernel",
        "param exp_avg exp_avg_sq copy",
        "correction1 correction2 eps weight_decay lr",
        {"INSIDE": True},
    ),
    Case(
        module="steps",
        kernel="fold_kernel",
        types={"partials": "*fp64", "spans": "*i32", "norms": "*fp32"},
        constants={"BLOCK": 1024},
    ),
    _step("adagrad_kernel", "param grad total copy", "factor weight_decay eps rate", {"COUPLED": True}),
    _step(
        "sgd_kernel",
        "param grad momenta copy",
        "factor weight_decay momentum undamped rate",
        {"COUPLED": True, "FIRST": False, "NESTEROV": True},
    ),
    _step(
        "sgd_kernel",
        "param grad",
        "factor weight_decay momentum undamped rate",
        {"COUPLED": False, "FIRST": True, "NESTEROV": False, "momenta": None, "copy": None},
    ),
    _step("squares_kernel", "x", "factor", {"WRITE": False}, half=True),
    _step("squares_kernel", "x", "factor", {"WRITE": True}),
    _step("cast_kernel", "source target", "", {}),
]

MUON = [
    Case(
        module="muon",
        kernel="symmetric_kernel",
        types={
            **dict.fromkeys(("x", "y", "added", "out"), dtype),
            **dict.fromkeys(("rows", "inner", "x_batch", "x_row", "x_column", "y_batch", "y_row", "y_column"), "i32"),
            **dict.fromkeys(("alpha", "beta"), "fp32"),
        },
        constants={"BLOCK": block, "BLOCK_K": block_k, "PRECISION": precision, **more},
        warps=warps,
        stages=3,
    )
    for dtype, block, block_k, precision, warps, more in (
        ("*bf16", 128, 64, "ieee", 8, {"x_column": 1, "y_column": 1}),
        ("*fp16", 128, 64, "ieee", 8, {"x_row": 1, "y_row": 1, "added": None}),
        ("*bf16", 16, 64, "ieee", 4, {}),
        ("*fp32", 64, 32, "tf32", 4, {"x_column": 1, "y_column": 1}),
        ("*fp32", 64, 32, "ieee", 4, {"x_column": 1, "y_column": 1}),
    )
]

_INT8 = {"BITS": 8, "MANTISSA": 0, "BIAS": 0, "LARGEST": 0, "SYMMETRIC": True}
_INT4_ASYMMETRIC = {"BITS": 4, "MANTISSA": 0, "BIAS": 0, "LARGEST": 0, "SYMMETRIC": False}
_FP8_E4M3 = {"BITS": 8, "MANTISSA": 3, "BIAS": 7, "LARGEST": 0x7E, "SYMMETRIC": True}
_FP8_E5M2 = {"BITS": 8, "MANTISSA": 2, "BIAS": 15, "LARGEST": 0x7B, "SYMMETRIC": True}
_FP6_E3M2 = {"BITS": 6, "MANTISSA": 2, "BIAS": 3, "LARGEST": 0x1F, "SYMMETRIC": True}


def _quantize(
    layout: Mapping[str, object], tile: tuple[int, int, int, int], limit: float, *, stochastic: bool, summed: bool
) -> Case:
    """`tile`: R, W, CHUNKS, SIZE. A dense tensor, or the sum of tensors quantised in the same way, is quantised."""
    sources = {f"S_{name}": value for name, value in {**layout, "SIZE": tile[3], "ALIGNED": True}.items()}
    integers = ("total", "blocks", "sources", "first", "second", "first_block")
    return Case(
        module="quantize",
        kernel="quantize_kernel",
        types={"dense": "*bf16", "table": "*i64", "values": "*u8", "scales": "*fp32", "zeros": "*fp32"}
        | dict.fromkeys(integers, "i32")
        | {"factor": "fp32"},
        constants={
            ("dense" if summed else "table"): None,
            **({"zeros": None} if layout["SYMMETRIC"] else {}),
            **dict(zip(("R", "W", "CHUNKS", "SIZE"), tile, strict=True)),
            "LIMIT": limit,
            "STOCHASTIC": stochastic,
            **layout,
            **sources,
        },
    )


def _dequantize(layout: Mapping[str, object], size: int, out: str, *, carried: bool) -> Case:
    return Case(
        module="quantize",
        kernel="dequantize_kernel",
        types={"table": "*i64", "carried": "*fp32", "out": out, "total": "i64", "sources": "i32", "factor": "fp32"},
        constants={
            **({} if carried else {"carried": None}),
            "W": 2048,
            "SIZE": size,
            **layout,
            "ALIGNED": carried,
        },
    )


QUANTIZE = [
    _quantize(_INT8, (8, 256, 1, 256), 127.0, stochastic=False, summed=False),
    _quantize(_INT8, (8, 256, 1, 256), 127.0, stochastic=True, summed=True),
    _quantize(_INT4_ASYMMETRIC, (32, 64, 1, 48), 15.0, stochastic=True, summed=False),
    _quantize(_FP8_E4M3, (16, 128, 1, 128), 448.0, stochastic=False, summed=True),
    _quantize(_FP6_E3M2, (1, 4096, 2, 8192), 28.0, stochastic=True, summed=True),
    _dequantize(_INT8, 256, "*bf16", carried=True),
    _dequantize(_INT4_ASYMMETRIC, 48, "*fp16", carried=False),
    _dequantize(_FP8_E5M2, 128, "*fp32", carried=False),
    _dequantize(_FP6_E3M2, 128, "*bf16", carried=True),
    *(
        Case(
            module="quantize",
            kernel="pack_signs_kernel",
            types={"source": "*bf16", "bits": "*u8", "scales": "*fp32", "partials": "*fp64"}
            | dict.fromkeys(("total", "blocks", "size"), "i32"),
            constants={"R": rows, "W": 2048 // rows, "RMS": rows > 1, **({"partials": None} if rows > 1 else {})},
        )
        for rows in (1, 8)
    ),
    Case(
        module="quantize",
        kernel="unpack_signs_kernel",
        types={"bits": "*u8", "scales": "*fp32", "out": "*bf16", "total": "i32", "size": "i32"},
        constants={"GROUPS": 128},
    ),
]


def _matmul(
    x: str,
    layout: Mapping[str, object],
    tile: tuple[int, int, int, int],
    warps: int,
    precision: str = "ieee",
    **flags: bool,
) -> Case:
    """`tile`: BLOCK_M, BLOCK_N, BLOCK_K, SIZE. x of type "*i8" has scales."""
    wanted = {"WHOLE": False, "SPLIT": False, "INTEGER": False, **flags}
    missing = {} if x == "*i8" else {"x_scales": None}
    return Case(
        module="matmul",
        kernel="matmul_kernel",
        types={"x": x, "values": "*i8" if wanted["INTEGER"] and layout["BITS"] == 8 else "*u8", "bias": "*bf16"}
        | dict.fromkeys(("x_scales", "scales", "zeros"), "*fp32")
        | {"out": "*fp32" if wanted["SPLIT"] else "*bf16"}
        | dict.fromkeys(("tokens", "outputs", "inputs", "x_row", "per_split"), "i32"),
        constants={
            **missing,
            **({"zeros": None} if layout["SYMMETRIC"] else {}),
            **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "SIZE"), tile, strict=True)),
            **wanted,
            "PRECISION": precision,
            **layout,
        },
        warps=warps,
        stages=3,
    )


_INT4 = {**_INT4_ASYMMETRIC, "SYMMETRIC": True}
MATMUL = [
    _matmul("*bf16", _INT8, (128, 64, 64, 128), 8),
    _matmul("*bf16", _INT4, (16, 64, 128, 128), 4, SPLIT=True),
    _matmul("*fp16", _INT4_ASYMMETRIC, (64, 64, 32, 32), 4),
    _matmul("*bf16", _FP8_E4M3, (128, 128, 64, 4096), 8, WHOLE=True),
    _matmul("*fp16", _FP6_E3M2, (128, 64, 64, 64), 8),
    _matmul("*fp32", _FP6_E3M2, (64, 64, 16, 48), 4),
    _matmul("*fp32", _INT8, (64, 64, 32, 64), 4, "tf32"),
    _matmul("*i8", _INT8, (128, 128, 64, 4096), 8, WHOLE=True, INTEGER=True),
    _matmul("*i8", _INT8, (16, 64, 128, 128), 4, INTEGER=True, SPLIT=True),
    _matmul("*i8", _INT4_ASYMMETRIC, (128, 64, 64, 64), 8, INTEGER=True),
    _matmul("*i8", _FP8_E5M2, (32, 64, 64, 64), 4),
    *(
        Case(
            module="matmul",
            kernel="vector_kernel",
            types={"x": "*bf16", "values": "*u8", "scales": "*fp32", "zeros": "*fp32", "bias": "*bf16", "out": "*fp32"}
            | dict.fromkeys(("outputs", "inputs", "per_split"), "i32"),
            constants={
                "BLOCK_N": 16,
                "BLOCK_K": 256,
                "SIZE": 128,
                "SPLIT": split,
                **layout,
                **({"zeros": None} if layout["SYMMETRIC"] else {}),
            },
        )
        for layout, split in ((_INT8, True), (_INT4, False), (_INT4_ASYMMETRIC, True), (_FP6_E3M2, True))
    ),
    Case(
        module="matmul",
        kernel="add_parts_kernel",
        types={"parts": "*fp32", "bias": "*bf16", "out": "*bf16"}
        | dict.fromkeys(("total", "outputs", "splits"), "i32"),
        constants={"BLOCK": 1024},
    ),
]

CASES: list[Case] = [*STEPS, *MUON, *QUANTIZE, *MATMUL]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("module", sorted({case.module for case in CASES}))
def test_kernels_compile_to_machine_code(module: str, target: Target) -> None:
    assert_compiles([case for case in CASES if case.module == module], target)
