"""Moving tokens to their experts and back, on GPUs. `drivetrain.kernels.token_permutation` says what is computed.

The sort is one by counting, in four launches and without waiting: blocks of assignments are counted, the counts of each
expert are summed up over the blocks, the experts' segments are laid out, and each assignment's row is that of its
segment, plus the assignments to its expert in blocks before, plus those before it in its own block. No step depends on
the order in which programs run.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["expert_histogram", "permutation", "permute_tokens", "unpermute_tokens"]

_BLOCK: Final = 128  # assignments ranked together, each against each
_UNLIMITED: Final = 2**31 - 1
_TILE: Final = 4096  # elements a program moves at a time

# ------------------------------------------------------------------------------------------------------------- kernels


# experts  [count]                    int32 or int64
# counts   [num_experts]              int32, zero before, or
#          [programs, num_experts]    int32, if PER_PROGRAM
@triton.jit
def _count_kernel(
    experts, counts, count, num_experts, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + index, mask=index < count, other=-1)
    named = (expert >= 0) & (expert < num_experts)
    found = tl.histogram(tl.where(named, expert, 0).to(tl.int32), BINS, mask=named)
    bins = tl.arange(0, BINS)
    if PER_PROGRAM:
        tl.store(counts + tl.program_id(0).to(tl.int64) * num_experts + bins, found, mask=bins < num_experts)
    else:
        tl.atomic_add(counts + bins, found, mask=(bins < num_experts) & (found > 0))


# counts  [blocks, num_experts]  int32; becomes the sum of the blocks before
# totals  [num_experts]          int32
# A program has BLOCK_E experts.
@triton.jit
def _sum_before_kernel(counts, totals, blocks, num_experts, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(0, blocks, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        mask = (block < blocks)[:, None] & (expert < num_experts)[None, :]
        at = counts + block.to(tl.int64)[:, None] * num_experts + expert[None, :]
        here = tl.load(at, mask=mask, other=0)
        tl.store(at, tl.cumsum(here, axis=0) - here + total[None, :], mask=mask)
        total += tl.sum(here, axis=0)
    tl.store(totals + expert, total, mask=expert < num_experts)


# totals   [num_experts]      int32
# offsets  [num_experts + 1]  int32
@triton.jit
def _offsets_kernel(totals, offsets, num_experts, capacity, alignment, BLOCK_E: tl.constexpr):
    expert = tl.arange(0, BLOCK_E)
    kept = tl.minimum(tl.load(totals + expert, mask=expert < num_experts, other=0), capacity)
    padded = (kept + (alignment - 1)) // alignment * alignment
    ends = tl.cumsum(padded, axis=0)
    tl.store(offsets + expert + 1, ends, mask=expert < num_experts)
    tl.store(offsets + expert, tl.zeros_like(ends), mask=expert == 0)


# experts       [count]                int32 or int64
# before        [blocks, num_experts]  int32: assignments to an expert in the blocks before
# offsets       [num_experts + 1]      int32
# assignments   [rows]                 int32, -1 before
# destinations  [count]                int32
# A program has a block of BLOCK assignments.
@triton.jit
def _place_kernel(
    experts, before, offsets, assignments, destinations, count, num_experts, capacity, BLOCK: tl.constexpr
):
    place = tl.arange(0, BLOCK)
    index = tl.program_id(0) * BLOCK + place
    expert = tl.load(experts + index, mask=index < count, other=-1)
    named = (expert >= 0) & (expert < num_experts)
    expert = tl.where(named, expert, -1).to(tl.int32)
    earlier = (expert[:, None] == expert[None, :]) & (place[:, None] > place[None, :])
    at = tl.program_id(0).to(tl.int64) * num_experts + expert
    rank = tl.sum(earlier.to(tl.int32), axis=1) + tl.load(before + at, mask=named, other=0)
    kept = named & (rank < capacity)
    row = tl.load(offsets + expert, mask=kept, other=0) + rank
    tl.store(destinations + index, tl.where(kept, row, -1), mask=index < count)
    tl.store(assignments + row, index, mask=kept)


# source       [tokens, hidden]
# assignments  [rows]            int32
# weights      [tokens * K]      any float, if HAS_WEIGHTS
# y            [rows, hidden]    if HAS_DOTS
# out          [rows, hidden]    source by assignment, times its weight; zero where there is none
# dots         [tokens * K]      float32, if HAS_DOTS: products of source and y, summed over hidden
# A program has BLOCK_R rows, whole. Strides are those of rows.
@triton.jit
def _spread_kernel(
    source,
    assignments,
    weights,
    y,
    out,
    dots,
    rows,
    hidden,
    source_stride,
    y_stride,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_DOTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    assignment = tl.load(assignments + row, mask=row < rows, other=-1)
    filled = assignment >= 0
    token = (tl.where(filled, assignment, 0) // K).to(tl.int64)[:, None]
    row_start = row.to(tl.int64)[:, None]
    dot = tl.zeros((BLOCK_R,), dtype=tl.float32)
    if HAS_WEIGHTS:
        weight = tl.load(weights + assignment, mask=filled, other=0.0).to(tl.float32)[:, None]
    for start in range(0, hidden, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)[None, :]
        mask = filled[:, None] & (column < hidden)
        value = tl.load(source + token * source_stride + column, mask=mask, other=0.0)
        if HAS_DOTS:
            other = tl.load(y + row_start * y_stride + column, mask=mask, other=0.0)
            dot += tl.sum(value.to(tl.float32) * other.to(tl.float32), axis=1)
        if HAS_WEIGHTS:
            # Rows of padding have weight zero and value zero.
            value = (value.to(tl.float32) * weight).to(out.dtype.element_ty)
        tl.store(out + row_start * hidden + column, value, mask=(row < rows)[:, None] & (column < hidden))
    if HAS_DOTS:
        tl.store(dots + assignment, dot, mask=filled)


# y             [rows, hidden]    rows `stride` apart
# destinations  [tokens, K]       int32
# weights       [tokens, K]       any float, if HAS_WEIGHTS
# out           [tokens, hidden]  the sum of a token's rows, times their weights
# A program has BLOCK_T tokens and BLOCK_H columns.
@triton.jit
def _combine_kernel(
    y,
    destinations,
    weights,
    out,
    tokens,
    hidden,
    stride,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_H), dtype=tl.float32)
    for choice in range(K):
        at = token.to(tl.int64) * K + choice
        row = tl.load(destinations + at, mask=token < tokens, other=-1)
        kept = row >= 0
        start = tl.where(kept, row, 0).to(tl.int64)[:, None] * stride
        value = tl.load(y + start + column, mask=kept[:, None] & (column < hidden), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value *= tl.load(weights + at, mask=kept, other=0.0).to(tl.float32)[:, None]
        total += value
    target = out + token.to(tl.int64)[:, None] * hidden + column
    tl.store(target, total.to(out.dtype.element_ty), mask=(token < tokens)[:, None] & (column < hidden))


# ----------------------------------------------------------------------------------------------------------- launchers


def _bins(num_experts: int) -> int:
    return max(16, triton.next_power_of_2(num_experts))


def expert_histogram(experts: Tensor, num_experts: int) -> Tensor:
    """int32 [num_experts]: how often each is named. Integers are added, so the order of the additions is nothing."""
    counts = torch.zeros(num_experts, dtype=torch.int32, device=experts.device)
    count = experts.numel()
    if count:
        block = 1024
        with torch.cuda.device_of(experts):
            _count_kernel[(triton.cdiv(count, block),)](
                experts.contiguous(),
                counts,
                count,
                num_experts,
                PER_PROGRAM=False,
                BLOCK=block,
                BINS=_bins(num_experts),
            )
    return counts


def permutation(
    experts: Tensor, num_experts: int, *, rows: int, capacity: int | None, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments [rows], destinations [tokens, k] and offsets [num_experts + 1], int32."""
    count = experts.numel()
    device = experts.device
    experts = experts.contiguous()
    assignments = torch.full((rows,), -1, dtype=torch.int32, device=device)
    destinations = torch.empty(experts.shape, dtype=torch.int32, device=device)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    if count == 0:
        return assignments, destinations, offsets
    limit = _UNLIMITED if capacity is None else min(capacity, _UNLIMITED)
    blocks = triton.cdiv(count, _BLOCK)
    before = torch.empty(blocks, num_experts, dtype=torch.int32, device=device)
    totals = torch.empty(num_experts, dtype=torch.int32, device=device)
    with torch.cuda.device_of(experts):
        _count_kernel[(blocks,)](
            experts, before, count, num_experts, PER_PROGRAM=True, BLOCK=_BLOCK, BINS=_bins(num_experts)
        )
        _sum_before_kernel[(triton.cdiv(num_experts, 16),)](
            before, totals, blocks, num_experts, BLOCK_B=128, BLOCK_E=16
        )
        _offsets_kernel[(1,)](totals, offsets, num_experts, limit, alignment, BLOCK_E=_bins(num_experts))
        _place_kernel[(blocks,)](
            experts, before, offsets, assignments, destinations, count, num_experts, limit, BLOCK=_BLOCK
        )
    return assignments, destinations, offsets


