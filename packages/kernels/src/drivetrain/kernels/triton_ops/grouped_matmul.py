"""One matrix product per expert, on GPUs, in one launch and without waiting for the bounds.

The grid has as many tiles of rows as any bounds could need, which the host knows from shapes; each program finds from
the offsets which expert its tile belongs to, and tiles beyond the last end at once. Rows after the last expert's are a
segment of their own, of zeros. Programs that follow each other share tiles of rows and of weights, for the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["grouped_matmul"]

# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _add_product(total, a, b, PRECISION: tl.constexpr):
    """`total + a @ b` in float32. PRECISION "interpreted" (see `_precision`) is not one of the GPU's."""
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _offset(offsets, index, rows, mask):
    """An offset, forced into 0 to `rows`: whatever stands there, no address lies outside the tensors."""
    found = tl.load(offsets + index, mask=mask, other=0)
    return tl.minimum(tl.maximum(found, 0), rows).to(tl.int32)


@triton.jit
def _find_tile(offsets, tile, rows, experts, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Segment, first row and end of the segment of a tile. Segment `experts` are the rows after the last expert's; a
    tile of segment `experts + 1` is one too many."""
    index = tl.arange(0, BLOCK_E)
    start = _offset(offsets, index, rows, index <= experts)
    end = _offset(offsets, index + 1, rows, index < experts)
    end = tl.where(index == experts, rows, end)
    tiles = (tl.maximum(end - start, 0) + (BLOCK_M - 1)) // BLOCK_M
    tiles = tl.where(index <= experts, tiles, 0)
    tiles_end = tl.cumsum(tiles, axis=0)
    segment = tl.minimum(tl.sum((tiles_end <= tile).to(tl.int32), axis=0), experts + 1)
    here = index == segment
    first_tile = tl.sum(tl.where(here, tiles_end - tiles, 0), axis=0)
    first_row = tl.sum(tl.where(here, start, 0), axis=0) + (tile - first_tile) * BLOCK_M
    return segment, first_row, tl.sum(tl.where(here, end, 0), axis=0)


# x        [rows, inner]            rows x_stride apart
# weights  [experts, inner, outer]  by its strides
# bias     [experts, outer]         if HAS_BIAS
# offsets  [experts + 1]            int32 or int64
# out      [rows, outer]            contiguous
# A program has a tile of BLOCK_M rows of one segment and BLOCK_N columns. BLOCK_E > experts + 1.
@triton.jit
def _grouped_matmul_kernel(
    x,
    weights,
    bias,
    offsets,
    out,
    rows,
    inner,
    outer,
    experts,
    tiles_m,
    x_stride,
    weights_stride_e,
    weights_stride_i,
    weights_stride_o,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    tiles_n = tl.cdiv(outer, BLOCK_N)
    band = tl.program_id(0) // (GROUP_M * tiles_n)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    tile = band * GROUP_M + within % height
    segment, first_row, end = _find_tile(offsets, tile, rows, experts, BLOCK_M, BLOCK_E)
    if segment > experts:
        return
    row = first_row + tl.arange(0, BLOCK_M)
    column = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_rows = (row < end)[:, None]
    in_columns = (column < outer)[None, :]
    left = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    right = weights + segment.to(tl.int64) * weights_stride_e
    right += k.to(tl.int64)[:, None] * weights_stride_i + column.to(tl.int64)[None, :] * weights_stride_o
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, tl.where(segment < experts, inner, 0), BLOCK_K):
        if EVEN_K:
            a = tl.load(left, mask=in_rows, other=0.0)
            b = tl.load(right, mask=in_columns, other=0.0)
        else:
            a = tl.load(left, mask=in_rows & (k < inner - start)[None, :], other=0.0)
            b = tl.load(right, mask=in_columns & (k < inner - start)[:, None], other=0.0)
        total = _add_product(total, a, b, PRECISION)
        left += BLOCK_K
        right += BLOCK_K * weights_stride_i
    if HAS_BIAS:
        real = (column < outer) & (segment < experts)
        total += tl.load(bias + segment.to(tl.int64) * outer + column, mask=real, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * outer + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=in_rows & in_columns)


# left     [rows, width_m]              rows left_stride apart
# right    [rows, width_n]              rows right_stride apart
# offsets  [experts + 1]                int32 or int64
# out      [experts, width_m, width_n]  left^T right of each segment
# A program has a tile of one expert.
@triton.jit
def _outer_kernel(
    left,
    right,
    offsets,
    out,
    rows,
    width_m,
    width_n,
    left_stride,
    right_stride,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    tiles_n = tl.cdiv(width_n, BLOCK_N)
    expert = tl.program_id(1)
    m = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = _offset(offsets, expert + 1, rows, True)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(_offset(offsets, expert, rows, True), end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        at = row.to(tl.int64)[:, None]
        in_rows = (row < end)[:, None]
        a = tl.load(left + at * left_stride + m[None, :], mask=in_rows & (m < width_m)[None, :], other=0.0)
        b = tl.load(right + at * right_stride + n[None, :], mask=in_rows & (n < width_n)[None, :], other=0.0)
        total = _add_product(total, tl.trans(a), b, PRECISION)
    target = out + (expert.to(tl.int64) * width_m + m.to(tl.int64)[:, None]) * width_n + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(m < width_m)[:, None] & (n < width_n)[None, :])


# values   [rows, width]     rows `stride` apart
# offsets  [experts + 1]     int32 or int64
# out      [experts, width]  the sum of each segment's rows
@triton.jit
def _segment_sums_kernel(values, offsets, out, rows, width, stride, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    expert = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = _offset(offsets, expert + 1, rows, True)
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in range(_offset(offsets, expert, rows, True), end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        mask = (row < end)[:, None] & (column < width)[None, :]
        total += tl.load(values + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    target = out + expert.to(tl.int64) * width + column
    tl.store(target, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < width)


# ----------------------------------------------------------------------------------------------------------- launchers


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Rows, columns and depth of a program's product, and how it is run."""

    m: int
    n: int
    k: int
    warps: int
    stages: int = 3


def _block(extent: int, largest: int) -> int:
    """The smallest power of two that holds `extent`, between what tensor cores take and `largest`."""
    return max(16, min(largest, triton.next_power_of_2(extent)))


def _tile(m: int, n: int, k: int, dtype: torch.dtype) -> _Tile:
    """For products of about `m` rows, `n` columns and depth `k`."""
    # 128 bytes of depth: three stages of 128 rows and 128 columns fill 96 KiB of shared memory.
    depth = _block(k, 32 if dtype == torch.float32 else 64)
    block_m, block_n = _block(m, 128), _block(n, 128)
    return _Tile(m=block_m, n=block_n, k=depth, warps=8 if block_m * block_n == 128 * 128 else 4)


def _precision(x: Tensor) -> str:
    """How torch was asked to multiply float32. On the host it is the interpreter that multiplies, which takes the bits
    of bfloat16 for integers unless they are converted first."""
    if not x.is_cuda:
        return "interpreted"
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _check(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"grouped_matmul in Triton: x has dtype {x.dtype}; expected float32, bfloat16 or float16")


def _product(x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [rows, inner] times `weights` [experts, inner, outer], of any strides."""
    rows, inner = x.shape
    experts, _, outer = weights.shape
    x = _rows_contiguous(x)
    out = x.new_empty(rows, outer)
    if out.numel() == 0:
        return out
    tile = _tile(rows // experts, outer, inner, x.dtype)
    # A segment's last tile may be short: one more per segment than rows alone would fill.
    tiles_m = (rows + min(experts + 1, rows) * (tile.m - 1)) // tile.m
    with torch.cuda.device_of(x):
        _grouped_matmul_kernel[(tiles_m * triton.cdiv(outer, tile.n),)](
            x,
            weights,
            x if bias is None else bias.contiguous(),
            offsets.contiguous(),
            out,
            rows,
            inner,
            outer,
            experts,
            tiles_m,
            x.stride(0),
            *weights.stride(),
            HAS_BIAS=bias is not None,
            EVEN_K=inner % tile.k == 0,
            PRECISION=_precision(x),
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            BLOCK_E=triton.next_power_of_2(experts + 2),
            GROUP_M=8,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """`left^T right` of every segment: [experts, columns of left, columns of right]."""
    experts = offsets.numel() - 1
    left, right = _rows_contiguous(left), _rows_contiguous(right)
    rows, width_m = left.shape
    width_n = right.shape[1]
    out = left.new_empty(experts, width_m, width_n)
    if out.numel() == 0:
        return out
    tile = _tile(width_m, width_n, max(1, rows // experts), left.dtype)
    with torch.cuda.device_of(left):
        _outer_kernel[(triton.cdiv(width_m, tile.m) * triton.cdiv(width_n, tile.n), experts)](
            left,
            right,
            offsets.contiguous(),
            out,
            rows,
            width_m,
            width_n,
            left.stride(0),
            right.stride(0),
            PRECISION=_precision(left),
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_R=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out


def _segment_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[experts, width]: the rows of each segment, added."""
    experts = offsets.numel() - 1
    values = _rows_contiguous(values)
    rows, width = values.shape
    out = values.new_empty(experts, width)
    if out.numel() == 0:
        return out
    block_n = _block(width, 128)
    with torch.cuda.device_of(values):
        _segment_sums_kernel[(triton.cdiv(width, block_n), experts)](
            values, offsets.contiguous(), out, rows, width, values.stride(0), BLOCK_R=32, BLOCK_N=block_n
        )
    return out


# ----------------------------------------------------------------------------------------------------------- functions


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weights, offsets)
        ctx.transposed = transposed
        return _product(x, weights.mT if transposed else weights, offsets, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        x, weights, offsets = ctx.saved_tensors
        wants_x, wants_weights, _, wants_bias, _ = ctx.needs_input_grad
        grad_x = _product(grad, weights if ctx.transposed else weights.mT, offsets, None) if wants_x else None
        left, right = (grad, x) if ctx.transposed else (x, grad)
        grad_weights = _outer(left, right, offsets) if wants_weights else None
        grad_bias = _segment_sums(grad, offsets) if wants_bias else None
        return grad_x, grad_weights, None, grad_bias, None


def grouped_matmul(
    x: Tensor, weights: Tensor, offsets: Tensor, *, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """`x` [rows, in] times `weights` [experts, in, out] ([experts, out, in] if `transposed`): [rows, out]."""
    _check(x)
    return _GroupedMatmul.apply(x, weights, offsets, bias, transposed)  # type: ignore[no-untyped-call]
