"""Attention with mask and pair bias, forward and backward, without its scores in memory.

Forward: a program per tile of queries walks over the keys (online softmax) and leaves log2 of each row's sum of
exponentials, `lse`. Backward makes the weights P again from it, with dS = P * (dO V^T - delta) and delta = sum(dO * O)
over head_dim:
- `_backward_q`, a program per tile of queries: delta, and dQ = dS K;
- `_backward_kv`, a program per tile of keys: dV = P^T dO, dK = dS^T Q, and the mask bias' gradient of its head, the sum
  of dS over queries; the sum over heads is left to torch;
- `_backward_pair`, a program per tile of the pair bias: the sum of dS over the rows, one after another.
No program adds to what another wrote, so gradients are the same bits at every run, at the price of making scores three
times.

Programs that share a tile of the pair bias, which is what most memory traffic is, and differ in the row are neighbours.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .attention_steps import (
    LOG2E,
    absorb,
    dot,
    dot_rows,
    finish,
    load_tile,
    padded,
    precision,
    probabilities,
    store_tile,
)

__all__ = ["evoformer_attention"]

_LOG2E: Final = tl.constexpr(LOG2E)


# mask_bias [length] of one row, columns int32 [any] -> float32 [any] in base 2, -inf beyond the end
@triton.jit
def _column_bias(mask_bias, columns, length, HAS_MASK: tl.constexpr):
    there = columns < length
    bias = tl.where(there, 0.0, float("-inf"))
    if HAS_MASK:
        bias += tl.load(mask_bias + columns, mask=there, other=0.0).to(tl.float32) * _LOG2E
    return bias


# pair_bias [length, length] of one head; a tile from row `first` on: rows and columns, of which one lies along its
# first dimension and one along its second -> float32 tile in base 2. Only the first row's place can need 64 bits.
@triton.jit
def _pair_bias(pair_bias, first, rows, columns, length):
    there = (first + rows < length) & (columns < length)
    where = pair_bias + tl.cast(first, tl.int64) * length + (rows * length + columns)
    return tl.load(where, mask=there, other=0.0).to(tl.float32) * _LOG2E


# q, k, v, o [batch, n, length, heads, SIZE]; mask_bias [batch, n, length]; pair_bias [batch, heads, length, length];
# lse float32 [batch, n, heads, length]. Grid: batch * heads * tiles of queries * n.
@triton.jit
def _forward(
    q,
    k,
    v,
    mask_bias,
    pair_bias,
    o,
    lse,
    n_rows,
    length,
    heads,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(length, BLOCK_M)
    n = tl.program_id(0) % n_rows
    tile = tl.program_id(0) // n_rows % tiles
    batch_head = (tl.program_id(0) // n_rows // tiles).to(tl.int64)
    batch_row = batch_head // heads * n_rows + n
    head = batch_head % heads
    base = (batch_row * length * heads + head) * SIZE
    step = heads * SIZE

    own = tl.arange(0, BLOCK_M)
    rows = tile * BLOCK_M + own
    real = rows < length
    pair = pair_bias + batch_head * length * length
    tile_q = load_tile(q + base, rows * step, real, SIZE, PADDED, True)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for first in range(0, length, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        there = columns < length
        tile_k = load_tile(k + base, columns * step, there, SIZE, PADDED, True)
        tile_v = load_tile(v + base, columns * step, there, SIZE, PADDED, True)
        scores = dot_rows(tile_q, tile_k, PRECISION) * scale
        scores += _column_bias(mask_bias + batch_row * length, columns, length, HAS_MASK)[None, :]
        if HAS_PAIR:
            scores += _pair_bias(pair, tile * BLOCK_M, own[:, None], columns[None, :], length)
        top, total, out = absorb(scores, tile_v, top, total, out, PRECISION)
    out, row_lse = finish(top, total, out)
    store_tile(o + base, rows * step, out, real, SIZE, PADDED)
    tl.store(lse + (batch_row * heads + head) * length + rows, row_lse, mask=real)


# as _forward; do, dq like o; delta float32 like lse, written. Grid: batch * heads * tiles of queries * n.
@triton.jit
def _backward_q(
    q,
    k,
    v,
    mask_bias,
    pair_bias,
    o,
    lse,
    do,
    dq,
    delta,
    n_rows,
    length,
    heads,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(length, BLOCK_M)
    n = tl.program_id(0) % n_rows
    tile = tl.program_id(0) // n_rows % tiles
    batch_head = (tl.program_id(0) // n_rows // tiles).to(tl.int64)
    batch_row = batch_head // heads * n_rows + n
    head = batch_head % heads
    base = (batch_row * length * heads + head) * SIZE
    step = heads * SIZE

    own = tl.arange(0, BLOCK_M)
    rows = tile * BLOCK_M + own
    real = rows < length
    pair = pair_bias + batch_head * length * length
    row_sums = (batch_row * heads + head) * length + rows
    tile_q = load_tile(q + base, rows * step, real, SIZE, PADDED, True)
    tile_do = load_tile(do + base, rows * step, real, SIZE, PADDED, True)
    tile_o = load_tile(o + base, rows * step, real, SIZE, PADDED, True)
    row_delta = tl.sum(tile_o.to(tl.float32) * tile_do.to(tl.float32), 1)
    tl.store(delta + row_sums, row_delta, mask=real)
    row_lse = tl.load(lse + row_sums, mask=real, other=float("inf"))
    sum_dq = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for first in range(0, length, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        there = columns < length
        tile_k = load_tile(k + base, columns * step, there, SIZE, PADDED, True)
        tile_v = load_tile(v + base, columns * step, there, SIZE, PADDED, True)
        scores = dot_rows(tile_q, tile_k, PRECISION) * scale
        scores += _column_bias(mask_bias + batch_row * length, columns, length, HAS_MASK)[None, :]
        if HAS_PAIR:
            scores += _pair_bias(pair, tile * BLOCK_M, own[:, None], columns[None, :], length)
        ds = probabilities(scores, row_lse[:, None]) * (dot_rows(tile_do, tile_v, PRECISION) - row_delta[:, None])
        sum_dq = dot(ds.to(tile_k.dtype), tile_k, sum_dq, PRECISION)
    store_tile(dq + base, rows * step, sum_dq * (scale / _LOG2E), real, SIZE, PADDED)


# as _backward_q, delta read; dk, dv like k; d_mask float32 [batch, n, heads, length], only with HAS_MASK.
# Everything here lies the other way round, [keys, queries]. Grid: batch * heads * tiles of keys * n.
@triton.jit
def _backward_kv(
    q,
    k,
    v,
    mask_bias,
    pair_bias,
    lse,
    do,
    delta,
    dk,
    dv,
    d_mask,
    n_rows,
    length,
    heads,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_PAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = tl.cdiv(length, BLOCK_N)
    n = tl.program_id(0) % n_rows
    tile = tl.program_id(0) // n_rows % tiles
    batch_head = (tl.program_id(0) // n_rows // tiles).to(tl.int64)
    batch_row = batch_head // heads * n_rows + n
    head = batch_head % heads
    base = (batch_row * length * heads + head) * SIZE
    step = heads * SIZE
    row_sums = (batch_row * heads + head) * length

    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = columns < length
    tile_k = load_tile(k + base, columns * step, there, SIZE, PADDED, True)
    tile_v = load_tile(v + base, columns * step, there, SIZE, PADDED, True)
    own = tl.arange(0, BLOCK_M)
    pair = pair_bias + batch_head * length * length
    column_bias = _column_bias(mask_bias + batch_row * length, columns, length, HAS_MASK)
    sum_dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, PADDED], tl.float32)
    sum_ds = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, length, BLOCK_M):
        rows = first + own
        real = rows < length
        tile_q = load_tile(q + base, rows * step, real, SIZE, PADDED, True)
        tile_do = load_tile(do + base, rows * step, real, SIZE, PADDED, True)
        row_lse = tl.load(lse + row_sums + rows, mask=real, other=float("inf"))
        row_delta = tl.load(delta + row_sums + rows, mask=real, other=0.0)
        scores = dot_rows(tile_k, tile_q, PRECISION) * scale + column_bias[:, None]
        if HAS_PAIR:
            scores += _pair_bias(pair, first, own[None, :], columns[:, None], length)
        p = probabilities(scores, row_lse[None, :])
        sum_dv = dot(p.to(tile_do.dtype), tile_do, sum_dv, PRECISION)
        ds = p * (dot_rows(tile_v, tile_do, PRECISION) - row_delta[None, :])
        sum_dk = dot(ds.to(tile_q.dtype), tile_q, sum_dk, PRECISION)
        if HAS_MASK:
            sum_ds += tl.sum(ds, 1)
    store_tile(dk + base, columns * step, sum_dk * (scale / _LOG2E), there, SIZE, PADDED)
    store_tile(dv + base, columns * step, sum_dv, there, SIZE, PADDED)
    if HAS_MASK:
        tl.store(d_mask + row_sums + columns, sum_ds, mask=there)


# as _backward_kv; d_pair like pair_bias. Grid: batch * heads * tiles of queries * tiles of keys.
@triton.jit
def _backward_pair(
    q,
    k,
    v,
    mask_bias,
    pair_bias,
    lse,
    do,
    delta,
    d_pair,
    n_rows,
    length,
    heads,
    scale,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    across = tl.cdiv(length, BLOCK_N)
    tiles = tl.cdiv(length, BLOCK_M) * across
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    head = batch_head % heads
    step = heads * SIZE

    first = tile // across * BLOCK_M
    own = tl.arange(0, BLOCK_M)
    rows = first + own
    columns = tile % across * BLOCK_N + tl.arange(0, BLOCK_N)
    real = rows < length
    there = columns < length
    matrix = batch_head * length * length
    pair = _pair_bias(pair_bias + matrix, first, own[:, None], columns[None, :], length)
    sum_ds = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for n in range(0, n_rows):
        batch_row = batch_head // heads * n_rows + n
        base = (batch_row * length * heads + head) * SIZE
        row_sums = (batch_row * heads + head) * length + rows
        tile_q = load_tile(q + base, rows * step, real, SIZE, PADDED, True)
        tile_k = load_tile(k + base, columns * step, there, SIZE, PADDED, True)
        tile_v = load_tile(v + base, columns * step, there, SIZE, PADDED, True)
        tile_do = load_tile(do + base, rows * step, real, SIZE, PADDED, True)
        row_lse = tl.load(lse + row_sums, mask=real, other=float("inf"))
        row_delta = tl.load(delta + row_sums, mask=real, other=0.0)
        scores = dot_rows(tile_q, tile_k, PRECISION) * scale + pair
        scores += _column_bias(mask_bias + batch_row * length, columns, length, HAS_MASK)[None, :]
        p = probabilities(scores, row_lse[:, None])
        sum_ds += p * (dot_rows(tile_do, tile_v, PRECISION) - row_delta[:, None])
    where = d_pair + matrix + first.to(tl.int64) * length + (own[:, None] * length + columns[None, :])
    tl.store(where, sum_ds.to(d_pair.dtype.element_ty), mask=real[:, None] & there[None, :])


class Tiles(NamedTuple):
    """What is compiled: queries and keys of a tile, warps, and stages of the loads' pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


