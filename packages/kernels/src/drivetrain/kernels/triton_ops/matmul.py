"""Products with quantised weights on GPUs: the weight is read as codes and decoded in registers.

Problem: with few tokens a linear layer is as fast as its weight is read, and a copy of it at full width would cost what
quantising saved; with many it is bound by the tensor cores, which must be fed numbers that they multiply.
Idea: every code stands for a number that bfloat16 and float16 hold exactly, so products are taken of codes, summed in
float32 over a block, and scaled once per block rather than once per element: `sum(code * x) * scale + sum(x) * zero`.
Tiles of the inner dimension never straddle a block. One token takes no tensor cores; up to some dozens split the inner
dimension over programs, so that the whole GPU reads the weight, and add the parts in a fixed order.
With activations "int8" blocks of x, as long as the weight's, are quantised symmetrically to int8 first (`quantize`, by
its own launch), and codes that are int8 too are multiplied as integers.
Invariants: nothing is rounded before the sums but x, where int8 is asked for; results depend neither on the order in
which programs run nor on the content of other tokens, but, in their last bits, on the number of tokens and on the GPU.

Shapes in the blocks above the kernels: T tokens, N outputs, K inputs, B = N * K / SIZE blocks, S splits of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from drivetrain.kernels.quantize_rules import QuantizationRule
from drivetrain.kernels.triton_ops.codes import decode, format_of, load_codes
from drivetrain.kernels.triton_ops.devices import DTYPES, float32_products, processors
from drivetrain.kernels.triton_ops.quantize import quantize, spread

__all__ = ["quantized_matmul"]

# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _tile_of(rows, columns, GROUP: tl.constexpr):
    """Row and column of this program's tile: down GROUP rows, then on to the next column, so that programs that run
    together share what they read."""
    program = tl.program_id(0)
    first = program // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    place = program % (GROUP * columns)
    return first + place % height, place // height


# x [T, K] with rows `x_row` apart, of a float dtype or int8; x_scales: float32 [T * K / SIZE] or None; values: uint8
# [N * K * BITS / 8], or int8 where INTEGER and BITS is 8; scales: float32 [B]; zeros: float32 [B] or None; bias [N] or
# None; out [T, N], or float32 [S, T, N] where SPLIT
@triton.jit(do_not_specialize=["per_split"])
def matmul_kernel(
    x,
    x_scales,
    values,
    scales,
    zeros,
    bias,
    out,
    tokens,
    outputs,
    inputs,
    x_row,
    per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    INTEGER: tl.constexpr,
    PRECISION: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """One tile of the result, or its part over `per_split` tiles of the inner dimension. Reads
    N * K * (BITS / 8 + 4 / SIZE) bytes of the weight once per BLOCK_M tokens, mostly from the L2 cache after the first.

    WHOLE: one block per row, so scales wait until the end. INTEGER: int8 by int8, sums int32, exact.
    """
    tile_m, tile_n = _tile_of(tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N), 8)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the end read others' and are not written.
    m_from = (m % tokens).to(tl.int64)
    n_from = (n % outputs).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    per_row = inputs // SIZE
    x_at = x + m_from[:, None] * x_row + k[None, :]
    if WHOLE and INTEGER:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1) * per_split
    for tile in range(first, tl.minimum(first + per_split, inputs // BLOCK_K)):
        start = tile * BLOCK_K
        left = tl.load(x_at + start)
        if INTEGER and BITS == 8:
            right = tl.load(values + n_from[:, None] * inputs + (start + k)[None, :])
        else:
            codes = load_codes(values, n_from * inputs + start, 0, True, BLOCK_N, BLOCK_K, BITS)
            if INTEGER:
                right = codes.to(tl.int8)
                if SYMMETRIC:
                    right = ((codes ^ (1 << (BITS - 1))) - (1 << (BITS - 1))).to(tl.int8)
            else:
                right = decode(codes, BITS, MANTISSA, BIAS, LARGEST, SYMMETRIC)
        if not INTEGER and left.dtype == tl.int8:
            left = left.to(tl.float16)
        if not INTEGER:
            right = right.to(left.dtype)
        right = tl.trans(right)
        if WHOLE and INTEGER:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
        elif WHOLE:
            total = tl.dot(left, right, total, input_precision=PRECISION)
        else:
            if INTEGER:
                part = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(left, right, input_precision=PRECISION)
            block = start // SIZE
            scale = tl.load(scales + n_from * per_row + block)[None, :]
            if x_scales is not None:
                x_scale = tl.load(x_scales + m_from * per_row + block)[:, None]
                scale = scale * x_scale
            total += part * scale
            if not SYMMETRIC:
                sums = tl.sum(left.to(tl.float32), axis=1)[:, None]
                if x_scales is not None:
                    sums *= x_scale
                total += sums * tl.load(zeros + n_from * per_row + block)[None, :]
    y = total.to(tl.float32)
    if WHOLE:
        scale = tl.load(scales + n_from)[None, :]
        if x_scales is not None:
            scale = scale * tl.load(x_scales + m_from)[:, None]
        y *= scale
    offsets = m.to(tl.int64)[:, None] * outputs + n[None, :]
    mask = (m < tokens)[:, None] & (n < outputs)[None, :]
    if SPLIT:
        out += tl.program_id(1).to(tl.int64) * tokens * outputs
    elif bias is not None:
        y += tl.load(bias + n_from).to(tl.float32)[None, :]
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


# x [K]; values: uint8; scales: float32 [B]; zeros: float32 [B] or None; bias [N] or None; out [N], or float32 [S, N]
# where SPLIT
@triton.jit(do_not_specialize=["per_split"])
def vector_kernel(
    x,
    values,
    scales,
    zeros,
    bias,
    out,
    outputs,
    inputs,
    per_split,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """One token: reads N * K * (BITS / 8 + 4 / SIZE) bytes of the weight once, all products in float32."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_from = (n % outputs).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    first = tl.program_id(1) * per_split
    for tile in range(first, tl.minimum(first + per_split, inputs // BLOCK_K)):
        starts = n_from * inputs + tile * BLOCK_K
        codes = load_codes(values, starts, 0, True, BLOCK_N, BLOCK_K, BITS)
        weight = decode(codes, BITS, MANTISSA, BIAS, LARGEST, SYMMETRIC)
        weight *= spread(scales, starts, 0, True, BLOCK_N, BLOCK_K, SIZE)
        if not SYMMETRIC:
            weight += spread(zeros, starts, 0, True, BLOCK_N, BLOCK_K, SIZE)
        total += weight * tl.load(x + tile * BLOCK_K + k).to(tl.float32)[None, :]
    y = tl.sum(total, axis=1)
    if SPLIT:
        out += tl.program_id(1).to(tl.int64) * outputs
    elif bias is not None:
        y += tl.load(bias + n_from).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < outputs)


# parts: float32 [S, T, N]; bias [N] or None; out [T, N]
@triton.jit(do_not_specialize=["splits"])
def add_parts_kernel(parts, bias, out, total, outputs, splits, BLOCK: tl.constexpr):
    """The sum over the splits, in their order, and the bias."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < total
    part = parts + offsets
    y = tl.load(part, mask=inside, other=0.0)
    for _ in range(1, splits):
        part += total
        y += tl.load(part, mask=inside, other=0.0)
    if bias is not None:
        y += tl.load(bias + offsets % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=inside)


# ----------------------------------------------------------------------------------------------------------- launchers

_FOLD: Final = 1024
_MOST_SPLITS: Final = 32
_LEAST_TILES: Final = 2  # of the inner dimension, for a program


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Tiles of one launch; `splits` programs of `per_split` tiles each share a tile of the result."""

    programs: int
    splits: int
    per_split: int


def _power_in(number: int) -> int:
    """The largest power of two that divides `number`."""
    return number & -number


def _grid(programs: int, tiles: int, device: torch.device) -> _Grid:
    """Split the inner dimension as far as it takes to give every multiprocessor two programs."""
    wanted = min(_MOST_SPLITS, triton.cdiv(2 * processors(device), programs), max(1, tiles // _LEAST_TILES))
    per_split = triton.cdiv(tiles, wanted)
    return _Grid(programs=programs, splits=triton.cdiv(tiles, per_split), per_split=per_split)


def _target(grid: _Grid, y: Tensor) -> Tensor:
    if grid.splits == 1:
        return y
    return torch.empty(grid.splits, *y.shape, dtype=torch.float32, device=y.device)


def _finish(grid: _Grid, parts: Tensor, bias: Tensor | None, y: Tensor) -> Tensor:
    if grid.splits > 1:
        add_parts_kernel[(triton.cdiv(y.numel(), _FOLD),)](
            parts, bias, y, y.numel(), y.shape[1], grid.splits, BLOCK=_FOLD, num_warps=4
        )
    return y


def _vector(
    x: Tensor, stored: tuple[Tensor, Tensor, Tensor | None], bias: Tensor | None, rule: QuantizationRule, y: Tensor
) -> Tensor:
    inputs, outputs = x.shape[1], y.shape[1]
    block_n, block_k = 16, min(256, _power_in(inputs))
    grid = _grid(triton.cdiv(outputs, block_n), inputs // block_k, x.device)
    target = _target(grid, y)
    vector_kernel[(grid.programs, grid.splits)](
        x,
        *stored,
        bias,
        target,
        outputs,
        inputs,
        grid.per_split,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SIZE=rule.block_size,
        SPLIT=grid.splits > 1,
        **format_of(rule),
        num_warps=4,
    )
    return _finish(grid, target, bias, y)


def _shape(tokens: int, dtype: torch.dtype, rule: QuantizationRule, *, whole: bool) -> tuple[int, int, int]:
    """Tile of tokens, outputs and inputs. float32 may run without tensor cores, and sums that are scaled block by block
    are held twice: larger tiles would not fit registers."""
    block_m = min(128, max(16, triton.next_power_of_2(tokens)))
    if dtype == torch.float32:
        return min(64, block_m), 64, min(32, _power_in(rule.block_size))
    block_n = 128 if whole and block_m == 128 else 64
    return block_m, block_n, min(128 if block_m < 64 else 64, _power_in(rule.block_size))


def _tiles(
    x: Tensor,
    x_scales: Tensor | None,
    stored: tuple[Tensor, Tensor, Tensor | None],
    bias: Tensor | None,
    rule: QuantizationRule,
    y: Tensor,
) -> Tensor:
    (tokens, inputs), outputs = x.shape, y.shape[1]
    values, scales, zeros = stored
    whole = rule.block_size == inputs and rule.symmetric
    block_m, block_n, block_k = _shape(tokens, x.dtype, rule, whole=whole)
    layout = format_of(rule)
    fits = rule.layout.mantissa == 0 and (rule.symmetric or rule.layout.bits == 4)
    integer = x.dtype == torch.int8 and fits and block_k >= 32
    grid = _grid(triton.cdiv(tokens, block_m) * triton.cdiv(outputs, block_n), inputs // block_k, x.device)
    target = _target(grid, y)
    matmul_kernel[(grid.programs, grid.splits)](
        x,
        x_scales,
        values.view(torch.int8) if integer and rule.layout.bits == 8 else values,
        scales,
        zeros,
        bias,
        target,
        tokens,
        outputs,
        inputs,
        x.stride(0),
        grid.per_split,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SIZE=rule.block_size,
        WHOLE=whole,
        SPLIT=grid.splits > 1,
        INTEGER=integer,
        PRECISION=float32_products(),
        **layout,
        num_warps=8 if block_m == 128 else 4,
        num_stages=3,
    )
    return _finish(grid, target, bias, y)


def _check(x: Tensor, rule: QuantizationRule, bias: Tensor | None, out_features: int, activations: str) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(
            f"quantized_matmul: x has dtype {x.dtype}; expected float32, bfloat16 or float16: convert it first"
        )
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"quantized_matmul: expected x as [tokens, in] with contiguous rows; found shape {tuple(x.shape)}, strides "
            f"{x.stride()}"
        )
    if x.shape[1] % rule.block_size:
        raise ValueError(
            f"quantized_matmul: blocks must not cross rows, but in={x.shape[1]} is no multiple of "
            f"block_size={rule.block_size}; quantise the weight in blocks that divide its rows"
        )
    if bias is not None and (bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(
            f"quantized_matmul: expected a contiguous bias of shape ({out_features},); found shape {tuple(bias.shape)}"
        )
    if activations not in ("native", "int8"):
        raise ValueError(f"quantized_matmul: activations must be 'native' or 'int8'; found {activations!r}")


def quantized_matmul(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    rule: QuantizationRule,
    out_features: int,
    bias: Tensor | None = None,
    activations: Literal["native", "int8"] = "native",
) -> Tensor:
    """`x @ W.T + bias` in x's dtype, [tokens, out_features], for x [tokens, in] with contiguous rows.

    W [out_features, in] is stored row-major as `values`, `scales` and `zeros` by `rule`, whose block size divides `in`.
    "native" multiplies x as it is (float32 by TF32 only where torch allows that); "int8" quantises blocks of x, as long
    as the weight's, symmetrically to int8 first.
    """
    _check(x, rule, bias, out_features, activations)
    y = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if x.shape[1] == 0:
        return y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    stored = (values, scales, zeros)
    with torch.cuda.device_of(x):
        if activations == "int8":
            x_values, x_scales = _int8(x, rule)
            return _tiles(x_values, x_scales, stored, bias, rule, y)
        if x.shape[0] == 1:
            return _vector(x, stored, bias, rule, y)
        return _tiles(x, None, stored, bias, rule, y)


def _int8(x: Tensor, rule: QuantizationRule) -> tuple[Tensor, Any]:
    """x's blocks as int8 [tokens, in], and their scales."""
    x_rule = QuantizationRule(format="int8", block_size=rule.block_size)
    x_values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    x_scales = torch.empty(x_rule.blocks(x.numel()), dtype=torch.float32, device=x.device)
    quantize(x.contiguous(), (x_values, x_scales, None), rule=x_rule)
    return x_values.view(torch.int8), x_scales
