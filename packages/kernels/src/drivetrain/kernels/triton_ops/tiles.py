"""Tensors seen as rows, and the sizes of the tiles that programs work on."""

from __future__ import annotations

from typing import Final

import triton
from torch import Tensor

__all__ = ["as_rows", "power_of_two", "tile_of", "warps_for"]

_PER_THREAD: Final = 16  # elements of a tile per thread: two vectors of 16 bytes in a half precision


def as_rows(x: Tensor) -> Tensor:
    """`x` (not empty) as [rows, last dimension], last stride one: a view where the strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def power_of_two(count: int) -> int:
    """The smallest power of two that isn't below `count`."""
    return int(triton.next_power_of_2(max(count, 1)))


def tile_of(columns: int, *, elements: int, block: int) -> tuple[int, int]:
    """Rows and columns of a tile of `elements` elements: as wide as the rows, at most `block`, and as many rows as make
    up the rest."""
    width = min(power_of_two(columns), block)
    return max(1, elements // width), width


def warps_for(elements: int) -> int:
    """Warps of a program that holds tiles of `elements` elements in registers."""
    return min(max(power_of_two(elements) // (32 * _PER_THREAD), 4), 32)
