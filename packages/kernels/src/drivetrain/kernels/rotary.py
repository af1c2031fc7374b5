"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) of queries and keys together.

Problem: written with slices and concatenations it moves queries and keys through memory five times or more.
Idea: one kernel rotates all heads of q and k; each cosine and sine is read once per few heads. The inverse of a
rotation is the rotation by the opposite angle, so backward is the same kernel, and nothing but the angles is saved.

Bytes moved on a GPU: q and k are read once and written once, forward and backward alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_floating, check_same_device, check_shape
from .dispatch import resolve_for

__all__ = ["rotary_embedding"]


def _check_heads(q: Tensor, k: Tensor) -> None:
    if q.dim() < 3 or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"rotary_embedding: q has shape {tuple(q.shape)}, k {tuple(k.shape)}; expected [tokens..., heads, dim], "
            "equal but for the number of heads"
        )
    if q.dtype != k.dtype:
        raise TypeError(f"rotary_embedding: q is {q.dtype}, k {k.dtype}: convert one of them")


def _check_angles(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise ValueError(
                f"rotary_embedding: {name} requires a gradient, but angles are constants: pass {name}.detach()"
            )
    check_shape("rotary_embedding", "sin", sin, cos.shape, "the shape of cos")
    pairs = cos.shape[-1] if cos.dim() else 0
    if not 0 < 2 * pairs <= q.shape[-1]:
        raise ValueError(
            f"rotary_embedding: cos has shape {tuple(cos.shape)}; expected [..., pairs] with 1 <= pairs <= dim / 2, "
            f"dim being {q.shape[-1]}: a table that repeats every angle is passed as cos[..., :pairs]"
        )


def _check_rows(q: Tensor, cos: Tensor, positions: Tensor | None) -> None:
    tokens = q.shape[:-2]
    if positions is not None:
        if positions.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"rotary_embedding: positions has dtype {positions.dtype}; expected int64 or int32")
        check_shape("rotary_embedding", "positions", positions, tokens, "the leading dimensions of q")
        if cos.dim() != 2:
            raise ValueError(
                f"rotary_embedding: cos has shape {tuple(cos.shape)}; with positions it must be a table [length, pairs]"
            )
        return
    rows = list(cos.shape[:-1])
    while rows and rows[0] == 1:
        rows.pop(0)
    if rows != list(tokens[len(tokens) - len(rows) :]):
        raise ValueError(
            f"rotary_embedding: cos has shape {tuple(cos.shape)}, q {tuple(q.shape)}; expected a row of cos for every "
            f"token {tuple(tokens)}, or for every token of the last of these dimensions; or pass positions"
        )


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of elements of every head by the angles of its token.

    q [tokens..., query heads, dim] and k [tokens..., key heads, dim]: `tokens...` is [tokens] or [batch, sequence];
    dtype float32, bfloat16, float16 or float64. Computed in float32 (float64 for float64); the results have q's and k's
    dtypes. Heads before the sequence, [batch, heads, sequence, dim], are passed as views, `q.transpose(1, 2)`: nothing
    is copied, and the results, transposed back, are contiguous.

    cos and sin [..., pairs]: a row for every token, or one for every place in the sequence, shared by the batch. With
    `positions` (int32 or int64 [tokens...]) they are tables [length, pairs] whose rows it picks; a position outside the
    table raises IndexError in host memory and gives NaN on a GPU. Gradients flow to q and k, never to the angles.

    The first 2 * pairs elements of a head are rotated, the rest passes through (partial rotary dimensions). Pair i is
    (i, pairs + i), as in Llama and GPT-NeoX, or (2i, 2i + 1) with `interleaved`, as in GPT-J.
    """
    check_floating("rotary_embedding", q=q, k=k, cos=cos, sin=sin)
    check_same_device("rotary_embedding", q=q, k=k, cos=cos, sin=sin, positions=positions)
    _check_heads(q, k)
    _check_angles(q, cos, sin)
    _check_rows(q, cos, positions)
    result: tuple[Tensor, Tensor] = resolve_for("rotary_embedding", q)(
        q, k, cos, sin, interleaved=interleaved, positions=positions
    )
    return result
