"""Cross entropy with label smoothing and z-loss in plain torch, and the same from hidden states without all logits.

The loss of a token with logits x [vocabulary], label y and smoothing e is
`log(sum(exp(x))) - (1 - e) * x[y] - e * mean(x) + z_loss * log(sum(exp(x)))**2`, in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.kernels.torch_ops.chunked_loss import LossRule, Reduction, chunked_loss, reduce_losses
from drivetrain.kernels.torch_ops.precision import working_dtype

__all__ = ["cross_entropy", "linear_cross_entropy"]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Losses of logits [tokens..., vocabulary] and integer labels [tokens...], reduced over the tokens that count."""
    counted = labels != ignore_index
    # Tokens that don't count are blanked first, so that nothing of theirs, not even NaN, enters a gradient.
    x = logits.to(working_dtype(logits)).masked_fill(~counted.unsqueeze(-1), 0.0)
    log_total = torch.logsumexp(x, dim=-1)
    target = x.gather(-1, labels.long().masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
    losses = log_total - (1 - label_smoothing) * target
    if label_smoothing:
        losses = losses - label_smoothing * x.mean(dim=-1)
    if z_loss:
        losses = losses + z_loss * log_total.square()
    return reduce_losses(losses.masked_fill(~counted, 0.0), counted, reduction)


def _step(logits: Tensor, labels: Tensor, rule: LossRule, *, gradient: bool, factors: Tensor | None) -> Tensor:
    """`chunked_loss.Step`, in place on the logits (on a float32 copy of them where they are smaller)."""
    x = logits.to(working_dtype(logits))
    skipped = labels == rule.ignore_index
    index = labels.long().masked_fill(skipped, 0).unsqueeze(-1)
    target = x.gather(-1, index).squeeze(-1)
    mean = x.mean(dim=-1) if rule.label_smoothing else None
    top = x.amax(dim=-1, keepdim=True)
    total = x.sub_(top).exp_().sum(dim=-1, keepdim=True)
    log_total = (top + total.log()).squeeze(-1)
    losses = log_total - (1 - rule.label_smoothing) * target
    if mean is not None:
        losses = losses - rule.label_smoothing * mean
    if rule.z_loss:
        losses = losses + rule.z_loss * log_total.square()
    if gradient:
        x.mul_((1 + 2 * rule.z_loss * log_total).unsqueeze(-1) / total)
        if rule.label_smoothing:
            x.sub_(rule.label_smoothing / x.shape[-1])
        x.scatter_add_(-1, index, torch.full_like(index, rule.label_smoothing - 1, dtype=x.dtype))
        if factors is not None:
            x.mul_(factors.unsqueeze(-1))
        x.masked_fill_(skipped.unsqueeze(-1), 0.0)
        if x is not logits:
            logits.copy_(x)
    return losses.masked_fill(skipped, 0.0)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T + bias, labels)`, a chunk of tokens at a time."""
    rule = LossRule(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    return chunked_loss(
        hidden, weight, labels, bias, rule=rule, reduction=reduction, chunk_tokens=chunk_tokens, step=_step
    )
