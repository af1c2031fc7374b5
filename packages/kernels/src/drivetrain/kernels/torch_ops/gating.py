"""Routing in plain torch. `drivetrain.kernels.gating` says what is computed.

The choice is `k` rounds of argmax, which takes the first of equals and NaN before all numbers, on every device; `topk`
promises no order of equals, and a stable sort of all experts is slower.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from drivetrain.kernels.gating_rules import GatingRule

__all__ = ["top_k_gating"]

_EPSILON: Final = 1e-20  # keeps weights whose scores all underflow at zero


def top_k_gating(logits: Tensor, bias: Tensor | None, *, rule: GatingRule) -> tuple[Tensor, Tensor]:
    """Weights [tokens, k] and experts [tokens, k] for `logits` [tokens, experts] and `bias` [experts] or None."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = wide.softmax(dim=1) if rule.scoring == "softmax" else wide.sigmoid()
    with torch.no_grad():
        experts = _choose(wide, scores, bias, rule)
    weights = scores.gather(1, experts)
    if rule.renormalize:
        weights = weights / (weights.sum(dim=1, keepdim=True) + _EPSILON)
    return weights * rule.scale, experts


def _choose(logits: Tensor, scores: Tensor, bias: Tensor | None, rule: GatingRule) -> Tensor:
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    keys = _above_excluded(logits if bias is None else biased)
    if rule.groups is not None and rule.top_groups is not None:
        per_group = biased.unflatten(1, (rule.groups, rule.group_size))
        best = per_group.topk(min(rule.group_best, rule.group_size), dim=2).values.sum(dim=2)
        groups = _largest(_above_excluded(best), rule.top_groups)
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, groups, True)
        keys = keys.masked_fill(~allowed.repeat_interleave(rule.group_size, dim=1), -torch.inf)
    return _largest(keys, rule.k)


def _above_excluded(keys: Tensor) -> Tensor:
    """No key at negative infinity: that is the key of what must not be chosen."""
    return keys.clamp(min=torch.finfo(keys.dtype).min)


def _largest(keys: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row, the first of equals first."""
    keys = keys.clone()
    found = []
    for _ in range(count):
        found.append(keys.argmax(dim=1, keepdim=True))
        keys.scatter_(1, found[-1], -torch.inf)
    return torch.cat(found, dim=1)