def _check(op: str, role: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{op} in Triton: {role} has dtype {tensor.dtype}; expected float32, bfloat16 or float16")


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _blocks(hidden: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = min(1024, triton.next_power_of_2(hidden))
    return max(1, min(64, _TILE // columns)), columns


def _spread(
    source: Tensor, assignments: Tensor, k: int, *, weights: Tensor | None = None, y: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The rows of `source` by assignment, times `weights`; and, given `y`, the products of its rows with them."""
    rows, hidden = assignments.numel(), source.shape[1]
    source = _rows_contiguous(source)
    out = source.new_empty(rows, hidden)
    dots = None if y is None else torch.zeros(source.shape[0] * k, dtype=torch.float32, device=source.device)
    if out.numel() == 0:
        return out, dots
    y = source if y is None else _rows_contiguous(y)
    block_r, block_h = _blocks(hidden)
    with torch.cuda.device_of(source):
        _spread_kernel[(triton.cdiv(rows, block_r),)](
            source,
            assignments,
            source if weights is None else weights.contiguous(),
            y,
            out,
            source if dots is None else dots,
            rows,
            hidden,
            source.stride(0),
            y.stride(0),
            K=k,
            HAS_WEIGHTS=weights is not None,
            HAS_DOTS=dots is not None,
            BLOCK_R=block_r,
            BLOCK_H=block_h,
        )
    return out, dots


def _combine(y: Tensor, destinations: Tensor, weights: Tensor | None) -> Tensor:
    """The sums of each token's rows of `y`, times `weights`."""
    tokens, k = destinations.shape
    hidden = y.shape[1]
    y = _rows_contiguous(y)
    out = y.new_empty(tokens, hidden)
    if out.numel() == 0:
        return out
    block_t, block_h = _blocks(hidden)
    with torch.cuda.device_of(y):
        _combine_kernel[(triton.cdiv(tokens, block_t), triton.cdiv(hidden, block_h))](
            y,
            destinations,
            y if weights is None else weights.contiguous(),
            out,
            tokens,
            hidden,
            y.stride(0),
            K=k,
            HAS_WEIGHTS=weights is not None,
            BLOCK_T=block_t,
            BLOCK_H=block_h,
        )
    return out


# ----------------------------------------------------------------------------------------------------------- functions


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, assignments: Tensor, destinations: Tensor) -> Tensor:
        ctx.save_for_backward(destinations)
        return _spread(x, assignments, destinations.shape[1])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (destinations,) = ctx.saved_tensors
        return _combine(grad, destinations, None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, assignments: Tensor, destinations: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if weights is None else y, assignments, destinations, weights)
        return _combine(y, destinations, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        y, assignments, destinations, weights = ctx.saved_tensors
        wanted = y if ctx.needs_input_grad[3] else None
        grad_y, dots = _spread(grad, assignments, destinations.shape[1], weights=weights, y=wanted)
        return grad_y, None, None, None if dots is None else dots.view(weights.shape).to(weights.dtype)


def permute_tokens(x: Tensor, assignments: Tensor, destinations: Tensor) -> Tensor:
    """`x` [tokens, hidden] as [rows, hidden], sorted by expert."""
    _check("permute_tokens", "x", x)
    return _Permute.apply(x, assignments, destinations)  # type: ignore[no-untyped-call]


def unpermute_tokens(y: Tensor, assignments: Tensor, destinations: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sums of `y` [rows, hidden] as [tokens, hidden]."""
    _check("unpermute_tokens", "y", y)
    return _Unpermute.apply(y, assignments, destinations, weights)  # type: ignore[no-untyped-call]
