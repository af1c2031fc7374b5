"""Softmax of attention scores under a mask, for attention that needs its weights.

Problem: scaling, masking and softmax written as separate ops move the largest tensor of attention through memory time
and again, and a row that is masked altogether comes out as NaN, forward and backward.
Idea: one kernel reads the scores and the (small, broadcast) mask and writes the weights; backward needs the weights
alone, which are kept, in the dtype of the scores.

Bytes moved on a GPU, in units of one tensor of the scores' size: forward 1 read + 1 write, backward 2 reads + 1 write;
and the mask as often as it is broadcast, mostly from the cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_floating, check_same_device
from .dispatch import resolve_for

__all__ = ["masked_softmax"]


def _check_mask(scores: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool:
        check_floating("masked_softmax", mask=mask)
    fits = mask.dim() <= scores.dim() and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    )
    if not fits:
        raise ValueError(
            f"masked_softmax: mask has shape {tuple(mask.shape)}, which can't be broadcast to that of scores, "
            f"{tuple(scores.shape)}"
        )


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False) -> Tensor:
    """`softmax(scale * scores + mask)` over the last dimension, of the scores' shape and dtype.

    scores [..., queries, keys] (or [keys] without `causal`): float32, bfloat16, float16 or float64, computed in float32
    (float64 for float64). mask, broadcast to the scores: boolean, True where a key may be attended to, or floating, to
    be added. `causal` hides keys after the query, the last query seeing all keys: query i sees keys 0 to i + keys -
    queries.

    A row in which every score is masked (False, -inf in the mask, or a score of -inf) gives zeros, and zero gradients.
    NaN behind a boolean or causal mask is not seen.

    Gradients flow to the scores and to an additive mask that requires one. On a GPU scores that aren't contiguous are
    copied (rows at regular distances are not), and so is a mask whose broadcast dimensions aren't adjacent when the
    scores have more than four dimensions; a gradient of the mask costs another pass over scores in float32.
    """
    check_floating("masked_softmax", scores=scores)
    check_same_device("masked_softmax", scores=scores, mask=mask)
    least = 2 if causal else 1
    if scores.dim() < least:
        raise ValueError(
            f"masked_softmax: scores has shape {tuple(scores.shape)}; expected at least {least} dimensions, "
            "[..., queries, keys]"
        )
    if mask is not None:
        _check_mask(scores, mask)
    if not math.isfinite(scale):
        raise ValueError(f"masked_softmax: scale must be finite; found {scale!r}")
    result: Tensor = resolve_for("masked_softmax", scores)(scores, mask, scale=scale, causal=causal)
    return result
