"""A tensor cut into equal parts, one for each rank: how parameters lie between their construction and `shard`.

`shard` lays parameters into buckets, whose layout follows from the whole module. While a module is still being built
nobody knows it, so each parameter is cut on its own: rank r keeps the r-th of as many equal parts as there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.comm import Axis, all_gather


@dataclass(frozen=True)
class SplitParameter:
    """What this rank keeps of one parameter."""

    piece: torch.Tensor  # [ceil(numel / ranks)] on the ranks' device; zeros beyond the parameter's end
    shape: torch.Size


def cut(flat: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A copy of this rank's part of ``flat`` [numel], which is the same on all ranks."""
    length = -(-flat.numel() // axis.size)
    piece = torch.empty(length, dtype=flat.dtype, device=axis.device)
    own = flat[axis.rank * length : (axis.rank + 1) * length]
    piece[: own.numel()].copy_(own)
    piece[own.numel() :].zero_()
    return piece


def join(piece: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The whole, out of every rank's part, and padding after it. Collective."""
    whole = torch.empty(axis.size * piece.numel(), dtype=piece.dtype, device=axis.device)
    all_gather(whole, piece, axis, purpose="a parameter built under Init").wait()
    return whole


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor with no memory behind it: its elements, of which there must be some, read as NaN."""
    nothing = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
    return nothing.expand(shape)


def is_placeholder(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has more elements than memory, as placeholders do."""
    return tensor.numel() > 1 and not any(tensor.stride())
