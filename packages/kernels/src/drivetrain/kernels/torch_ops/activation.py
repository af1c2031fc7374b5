"""Activations of feed-forward layers, fused with what stands around them, in plain torch.

Everything is computed in float32 (float64 for float64) and rounded once on writing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.torch_ops.counter_random import random_bits
from drivetrain.kernels.torch_ops.precision import working_dtype

__all__ = ["bias_dropout_residual", "bias_gelu", "drop_threshold", "geglu", "swiglu"]

Approximation = Literal["none", "tanh"]


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    work = working_dtype(gate)
    first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return first.to(work), second.to(work)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`; gate and up are the halves of `gate` if `up` is None."""
    first, second = _halves(gate, up)
    return (silu(first) * second).to(gate.dtype)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: Approximation = "none") -> Tensor:
    """`gelu(gate) * up`; gate and up are the halves of `gate` if `up` is None."""
    first, second = _halves(gate, up)
    return (gelu(first, approximate=approximate) * second).to(gate.dtype)


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: Approximation = "none") -> Tensor:
    """`gelu(x + bias)`, bias [last dimension of x]."""
    work = working_dtype(x)
    return gelu(x.to(work) + bias.to(work), approximate=approximate).to(x.dtype)


def drop_threshold(p: float) -> int:
    """An element is dropped if its 24 random bits are below this."""
    return round(p * 2**24)


class _Dropout(torch.autograd.Function):
    """(x [rows, columns], p, seed, first_row) -> x / (1 - p) where it is kept, else 0. Nothing is saved: backward makes
    the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int, first_row: int) -> Tensor:
        ctx.arguments = (p, seed, first_row)
        return _dropped(x, p, seed, first_row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _dropped(grad, *ctx.arguments), None, None, None


def _dropped(x: Tensor, p: float, seed: int, first_row: int) -> Tensor:
    bits = random_bits(*x.shape, seed=seed, first_row=first_row, device=x.device)
    return torch.where(bits >= drop_threshold(p), x * (1 / (1 - p)), 0.0)


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    p: float,
    training: bool = True,
    seed: int,
    first_row: int = 0,
) -> Tensor:
    """`residual + dropout(x + bias)`, in the residual's dtype."""
    work = working_dtype(residual)
    added = x.to(work) if bias is None else x.to(work) + bias.to(work)
    if training and p > 0 and x.numel():
        dropped: Tensor = apply(_Dropout, added.reshape(-1, x.shape[-1]), p, seed, first_row)
        added = dropped.view(x.shape)
    return (residual.to(work) + added).to(residual.dtype)
