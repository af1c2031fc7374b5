"""Parallel lists of tensors, as the optimizer steps take them: one column per role, one row per parameter.

Invariant: a column that passes `check_column` has one tensor (or None, among copies) for every row, of the row's
number of elements; whoever takes an address relies on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

__all__ = ["Column", "Copies", "check_column", "pick", "pick_copies"]

Column = Sequence[Tensor | None]
Copies = Sequence[Tensor | None] | None

Item = TypeVar("Item")


def check_column(op: str, role: str, column: Column, counts: Sequence[int], first: str) -> None:
    """Refuse a column whose length is not that of `counts`, the numbers of elements of the column `first`, or a tensor
    of another number of elements."""
    if len(column) != len(counts):
        raise ValueError(f"{op}: {len(column)} {role} for {len(counts)} {first}; the lists must be parallel")
    for index, (tensor, count) in enumerate(zip(column, counts, strict=True)):
        if tensor is not None and tensor.numel() != count:
            raise ValueError(f"{op}: {role} {index} has {tensor.numel()} elements, but its first operand has {count}")


def pick(column: Sequence[Item], places: Sequence[int]) -> list[Item]:
    """The entries at `places`."""
    return [column[index] for index in places]


def pick_copies(copies: Copies, places: Sequence[int]) -> Copies:
    """The copies at `places`, if there are any at all."""
    return None if copies is None else pick(copies, places)
