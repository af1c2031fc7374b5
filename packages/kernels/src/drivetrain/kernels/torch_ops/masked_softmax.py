"""The softmax of the attention oracles: a row in which all is -inf gives zeros, as tiled kernels do, and not NaN."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked_softmax"]


def masked_softmax(scores: Tensor) -> Tensor:
    """Softmax over the last dimension, which may be empty; zeros for rows of -inf only. Gradients are finite there."""
    if scores.shape[-1] == 0:
        return scores
    top = scores.detach().amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)
