"""Attention over a paged key-value cache: one kernel for decode steps and ragged batches, one that joins split
contexts, and one that writes the cache.

A program takes a tile of rows, which are the query heads of one key-value head at one or several neighbouring positions
of one sequence, so that a key that is loaded serves them all. Ragged batches are cut into tiles without knowing the
lengths on the host: sequence `i` owns the tiles from `query_starts[i] // T + i` on, with T positions per tile, which is
always enough room, and a program finds its sequence by bisection. Contexts are split evenly by their actual lengths
over a number of programs chosen from the shapes alone, so nothing waits for the device and launches can be captured in
graphs.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_steps import LOG2E, absorb, dot_rows, finish, load_tile, padded, precision, store_tile
from .devices import processors

__all__ = ["paged_decode", "ragged_attention", "write_cache"]

_WAVES: Final = 2  # programs per multiprocessor that a split aims at
_SPLIT_TOKENS: Final = 256  # a split is worth it from this many tokens of room on
_MOST_SPLITS: Final = 64
_MOST_HEADS: Final = 64  # query heads of one key-value head in one program


# Positions start to end - 1 of the keys and values of one head, for the rows of a tile.
# q [BLOCK_M, PADDED]; key_base, value_base: the head's first element in block 0; table int32 [max_blocks];
# position int32 [BLOCK_M]; top, total float32 [BLOCK_M]; out float32 [BLOCK_M, PADDED].
@triton.jit
def _visit(
    q,
    key_base,
    value_base,
    table,
    start,
    end,
    position,
    top,
    total,
    out,
    scale,
    cap,
    window,
    key_block,
    key_token,
    value_block,
    value_token,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    for first in range(start, end, BLOCK_N):
        seen = first + tl.arange(0, BLOCK_N)
        there = seen < end
        if MASKED:
            block = tl.load(table + seen // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        else:
            block = tl.load(table + seen // BLOCK_SIZE).to(tl.int64)
        place = seen % BLOCK_SIZE
        k = load_tile(key_base, block * key_block + place * key_token, there, SIZE, PADDED, MASKED)
        v = load_tile(value_base, block * value_block + place * value_token, there, SIZE, PADDED, MASKED)
        scores = dot_rows(q, k, PRECISION) * scale
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        if MASKED:
            visible = there[None, :]
            if CAUSAL:
                visible = visible & (seen[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (position[:, None] - seen[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
        top, total, out = absorb(scores, v, top, total, out, PRECISION)
    return top, total, out


# The sequence that owns tile `tile`, and the number of its first row: int32 scalars. query_starts int32 [sequences + 1]
@triton.jit
def _owner(query_starts, sequences, tile, TOKENS: tl.constexpr):
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(query_starts + low)
    return low, start, (tile - (start // TOKENS + low)) * TOKENS


# q [tokens, heads, SIZE]; key_cache, value_cache [num_blocks, BLOCK_SIZE, kv_heads, SIZE]
# block_tables int32 [sequences, max_blocks]; query_starts int32 [sequences + 1], not read with DECODE
# context_lengths int32 [sequences]; out [splits, tokens, heads, SIZE], in float32 if SPLIT
# lse float32 [splits, tokens, heads], only with SPLIT. Grid: tiles, kv_heads * head tiles, splits.
@triton.jit(do_not_specialize=["tokens", "sequences", "window"])
def _attend(
    q,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lengths,
    out,
    lse,
    tokens,
    sequences,
    scale,
    cap,
    window,
    q_token,
    q_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TOKENS: tl.constexpr = 1 if DECODE else BLOCK_M // HEADS
    tile = tl.program_id(0)
    if DECODE:
        sequence = tile
        start = tile
        first = 0
        count = 1
    else:
        sequence, start, first = _owner(query_starts, sequences, tile, TOKENS)
        count = tl.load(query_starts + sequence + 1) - start
    if first >= count:
        return
    kv_head = tl.program_id(1) % KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    token = first + rows // HEADS
    head = (tl.program_id(1) // KV_HEADS) * HEADS + rows % HEADS
    real = (rows // HEADS < TOKENS) & (token < count) & (head < GROUP)
    head = kv_head * GROUP + head
    context = tl.load(context_lengths + sequence)
    position = context - count + token

    lowest = 0
    highest = context
    if WINDOWED:
        lowest = tl.maximum(context - count + first - window + 1, 0)
    if CAUSAL:
        highest = tl.minimum(context, context - count + first + TOKENS)
    highest = tl.maximum(highest, lowest)
    if SPLIT:
        span = tl.cdiv(tl.cdiv(highest - lowest, tl.num_programs(2)), BLOCK_N) * BLOCK_N
        lowest = lowest + tl.program_id(2) * span
        highest = tl.minimum(highest, lowest + span)
    clear = highest  # up to here every row of the tile sees every position
    if CAUSAL:
        clear = tl.minimum(highest, context - count + first + 1)
    clear = lowest if WINDOWED else lowest + tl.maximum(clear - lowest, 0) // BLOCK_N * BLOCK_N

    row = (start + token).to(tl.int64)
    tile_q = load_tile(q, row * q_token + head * q_head, real, SIZE, PADDED, True)
    key_base = key_cache + kv_head.to(tl.int64) * key_head
    value_base = value_cache + kv_head.to(tl.int64) * value_head
    table = block_tables + sequence.to(tl.int64) * table_row
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, PADDED], tl.float32)
    if not WINDOWED:
        top, total, weighted = _visit(
            tile_q,
            key_base,
            value_base,
            table,
            lowest,
            clear,
            position,
            top,
            total,
            weighted,
            scale,
            cap,
            window,
            key_block,
            key_token,
            value_block,
            value_token,
            BLOCK_SIZE,
            SIZE,
            PADDED,
            BLOCK_N,
            CAUSAL,
            WINDOWED,
            CAPPED,
            False,
            PRECISION,
        )
    top, total, weighted = _visit(
        tile_q,
        key_base,
        value_base,
        table,
        clear,
        highest,
        position,
        top,
        total,
        weighted,
        scale,
        cap,
        window,
        key_block,
        key_token,
        value_block,
        value_token,
        BLOCK_SIZE,
        SIZE,
        PADDED,
        BLOCK_N,
        CAUSAL,
        WINDOWED,
        CAPPED,
        True,
        PRECISION,
    )
    weighted, row_lse = finish(top, total, weighted)
    place = row * (KV_HEADS * GROUP) + head
    if SPLIT:
        place += tl.program_id(2).to(tl.int64) * tokens * (KV_HEADS * GROUP)
        tl.store(lse + place, row_lse, mask=real)
    store_tile(out, place * SIZE, weighted, real, SIZE, PADDED)


# parts float32 [splits, rows, SIZE], lse float32 [splits, rows] (base 2), out [rows, SIZE]. Grid: rows.
@triton.jit(do_not_specialize=["rows", "splits"])
def _join(
    parts,
    lse,
    out,
    rows,
    splits,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < splits
    place = split.to(tl.int64) * rows + row
    part_lse = tl.load(lse + place, mask=there, other=float("-inf"))
    top = tl.max(part_lse, 0)
    weights = tl.exp2(part_lse - tl.where(top == float("-inf"), 0.0, top))
    part = load_tile(parts, place * SIZE, there & (part_lse != float("-inf")), SIZE, PADDED, True)
    total = tl.sum(weights, 0)
    joined = tl.sum(part * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    dims = tl.arange(0, PADDED)
    tl.store(out + row * SIZE + dims, joined.to(out.dtype.element_ty), mask=dims < SIZE)


# key, value [tokens, kv_heads, SIZE]; caches [num_blocks, block_size, kv_heads, SIZE]; slots int32 [tokens].
# Grid: tokens, tiles of heads.
@triton.jit
def _write(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    block_size,
    kv_heads,
    key_in,
    key_in_head,
    value_in,
    value_in_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = (slot // block_size).to(tl.int64)
    place = slot % block_size
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    there = head < kv_heads
    k = load_tile(key, token * key_in + head * key_in_head, there, SIZE, PADDED, True)
    store_tile(key_cache, block * key_block + place * key_token + head * key_head, k, there, SIZE, PADDED)
    v = load_tile(value, token * value_in + head * value_in_head, there, SIZE, PADDED, True)
    store_tile(value_cache, block * value_block + place * value_token + head * value_head, v, there, SIZE, PADDED)


class Tiles(NamedTuple):
    """What is compiled for a shape: query heads and rows of a tile, positions that it visits at once, warps, and stages
    of the loads' pipeline."""

    heads: int
    rows: int
    positions: int
    warps: int
    stages: int