class Shape(NamedTuple):
    """Sizes of the operands [batch, rows, length, heads, head_dim] and how they are multiplied."""

    batch: int
    rows: int
    length: int
    heads: int
    size: int
    precision: str

    @property
    def scale(self) -> float:
        """The factor of the scores, in base 2."""
        return self.size**-0.5 * LOG2E

    @property
    def slices(self) -> int:
        """Attentions that are independent of each other."""
        return self.batch * self.rows * self.heads

    def compiled(self, tiles: Tiles) -> dict[str, Any]:
        """What a launch fixes at compile time."""
        return {
            "SIZE": self.size,
            "PADDED": padded(self.size),
            "BLOCK_M": tiles.queries,
            "BLOCK_N": tiles.keys,
            "PRECISION": self.precision,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


def shape_of(q: Tensor) -> Shape:
    batch, rows, length, heads, size = q.shape
    return Shape(batch, rows, length, heads, size, precision(q))


def forward_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles within 99 KiB of shared memory and, but for the largest heads in float32, within registers. Head dims are
    small in these models (8 to 64), and a tile of the pair bias takes more registers than the operands do."""
    single, size = dtype == torch.float32, padded(head_dim)
    if size <= 64:
        return Tiles(32, 32, 4, 2) if single else Tiles(64, 64, 4, 2)
    if size <= 128:
        return Tiles(32, 32, 4, 2) if single else Tiles(64, 32, 4, 2)
    return Tiles(16, 16, 8, 1) if single else Tiles(32, 32, 4, 2)


def backward_tiles(head_dim: int, dtype: torch.dtype) -> Tiles:
    """The same for the three kernels of the backward pass, which hold four operands and up to three sums."""
    single, size = dtype == torch.float32, padded(head_dim)
    if size <= 64:
        return Tiles(32 if size <= 32 else 16, 32, 4, 2) if single else Tiles(64, 32, 4, 2)
    if size <= 128:
        return Tiles(16, 32, 4, 2) if single else Tiles(64, 32, 8, 2)
    return Tiles(16, 16, 8, 1) if single else Tiles(16, 32, 4, 2)


def _forward_launch(
    operands: tuple[Tensor, Tensor, Tensor], mask_bias: Tensor | None, pair_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The result and `lse`, of contiguous tensors."""
    q = operands[0]
    shape = shape_of(q)
    out = torch.empty_like(q)
    lse = torch.empty((shape.batch, shape.rows, shape.heads, shape.length), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(shape.size, q.dtype)
    if q.numel():
        with torch.cuda.device_of(q):
            _forward[(shape.slices * triton.cdiv(shape.length, tiles.queries),)](
                *operands,
                q if mask_bias is None else mask_bias,
                q if pair_bias is None else pair_bias,
                out,
                lse,
                shape.rows,
                shape.length,
                shape.heads,
                shape.scale,
                HAS_MASK=mask_bias is not None,
                HAS_PAIR=pair_bias is not None,
                **shape.compiled(tiles),
            )
    return out, lse


class Gradients(NamedTuple):
    """Of the operands and biases; None where not asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask_bias: Tensor | None
    pair_bias: Tensor | None


def _backward_launch(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    do: Tensor,
    want_pair: bool,
) -> Gradients:
    """`saved`: q, k, v, the result and lse; all contiguous."""
    q, k, v, out, lse = saved
    shape = shape_of(q)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    d_mask = None if mask_bias is None else torch.empty_like(lse)
    d_pair = torch.empty_like(pair_bias) if pair_bias is not None and want_pair else None
    if q.numel() == 0:
        zeros = [None if x is None else torch.zeros_like(x) for x in (mask_bias, d_pair)]
        return Gradients(dq, dk, dv, *zeros)
    biases = (q if mask_bias is None else mask_bias, q if pair_bias is None else pair_bias)
    sizes = (shape.rows, shape.length, shape.heads, shape.scale)
    tiles = backward_tiles(shape.size, q.dtype)
    compiled = shape.compiled(tiles) | {"HAS_MASK": mask_bias is not None}
    has_pair = pair_bias is not None
    down, across = triton.cdiv(shape.length, tiles.queries), triton.cdiv(shape.length, tiles.keys)
    with torch.cuda.device_of(q):
        _backward_q[(shape.slices * down,)](
            q, k, v, *biases, out, lse, do, dq, delta, *sizes, HAS_PAIR=has_pair, **compiled
        )
        _backward_kv[(shape.slices * across,)](
            q,
            k,
            v,
            *biases,
            lse,
            do,
            delta,
            dk,
            dv,
            lse if d_mask is None else d_mask,
            *sizes,
            HAS_PAIR=has_pair,
            **compiled,
        )
        if d_pair is not None:
            _backward_pair[(shape.batch * shape.heads * down * across,)](
                q, k, v, *biases, lse, do, delta, d_pair, *sizes, **compiled
            )
    summed = None
    if mask_bias is not None and d_mask is not None:
        summed = d_mask.sum(dim=2).to(mask_bias.dtype).view_as(mask_bias)
    return Gradients(dq, dk, dv, summed, d_pair)


class _Attention(torch.autograd.Function):
    """Keeps the operands, the result and one number per query, never scores."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None
    ) -> Tensor:
        operands = (q.contiguous(), k.contiguous(), v.contiguous())
        biases = tuple(None if bias is None else bias.contiguous() for bias in (mask_bias, pair_bias))
        out, lse = _forward_launch(operands, *biases)
        ctx.save_for_backward(*operands, out, lse, *biases)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask_bias, pair_bias = ctx.saved_tensors
        return _backward_launch(tuple(saved), mask_bias, pair_bias, do.contiguous(), ctx.needs_input_grad[4])


def evoformer_attention(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    """See `drivetrain.kernels.evoformer_attention`; mask_bias [B, N, 1, 1, L], pair_bias [B, 1, H, L, L]."""
    out: Tensor = _Attention.apply(q, k, v, mask_bias, pair_bias)  # type: ignore[no-untyped-call]
    return out
