"""A loss over a vocabulary from hidden states, a chunk of tokens at a time, so that all logits are never there at once.

Problem: the logits of a language model, [tokens, vocabulary], and their gradient are by far its largest activations.
Idea: the loss of a token needs the logits of that token alone. For each chunk of tokens the logits are computed into
one buffer, `Step` turns them into losses and, in place, into their gradient, and two products take that to the
gradients of hidden states and weight before the buffer is used again. Since the loss is the last thing a forward pass
computes, its gradients are computed in the forward pass: backward only multiplies them by the factor it is given, which
makes three matrix products in all, as many as without chunks. Losses that aren't reduced have a factor for every token
that only backward knows: for them backward computes the logits again, four products in all.

Gradients are kept without their factor (1 / tokens, loss scale), so that a half-precision one neither underflows nor
overflows before it is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.torch_ops.precision import working_dtype

__all__ = ["LossRule", "Reduction", "Step", "chunk_size", "chunked_loss", "reduce_losses", "token_share"]

Reduction = Literal["mean", "sum", "none"]

_ALIGNMENT: Final = 64  # elements: rows of logits start at multiples of 128 bytes, whatever the vocabulary's size
_LEAST: Final = 2048  # tokens of a chunk: below, the products are too small, and adding up weight gradients too dear
_ROUND: Final = 128  # tokens: chunks are multiples of it


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """What `cross_entropy` is told beside its tensors; meanings there."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Step(Protocol):
    """Losses [tokens] (working dtype) of logits [tokens, vocabulary] and labels [tokens].

    The logits may be written over; with `gradient` they must be, by the gradient of sum(factors * losses), factors
    [tokens] being ones if None. Rows are `logits.stride(0)` apart, a multiple of 16 elements; what lies between the end
    of one row and the start of the next is zero, may be read, and must be left zero.
    """

    def __call__(
        self, logits: Tensor, labels: Tensor, rule: LossRule, *, gradient: bool, factors: Tensor | None
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class _Projection:
    """hidden [tokens, features], weight [vocabulary, features], bias [vocabulary] or None, of one dtype; labels."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor

    def logits(self, part: slice, buffer: Tensor) -> Tensor:
        """Those of some tokens, in the buffer."""
        hidden = self.hidden[part]
        out = buffer[: hidden.shape[0], : self.weight.shape[0]]
        if self.bias is None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return torch.addmm(self.bias, hidden, self.weight.t(), out=out)


@dataclass(frozen=True, kw_only=True)
class _Gradients:
    """Those that are wanted: hidden's in its dtype, weight's and bias's in the working dtype, as they are summed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, projection: _Projection, wanted: tuple[bool, bool, bool]) -> _Gradients:
        work = working_dtype(projection.hidden)
        bias = projection.bias
        return cls(
            hidden=torch.empty_like(projection.hidden) if wanted[0] else None,
            weight=torch.zeros_like(projection.weight, dtype=work) if wanted[1] else None,
            bias=torch.zeros_like(bias, dtype=work) if wanted[2] and bias is not None else None,
        )

    def add(self, projection: _Projection, part: slice, dlogits: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(dlogits, projection.weight, out=self.hidden[part])
        if self.weight is not None:
            _add_product(self.weight, dlogits.t(), projection.hidden[part])
        if self.bias is not None:
            self.bias.add_(dlogits.sum(dim=0, dtype=self.bias.dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, rounded to nothing smaller than total's dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def chunk_size(tokens: int, features: int, limit: int | None) -> int:
    """Tokens of a chunk: `limit`, or about as many as make the logits of a chunk as large as the weight; equal
    parts."""
    if limit is not None:
        return max(1, min(limit, tokens))
    parts = -(-tokens // max(_LEAST, features))
    each = -(-tokens // max(1, parts))
    return max(1, min(tokens, -(-each // _ROUND) * _ROUND))


def token_share(counted: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the number of tokens that count (one if none does)."""
    return counted.sum().clamp(min=1).to(dtype).reciprocal()


def reduce_losses(losses: Tensor, counted: Tensor, reduction: Reduction) -> Tensor:
    """The mean is over the tokens that count, and zero if there are none."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / counted.sum().clamp(min=1)


def _run(
    projection: _Projection,
    rule: LossRule,
    chunk: int,
    step: Step,
    gradients: _Gradients | None,
    factors: Tensor | None = None,
) -> Tensor:
    """The losses of all tokens; `gradients`, if given, receive those of sum(factors * losses)."""
    hidden, labels = projection.hidden, projection.labels
    tokens, vocabulary = hidden.shape[0], projection.weight.shape[0]
    losses = torch.empty(tokens, dtype=working_dtype(hidden), device=hidden.device)
    width = -(-vocabulary // _ALIGNMENT) * _ALIGNMENT
    # Zeros, because products of half-precision matrices on the host read past the end of a row (and multiply by zero).
    buffer = torch.zeros(min(chunk, tokens), width, dtype=hidden.dtype, device=hidden.device)
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        logits = projection.logits(part, buffer)
        own = None if factors is None else factors[part]
        losses[part] = step(logits, labels[part], rule, gradient=gradients is not None, factors=own)
        if gradients is not None:
            gradients.add(projection, part, logits)
    return losses


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return None
    # As a vector of one the factor keeps its dtype; a scalar would be rounded to the gradient's.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))


class _Reduced(torch.autograd.Function):
    """(hidden, weight, bias, labels, rule, reduction, chunk, step) -> mean or sum of the losses.

    Saved: the gradients of their sum, and the number of tokens that count.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rule: LossRule,
        reduction: Reduction,
        chunk: int,
        step: Step,
    ) -> Tensor:
        projection = _Projection(hidden=hidden, weight=weight, bias=bias, labels=labels)
        gradients = _Gradients.zeros(projection, ctx.needs_input_grad[:3])
        losses = _run(projection, rule, chunk, step, gradients)
        counted = labels != rule.ignore_index
        share = token_share(counted, losses.dtype) if reduction == "mean" else losses.new_ones(())
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias, share)
        ctx.dtype = hidden.dtype
        return reduce_losses(losses, counted, reduction)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, share = ctx.saved_tensors
        factor = grad * share
        scaled = (_scaled(gradient, factor, ctx.dtype) for gradient in (hidden, weight, bias))
        return *scaled, None, None, None, None, None


class _Separate(torch.autograd.Function):
    """(hidden, weight, bias, labels, rule, chunk, step) -> losses [tokens]. Saved: the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rule: LossRule,
        chunk: int,
        step: Step,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.how = (rule, chunk, step)
        return _run(_Projection(hidden=hidden, weight=weight, bias=bias, labels=labels), rule, chunk, step, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        projection = _Projection(hidden=hidden, weight=weight, bias=bias, labels=labels)
        gradients = _Gradients.zeros(projection, ctx.needs_input_grad[:3])
        rule, chunk, step = ctx.how
        _run(projection, rule, chunk, step, gradients, grad)
        parts = (gradients.hidden, gradients.weight, gradients.bias)
        return *(None if part is None else part.to(hidden.dtype) for part in parts), None, None, None, None


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    *,
    rule: LossRule,
    reduction: Reduction,
    chunk_tokens: int | None,
    step: Step,
) -> Tensor:
    """The reduced (or separate) losses of hidden [tokens..., features] and labels [tokens...]."""
    features = hidden.shape[-1]
    rows, flat = hidden.reshape(-1, features), labels.reshape(-1)
    chunk = chunk_size(rows.shape[0], features, chunk_tokens)
    learns = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    if reduction == "none":
        losses: Tensor = apply(_Separate, rows, weight, bias, flat, rule, chunk, step)
        return losses.view(labels.shape)
    if learns:
        loss: Tensor = apply(_Reduced, rows, weight, bias, flat, rule, reduction, chunk, step)
        return loss
    projection = _Projection(hidden=rows, weight=weight, bias=bias, labels=flat)
    with torch.no_grad():
        return reduce_losses(_run(projection, rule, chunk, step, None), flat != rule.ignore_index, reduction)
