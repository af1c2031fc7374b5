"""Attention over a key-value cache that is cut into blocks, for serving.

Problem: sequences that are served together grow and end at different times; one tensor per sequence would have to be
copied as it grows, or be as long as the longest that may come.
Idea (PagedAttention, arXiv:2309.06180): the cache is a pool of blocks of `block_size` tokens, and a row of
`block_tables` says in which blocks a sequence lies. `write_cache` puts new tokens there; `ragged_attention` serves
prompts, pieces of prompts and single tokens of many sequences in one launch (Dynamic SplitFuse, arXiv:2401.08671);
`paged_decode` is for one new token per sequence and splits long contexts over the GPU (Flash-Decoding).
Invariant: nothing outside the visible positions of a sequence is read, so what lies in unused slots, and which number a
block table has there (say -1), changes nothing.

Shapes that all functions share:
- key_cache, value_cache [num_blocks, block_size, kv_heads, head_dim]: token `t` of sequence `s` lies in slot
  `block_tables[s, t // block_size] * block_size + t % block_size` of the first two dimensions seen as one;
- block_tables int32 [sequences, max_blocks];
- context_lengths int32 [sequences]: tokens in the cache, the new ones included; 0 is allowed.
`heads` must be a multiple of `kv_heads`: query head `h` uses key-value head `h // (heads // kv_heads)`.

Tensors of lengths and tables stay on their device: on GPUs no call waits for it, and their contents are the caller's
responsibility. On CPU a block number outside the cache raises IndexError.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from .dispatch import Implementation, implementation, resolve

__all__ = ["paged_decode", "ragged_attention", "write_cache"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_HEAD: Final = 256


def _check_tensor(op: str, role: str, tensor: Tensor, dims: str, like: Tensor) -> None:
    expected = dims.count(",") + 1
    if tensor.dim() != expected:
        raise ValueError(f"{op}: {role} has shape {tuple(tensor.shape)}; expected [{dims}]")
    if tensor.device != like.device:
        raise ValueError(f"{op}: {role} lies on {tensor.device}, the first operand on {like.device}")


def _check_index(op: str, role: str, tensor: Tensor, dims: str, like: Tensor) -> None:
    _check_tensor(op, role, tensor, dims, like)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{op}: {role} has dtype {tensor.dtype}; expected int32: convert it once, where it is made")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: {role} has strides {tensor.stride()}; its last dimension must be contiguous")


def _check_dense(op: str, role: str, tensor: Tensor, dims: str, like: Tensor) -> None:
    _check_tensor(op, role, tensor, dims, like)
    if tensor.dtype != like.dtype:
        raise TypeError(f"{op}: {role} has dtype {tensor.dtype}, the first operand {like.dtype}; they must be the same")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: {role} of shape {tuple(tensor.shape)} has strides {tensor.stride()}; head_dim, the last dimension, "
            "must be contiguous (.contiguous() makes a copy)"
        )


def _check_caches(op: str, role: str, x: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """`x` [tokens, heads, head_dim], called `role`, and the caches that it goes with."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"{op}: {role} has dtype {x.dtype}; expected float32, bfloat16, float16 or float64")
    _check_dense(op, role, x, "tokens, heads, head_dim", x)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        _check_dense(op, name, cache, "num_blocks, block_size, kv_heads, head_dim", x)
    if key_cache.shape != value_cache.shape:
        raise ValueError(
            f"{op}: key_cache has shape {tuple(key_cache.shape)}, value_cache {tuple(value_cache.shape)}; "
            "they must be the same"
        )
    if x.shape[-1] != key_cache.shape[-1]:
        raise ValueError(f"{op}: {role} has head_dim {x.shape[-1]}, the caches have {key_cache.shape[-1]}")
    if not 1 <= x.shape[-1] <= _LARGEST_HEAD:
        raise ValueError(f"{op}: head_dim must lie in 1..{_LARGEST_HEAD}; found {x.shape[-1]}")
    if key_cache.shape[1] < 1 or key_cache.shape[2] < 1:
        raise ValueError(f"{op}: block_size and kv_heads must be positive; key_cache has {tuple(key_cache.shape)}")


