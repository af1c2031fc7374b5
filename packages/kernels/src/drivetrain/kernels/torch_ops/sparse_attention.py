"""Block-sparse attention in plain torch: a dense softmax with what the layout leaves out at -inf. Oracle of the Triton
op, and fallback on any device; computes, and in training keeps, all scores."""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.kernels.sparse_layouts import BlockLists

from .masked_softmax import masked_softmax

__all__ = ["block_sparse_attention"]


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
    visible = layout.mask.repeat_interleave(block, dim=1).repeat_interleave(block, dim=2)
    if causal:
        visible = visible.tril()
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    precise = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(precise) @ k.to(precise).transpose(-1, -2) * scale
    weights = masked_softmax(scores.masked_fill(~visible, -torch.inf))
    return (weights @ v.to(precise)).to(q.dtype)
