"""One matrix product per expert, over rows that lie together.

Problem: experts get different numbers of tokens. A batched product would pad them all to the largest, and a product
per expert launches many small ones, whose sizes the host would have to wait for.
Idea: one op over all rows, with the bounds of the segments on the device (MegaBlocks, arXiv:2211.15841, has the case
for not dropping tokens). Segments may have any length, also none.
Invariant: a row's result depends on that row and its expert alone, and sums run in a fixed order.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .dispatch import resolve_for

__all__ = ["grouped_matmul"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def grouped_matmul(
    x: Tensor, weights: Tensor, offsets: Tensor, *, bias: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """`x[a:b] @ weights[e] + bias[e]` for every expert e, whose rows are a = `offsets[e]` up to b = `offsets[e + 1]`.

    `x` [rows, in] and `weights` [experts, in, out], or [experts, out, in] if `transposed` (torch.nn.Linear's layout),
    of one dtype: float32, bfloat16, float16 or float64; `bias` [experts, out] of the same. `offsets` int32 or int64
    [experts + 1], not decreasing, from 0 to at most `rows`: those of a `TokenPermutation`, or a cumulative sum of
    counts with a zero before it. Returns [rows, out] in that dtype, summed in float32 (float64 for float64; on GPUs
    float32 is multiplied as `torch.set_float32_matmul_precision` asks). Rows from `offsets[-1]` on are zero.

    Gradients for `x`, `weights` (zero for experts without rows) and `bias`.
    Strides of `weights` may be any. Offsets that decrease are refused where they are read on the host (CPU); on a GPU
    they are not, and give wrong rows, but nothing outside the tensors is touched.
    """
    _check_operands(x, weights, transposed)
    _check_offsets(offsets, x, weights)
    if bias is not None:
        _check_bias(bias, x, weights.shape[0], weights.shape[1 if transposed else 2])
    product: Tensor = resolve_for("grouped_matmul", x)(x, weights, offsets, bias=bias, transposed=transposed)
    return product


def _check_operands(x: Tensor, weights: Tensor, transposed: bool) -> None:
    if x.dtype not in _DTYPES or weights.dtype != x.dtype:
        raise TypeError(
            f"grouped_matmul: x has dtype {x.dtype}, weights {weights.dtype}; expected one of float32, bfloat16, "
            "float16 and float64 for both"
        )
    if x.dim() != 2 or weights.dim() != 3 or weights.shape[0] < 1:
        raise ValueError(
            f"grouped_matmul: x has shape {tuple(x.shape)}, weights {tuple(weights.shape)}; expected [rows, in] and "
            f"{'[experts, out, in]' if transposed else '[experts, in, out]'} of at least one expert"
        )
    inner = weights.shape[2 if transposed else 1]
    if x.shape[1] != inner:
        raise ValueError(
            f"grouped_matmul: x has {x.shape[1]} columns, but weights of shape {tuple(weights.shape)} take {inner}"
            f"{' (transposed)' if transposed else '; pass transposed=True for [experts, out, in]'}"
        )
    if x.device != weights.device:
        raise ValueError(f"grouped_matmul: weights lie on {weights.device}, x on {x.device}")


def _check_offsets(offsets: Tensor, x: Tensor, weights: Tensor) -> None:
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"grouped_matmul: offsets have dtype {offsets.dtype}; expected int32 or int64")
    if offsets.shape != (weights.shape[0] + 1,):
        raise ValueError(
            f"grouped_matmul: offsets have shape {tuple(offsets.shape)}; expected {weights.shape[0] + 1} numbers, one "
            "more than experts, the first of them 0"
        )
    if offsets.device != x.device:
        raise ValueError(f"grouped_matmul: offsets lie on {offsets.device}, x on {x.device}")


def _check_bias(bias: Tensor, x: Tensor, experts: int, outer: int) -> None:
    if bias.dtype != x.dtype or bias.shape != (experts, outer):
        raise ValueError(
            f"grouped_matmul: bias is {bias.dtype} of shape {tuple(bias.shape)}; expected {x.dtype} of shape "
            f"{(experts, outer)}, [experts, out]"
        )
    if bias.device != x.device:
        raise ValueError(f"grouped_matmul: bias lies on {bias.device}, x on {x.device}")
