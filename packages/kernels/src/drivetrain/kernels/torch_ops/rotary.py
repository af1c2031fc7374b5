"""Rotary position embedding in plain torch.

A head's first 2 * pairs elements are rotated in pairs, the rest is left as it is. Pair i is (i, pairs + i), or
(2i, 2i + 1) when interleaved; it turns by the angle whose cosine and sine are `cos[..., i]` and `sin[..., i]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drivetrain.kernels.torch_ops.precision import working_dtype

__all__ = ["rotary_embedding"]


def _angles(table: Tensor, positions: Tensor | None) -> Tensor:
    """[..., 1, pairs]: a row for every token, for all its heads."""
    rows = table if positions is None else torch.nn.functional.embedding(positions, table)
    return rows.unsqueeze(-2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].to(working_dtype(x)), x[..., 2 * pairs :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    cos, sin = cos.to(turned.dtype), sin.to(turned.dtype)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    together = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((together.to(x.dtype), rest), dim=-1)


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q and k [..., heads, dim] with every head rotated by the angles of its token; cos and sin [..., pairs] broadcast
    over the leading dimensions, or are tables [length, pairs] of which `positions` [...] picks the rows."""
    cos, sin = _angles(cos, positions), _angles(sin, positions)
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)
