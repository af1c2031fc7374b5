"""Attention over a paged key-value cache in plain torch: oracle of the Triton ops, and what serves on CPU.

Idea: what a piece of work sees becomes one tensor, in place if its blocks follow each other and by one gather
otherwise, and goes through torch's fused attention, which never holds the scores of a long prompt. Ragged batches are a
loop over sequences, and in each over pieces of `_PIECE` queries, or the whole prompt where nothing went before it.
Decode steps let the query heads that share keys take the place of queries, so that keys are read once for all of them;
sequences of like length are done together as long as what is gathered stays in the processor's cache. Only `softcap`,
which the fused attention lacks, is written out, in float32 or better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["paged_decode", "ragged_attention", "write_cache"]

_PIECE: Final = 512
_GATHERED: Final = 1 << 20  # bytes of keys of sequences that are done together
_ALIKE: Final = 0.75  # the shortest of them, as part of the longest


class _Rule(NamedTuple):
    """What a query sees, and how its scores are made."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None

    def start(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)


class _Piece(NamedTuple):
    """Queries of one sequence that are computed together."""

    rows: slice  # of q
    position: int  # of the first query
    start: int  # first position that any of them sees
    end: int  # one past the last

    def is_prompt(self, rule: _Rule) -> bool:
        """Whether these are all positions there are, each of which sees all up to itself."""
        square = self.position == 0 and self.end == self.rows.stop - self.rows.start
        return rule.causal and square and (rule.window is None or rule.window >= self.end)


def _pieces(first: int, last: int, context: int, rule: _Rule) -> Iterator[_Piece]:
    """Cut rows `first` to `last - 1` of q, whose last stands at position `context - 1`; leave out those that see
    nothing."""
    if context < 1:
        return
    offset = context - last  # position of a row, less the row
    if rule.causal:
        first = max(first, -offset)
    whole = _Piece(slice(first, last), first + offset, rule.start(first + offset), context)
    if rule.softcap is None and whole.is_prompt(rule):
        yield whole
        return
    for begin in range(first, last, _PIECE):
        stop = min(begin + _PIECE, last)
        position = begin + offset
        yield _Piece(slice(begin, stop), position, rule.start(position), stop + offset if rule.causal else context)


def _check_blocks(chosen: Tensor, blocks: int, sequences: Sequence[int]) -> None:
    low, high = (int(x) for x in chosen.aminmax())
    if low < 0 or high >= blocks:
        wrong = low if low < 0 else high
        raise IndexError(f"block_tables of {_named(sequences)} names block {wrong}; the cache has {blocks}")


def _check_room(context: int, sequences: Sequence[int], table: Tensor, block_size: int) -> None:
    if context > table.shape[1] * block_size:
        raise IndexError(f"context of {context} of {_named(sequences)} is longer than its {table.shape[1]} blocks")


def _named(sequences: Sequence[int]) -> str:
    return f"sequence {sequences[0]}" if len(sequences) == 1 else f"one of the sequences {list(sequences)}"


def _visible(caches: tuple[Tensor, Tensor], table: Tensor, sequence: int, start: int, end: int) -> Iterator[Tensor]:
    """Keys and values [kv_heads, positions, head_dim] of a range of positions: views of the caches where possible."""
    blocks, size = caches[0].shape[:2]
    _check_room(end, [sequence], table, size)
    chosen = table[sequence, start // size : -(-end // size)]
    _check_blocks(chosen, blocks, [sequence])
    first = int(chosen[0])
    consecutive = chosen.tolist() == list(range(first, first + len(chosen)))
    for cache in caches:
        picked = cache[first : first + len(chosen)] if consecutive else cache.index_select(0, chosen)
        yield picked.flatten(0, 1)[start % size :][: end - start].transpose(0, 1)


def _mask(piece: _Piece, rule: _Rule, device: torch.device) -> Tensor | None:
    """Bool [queries, positions], or None if all is visible to all."""
    if not rule.causal:
        return None
    count = piece.rows.stop - piece.rows.start
    ages = torch.arange(piece.position, piece.position + count, device=device)[:, None] - torch.arange(
        piece.start, piece.end, device=device
    )
    return ages >= 0 if rule.window is None else (ages >= 0) & (ages < rule.window)


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule) -> Tensor:
    """Attention of [batch, kv_heads, queries, head_dim] on `k` and `v` alike."""
    if rule.softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(precise) @ k.to(precise).transpose(-1, -2) * (rule.scale / rule.softcap)
    scores = rule.softcap * torch.tanh(scores)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v.to(precise)).to(q.dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, piece: _Piece, rule: _Rule) -> Tensor:
    """[queries, heads, head_dim] of `q` (alike) on `k` and `v` [kv_heads, positions, head_dim]."""
    queries, heads, size = q.shape
    grouped = q.view(queries, k.shape[0], -1, size).permute(2, 1, 0, 3)
    k, v = (x.expand(grouped.shape[0], -1, -1, -1) for x in (k, v))
    if rule.softcap is None and piece.is_prompt(rule):
        out = scaled_dot_product_attention(grouped, k, v, is_causal=True, scale=rule.scale)
    else:
        out = _softmax(grouped, k, v, _mask(piece, rule, q.device), rule)
    return out.permute(2, 1, 0, 3).reshape(queries, heads, size)


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
    caches = (key_cache, value_cache)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    q = q.contiguous()
    starts = query_starts.tolist()
    single: list[int] = []  # sequences with one query, which sees all of the context
    for sequence, context in enumerate(context_lengths.tolist()):
        if starts[sequence + 1] - starts[sequence] == 1:
            single.append(sequence)
            continue
        for piece in _pieces(starts[sequence], starts[sequence + 1], context, rule):
            k, v = _visible(caches, block_tables, sequence, piece.start, piece.end)
            out[piece.rows] = _attend(q[piece.rows], k, v, piece, rule)
    if single:
        chosen = torch.tensor(single, device=q.device)
        rows = query_starts[chosen].long()
        out[rows] = _decode(q[rows], caches, block_tables[chosen], context_lengths[chosen], rule, single)
    return out


