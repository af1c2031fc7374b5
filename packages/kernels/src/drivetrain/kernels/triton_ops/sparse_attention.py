"""Block-sparse attention, forward and backward, over lists of blocks.

A program takes a tile of queries (or, for dK and dV, of keys) of one block row, and walks over the row's list of key
blocks as if these lay one after another: a step takes as many tokens as a tile has, be that several small blocks or
part of a large one. Forward leaves log2 of each query's sum of exponentials, `lse`, from which the backward pass makes
the weights again; see `evoformer_attention` for its arithmetic. No program adds to what another wrote: gradients are
the same bits at every run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.sparse_layouts import BlockLists

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

__all__ = ["block_sparse_attention"]


# The tokens `step` to `step + TILE - 1` of a list of `count` blocks: places int32 [TILE], and which of them are real.
@triton.jit
def _listed(entries, step, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    if BLOCK >= TILE:
        place = tl.load(entries + step // BLOCK) * BLOCK + step % BLOCK + tl.arange(0, TILE)
        there = place >= 0
    else:
        token = step + tl.arange(0, TILE)
        there = token < count * BLOCK
        place = tl.load(entries + token // BLOCK, mask=there, other=0) * BLOCK + token % BLOCK
    return place, there


# queries and keys int32, one [a, 1] and one [1, b]; shown bool, of the keys -> scores, -inf where hidden
@triton.jit
def _hide(scores, queries, keys, shown, CAUSAL: tl.constexpr):
    if CAUSAL:
        shown = shown & (keys <= queries)
    return tl.where(shown, scores, float("-inf"))


# keep uint8 [length] of one sequence -> which of the keys take part
@triton.jit
def _kept(keep, keys, there, HAS_KEEP: tl.constexpr):
    if HAS_KEEP:
        there = there & (tl.load(keep + keys, mask=there, other=0) != 0)
    return there


# q, k, v, o [batch * heads, length, SIZE]; keep uint8 [batch, length]; starts, ends int32 [heads * blocks];
# columns int32 [blocks in the layout]; lse float32 [batch * heads, length]. Grid: batch * heads * tiles of queries.
@triton.jit
def _forward(
    q,
    k,
    v,
    keep,
    starts,
    ends,
    columns,
    o,
    lse,
    heads,
    length,
    scale,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = length // BLOCK_M
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    row = batch_head % heads * (length // BLOCK) + tile * BLOCK_M // BLOCK
    start = tl.load(starts + row)
    count = tl.load(ends + row) - start
    base = batch_head * length * SIZE

    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = queries >= 0
    tile_q = load_tile(q + base, queries * SIZE, real, SIZE, PADDED, False)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for step in range(0, count * BLOCK, BLOCK_N):
        keys, there = _listed(columns + start, step, count, BLOCK, BLOCK_N)
        tile_k = load_tile(k + base, keys * SIZE, there, SIZE, PADDED, BLOCK < BLOCK_N)
        tile_v = load_tile(v + base, keys * SIZE, there, SIZE, PADDED, BLOCK < BLOCK_N)
        shown = _kept(keep + batch_head // heads * length, keys, there, HAS_KEEP)
        scores = dot_rows(tile_q, tile_k, PRECISION) * scale
        scores = _hide(scores, queries[:, None], keys[None, :], shown[None, :], CAUSAL)
        top, total, out = absorb(scores, tile_v, top, total, out, PRECISION)
    out, row_lse = finish(top, total, out)
    store_tile(o + base, queries * SIZE, out, real, SIZE, PADDED)
    tl.store(lse + batch_head * length + queries, row_lse)


# as _forward; do, dq like o; delta float32 like lse, written. Grid: batch * heads * tiles of queries.
@triton.jit
def _backward_q(
    q,
    k,
    v,
    keep,
    starts,
    ends,
    columns,
    o,
    lse,
    do,
    dq,
    delta,
    heads,
    length,
    scale,
    plain_scale,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = length // BLOCK_M
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    row = batch_head % heads * (length // BLOCK) + tile * BLOCK_M // BLOCK
    start = tl.load(starts + row)
    count = tl.load(ends + row) - start
    base = batch_head * length * SIZE

    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = queries >= 0
    tile_q = load_tile(q + base, queries * SIZE, real, SIZE, PADDED, False)
    tile_do = load_tile(do + base, queries * SIZE, real, SIZE, PADDED, False)
    tile_o = load_tile(o + base, queries * SIZE, real, SIZE, PADDED, False)
    row_delta = tl.sum(tile_o.to(tl.float32) * tile_do.to(tl.float32), 1)
    tl.store(delta + batch_head * length + queries, row_delta)
    row_lse = tl.load(lse + batch_head * length + queries)
    sum_dq = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for step in range(0, count * BLOCK, BLOCK_N):
        keys, there = _listed(columns + start, step, count, BLOCK, BLOCK_N)
        tile_k = load_tile(k + base, keys * SIZE, there, SIZE, PADDED, BLOCK < BLOCK_N)
        tile_v = load_tile(v + base, keys * SIZE, there, SIZE, PADDED, BLOCK < BLOCK_N)
        shown = _kept(keep + batch_head // heads * length, keys, there, HAS_KEEP)
        scores = dot_rows(tile_q, tile_k, PRECISION) * scale
        scores = _hide(scores, queries[:, None], keys[None, :], shown[None, :], CAUSAL)
        ds = probabilities(scores, row_lse[:, None]) * (dot_rows(tile_do, tile_v, PRECISION) - row_delta[:, None])
        sum_dq = dot(ds.to(tile_k.dtype), tile_k, sum_dq, PRECISION)
    store_tile(dq + base, queries * SIZE, sum_dq * plain_scale, real, SIZE, PADDED)


# as _backward_q, delta read; dk, dv like k; starts, ends, rows: of the columns' lists. Everything here lies the other
# way round, [keys, queries]. Grid: batch * heads * tiles of keys.
@triton.jit
def _backward_kv(
    q,
    k,
    v,
    keep,
    starts,
    ends,
    rows,
    lse,
    do,
    delta,
    dk,
    dv,
    heads,
    length,
    scale,
    plain_scale,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles = length // BLOCK_N
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    column = batch_head % heads * (length // BLOCK) + tile * BLOCK_N // BLOCK
    start = tl.load(starts + column)
    count = tl.load(ends + column) - start
    base = batch_head * length * SIZE

    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    there = keys >= 0
    tile_k = load_tile(k + base, keys * SIZE, there, SIZE, PADDED, False)
    tile_v = load_tile(v + base, keys * SIZE, there, SIZE, PADDED, False)
    shown = _kept(keep + batch_head // heads * length, keys, there, HAS_KEEP)
    sum_dk = tl.zeros([BLOCK_N, PADDED], tl.float32)
    sum_dv = tl.zeros([BLOCK_N, PADDED], tl.float32)
    for step in range(0, count * BLOCK, BLOCK_M):
        queries, real = _listed(rows + start, step, count, BLOCK, BLOCK_M)
        tile_q = load_tile(q + base, queries * SIZE, real, SIZE, PADDED, BLOCK < BLOCK_M)
        tile_do = load_tile(do + base, queries * SIZE, real, SIZE, PADDED, BLOCK < BLOCK_M)
        row_lse = tl.load(lse + batch_head * length + queries, mask=real, other=float("inf"))
        row_delta = tl.load(delta + batch_head * length + queries, mask=real, other=0.0)
        scores = dot_rows(tile_k, tile_q, PRECISION) * scale
        scores = _hide(scores, queries[None, :], keys[:, None], shown[:, None], CAUSAL)
        p = probabilities(scores, row_lse[None, :])
        sum_dv = dot(p.to(tile_do.dtype), tile_do, sum_dv, PRECISION)
        ds = p * (dot_rows(tile_v, tile_do, PRECISION) - row_delta[None, :])
        sum_dk = dot(ds.to(tile_q.dtype), tile_q, sum_dk, PRECISION)
    store_tile(dk + base, keys * SIZE, sum_dk * plain_scale, there, SIZE, PADDED)
    store_tile(dv + base, keys * SIZE, sum_dv, there, SIZE, PADDED)


class Tiles(NamedTuple):
    """What is compiled: tokens of a program's own tile and of one step along the list, warps, and stages of the loads'
    pipeline."""

    own: int
    step: int
    warps: int
    stages: int


class Attention(NamedTuple):
    """What a call is about, beside its operands."""

    lists: BlockLists
    block: int
    causal: bool
    scale: float
    keep: Tensor | None


def forward_tiles(block: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Tiles within 99 KiB of shared memory and within registers, on Ampere and Hopper."""
    single, size = dtype == torch.float32, padded(head_dim)
    if size <= 64:
        tiles = Tiles(32, 32, 4, 2) if single else Tiles(128, 64, 8, 2)
    elif size <= 128:
        tiles = Tiles(32, 32, 4, 2) if single else Tiles(64, 64, 4, 2)
    else:
        tiles = Tiles(16, 16, 8, 1) if single else Tiles(64, 32, 8, 2)
    return _within(tiles, block)


