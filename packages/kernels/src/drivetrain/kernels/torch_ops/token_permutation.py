"""Moving tokens to their experts and back in plain torch; `drivetrain.kernels.token_permutation` says what is computed.

The gradients are written out: they are gathers by the other half of the permutation, where autograd's would be
scattered additions, slower on the host and in no fixed order on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["expert_histogram", "permutation", "permute_tokens", "unpermute_tokens"]


def expert_histogram(experts: Tensor, num_experts: int) -> Tensor:
    """int32 [num_experts]: how often each is named."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=experts.device)
    named = _named(experts, num_experts)
    return counts.scatter_add_(0, named, torch.ones_like(named, dtype=torch.int32))[:num_experts].clone()


def permutation(
    experts: Tensor, num_experts: int, *, rows: int, capacity: int | None, alignment: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments [rows], destinations [tokens, k] and offsets [num_experts + 1], int32."""
    named, order = torch.sort(_named(experts, num_experts), stable=True)
    bounds = torch.searchsorted(named, torch.arange(num_experts + 1, device=experts.device))
    kept = bounds.diff().clamp(max=capacity) if capacity is not None else bounds.diff()
    padded = (kept + (alignment - 1)) // alignment * alignment
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))

    expert = named.clamp(max=num_experts - 1)
    rank = torch.arange(named.numel(), device=experts.device) - bounds[expert]
    has_row = (named < num_experts) & (rank < kept[expert])
    row = offsets[expert] + rank
    destinations = torch.empty_like(order).scatter_(0, order, torch.where(has_row, row, -1))
    # One more row takes what is dropped, and is cut off.
    assignments = torch.full((rows + 1,), -1, device=experts.device)
    assignments.scatter_(0, torch.where(has_row, row, rows), order)
    return (
        assignments[:rows].to(torch.int32),
        destinations.view(experts.shape).to(torch.int32),
        offsets.to(torch.int32),
    )


def permute_tokens(x: Tensor, assignments: Tensor, destinations: Tensor) -> Tensor:
    """`x` [tokens, hidden] as [rows, hidden], sorted by expert."""
    moved: Tensor = _Permute.apply(x, assignments, destinations)  # type: ignore[no-untyped-call]
    return moved


def unpermute_tokens(y: Tensor, assignments: Tensor, destinations: Tensor, weights: Tensor | None) -> Tensor:
    """The weighted sums of `y` [rows, hidden] as [tokens, hidden]."""
    summed: Tensor = _Unpermute.apply(y, assignments, destinations, weights)  # type: ignore[no-untyped-call]
    return summed


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, assignments: Tensor, destinations: Tensor) -> Tensor:
        ctx.save_for_backward(destinations)
        return _gather(x, _tokens(assignments, destinations))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (destinations,) = ctx.saved_tensors
        return _sum(grad, destinations, None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, assignments: Tensor, destinations: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(None if weights is None else y, assignments, destinations, weights)
        return _sum(y, destinations, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        y, assignments, destinations, weights = ctx.saved_tensors
        spread = _gather(grad, _tokens(assignments, destinations))
        if weights is None:
            return spread, None, None, None
        wide = spread.to(_sum_dtype(y))
        dots = torch.linalg.vecdot(wide, y.to(wide.dtype))
        grad_weights = _gather(dots, destinations.flatten()).view(weights.shape).to(weights.dtype)
        factors = _gather(weights.flatten().to(wide.dtype), assignments)
        return (wide * factors[:, None]).to(y.dtype), None, None, grad_weights


def _named(experts: Tensor, num_experts: int) -> Tensor:
    """Flat, int64, with `num_experts` for numbers that name no expert."""
    flat = experts.flatten().long()
    return torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)


def _tokens(assignments: Tensor, destinations: Tensor) -> Tensor:
    return torch.where(assignments < 0, -1, assignments // max(destinations.shape[1], 1))


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """`source[index]`, zero where `index` is negative."""
    if source.shape[0] == 0:
        return source.new_zeros(index.shape + source.shape[1:])
    found = source.index_select(0, index.clamp(min=0))
    return found.index_fill_(0, (index < 0).nonzero().squeeze(1), 0)


def _sum(y: Tensor, destinations: Tensor, weights: Tensor | None) -> Tensor:
    tokens, k = destinations.shape
    total = torch.zeros(tokens, y.shape[1], dtype=_sum_dtype(y), device=y.device)
    # The weight of what was dropped may be anything, also NaN.
    factors = None if weights is None else weights.to(total.dtype).masked_fill(destinations < 0, 0)
    for choice in range(k):
        part = _gather(y, destinations[:, choice]).to(total.dtype)
        if factors is None:
            total += part
        else:
            total.addcmul_(part, factors[:, choice, None])
    return total.to(y.dtype)


def _sum_dtype(y: Tensor) -> torch.dtype:
    return torch.float64 if y.dtype == torch.float64 else torch.float32
