"""One matrix product per expert, in plain torch: a loop over experts that waits once for their bounds.

The gradients are written out so that each product lands in its place: autograd's would make one tensor per expert and
stack them, a copy of all the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["grouped_matmul"]


def grouped_matmul(
    x: Tensor, weights: Tensor, offsets: Tensor, *, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """`x` [rows, in] times `weights` [experts, in, out] ([experts, out, in] if `transposed`): [rows, out]."""
    product: Tensor = _GroupedMatmul.apply(x, weights, _bounds(offsets, x.shape[0]), bias, transposed)  # type: ignore[no-untyped-call]
    return product


def _bounds(offsets: Tensor, rows: int) -> tuple[int, ...]:
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > rows or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(
            f"grouped_matmul: offsets must rise from 0 to at most {rows}, the rows of x, and never fall; found {bounds}"
        )
    return tuple(bounds)


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bounds: Sequence[int], bias: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.bounds = bounds
        ctx.transposed = transposed
        return _product(x, weights.mT if transposed else weights, bounds, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        wants_x, wants_weights, _, wants_bias, _ = ctx.needs_input_grad
        grad_x = _product(grad, weights if ctx.transposed else weights.mT, ctx.bounds, None) if wants_x else None
        left, right = (grad, x) if ctx.transposed else (x, grad)
        grad_weights = _outer(left, right, ctx.bounds) if wants_weights else None
        grad_bias = _segment_sums(grad, ctx.bounds) if wants_bias else None
        return grad_x, grad_weights, None, grad_bias, None


def _product(x: Tensor, weights: Tensor, bounds: Sequence[int], bias: Tensor | None) -> Tensor:
    out = x.new_empty(x.shape[0], weights.shape[2])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start and bias is None:
            torch.mm(x[start:end], weights[expert], out=out[start:end])
        elif end > start and bias is not None:
            torch.addmm(bias[expert], x[start:end], weights[expert], out=out[start:end])
    out[bounds[-1] :] = 0
    return out


def _outer(left: Tensor, right: Tensor, bounds: Sequence[int]) -> Tensor:
    """`left[a:b].T @ right[a:b]` of every segment: [experts, columns of left, columns of right]."""
    out = left.new_empty(len(bounds) - 1, left.shape[1], right.shape[1])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            torch.mm(left[start:end].mT, right[start:end], out=out[expert])
        else:
            out[expert] = 0
    return out


def _segment_sums(grad: Tensor, bounds: Sequence[int]) -> Tensor:
    out = grad.new_empty(len(bounds) - 1, grad.shape[1])
    for expert, (start, end) in enumerate(pairwise(bounds)):
        torch.sum(grad[start:end], dim=0, out=out[expert])
    return out
