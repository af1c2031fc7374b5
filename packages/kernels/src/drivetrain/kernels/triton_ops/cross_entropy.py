"""`torch_ops.cross_entropy` on GPUs: a kernel that reads logits once for loss and normaliser, one that makes the
gradient from logits and normaliser, and for chunks of logits that are needed no longer one that does both in place.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.torch_ops import cross_entropy as torch_cross_entropy
from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.torch_ops.chunked_loss import LossRule, Reduction, chunked_loss, reduce_losses, token_share
from drivetrain.kernels.triton_ops.tiles import as_rows, power_of_two, warps_for

__all__ = ["cross_entropy", "linear_cross_entropy"]

_BLOCK: Final = 4096  # columns of a row at a time


# The gradient of one token's loss with respect to its logits x in the columns col.
@triton.jit
def _gradient(x, col, label, log_total, vocabulary, smoothing, z_loss):
    p = tl.exp(x - log_total) * (1.0 + 2.0 * z_loss * log_total)
    return p - smoothing / vocabulary - tl.where(col == label, 1.0 - smoothing, 0.0)


# logits      [rows, vocabulary], rows logits_stride apart, of which `width` columns may be read
# labels      integer [rows]                         losses      float32 [rows]
# log_totals  float32 [rows], or None                factors     float32, factor_stride apart, or None
# Writes losses and log_totals; with GRADIENT also factor times the gradient over the logits, and zeros from the end of
# the vocabulary to `width`.
@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    losses,
    log_totals,
    factors,
    vocabulary,
    width,
    logits_stride,
    factor_stride,
    ignore_index,
    smoothing,
    z_loss,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    lane = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    counted = label != ignore_index
    known = (label >= 0) & (label < vocabulary)
    target = tl.load(logits + tl.where(known, label, 0), mask=counted, other=0.0).to(tl.float32)
    top = -float("inf")
    total = tl.zeros([BLOCK], dtype=tl.float32)
    plain = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, tl.where(counted, vocabulary, 0), BLOCK):
        col = start + lane
        x = tl.load(logits + col, mask=col < width, other=0.0).to(tl.float32)
        if SMOOTHED:
            plain += tl.where(col < vocabulary, x, 0.0)
        x = tl.where(col < vocabulary, x, -float("inf"))
        higher = tl.maximum(top, tl.max(x, axis=0))
        level = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.exp(x - level)
        top = higher
    log_total = tl.where(top == -float("inf"), 0.0, top) + tl.log(tl.sum(total, axis=0))
    log_total = tl.where(known, log_total, float("nan"))
    loss = log_total - (1.0 - smoothing) * target + z_loss * log_total * log_total
    if SMOOTHED:
        loss -= smoothing * (tl.sum(plain, axis=0) / vocabulary)
    tl.store(losses + row, tl.where(counted, loss, 0.0))
    if log_totals is not None:
        tl.store(log_totals + row, log_total)
    if GRADIENT:
        tl.debug_barrier()  # the label's logit has been read by all threads before any writes over it
        factor = 1.0
        if factors is not None:
            factor = tl.load(factors + row * factor_stride)
        for start in range(0, width, BLOCK):
            col = start + lane
            x = tl.load(logits + col, mask=(col < width) & counted, other=0.0).to(tl.float32)
            g = _gradient(x, col, label, log_total, vocabulary, smoothing, z_loss) * factor
            tl.store(logits + col, tl.where(counted & (col < vocabulary), g, 0.0), mask=col < width)


# Pointers as in `cross_entropy_kernel`; out [rows, vocabulary], contiguous. Program (r, b): block b of row r.
@triton.jit
def cross_entropy_backward_kernel(
    logits,
    labels,
    log_totals,
    factors,
    out,
    vocabulary,
    logits_stride,
    factor_stride,
    ignore_index,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    counted = label != ignore_index
    x = tl.load(logits + row * logits_stride + col, mask=(col < vocabulary) & counted, other=0.0).to(tl.float32)
    log_total = tl.load(log_totals + row)
    factor = tl.load(factors + row * factor_stride)
    g = _gradient(x, col, label, log_total, vocabulary, smoothing, z_loss) * factor
    tl.store(out + row * vocabulary + col, tl.where(counted, g, 0.0), mask=col < vocabulary)


def _losses(
    logits: Tensor,
    labels: Tensor,
    rule: LossRule,
    *,
    log_totals: Tensor | None,
    gradient: bool = False,
    factors: Tensor | None = None,
    width: int | None = None,
) -> Tensor:
    """logits [rows, vocabulary], not empty, last stride one; labels [rows], contiguous."""
    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(power_of_two(vocabulary), _BLOCK)
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(rows,)](
            logits,
            labels,
            losses,
            log_totals,
            factors,
            vocabulary,
            vocabulary if width is None else width,
            logits.stride(0),
            0 if factors is None else factors.stride(0),
            rule.ignore_index,
            rule.label_smoothing,
            rule.z_loss,
            SMOOTHED=rule.label_smoothing > 0,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return losses


def _backward(logits: Tensor, labels: Tensor, log_totals: Tensor, factors: Tensor, rule: LossRule) -> Tensor:
    """factors: float32 [rows], or one for all rows."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, vocabulary, dtype=logits.dtype, device=logits.device)
    block = min(power_of_two(vocabulary), _BLOCK)
    with torch.cuda.device_of(logits):
        cross_entropy_backward_kernel[(rows, triton.cdiv(vocabulary, block))](
            logits,
            labels,
            log_totals,
            factors,
            out,
            vocabulary,
            logits.stride(0),
            factors.stride(0) if factors.dim() else 0,
            rule.ignore_index,
            rule.label_smoothing,
            rule.z_loss,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return out


class _CrossEntropy(torch.autograd.Function):
    """(logits, labels, rule, reduction) -> reduced losses. Saved: logits, labels and a float32 number per token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rule: LossRule, reduction: Reduction) -> Tensor:
        rows, flat = as_rows(logits), labels.reshape(-1).contiguous()
        log_totals = torch.empty(rows.shape[0], dtype=torch.float32, device=logits.device)
        losses = _losses(rows, flat, rule, log_totals=log_totals).view(labels.shape)
        counted = labels != rule.ignore_index
        share = token_share(counted, torch.float32) if reduction == "mean" else None
        ctx.save_for_backward(logits, flat, log_totals, share)
        ctx.rule = rule
        return reduce_losses(losses, counted, reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, flat, log_totals, share = ctx.saved_tensors
        factors = (grad if share is None else grad * share).float()
        factors = factors.reshape(-1) if factors.dim() else factors
        out = _backward(as_rows(logits), flat, log_totals, factors, ctx.rule)
        return out.view(logits.shape), None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`torch_ops.cross_entropy.cross_entropy`."""
    rule = LossRule(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    if labels.numel() == 0:
        return torch_cross_entropy.cross_entropy(logits, labels, reduction=reduction)
    result: Tensor = apply(_CrossEntropy, logits, labels, rule, reduction)
    return result


def _step(logits: Tensor, labels: Tensor, rule: LossRule, *, gradient: bool, factors: Tensor | None) -> Tensor:
    """`chunked_loss.Step`: loss and gradient in one kernel."""
    own = None if factors is None else factors.float().contiguous()
    width = -(-logits.shape[1] // 16) * 16
    return _losses(logits, labels.contiguous(), rule, log_totals=None, gradient=gradient, factors=own, width=width)


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
    """`torch_ops.cross_entropy.linear_cross_entropy`, with the losses and gradients of a chunk from one kernel."""
    rule = LossRule(ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss)
    return chunked_loss(
        hidden, weight, labels, bias, rule=rule, reduction=reduction, chunk_tokens=chunk_tokens, step=_step
    )
