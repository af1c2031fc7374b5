"""Arithmetic on ranges of a flattened tensor: is every element claimed exactly once, and which stored ranges answer
a request.

Pure: no tensors, no files, no processes. A range is half-open and counted in elements of the row-major flattened
tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Extent", "Overlap", "coverage_fault", "overlaps"]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Elements `start <= i < stop`, and who holds them (a rank or a file, for messages)."""

    start: int
    stop: int
    owner: str = ""

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What one stored extent contributes to a request.

    `stored` is the index of the extent; `source` and `target` are where the common elements begin, counted from the
    start of the stored extent and of the request.
    """

    stored: int
    source: int
    target: int
    numel: int


def coverage_fault(extents: Iterable[Extent], total: int) -> str | None:
    """The first reason why `extents` are not a partition of `[0, total)`, in words; None if they are one. Empty
    extents don't count.
    """
    reached, last_owner = 0, ""
    for extent in sorted((e for e in extents if e.numel != 0), key=lambda e: (e.start, e.stop)):
        if extent.start < 0 or extent.stop > total or extent.numel < 0:
            return f"elements [{extent.start}, {extent.stop}) of {extent.owner} lie outside the {total} elements"
        if extent.start > reached:
            return f"elements [{reached}, {extent.start}) of {total} are in nobody's part"
        if extent.start < reached:
            both = f"[{extent.start}, {min(reached, extent.stop)})"
            return f"elements {both} of {total} are both in the part of {last_owner} and in that of {extent.owner}"
        reached, last_owner = extent.stop, extent.owner
    if reached < total:
        return f"elements [{reached}, {total}) of {total} are in nobody's part"
    return None


def overlaps(stored: Sequence[Extent], start: int, stop: int) -> Iterator[Overlap]:
    """The parts of `stored` that make up `[start, stop)`. `stored` is sorted and holds no empty and no overlapping
    extents.
    """
    if stop <= start:
        return
    first = max(bisect_right(stored, start, key=lambda e: e.start) - 1, 0)
    for index in range(first, len(stored)):
        extent = stored[index]
        if extent.start >= stop:
            return
        low, high = max(start, extent.start), min(stop, extent.stop)
        if low < high:
            yield Overlap(stored=index, source=low - extent.start, target=low - start, numel=high - low)