class _Queries(NamedTuple):
    """The rows of q: where each sequence's begin (None: one per sequence), and how their scores are made."""

    starts: Tensor | None
    scale: float
    causal: bool
    window: int | None
    softcap: float | None


def choose_tiles(group: int, head_dim: int, dtype: torch.dtype, tokens_per_sequence: float) -> Tiles:
    """Tiles for `group` query heads per key-value head. Keys, values and queries in flight stay below 99 KiB, what a
    program can have on the smaller parts of the Ampere generation, and 32-bit products, which are made of three, in
    registers."""
    single = dtype == torch.float32
    wide = padded(head_dim) * (2 if single else 1)
    most = min(_MOST_HEADS, 8192 // wide) if single else _MOST_HEADS
    heads = min(group, most)
    rows = padded(heads)
    if tokens_per_sequence > 1:
        rows = 2 * most if tokens_per_sequence * heads >= 4 * most and wide <= 128 and not single else most
    positions = 64 if wide <= 64 or (wide == 128 and not single) else 32 if wide <= 256 else 16
    return Tiles(heads, rows, positions, warps=8 if rows * wide >= 128 * 128 else 4, stages=2 if rows > 16 else 3)


def choose_splits(programs: int, tokens: int, processors: int) -> int:
    """Into how many parts contexts of up to `tokens` are split so that `programs` times as many fill the GPU."""
    room = max(1, tokens // _SPLIT_TOKENS)
    return max(1, min(_WAVES * processors // max(programs, 1), room, _MOST_SPLITS))


def _launch(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    context_lengths: Tensor,
    queries: _Queries,
    splits: int | None = None,
) -> Tensor:
    """The attention of both public functions; `splits` overrules what is chosen."""
    tokens, heads, size = q.shape
    sequences = context_lengths.shape[0]
    _, block_size, kv_heads, _ = caches[0].shape
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if tokens == 0 or sequences == 0:
        return out
    group = heads // kv_heads
    tiles = choose_tiles(group, size, q.dtype, 1.0 if queries.starts is None else tokens / sequences)
    positions_per_tile = 1 if queries.starts is None else tiles.rows // tiles.heads
    grid = (
        tokens if queries.starts is None else tokens // positions_per_tile + sequences,
        kv_heads * triton.cdiv(group, tiles.heads),
    )
    if splits is None:
        room = block_tables.shape[1] * block_size
        room = room if queries.window is None else min(room, queries.window + positions_per_tile)
        splits = choose_splits(grid[0] * grid[1], room, processors(q.device))
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.full((splits, tokens, heads), -math.inf, dtype=torch.float32, device=q.device)
    capped = queries.softcap is not None
    with torch.cuda.device_of(q):
        _attend[(*grid, splits)](
            q,
            *caches,
            block_tables,
            context_lengths if queries.starts is None else queries.starts,
            context_lengths,
            parts,
            lse,
            tokens,
            sequences,
            queries.scale / queries.softcap if queries.softcap is not None else queries.scale * LOG2E,
            queries.softcap * LOG2E if queries.softcap is not None else 0.0,
            queries.window or 0,
            *q.stride()[:2],
            *caches[0].stride()[:3],
            *caches[1].stride()[:3],
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            KV_HEADS=kv_heads,
            GROUP=group,
            HEADS=tiles.heads,
            SIZE=size,
            PADDED=padded(size),
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.positions,
            DECODE=queries.starts is None,
            CAUSAL=queries.causal,
            WINDOWED=queries.window is not None,
            CAPPED=capped,
            SPLIT=splits > 1,
            PRECISION=precision(q),
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            _join[(tokens * heads,)](
                parts,
                lse,
                out,
                tokens * heads,
                splits,
                SIZE=size,
                PADDED=padded(size),
                SPLITS=triton.next_power_of_2(splits),
                num_warps=4 if splits > 8 else 2,
            )
    return out


@torch.no_grad()
def paged_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See `drivetrain.kernels.paged_decode`."""
    queries = _Queries(None, scale, True, window, softcap)
    return _launch(q, (key_cache, value_cache), block_tables, context_lengths, queries)


@torch.no_grad()
def ragged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See `drivetrain.kernels.ragged_attention`."""
    queries = _Queries(query_starts, scale, causal, window, softcap)
    return _launch(q, (key_cache, value_cache), block_tables, context_lengths, queries)


@torch.no_grad()
def write_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See `drivetrain.kernels.write_cache`."""
    tokens, kv_heads, size = key.shape
    if tokens == 0:
        return
    block_h = min(triton.next_power_of_2(kv_heads), max(1, 4096 // padded(size)))
    with torch.cuda.device_of(key):
        _write[(tokens, triton.cdiv(kv_heads, block_h))](
            key,
            value,
            key_cache,
            value_cache,
            slots,
            key_cache.shape[1],
            kv_heads,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            SIZE=size,
            PADDED=padded(size),
            BLOCK_H=block_h,
        )
