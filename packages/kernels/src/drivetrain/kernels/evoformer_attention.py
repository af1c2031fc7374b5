"""Attention with a mask bias and a pair bias, as in AlphaFold's Evoformer and its triangles.

Problem: `softmax(q k^T / sqrt(d) + biases) v` over [batch, rows, length] keeps `length ** 2` scores per row and head,
which in training is most of the memory of a structure model; fused attentions take no bias with gradients.
Idea (DS4Sci_EvoformerAttention, arXiv:2310.04610; FlashAttention, arXiv:2205.14135): scores are made tile by tile,
never stored, and made again in the backward pass from one number per query. The pair bias is shared by all rows, so its
gradient is a sum over them, which one program per tile makes in order.
Invariant: nothing of size rows * length ** 2 is kept between forward and backward, and gradients are the same bits at
every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .dispatch import implementation, resolve

__all__ = ["evoformer_attention"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LARGEST_HEAD: Final = 256
_BIASES: Final = ("mask bias", "pair bias")


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 5:
        raise ValueError(
            f"evoformer_attention: q has shape {tuple(q.shape)}; expected [batch, rows, length, heads, head_dim]"
        )
    if q.dtype not in _DTYPES:
        raise TypeError(f"evoformer_attention: q has dtype {q.dtype}; expected float32, bfloat16, float16 or float64")
    if not 1 <= q.shape[-1] <= _LARGEST_HEAD:
        raise ValueError(f"evoformer_attention: head_dim must lie in 1..{_LARGEST_HEAD}; found {q.shape[-1]}")
    for name, x in (("k", k), ("v", v)):
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"evoformer_attention: {name} is {x.dtype} of shape {tuple(x.shape)} on {x.device}, q {q.dtype} of "
                f"shape {tuple(q.shape)} on {q.device}; they must be the same"
            )


def _check_bias(role: str, bias: Tensor, expected: tuple[int, ...], q: Tensor) -> None:
    if bias.shape != expected:
        raise ValueError(f"evoformer_attention: the {role} has shape {tuple(bias.shape)}; expected {expected}")
    if bias.device != q.device:
        raise ValueError(f"evoformer_attention: the {role} lies on {bias.device}, q on {q.device}")
    if bias.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"evoformer_attention: the {role} has dtype {bias.dtype}; expected {q.dtype} or float32")


def evoformer_attention(q: Tensor, k: Tensor, v: Tensor, biases: Sequence[Tensor | None] = ()) -> Tensor:
    """`softmax(q k^T / sqrt(head_dim) + mask bias + pair bias) v`, per row of `rows` and head; shaped like `q`.

    `q`, `k`, `v` [batch, rows, length, heads, head_dim] of one dtype; sums are in float32 (float64 for float64).
    `biases` holds up to two tensors of that dtype or float32, either of which may be None: first the mask bias
    [batch, rows, 1, 1, length], then the pair bias [batch, 1, heads, length, length]. Gradients reach all five. A bias
    of -inf hides a key; a query that all keys are hidden from gives zeros.
    """
    _check_operands(q, k, v)
    if len(biases) > len(_BIASES):
        raise ValueError(
            f"evoformer_attention: biases has {len(biases)} entries; expected at most {len(_BIASES)}: the "
            f"{' and the '.join(_BIASES)}"
        )
    mask_bias, pair_bias = (*biases, None, None)[:2]
    batch, rows, length, heads, _ = q.shape
    if mask_bias is not None:
        _check_bias(_BIASES[0], mask_bias, (batch, rows, 1, 1, length), q)
    if pair_bias is not None:
        _check_bias(_BIASES[1], pair_bias, (batch, 1, heads, length, length), q)
    double = q.dtype == torch.float64  # for comparisons; plain torch has it
    serve = implementation("evoformer_attention", "torch") if double else resolve("evoformer_attention", q.device)
    out: Tensor = serve(q, k, v, mask_bias, pair_bias)
    return out
