"""Attention with mask and pair bias in plain torch: oracle of the Triton op, and fallback on any device.

Some rows at a time, as many as have `_SCORES` scores together but at least one; in training each of these groups is
computed again in the backward pass, so that what is kept between the passes is the operands and the result.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .masked_softmax import masked_softmax

__all__ = ["evoformer_attention"]

_SCORES: Final = 1 << 22


def _attend(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    """All scores at once; arguments as those of `evoformer_attention`."""
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bnihd,bnjhd->bnhij", q.to(precise), k.to(precise)) * q.shape[-1] ** -0.5
    for bias in (mask_bias, pair_bias):
        if bias is not None:
            scores = scores + bias
    return torch.einsum("bnhij,bnjhd->bnihd", masked_softmax(scores), v.to(precise)).to(q.dtype)


def evoformer_attention(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    """See `drivetrain.kernels.evoformer_attention`; mask_bias [B, N, 1, 1, L], pair_bias [B, 1, H, L, L]."""
    batch, rows, length, heads, _ = q.shape
    group = max(1, _SCORES // max(1, batch * heads * length**2))
    if group >= rows:
        return _attend(q, k, v, mask_bias, pair_bias)
    parts = []
    for first in range(0, rows, group):
        mine = slice(first, first + group)
        piece = (q[:, mine], k[:, mine], v[:, mine], None if mask_bias is None else mask_bias[:, mine], pair_bias)
        again = torch.is_grad_enabled()
        parts.append(checkpoint(_attend, *piece, use_reentrant=False) if again else _attend(*piece))
    return torch.cat(parts, dim=1)
