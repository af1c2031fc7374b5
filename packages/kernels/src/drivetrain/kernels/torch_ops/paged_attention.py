"""Attention over a paged key-value cache in plain torch: oracle of the Triton ops, and what serves on CPU.

Idea: a loop over sequences, and in each over pieces of at most `_PIECE` queries; the keys and values that a piece sees
become one tensor, in place if their blocks follow each other and by one gather otherwise, and go through torch's fused
attention. That reads each key once for all query heads that share it in a decode step, and never holds the scores of a
long prompt. Only `softcap`, which the fused one lacks, is written out, in float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["paged_decode", "ragged_attention", "write_cache"]

_PIECE: Final = 512


class _Piece(NamedTuple):
    """Queries of one sequence that are computed together."""

    rows: slice  # of q
    position: int  # of the first query
    start: int  # first position that any of them sees
    end: int  # one past the last


class _Rule(NamedTuple):
    """What a query sees, and how its scores are made."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None


def _pieces(first: int, last: int, context: int, rule: _Rule) -> Iterator[_Piece]:
    """Cut rows `first` to `last - 1` of q, whose last stands at position `context - 1`; leave out those that see
    nothing."""
    if context < 1:
        return
    offset = context - last  # position of a row, less the row
    if rule.causal:
        first = max(first, -offset)
    for begin in range(first, last, _PIECE):
        stop = min(begin + _PIECE, last)
        position = begin + offset
        start = 0 if rule.window is None else max(0, position - rule.window + 1)
        yield _Piece(slice(begin, stop), position, start, stop + offset if rule.causal else context)


def _blocks(table: Tensor, sequence: int, piece: _Piece, shape: torch.Size) -> tuple[Tensor, slice | None]:
    """The blocks of the positions that a piece sees, and their range if they follow each other."""
    size = shape[1]
    if piece.end > table.shape[1] * size:
        raise IndexError(f"context of {piece.end} of sequence {sequence} is longer than its {table.shape[1]} blocks")
    chosen = table[sequence, piece.start // size : -(-piece.end // size)]
    numbers = chosen.tolist()
    low, high = min(numbers), max(numbers)
    if low < 0 or high >= shape[0]:
        raise IndexError(
            f"block_tables of sequence {sequence} names block {low if low < 0 else high}; the cache has {shape[0]}"
        )
    return chosen, slice(low, high + 1) if numbers == list(range(low, high + 1)) else None


def _visible(cache: Tensor, blocks: tuple[Tensor, slice | None], piece: _Piece) -> Tensor:
    """[kv_heads, positions, head_dim]: a view of the cache where possible."""
    chosen, consecutive = blocks
    picked = cache.index_select(0, chosen) if consecutive is None else cache[consecutive]
    skipped = piece.start % cache.shape[1]
    return picked.flatten(0, 1)[skipped : skipped + piece.end - piece.start].transpose(0, 1)


def _mask(piece: _Piece, rule: _Rule, device: torch.device) -> Tensor | None:
    """Bool [queries, positions], or None if all is visible to all."""
    if not rule.causal:
        return None
    count = piece.rows.stop - piece.rows.start
    ages = torch.arange(piece.position, piece.position + count, device=device)[:, None] - torch.arange(
        piece.start, piece.end, device=device
    )
    return ages >= 0 if rule.window is None else (ages >= 0) & (ages < rule.window)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule) -> Tensor:
    """[group, kv_heads, queries, head_dim] of `_attend` with softcap."""
    softcap = 0.0 if rule.softcap is None else rule.softcap
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = softcap * torch.tanh((q.to(precise) @ k.to(precise).transpose(-1, -2)) * (rule.scale / softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v.to(precise)).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, rule: _Rule) -> Tensor:
    """[queries, heads, head_dim] of `q` (alike) on `k` and `v` [kv_heads, positions, head_dim]."""
    queries, heads, size = q.shape
    grouped = q.view(queries, k.shape[0], -1, size)
    if queries == 1:  # the heads that share keys take the place of queries, so that keys are read once
        grouped, mask = grouped, None
    else:
        grouped, mask = grouped.permute(2, 1, 0, 3), _mask(piece, rule, q.device)
    k, v = (x.expand(grouped.shape[0], -1, -1, -1) for x in (k, v))
    if rule.softcap is None:
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=rule.scale)
    else:
        out = _capped(grouped, k, v, mask, rule)
    return out.view(1, heads, size) if queries == 1 else out.permute(2, 1, 0, 3).reshape(queries, heads, size)


def _loop(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    block_tables: Tensor,
    starts: list[int],
    contexts: list[int],
    rule: _Rule,
) -> Tensor:
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    q = q.contiguous()
    for sequence, context in enumerate(contexts):
        for piece in _pieces(starts[sequence], starts[sequence + 1], context, rule):
            blocks = _blocks(block_tables, sequence, piece, caches[0].shape)
            k, v = (_visible(cache, blocks, piece) for cache in caches)
            out[piece.rows] = _attend(q[piece.rows], k, v, piece, rule)
    return out


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
    rule = _Rule(scale, causal, window, softcap)
    return _loop(q, (key_cache, value_cache), block_tables, query_starts.tolist(), context_lengths.tolist(), rule)


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
    starts = list(range(q.shape[0] + 1))
    rule = _Rule(scale, True, window, softcap)
    return _loop(q, (key_cache, value_cache), block_tables, starts, context_lengths.tolist(), rule)


@torch.no_grad()
def write_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """See `drivetrain.kernels.write_cache`."""
    written = slots >= 0
    if not bool(written.all()):
        key, value, slots = key[written], value[written], slots[written]
    block_size = key_cache.shape[1]
    where = (torch.div(slots, block_size, rounding_mode="floor"), slots % block_size)
    key_cache[where] = key
    value_cache[where] = value