def backward_tiles(block: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """The same for the two kernels of the backward pass, which hold four operands and up to two sums."""
    single, size = dtype == torch.float32, padded(head_dim)
    if size <= 64:
        tiles = Tiles(32, 16, 4, 2) if single else Tiles(64, 32, 4, 2)
    elif size <= 128:
        tiles = Tiles(16, 16, 4, 2) if single else Tiles(64, 32, 8, 2)
    else:
        tiles = Tiles(16, 16, 4, 1) if single else Tiles(32, 32, 8, 2)
    return _within(tiles, block)


def _within(tiles: Tiles, block: int) -> Tiles:
    """The program's own tile is part of one block; a small one does not occupy eight warps."""
    return tiles if tiles.own <= block else tiles._replace(own=block, warps=4)


def _compiled(q: Tensor, call: Attention, own: str, step: str, tiles: Tiles) -> dict[str, Any]:
    """What a launch fixes at compile time; `own` and `step` say which of these is BLOCK_M and which BLOCK_N."""
    return {
        "BLOCK": call.block,
        "SIZE": q.shape[-1],
        "PADDED": padded(q.shape[-1]),
        own: tiles.own,
        step: tiles.step,
        "CAUSAL": call.causal,
        "HAS_KEEP": call.keep is not None,
        "PRECISION": precision(q),
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _row_lists(call: Attention) -> tuple[Tensor, Tensor, Tensor]:
    lists = call.lists
    return lists.row_starts, lists.row_ends if call.causal else lists.row_starts[1:], lists.columns


def _column_lists(call: Attention) -> tuple[Tensor, Tensor, Tensor]:
    lists = call.lists
    return lists.column_begins if call.causal else lists.column_starts, lists.column_starts[1:], lists.rows


def _forward_launch(operands: tuple[Tensor, Tensor, Tensor], call: Attention) -> tuple[Tensor, Tensor]:
    """The result and `lse`, of contiguous tensors."""
    q = operands[0]
    batch, heads, length, size = q.shape
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(call.block, size, q.dtype)
    if q.numel():
        with torch.cuda.device_of(q):
            _forward[(batch * heads * (length // tiles.own),)](
                *operands,
                q if call.keep is None else call.keep,
                *_row_lists(call),
                out,
                lse,
                heads,
                length,
                call.scale * LOG2E,
                **_compiled(q, call, "BLOCK_M", "BLOCK_N", tiles),
            )
    return out, lse


def _backward_launch(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], do: Tensor, call: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `saved`: q, k, v, the result and lse; all contiguous."""
    q, k, v, out, lse = saved
    batch, heads, length, size = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    if q.numel() == 0:
        return dq, dk, dv
    keep = q if call.keep is None else call.keep
    sizes = (heads, length, call.scale * LOG2E, call.scale)
    tiles = backward_tiles(call.block, size, q.dtype)
    grid = (batch * heads * (length // tiles.own),)
    with torch.cuda.device_of(q):
        _backward_q[grid](
            q,
            k,
            v,
            keep,
            *_row_lists(call),
            out,
            lse,
            do,
            dq,
            delta,
            *sizes,
            **_compiled(q, call, "BLOCK_M", "BLOCK_N", tiles),
        )
        _backward_kv[grid](
            q,
            k,
            v,
            keep,
            *_column_lists(call),
            lse,
            do,
            delta,
            dk,
            dv,
            *sizes,
            **_compiled(q, call, "BLOCK_N", "BLOCK_M", tiles),
        )
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    """Keeps the operands, the result and one number per query, never scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Attention) -> Tensor:
        operands = (q.contiguous(), k.contiguous(), v.contiguous())
        out, lse = _forward_launch(operands, call)
        ctx.save_for_backward(*operands, out, lse)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return (*_backward_launch(ctx.saved_tensors, do.contiguous(), ctx.call), None)


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLists,
    *,
    block: int,
    causal: bool,
    scale: float,
    key_padding_mask: Tensor | None,
) -> Tensor:
    """See `drivetrain.kernels.block_sparse_attention`."""
    keep = None if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8)
    call = Attention(layout, block, causal, scale, keep)
    out: Tensor = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    return out