def _check_attention(
    op: str, q: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, context_lengths: Tensor
) -> None:
    _check_caches(op, "q", q, key_cache, value_cache)
    _check_index(op, "block_tables", block_tables, "sequences, max_blocks", q)
    _check_index(op, "context_lengths", context_lengths, "sequences", q)
    heads, kv_heads = q.shape[1], key_cache.shape[2]
    if heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: q has {heads} heads, which is no positive multiple of the {kv_heads} of the caches")
    if block_tables.shape[0] != context_lengths.shape[0]:
        raise ValueError(
            f"{op}: block_tables is for {block_tables.shape[0]} sequences, context_lengths for "
            f"{context_lengths.shape[0]}"
        )


def _scale(op: str, scale: float | None, window: int | None, softcap: float | None, head_dim: int) -> float:
    """The scale to use, once the three numbers are known to be good."""
    if window is not None and window < 1:
        raise ValueError(f"{op}: window counts the visible positions, the query's own included; found {window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"{op}: softcap must be positive and finite, or None for none; found {softcap}")
    return head_dim**-0.5 if scale is None else scale


def _serving(op: str, x: Tensor) -> Implementation:
    """The implementation for `x`: float64 is for comparisons, and plain torch has it."""
    return implementation(op, "torch") if x.dtype == torch.float64 else resolve(op, x.device)


def paged_decode(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of one new token per sequence, at position `context_lengths - 1`; [sequences, heads, head_dim].

    `q` [sequences, heads, head_dim], in the caches' dtype; sums are in float32 (float64 for float64). `scale`
    multiplies the scores and is `head_dim ** -0.5` if None. With `window` only the last `window` positions are visible;
    blocks wholly before them may have been given away. `softcap` bounds scores to `softcap * tanh(score / softcap)`. A
    sequence of context length 0 gives zeros. Has no gradient.
    """
    _check_attention("paged_decode", q, key_cache, value_cache, block_tables, context_lengths)
    if q.shape[0] != context_lengths.shape[0]:
        raise ValueError(
            f"paged_decode: q has {q.shape[0]} tokens for {context_lengths.shape[0]} sequences; expected one each"
        )
    used = _scale("paged_decode", scale, window, softcap, q.shape[-1])
    out: Tensor = _serving("paged_decode", q)(
        q, key_cache, value_cache, block_tables, context_lengths, scale=used, window=window, softcap=softcap
    )
    return out


def ragged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of any number of new tokens per sequence, prompts and single tokens mixed; [tokens, heads, head_dim].

    `q` [tokens, heads, head_dim] holds the new tokens of all sequences one after another: those of sequence `i` are
    rows `query_starts[i]` to `query_starts[i + 1] - 1` (int32 [sequences + 1], ascending from 0) and stand at the last
    positions of its context, which their keys and values in the cache are part of. A position sees itself and those
    before, or with `causal=False` the whole context. `window` (causal only), `scale` and `softcap` as in
    `paged_decode`. Rows that see nothing, and rows of no sequence, are zero. Has no gradient.
    """
    _check_attention("ragged_attention", q, key_cache, value_cache, block_tables, context_lengths)
    _check_index("ragged_attention", "query_starts", query_starts, "sequences + 1", q)
    sequences = context_lengths.shape[0]
    if query_starts.shape[0] != sequences + 1:
        raise ValueError(
            f"ragged_attention: query_starts has {query_starts.shape[0]} entries for {sequences} sequences; expected "
            f"{sequences + 1}, the last being the number of tokens"
        )
    if window is not None and not causal:
        raise ValueError("ragged_attention: window counts positions back from the query and needs causal=True")
    used = _scale("ragged_attention", scale, window, softcap, q.shape[-1])
    out: Tensor = _serving("ragged_attention", q)(
        q,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lengths,
        scale=used,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    return out


def write_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write the keys and values of new tokens into the caches.

    `key`, `value` [tokens, kv_heads, head_dim], in the caches' dtype; `slots` int32 [tokens]: block times block_size
    plus place in the block, each at most once, or -1 for tokens that are not written (padding).
    """
    _check_caches("write_cache", "key", key, key_cache, value_cache)
    _check_dense("write_cache", "value", value, "tokens, kv_heads, head_dim", key)
    _check_index("write_cache", "slots", slots, "tokens", key)
    expected = (slots.shape[0], *key_cache.shape[2:])
    if key.shape != expected or value.shape != expected:
        raise ValueError(
            f"write_cache: key has shape {tuple(key.shape)}, value {tuple(value.shape)}; expected {expected}: one row "
            "per slot, with the caches' kv_heads and head_dim"
        )
    _serving("write_cache", key)(key, value, key_cache, value_cache, slots)