class _Decoding(NamedTuple):
    """A sequence of a decode step: its row of q, and the positions that its query sees."""

    row: int
    start: int
    end: int


def _groups(sequences: list[_Decoding], bytes_per_token: int) -> Iterator[list[_Decoding]]:
    """Sequences of like length, the longest first, as many as may be done together."""
    group: list[_Decoding] = []
    for sequence in sorted(sequences, key=lambda s: s.start - s.end):
        longest = group[0].end - group[0].start if group else 0
        full = (len(group) + 1) * longest * bytes_per_token > _GATHERED
        if group and (full or sequence.end - sequence.start < _ALIKE * longest):
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _gathered(
    caches: tuple[Tensor, Tensor], table: Tensor, group: list[_Decoding], names: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [group, kv_heads, positions, head_dim], zero where a sequence has none, and where it has some:
    bool [group, 1, 1, positions]."""
    blocks, size = caches[0].shape[:2]
    device = table.device
    _check_room(max(s.end for s in group), names, table, size)
    starts, ends = (
        torch.tensor(bounds, device=device)[:, None] for bounds in zip(*(s[1:] for s in group), strict=True)
    )
    most = max(-(-s.end // size) - s.start // size for s in group)
    numbers = starts // size + torch.arange(most, device=device)
    rows = torch.tensor([s.row for s in group], device=device)[:, None]
    used = numbers * size < ends
    chosen = torch.where(used, table[rows, torch.where(used, numbers, 0)], 0).flatten()
    _check_blocks(chosen, blocks, names)
    positions = (numbers[..., None] * size + torch.arange(size, device=device)).flatten(1)
    shown = (positions >= starts) & (positions < ends)
    k, v = (cache.index_select(0, chosen).view(len(group), most * size, *cache.shape[2:]) for cache in caches)
    hidden = (~shown).nonzero(as_tuple=True)
    k[hidden], v[hidden] = 0, 0
    return k.transpose(1, 2), v.transpose(1, 2), shown[:, None, None, :]


def _decode(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    context_lengths: Tensor,
    rule: _Rule,
    names: Sequence[int],
) -> Tensor:
    """[sequences, heads, head_dim]; `names`: what the sequences are called in errors."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    _, _, kv_heads, size = caches[0].shape
    grouped = q.reshape(q.shape[0], kv_heads, q.shape[1] // kv_heads, size)
    contexts = [(row, int(context)) for row, context in enumerate(context_lengths.tolist())]
    sequences = [_Decoding(row, rule.start(context - 1), context) for row, context in contexts if context > 0]
    for group in _groups(sequences, kv_heads * size * q.element_size()):
        if len(group) == 1:
            (one,) = group
            k, v = _visible(caches, table, one.row, one.start, one.end)
            out[one.row] = _softmax(grouped[one.row : one.row + 1], k[None], v[None], None, rule).view(-1, size)
            continue
        rows = [s.row for s in group]
        k, v, shown = _gathered(caches, table, group, [names[row] for row in rows])
        out[rows] = _softmax(grouped[rows], k, v, shown, rule).flatten(1, 2)
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
    rule = _Rule(scale, True, window, softcap)
    return _decode(q, (key_cache, value_cache), block_tables, context_lengths, rule, range(q.shape[0]))


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
