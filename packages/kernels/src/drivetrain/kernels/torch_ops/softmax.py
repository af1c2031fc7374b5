"""Softmax of masked attention scores in plain torch.

A score that is masked, by a boolean False, by -inf in an additive mask or by being -inf itself, gets the weight zero; a
row that has no other scores is zero altogether, and so are its gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.kernels.torch_ops.precision import working_dtype

__all__ = ["masked_softmax"]


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """`softmax(scale * scores + mask)` over the last dimension, scores [..., queries, keys], mask broadcast to it."""
    x = scores.to(working_dtype(scores)) * scale
    hidden = torch.zeros((), dtype=torch.bool, device=scores.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = ~mask
    elif mask is not None:
        x = x + mask.to(x.dtype)
    if causal:
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        hidden = hidden | later
    hidden = hidden | (x == -torch.inf)
    # Rows without a visible score have a softmax of their own (of zeros), so that no NaN arises in backward either.
    empty = hidden.expand(x.shape).all(dim=-1, keepdim=True)
    weights = torch.softmax(x.masked_fill(hidden, -torch.inf).masked_fill(empty, 0.0), dim=-1)
    return weights.masked_fill(hidden, 0.0).to(scores.dtype)
