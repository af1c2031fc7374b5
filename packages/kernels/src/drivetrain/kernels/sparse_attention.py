"""Attention that computes only some blocks of the attention matrix.

Idea: the softmax of a query runs over the keys of the blocks that its block sees and no others; kernels walk over lists
of these blocks, forward and backward, so time and traffic grow with the number of blocks and memory with the length.
Which blocks: `sparse_layouts`.
Invariant: the result equals dense attention with all other scores at -inf; a query that sees nothing gives zeros.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .dispatch import implementation, resolve
from .sparse_layouts import BlockLists, check_block

__all__ = ["block_sparse_attention"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_HEAD: Final = 256


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4:
        raise ValueError(
            f"block_sparse_attention: q has shape {tuple(q.shape)}; expected [batch, heads, length, head_dim]"
        )
    if q.dtype not in _DTYPES:
        raise TypeError(
            f"block_sparse_attention: q has dtype {q.dtype}; expected float32, bfloat16, float16 or float64"
        )
    if not 1 <= q.shape[-1] <= _LARGEST_HEAD:
        raise ValueError(f"block_sparse_attention: head_dim must lie in 1..{_LARGEST_HEAD}; found {q.shape[-1]}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"block_sparse_attention: {name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}, q {q.dtype} of "
                f"shape {tuple(q.shape)} on {q.device}; they must be the same"
            )


def _check_layout(lists: BlockLists, block: int, q: Tensor) -> None:
    check_block(block)
    _, heads, length, _ = q.shape
    blocks = length // block
    if length % block or lists.mask.shape != (heads, blocks, blocks):
        raise ValueError(
            f"block_sparse_attention: a layout of shape {tuple(lists.mask.shape)} with blocks of {block} is not for "
            f"{heads} heads of length {length}; expected [heads, length / block, length / block]"
        )
    if lists.mask.device != q.device:
        raise ValueError(f"block_sparse_attention: the layout lies on {lists.mask.device}, q on {q.device}")


def _check_padding(mask: Tensor, q: Tensor) -> None:
    expected = (q.shape[0], q.shape[2])
    if mask.shape != expected or mask.dtype != torch.bool:
        raise ValueError(
            f"block_sparse_attention: key_padding_mask is {mask.dtype} of shape {tuple(mask.shape)}; expected bool "
            f"{expected}, True where a key takes part"
        )
    if mask.device != q.device:
        raise ValueError(f"block_sparse_attention: key_padding_mask lies on {mask.device}, q on {q.device}")


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Tensor | BlockLists,
    *,
    block: int,
    causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attention within the blocks of `layout`; shaped like `q`.

    `q`, `k`, `v` [batch, heads, length, head_dim] of one dtype; sums are in float32 (float64 for float64). `layout`:
    bool [heads, length / block, length / block], True where a query block sees a key block, or `BlockLists.of` it,
    which saves making the lists (and waiting for the device) at every call. `block`: a power of two, 16 or more.
    `causal` hides from a token what comes after it; `key_padding_mask` bool [batch, length] is True where a key takes
    part. `scale` multiplies the scores and is `head_dim ** -0.5` if None. Gradients reach q, k and v. In plain torch,
    on CPU, all scores are computed and the layout hides them.
    """
    _check_operands(q, k, v)
    lists = layout if isinstance(layout, BlockLists) else BlockLists.of(layout)
    _check_layout(lists, block, q)
    if key_padding_mask is not None:
        _check_padding(key_padding_mask, q)
    double = q.dtype == torch.float64  # for comparisons; plain torch has it
    serve = implementation("block_sparse_attention", "torch") if double else resolve("block_sparse_attention", q.device)
    used = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = serve(q, k, v, lists, block=block, causal=causal, scale=used, key_padding_mask=key_padding_mask)
    return out
