"""Paged attention against one dense softmax per query, computed from a copy of each sequence in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.kernels import implementation, paged_decode, ragged_attention, write_cache

# A result is within this of the exact one: a few units in the last place of the dtype, times values of size 1.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences in a paged cache, and the dense keys and values [context, kv_heads, head_dim] that lie there."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    def cache(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.key_cache, self.value_cache, self.block_tables


def make_batch(
    queries: list[int],
    contexts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    consecutive: bool = False,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    needed = [-(-context // block_size) for context in contexts]
    count = sum(needed) + 3
    order = torch.arange(count) if consecutive else torch.randperm(count, generator=generator)
    tables = torch.full((len(contexts), max(needed, default=0) + 2), -1, dtype=torch.int32)
    key_cache = torch.full((count, block_size, kv_heads, head_dim), math.nan, dtype=dtype)
    value_cache = key_cache.clone()
    keys, values, taken = [], [], 0
    for sequence, (blocks, context) in enumerate(zip(needed, contexts, strict=True)):
        chosen = order[taken : taken + blocks]
        tables[sequence, :blocks] = chosen
        taken += blocks
        keys.append(normal(context, kv_heads, head_dim))
        values.append(normal(context, kv_heads, head_dim))
        slots = (chosen[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
        key_cache.view(-1, kv_heads, head_dim)[slots] = keys[-1]
        value_cache.view(-1, kv_heads, head_dim)[slots] = values[-1]
    return Batch(
        q=normal(sum(queries), heads, head_dim),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables,
        query_starts=torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).to(torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        keys=keys,
        values=values,
    )


def one_query(q: Tensor, keys: Tensor, values: Tensor, *, scale: float | None, softcap: float | None) -> Tensor:
    """[heads, head_dim] of `q` (alike) over all of `keys`, in float64."""
    group = q.shape[0] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,thd->ht", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), v)


def expected(
    batch: Batch,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    starts = batch.query_starts.tolist()
    for sequence, context in enumerate(batch.context_lengths.tolist()):
        for row in range(starts[sequence], starts[sequence + 1]):
            position = context - starts[sequence + 1] + row
            last = position + 1 if causal else context
            first = 0 if window is None else max(0, last - window)
            if last > 0:
                keys, values = batch.keys[sequence][first:last], batch.values[sequence][first:last]
                out[row] = one_query(batch.q[row], keys, values, scale=scale, softcap=softcap)
    return out


class LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that an operator returned."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCES[found.dtype], rtol=TOLERANCES[found.dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.5}, {"window": 5}, {"softcap": 2.0}, {"window": 1, "softcap": 30.0}],
    ids=str,
)
def test_decode_equals_a_softmax_per_sequence(dtype: torch.dtype, options: dict[str, float]) -> None:
    batch = make_batch([1] * 6, [1, 5, 0, 123, 16, 17], dtype=dtype)
    found = paged_decode(batch.q, *batch.cache(), batch.context_lengths, **options)
    close(found, expected(batch, **options))
    assert not bool(found[2].any())


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.5}, {"window": 5}, {"softcap": 2.0}, {"causal": False}, {"causal": False, "softcap": 2.0}],
    ids=str,
)
def test_ragged_batches_mix_prompts_pieces_and_single_tokens(dtype: torch.dtype, options: dict[str, float]) -> None:
    batch = make_batch([7, 1, 0, 5, 1, 0, 4], [7, 33, 9, 21, 1, 0, 4], heads=6, dtype=dtype)
    found = ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths, **options)
    close(found, expected(batch, **options))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (14, 2)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(80, 16), (17, 5), (256, 1)])
@pytest.mark.parametrize("consecutive", [False, True])
def test_head_groups_head_dims_and_block_sizes(
    heads: int, kv_heads: int, head_dim: int, block_size: int, consecutive: bool
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
    batch = make_batch([3, 1], [19, 20], consecutive=consecutive, **shape)
    found = ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths, window=11)
    close(found, expected(batch, window=11))


def test_a_prompt_longer_than_the_pieces_it_is_cut_into() -> None:
    batch = make_batch([1030, 1], [1040, 2], heads=2, kv_heads=1, head_dim=8, dtype=torch.float32, block_size=64)
    for options in ({}, {"window": 300}):
        found = ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths, **options)
        close(found, expected(batch, **options))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=5),
    window=st.none() | st.integers(1, 30),
    block_size=st.integers(1, 7),
)
@settings(max_examples=40, deadline=None)
def test_any_lengths(sizes: list[tuple[int, int]], window: int | None, block_size: int) -> None:
    """Among them empty batches, and sequences with more queries than context, whose first rows see nothing."""
    batch = make_batch([n for n, _ in sizes], [c for _, c in sizes], block_size=block_size)
    found = ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths, window=window)
    close(found, expected(batch, window=window))


def test_blocks_before_the_window_may_have_been_given_away() -> None:
    batch = make_batch([1, 2], [30, 41])
    tables = batch.block_tables.clone()
    tables[0, : (30 - 6) // 4] = -1
    tables[1, : (41 - 7) // 4] = -1
    given_away = replace(batch, block_tables=tables)
    found = ragged_attention(given_away.q, *given_away.cache(), batch.query_starts, batch.context_lengths, window=6)
    close(found, expected(batch, window=6))


def test_writing_then_decoding_equals_the_cache_that_was_filled_at_once() -> None:
    batch = make_batch([1, 1, 1], [9, 4, 1], dtype=torch.float32)
    empty = replace(
        batch,
        key_cache=torch.full_like(batch.key_cache, math.nan),
        value_cache=torch.full_like(batch.value_cache, math.nan),
    )
    for position in range(9):
        rows = [s for s in range(3) if position < len(batch.keys[s])]
        slots = [int(batch.block_tables[s, position // 4]) * 4 + position % 4 for s in rows] + [-1]
        key, value = (torch.stack([*(x[s][position] for s in rows), x[0][0]]) for x in (batch.keys, batch.values))
        write_cache(key, value, empty.key_cache, empty.value_cache, torch.tensor(slots, dtype=torch.int32))
    torch.testing.assert_close(empty.key_cache, batch.key_cache, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(empty.value_cache, batch.value_cache, equal_nan=True, rtol=0, atol=0)
    close(paged_decode(empty.q, *empty.cache(), empty.context_lengths), expected(batch))


def test_views_are_taken_as_they_are() -> None:
    batch = make_batch([2, 1], [9, 6], dtype=torch.float32)
    wanted = expected(batch)
    both = torch.stack([batch.key_cache, batch.value_cache], dim=1)  # one tensor for keys and values
    fused = torch.cat([batch.q, torch.zeros_like(batch.q)], dim=1)  # q as a slice of a fused projection
    found = ragged_attention(
        fused[:, : batch.q.shape[1]],
        both[:, 0],
        both[:, 1],
        batch.block_tables,
        batch.query_starts,
        batch.context_lengths,
    )
    close(found, wanted)
    write_cache(
        batch.keys[0][:1] + 1, batch.values[0][:1], both[:, 0], both[:, 1], torch.tensor([5], dtype=torch.int32)
    )
    assert torch.equal(both[1, 0, 1], batch.keys[0][0] + 1)


def test_visible_nan_and_infinity_are_seen_and_stay_in_their_sequence() -> None:
    batch = make_batch([1, 1], [9, 6], dtype=torch.float32)
    for bad in (math.nan, math.inf):
        caches = batch.key_cache.clone(), batch.value_cache.clone()
        caches[1][int(batch.block_tables[0, 1]), 2] = bad
        found = paged_decode(batch.q, *caches, batch.block_tables, batch.context_lengths)
        assert not bool(found[0].isfinite().any())
        close(found[1:], expected(batch)[1:])


def test_nothing_in_nothing_out() -> None:
    batch = make_batch([], [])
    assert paged_decode(batch.q, *batch.cache(), batch.context_lengths).shape == batch.q.shape
    found = ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths)
    assert found.shape == batch.q.shape
    write_cache(batch.q[:, :2], batch.q[:, :2], batch.key_cache, batch.value_cache, torch.zeros(0, dtype=torch.int32))
    assert bool(batch.key_cache.isnan().all())


def test_long_prompts_hold_no_square_of_scores() -> None:
    """The largest tensor that is made on the way has pieces by context, not tokens by context times heads."""
    batch = make_batch([1500], [1500], heads=8, kv_heads=2, head_dim=16, dtype=torch.float32, block_size=64)
    with LargestResult() as largest:
        ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths)
    assert 0 < largest.numel <= 512 * 1536  # a mask of one piece; the scores would be 8 * 1500 * 1500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 8)}, r"q has head_dim 8, the caches have 16"),
        ({"q": torch.zeros(2, 3, 16)}, r"q has 3 heads, which is no positive multiple of the 2"),
        ({"q": torch.zeros(3, 4, 16)}, r"q has 3 tokens for 2 sequences"),
        ({"q": torch.zeros(2, 4, 32)[..., ::2]}, r"q of shape \(2, 4, 16\) has strides .* must be contiguous"),
        ({"q": torch.zeros(2, 64)}, r"q has shape \(2, 64\); expected \[tokens, heads, head_dim\]"),
        ({"value_cache": torch.zeros(1, 4, 2, 16)}, r"key_cache has shape .* value_cache \(1, 4, 2, 16\)"),
        ({"context_lengths": torch.ones(3, dtype=torch.int32)}, r"block_tables is for 2 sequences, context_lengths"),
        ({"window": 0}, r"window counts the visible positions, the query's own included; found 0"),
        ({"softcap": -1.0}, r"softcap must be positive and finite, or None for none; found -1"),
    ],
)
def test_bad_shapes_are_refused_by_name(change: dict[str, Tensor], message: str) -> None:
    batch = make_batch([1, 1], [9, 6], dtype=torch.float32)
    names = ("q", "key_cache", "value_cache", "block_tables", "context_lengths")
    arguments = {name: getattr(batch, name) for name in names} | change
    with pytest.raises(ValueError, match=message):
        paged_decode(**arguments)


def test_bad_dtypes_are_refused_by_name() -> None:
    batch = make_batch([1, 1], [9, 6], dtype=torch.float32)
    with pytest.raises(TypeError, match=r"block_tables has dtype torch.int64; expected int32"):
        paged_decode(batch.q, batch.key_cache, batch.value_cache, batch.block_tables.long(), batch.context_lengths)
    with pytest.raises(TypeError, match=r"key_cache has dtype torch.float32, the first operand torch.bfloat16"):
        paged_decode(batch.q.bfloat16(), *batch.cache(), batch.context_lengths)
    with pytest.raises(TypeError, match=r"q has dtype torch.int32; expected float32, bfloat16"):
        paged_decode(batch.q.int(), *batch.cache(), batch.context_lengths)


def test_bad_tables_and_batches_are_refused() -> None:
    batch = make_batch([1, 1], [9, 6], dtype=torch.float32)
    tables = batch.block_tables.clone()
    tables[1, 1] = 99
    with pytest.raises(IndexError, match=r"block_tables of sequence 1 names block 99; the cache has 8"):
        paged_decode(batch.q, batch.key_cache, batch.value_cache, tables, batch.context_lengths)
    with pytest.raises(IndexError, match=r"context of 99 of sequence 0 is longer than its 5 blocks"):
        paged_decode(batch.q, *batch.cache(), torch.tensor([99, 6], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"query_starts has 2 entries for 2 sequences; expected 3"):
        ragged_attention(batch.q, *batch.cache(), batch.query_starts[:2], batch.context_lengths)
    with pytest.raises(ValueError, match="window counts positions back from the query and needs causal=True"):
        ragged_attention(batch.q, *batch.cache(), batch.query_starts, batch.context_lengths, causal=False, window=3)
    with pytest.raises(ValueError, match=r"key has shape \(2, 4, 16\).* expected \(2, 2, 16\)"):
        write_cache(batch.q, batch.q, batch.key_cache, batch.value_cache, torch.zeros(2, dtype=torch.int32))


def test_the_table_offers_the_ops_everywhere() -> None:
    for op in ("paged_decode", "ragged_attention", "write_cache"):
        assert callable(implementation(op, "torch"))
