"""RMS and layer normalisation of the last dimension in plain torch, with the residual added first if there is one.

Everything is computed in float32 (float64 for float64) and rounded once on writing; the sum with the residual is
rounded to the residual's dtype before it is normalised, so that the result is the norm of the very sum that is handed
out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.kernels.torch_ops.precision import working_dtype

__all__ = ["layer_norm", "rms_norm"]


def _add(x: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return x
    work = working_dtype(residual)
    return (x.to(work) + residual.to(work)).to(residual.dtype)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`h / sqrt(mean(h**2) + eps) * weight` of h = x + residual, and h as well if there is a residual."""
    total = _add(x, residual)
    h = total.to(working_dtype(total))
    scale = torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    normalised = (h * scale * weight.to(h.dtype)).to(x.dtype)
    return normalised if residual is None else (normalised, total)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`(h - mean(h)) / sqrt(var(h) + eps) * weight + bias` of h = x + residual; and h if there is a residual."""
    total = _add(x, residual)
    h = total.to(working_dtype(total))
    centred = h - h.mean(dim=-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    normalised = centred * scale * weight.to(h.dtype)
    if bias is not None:
        normalised = normalised + bias.to(h.dtype)
    return normalised.to(x.dtype) if residual is None else (normalised.to(x.dtype), total)
