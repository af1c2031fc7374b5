"""Routing of tokens to experts: which experts, and with what weights.

Problem: a mixture of experts sends every token to the `k` experts that score best. Load balancing wants a say in the
choice without a say in the output, and experts spread over nodes want the choice limited to few nodes.
Idea: one op covers the routers in use: Switch (arXiv:2101.03961: k = 1, not renormalized), GShard (arXiv:2006.16668)
and Mixtral (arXiv:2401.04088: softmax, renormalized), and DeepSeek-V3 (arXiv:2412.19437: sigmoid, bias, groups, scale).
Invariant: equal logits are chosen lowest index first, and every index lies in range whatever the logits hold.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .dispatch import resolve_for
from .gating_rules import GatingRule, Scoring

__all__ = ["top_k_gating"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def top_k_gating(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = True,
    bias: Tensor | None = None,
    groups: int | None = None,
    top_groups: int | None = None,
    group_best: int = 2,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The `k` best experts of every token, best first, and their weights.

    `logits` [tokens, experts], float32, bfloat16, float16 or float64. Returns the weights [tokens, k], float32 (float64
    for float64 logits), and the experts [tokens, k], int64, all different. Gradients flow from the weights to `logits`.

    Scores are the softmax of a row or the sigmoid of each logit, in float32. The weights are the scores of the chosen,
    divided by their sum plus 1e-20 if `renormalize`, times `scale`. (With k = 1 renormalized weights are constant, and
    the router learns nothing from them.)

    The choice: by logits, or by score plus `bias` where there is one ([experts], any float dtype; it gets no gradient
    and is in no weight: the load-balancing bias of DeepSeek-V3). Equal ones: lowest index first.
    With `groups` only experts of the `top_groups` best of so many equal runs of experts may be chosen. A group's score
    is the sum of its `group_best` best scores (plus bias): 2 in DeepSeek-V3, 1 in DeepSeek-V2.

    NaN counts as greater than every number: it is chosen first and makes the weights NaN, so it is seen; negative
    infinity counts as the lowest finite number. ValueError or TypeError for arguments that do not fit together.
    """
    _check_logits(logits)
    rule = GatingRule(
        k=k,
        experts=logits.shape[1],
        scoring=scoring,
        renormalize=renormalize,
        groups=groups,
        top_groups=top_groups,
        group_best=group_best,
        scale=scale,
    )
    if bias is not None:
        _check_bias(bias, logits)
        bias = bias.detach()
    weights, experts = resolve_for("top_k_gating", logits)(logits, bias, rule=rule)
    return weights, experts


def _check_logits(logits: Tensor) -> None:
    if logits.dtype not in _DTYPES:
        raise TypeError(
            f"top_k_gating: logits have dtype {logits.dtype}; expected float32, bfloat16, float16 or float64"
        )
    if logits.dim() != 2:
        raise ValueError(
            f"top_k_gating: logits have shape {tuple(logits.shape)}; expected [tokens, experts]: flatten the batch"
        )


def _check_bias(bias: Tensor, logits: Tensor) -> None:
    if bias.shape != logits.shape[1:] or not bias.is_floating_point():
        raise ValueError(
            f"top_k_gating: bias is {bias.dtype} of shape {tuple(bias.shape)}; expected one floating-point number for "
            f"each of {logits.shape[1]} experts"
        )
    if bias.device != logits.device:
        raise ValueError(f"top_k_gating: bias lies on {bias.device}, logits on {logits.device}")
