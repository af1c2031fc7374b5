"""Random numbers that are a function of a seed and of where an element stands: nothing is stored, nothing has an order.

The number of an element is a hash of the seed, the index of its row and its column, so it depends on neither threads
nor device, a slice of rows that starts at `first_row` gives what the whole gives, and backward can make it again.
Invariant: every implementation, in any language, gives these bits.
"""

from __future__ import annotations

from typing import Final, TypeVar

import torch
from torch import Tensor

__all__ = ["random_bits", "seed_keys"]

_WORD: Final = 0xFFFFFFFF

_Number = TypeVar("_Number", int, Tensor)


def _mix(x: _Number) -> _Number:
    """C. Wellons' lowbias32, a bijection of 32-bit numbers, on int64 (products wrap; the low 32 bits stay right)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def seed_keys(seed: int) -> tuple[int, int]:
    """The two 32-bit keys of `seed`, which lies in [0, 2**63)."""
    first = _mix(((seed & _WORD) + 0x9E3779B9) & _WORD)
    return first, _mix((seed >> 32) ^ first)


def random_bits(rows: int, columns: int, *, seed: int, first_row: int, device: torch.device) -> Tensor:
    """24 random bits for each element of [rows, columns], int64."""
    first, second = seed_keys(seed)
    row = torch.arange(rows, dtype=torch.int64, device=device) + first_row
    column = torch.arange(columns, dtype=torch.int64, device=device)
    key0 = _mix((row & _WORD) ^ first)
    key1 = _mix(_mix((row >> 32) ^ key0) ^ second)
    return _mix((_mix(column ^ key0[:, None]) + key1[:, None]) & _WORD) >> 8
