"""`torch_ops.softmax` on GPUs: one kernel forward, one backward.

Rows of up to 8192 scores stay in registers; longer ones are read twice in blocks, the second time from the cache, with
a running maximum and sum in between.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.torch_ops import softmax as torch_softmax
from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.triton_ops.tiles import as_rows, tile_of, warps_for

__all__ = ["masked_softmax"]

_LONGEST: Final = 8192  # elements of a row that are kept in registers
_TILE: Final = 2048  # elements of a tile of short rows
_BLOCK: Final = 4096  # columns at a time of longer rows


# The scores of a tile as softmax sees them: scaled, masked, and -inf where there is nothing to see.
# scores  [rows, columns], rows scores_stride apart        row  [ROWS, 1]        col  [1, BLOCK]
# mask    [outer, inner, queries, columns] at the strides given, or None
# Rows count through outer, inner and queries.
@triton.jit
def _visible(
    scores,
    mask,
    row,
    col,
    rows,
    columns,
    queries,
    inners,
    scores_stride,
    mask_outer,
    mask_inner,
    mask_query,
    mask_column,
    scale,
    CAUSAL: tl.constexpr,
    BOOLEAN: tl.constexpr,
):
    inside = (row < rows) & (col < columns)
    query = row % queries
    if CAUSAL:
        # What is loaded ends at a multiple of 16 keys, so that loads stay vectors; the rest is hidden below.
        last = query + (columns - queries)
        inside = inside & (col < (last // 16 + 1) * 16)
    x = tl.load(scores + row.to(tl.int64) * scores_stride + col, mask=inside, other=0.0).to(tl.float32) * scale
    if mask is not None:
        batch = row // queries
        place = (batch // inners).to(tl.int64) * mask_outer + (batch % inners).to(tl.int64) * mask_inner
        place += query.to(tl.int64) * mask_query
        m = tl.load(mask + place + col.to(tl.int64) * mask_column, mask=inside, other=0)
        if BOOLEAN:
            inside = inside & (m != 0)
        else:
            x += m.to(tl.float32)
    if CAUSAL:
        inside = inside & (col <= last)
    return tl.where(inside, x, -float("inf"))


# weights  [rows, columns], contiguous; the rest as in `_visible`
@triton.jit
def softmax_kernel(
    scores,
    mask,
    weights,
    rows,
    columns,
    queries,
    inners,
    scores_stride,
    mask_outer,
    mask_inner,
    mask_query,
    mask_column,
    scale,
    CAUSAL: tl.constexpr,
    BOOLEAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    x = _visible(
        scores,
        mask,
        row,
        col,
        rows,
        columns,
        queries,
        inners,
        scores_stride,
        mask_outer,
        mask_inner,
        mask_query,
        mask_column,
        scale,
        CAUSAL,
        BOOLEAN,
    )
    top = tl.max(x, axis=1)[:, None]
    e = tl.exp(x - tl.where(top == -float("inf"), 0.0, top))
    total = tl.sum(e, axis=1)[:, None]
    out = e / tl.where(total == 0.0, 1.0, total)
    tl.store(weights + row.to(tl.int64) * columns + col, out, mask=(row < rows) & (col < columns))


# As `softmax_kernel`, one row per program.
@triton.jit
def softmax_long_kernel(
    scores,
    mask,
    weights,
    rows,
    columns,
    queries,
    inners,
    scores_stride,
    mask_outer,
    mask_inner,
    mask_query,
    mask_column,
    scale,
    CAUSAL: tl.constexpr,
    BOOLEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) + tl.arange(0, 1))[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    end = columns
    if CAUSAL:
        end = tl.minimum(columns, tl.program_id(0) % queries + (columns - queries) + 1)
    top = tl.full([1, 1], -float("inf"), dtype=tl.float32)
    total = tl.zeros([1, BLOCK], dtype=tl.float32)
    for start in range(0, end, BLOCK):
        x = _visible(
            scores,
            mask,
            row,
            start + lane,
            rows,
            columns,
            queries,
            inners,
            scores_stride,
            mask_outer,
            mask_inner,
            mask_query,
            mask_column,
            scale,
            CAUSAL,
            BOOLEAN,
        )
        higher = tl.maximum(top, tl.max(x, axis=1)[:, None])
        level = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.exp(x - level)
        top = higher
    level = tl.where(top == -float("inf"), 0.0, top)
    whole = tl.sum(total, axis=1)[:, None]
    whole = tl.where(whole == 0.0, 1.0, whole)
    for start in range(0, columns, BLOCK):
        col = start + lane
        x = _visible(
            scores,
            mask,
            row,
            col,
            rows,
            columns,
            queries,
            inners,
            scores_stride,
            mask_outer,
            mask_inner,
            mask_query,
            mask_column,
            scale,
            CAUSAL,
            BOOLEAN,
        )
        tl.store(weights + row.to(tl.int64) * columns + col, tl.exp(x - level) / whole, mask=col < columns)


# weights  [rows, columns], contiguous        grad  the same, rows grad_stride apart        out  like weights
@triton.jit
def softmax_backward_kernel(
    weights, grad, out, rows, columns, grad_stride, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    p = tl.load(weights + row * columns + col, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
    along = tl.sum(p * g, axis=1)[:, None]
    tl.store(out + row * columns + col, p * (g - along) * scale, mask=inside)


# As `softmax_backward_kernel`, one row per program.
@triton.jit
def softmax_long_backward_kernel(weights, grad, out, columns, grad_stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    weights += row * columns
    grad += row * grad_stride
    out += row * columns
    lane = tl.arange(0, BLOCK)
    along = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        col = start + lane
        p = tl.load(weights + col, mask=col < columns, other=0.0).to(tl.float32)
        along += p * tl.load(grad + col, mask=col < columns, other=0.0).to(tl.float32)
    total = tl.sum(along, axis=0)
    for start in range(0, columns, BLOCK):
        col = start + lane
        p = tl.load(weights + col, mask=col < columns, other=0.0).to(tl.float32)
        g = tl.load(grad + col, mask=col < columns, other=0.0).to(tl.float32)
        tl.store(out + col, p * (g - total) * scale, mask=col < columns)


def _four_dimensions(mask: Tensor | None, scores: Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """The mask as [outer, inner, queries, keys] against the scores, and (queries, inners, and its four strides).

    A view, but for scores of more than four dimensions whose leading ones the mask doesn't treat alike.
    """
    shape = (1,) * max(0, 4 - scores.dim()) + tuple(scores.shape)
    queries, inners = shape[-2], shape[-3]
    if mask is None:
        return None, (queries, inners, 0, 0, 0, 0)
    wide = mask.expand(shape).reshape(-1, *shape[-3:])
    return (wide.view(torch.uint8) if wide.dtype == torch.bool else wide), (queries, inners, *wide.stride())


def _softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """scores not empty."""
    wide, numbers = _four_dimensions(mask, scores)
    x = as_rows(scores)
    rows, columns = x.shape
    weights = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    queries, inners, *strides = numbers
    arguments = (x, wide, weights, rows, columns, queries, inners, x.stride(0), *strides, scale)
    flags = {"CAUSAL": causal, "BOOLEAN": mask is not None and mask.dtype == torch.bool}
    with torch.cuda.device_of(scores):
        if columns <= _LONGEST:
            tile, block = tile_of(columns, elements=_TILE, block=_LONGEST)
            softmax_kernel[(triton.cdiv(rows, tile),)](
                *arguments, **flags, ROWS=tile, BLOCK=block, num_warps=warps_for(tile * block)
            )
        else:
            softmax_long_kernel[(rows,)](*arguments, **flags, BLOCK=_BLOCK, num_warps=warps_for(_BLOCK))
    return weights


def _softmax_backward(grad: Tensor, weights: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """`scale` times the gradient of what softmax was taken of, in `dtype`."""
    g = as_rows(grad)
    rows, columns = g.shape
    out = torch.empty(weights.shape, dtype=dtype, device=weights.device)
    with torch.cuda.device_of(weights):
        if columns <= _LONGEST:
            tile, block = tile_of(columns, elements=_TILE, block=_LONGEST)
            softmax_backward_kernel[(triton.cdiv(rows, tile),)](
                weights,
                g,
                out,
                rows,
                columns,
                g.stride(0),
                scale,
                ROWS=tile,
                BLOCK=block,
                num_warps=warps_for(tile * block),
            )
        else:
            softmax_long_backward_kernel[(rows,)](
                weights, g, out, columns, g.stride(0), scale, BLOCK=_BLOCK, num_warps=warps_for(_BLOCK)
            )
    return out


class _MaskedSoftmax(torch.autograd.Function):
    """(scores, mask or None, scale, causal) -> weights. Saved: the weights."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        weights = _softmax(scores, mask, scale, causal)
        ctx.save_for_backward(weights)
        ctx.scale = scale
        ctx.mask = None if mask is None else (mask.shape, mask.dtype)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return _softmax_backward(grad, weights, ctx.scale, weights.dtype), None, None, None
        shape, dtype = ctx.mask
        inner = _softmax_backward(grad, weights, 1.0, torch.float32)
        return (inner * ctx.scale).to(weights.dtype), inner.sum_to_size(shape).to(dtype), None, None


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """`torch_ops.softmax.masked_softmax`."""
    if scores.numel() == 0:
        return torch_softmax.masked_softmax(scores, mask, scale=scale, causal=causal)
    result: Tensor = apply(_MaskedSoftmax, scores, mask, scale, causal)
    return result
