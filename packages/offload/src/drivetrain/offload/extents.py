"""Which parts of a range of bytes are free: for memory and for files alike.

Problem: records of several sizes come and go, and what they leave must serve again.
Idea: a list of free parts in order of their place. A request takes the first that is large enough (first fit), and what
comes back is joined with its free neighbours.
Invariants: free parts never touch or overlap; free and taken bytes add up to the size.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["Extents"]


class Extents:
    """The free parts of `size` bytes, all of it at first."""

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._free = [(0, size)] if size else []  # (start, length), sorted

    @property
    def size(self) -> int:
        """Bytes, free or taken."""
        return self._size

    @property
    def free(self) -> int:
        """Bytes that are free, in however many parts."""
        return sum(length for _, length in self._free)

    @property
    def largest(self) -> int:
        """Bytes of the largest free part."""
        return max((length for _, length in self._free), default=0)

    @property
    def free_at_end(self) -> int:
        """Bytes of the free part that the range ends with."""
        if not self._free:
            return 0
        start, length = self._free[-1]
        return length if start + length == self._size else 0

    def take(self, length: int) -> int | None:
        """The start of `length` bytes (at least one) that now are taken; None where no free part is that large."""
        for index, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[index : index + 1] = [(start + length, room - length)] if room > length else []
                return start
        return None

    def give_back(self, start: int, length: int) -> None:
        """These bytes, which were taken, are free again."""
        end = start + length
        index = bisect_left(self._free, (start, 0))
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        if (
            length < 1
            or end > self._size
            or (before is not None and sum(before) > start)
            or (after is not None and after[0] < end)
        ):
            raise ValueError(f"bytes {start} to {end} of {self._size} were not taken, at least not all of them")
        low, high = index, index
        if before is not None and sum(before) == start:
            start, low = before[0], index - 1
        if after is not None and after[0] == end:
            end, high = sum(after), index + 1
        self._free[low:high] = [(start, end - start)]

    def grow(self, length: int) -> None:
        """The range becomes so much longer, by free bytes at its end."""
        self._size += length
        self.give_back(self._size - length, length)
