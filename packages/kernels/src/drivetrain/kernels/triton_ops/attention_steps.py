"""What the attention kernels share: loading tiles, one step of the online softmax, and choosing how to multiply.

Scores are in units of base 2 (log2(e) is folded into the scale), because the hardware's exponential is exp2. A row of
the softmax is carried as its largest score `top`, the sum `total` of 2**(score - top) and `out`, the values weighted by
those: tiles can be absorbed in any order (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention, arXiv:2205.14135).
A row that has seen nothing yet, or nothing but -inf, has top -inf, total 0 and out 0.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "LOG2E",
    "absorb",
    "dot",
    "dot_rows",
    "finish",
    "load_tile",
    "padded",
    "precision",
    "probabilities",
    "store_tile",
]

LOG2E: Final = 1.4426950408889634
_SMALLEST_DOT: Final = 16


# offsets [rows], there bool [rows] -> [rows, PADDED], zero where `there` is false and beyond SIZE
@triton.jit
def load_tile(base, offsets, there, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    dims = tl.arange(0, PADDED)
    where = base + offsets[:, None] + dims[None, :]
    if SIZE == PADDED:
        if MASKED:
            tile = tl.load(where, mask=there[:, None], other=0.0)
        else:
            tile = tl.load(where)
    else:
        inside = (dims < SIZE)[None, :]
        if MASKED:
            tile = tl.load(where, mask=there[:, None] & inside, other=0.0)
        else:
            tile = tl.load(where, mask=inside, other=0.0)
    return tile


# tile [rows, PADDED], offsets [rows], there bool [rows]
@triton.jit
def store_tile(base, offsets, tile, there, SIZE: tl.constexpr, PADDED: tl.constexpr):
    dims = tl.arange(0, PADDED)
    where = base + offsets[:, None] + dims[None, :]
    tl.store(where, tile.to(base.dtype.element_ty), mask=there[:, None] & (dims < SIZE)[None, :])


# a [rows, inner], b [inner, columns] of one dtype, sum float32 [rows, columns] -> sum + a @ b
@triton.jit
def dot(a, b, sum, PRECISION: tl.constexpr):
    if PRECISION == "interpreted":
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), sum, input_precision="ieee")
    else:
        result = tl.dot(a, b, sum, input_precision=PRECISION)
    return result


# a [rows, inner], b [columns, inner] of one dtype -> float32 [rows, columns]
@triton.jit
def dot_rows(a, b, PRECISION: tl.constexpr):
    return dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32), PRECISION)


# scores float32 [rows, columns], values [columns, dims], top and total float32 [rows], out float32 [rows, dims]
@triton.jit
def absorb(scores, values, top, total, out, PRECISION: tl.constexpr):
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    out = dot(weights.to(values.dtype), values, out * shrink[:, None], PRECISION)
    return new_top, total, out


# -> out divided by total, and log2 of the sum of all 2**score (-inf for a row without scores)
@triton.jit
def finish(top, total, out):
    empty = total == 0.0
    out = out / tl.where(empty, 1.0, total)[:, None]
    return out, tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))


# scores float32 [rows, columns], lse broadcastable to it -> weights of the softmax; 0 in rows without scores
@triton.jit
def probabilities(scores, lse):
    return tl.exp2(scores - tl.where(lse == float("-inf"), float("inf"), lse))


def padded(size: int) -> int:
    """The power of two that a dimension of matrix products is filled up to."""
    return max(_SMALLEST_DOT, triton.next_power_of_2(size))


def precision(tensor: Tensor) -> str:
    """How products of float32 tiles are made: on tensor cores in three parts, as good as float32, where they can.

    Products of 16-bit numbers are exact whatever this says; only the interpreter must have them converted first, since
    it has no bfloat16.
    """
    if not tensor.is_cuda:
        return "interpreted"
    if torch.version.hip is None and torch.cuda.get_device_capability(tensor.device) >= (8, 0):
        return "tf32x3"
    return "ieee"
