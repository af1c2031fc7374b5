"""RMS and layer normalisation, optionally fused with the addition of the residual stream that precedes them.

Problem: a normalisation does almost no arithmetic; its time is that of moving rows through memory. Written as separate
ops it moves each row several times, and the residual addition before it twice more.
Idea: one pass reads x (and the residual), writes the sum and its normalised form. Backward is one pass too: it
recomputes the normalised row from the sum and one or two float32 numbers per row, and collects the gradients of weight
and bias on the way.

Bytes moved on a GPU, in units of one tensor of x's size: forward 1 read + 1 write (with residual: 2 + 2); backward 2
reads + 1 write (with residual: up to 3 + 1).
"""

from __future__ import annotations

from typing import overload

from torch import Tensor

from .checks import check_at_least, check_floating, check_same_device, check_shape
from .dispatch import resolve_for

__all__ = ["layer_norm", "rms_norm"]


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None) -> None:
    check_floating(op, x=x, weight=weight, bias=bias, residual=residual)
    check_same_device(op, x=x, weight=weight, bias=bias, residual=residual)
    if x.dim() == 0:
        raise ValueError(f"{op}: x has no dimensions; expected [..., hidden]")
    hidden = x.shape[-1:]
    check_shape(op, "weight", weight, hidden, "the size of x's last dimension")
    if bias is not None:
        check_shape(op, "bias", bias, hidden, "the size of x's last dimension")
    if residual is not None:
        check_shape(op, "residual", residual, x.shape, "the shape of x")
    check_at_least(op, 0.0, eps=eps)


@overload
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = ..., residual: None = ...) -> Tensor: ...
@overload
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = ..., residual: Tensor) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension: `h / sqrt(mean(h**2) + eps) * weight`.

    x [..., hidden], weight [hidden], both float32, bfloat16, float16 or float64, not necessarily the same. The result
    has x's shape and dtype. With `residual` (x's shape; its dtype is that of the residual stream), h is x + residual
    and the result is the pair (normalised h, h), h in the residual's dtype; without, h is x.

    A weight that is kept as a distance from one is passed as `1 + weight.float()`.

    Rows whose last dimension isn't contiguous, and batches of rows at irregular distances, are copied on a GPU; slices
    `x[:, a:b]` of a matrix are not. The gradient of weight is summed in a fixed order, which depends on the number of
    rows and on the GPU's number of processors alone.
    """
    _check("rms_norm", x, weight, None, eps, residual)
    result: Tensor | tuple[Tensor, Tensor] = resolve_for("rms_norm", x)(x, weight, eps=eps, residual=residual)
    return result


@overload
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float = ..., residual: None = ...) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float = ..., residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """LayerNorm (Ba et al., 2016) over the last dimension: `(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`.

    As `rms_norm`, with a mean that is taken off and a bias [hidden] (or None). The variance is that of the centred row,
    not a difference of two large sums.
    """
    _check("layer_norm", x, weight, bias, eps, residual)
    result: Tensor | tuple[Tensor, Tensor] = resolve_for("layer_norm", x)(x, weight, bias, eps=eps, residual=residual)
    return result
