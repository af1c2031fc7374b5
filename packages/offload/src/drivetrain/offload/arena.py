"""Host memory for records: page aligned, reused, pinned where it serves a GPU.

Problem: states come and go by the gigabyte. Memory that is asked of the system each time costs a page fault per page,
and pinned memory a call to the driver that stops the device.
Idea: `HostArena` takes memory from the system in few large slabs and hands out parts of them, first fit. With a
capacity there is one slab, made at once; without, a slab is added where nothing fits, and empty ones go first.
Invariants: a byte belongs to one taker at most; what is handed out begins at a page and is a whole number of pages
long; with a capacity, the system is asked for memory once.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from drivetrain.kernels import aligned_empty

from .extents import Extents
from .records import PAGE, whole_pages

__all__ = ["ArenaFullError", "HostArena", "pinning"]

# A page less than a power of two: torch rounds pinned memory up to one, and the alignment takes a page.
_SLAB: Final = (16 << 20) - PAGE


class ArenaFullError(MemoryError):
    """A request did not fit in an arena: `wanted` and `free` bytes, and the `largest` free part."""

    def __init__(self, wanted: int, free: int, largest: int, capacity: int, what: str = "a request") -> None:
        super().__init__(
            f"{what} takes {wanted} bytes of host memory; {free} of {capacity} bytes are free, at most {largest} in "
            "one piece. Set a larger capacity, or keep less in it"
        )
        self.wanted = wanted
        self.free = free
        self.largest = largest


class _Slab:
    def __init__(self, size: int, *, pin: bool) -> None:
        # Memory made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.memory = aligned_empty(size, dtype=torch.uint8, pin=pin)
        self.extents = Extents(size)


def pinning(wanted: bool) -> bool:
    """Whether host memory is to be pinned: where it is wanted and there is a GPU that it could serve."""
    return wanted and torch.cuda.is_available()


class HostArena:
    """Host memory that is handed out in pieces and taken back.

    `capacity`: bytes, rounded up to whole pages and taken from the system at once; None takes more whenever a request
    doesn't fit. `pin`: lock it for transfers to a GPU; where there is no GPU this says nothing. torch rounds each
    allocation of pinned memory up to a power of two.
    """

    def __init__(self, capacity: int | None = None, *, pin: bool = False) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"HostArena: expected a capacity of at least one byte, or None; found {capacity}")
        self._pin = pinning(pin)
        self._bounded = capacity is not None
        self._slabs = [] if capacity is None else [_Slab(whole_pages(capacity), pin=self._pin)]
        self._taken: dict[int, tuple[_Slab, int]] = {}

    @property
    def pinned(self) -> bool:
        """Whether the memory is locked for transfers to a GPU."""
        return self._pin

    @property
    def size(self) -> int:
        """Bytes taken from the system."""
        return sum(slab.extents.size for slab in self._slabs)

    @property
    def free(self) -> int:
        """Bytes of these that nobody has."""
        return sum(slab.extents.free for slab in self._slabs)

    def take(self, size: int) -> Tensor:
        """uint8[size] that begins at a page, with what was last in it. Give it back when it is no longer in use.

        Raises `ArenaFullError` where it doesn't fit in the capacity.
        """
        if size < 0:
            raise ValueError(f"take: expected a number of bytes; found {size}")
        room = whole_pages(size)
        for slab in self._slabs:
            start = slab.extents.take(room)
            if start is not None:
                return self._hand_out(slab, start, size, room)
        if self._bounded:
            largest = max(slab.extents.largest for slab in self._slabs)
            raise ArenaFullError(room, self.free, largest, self.size)
        self._slabs[:] = [slab for slab in self._slabs if slab.extents.free < slab.extents.size]
        slab = _Slab(max(room, _SLAB), pin=self._pin)
        self._slabs.append(slab)
        slab.extents.take(room)
        return self._hand_out(slab, 0, size, room)

    def _hand_out(self, slab: _Slab, start: int, size: int, room: int) -> Tensor:
        self._taken[slab.memory.data_ptr() + start] = (slab, room)
        return slab.memory[start : start + size]

    def give_back(self, memory: Tensor) -> None:
        """Take back what `take` handed out, or any view that begins where it does."""
        place = memory.data_ptr() if memory.numel() else _address(memory)
        slab, room = self._taken.pop(place, (None, 0))
        if slab is None:
            raise ValueError(
                "give_back: the tensor doesn't begin where memory does that this arena handed out and hasn't got back"
            )
        slab.extents.give_back(place - slab.memory.data_ptr(), room)


def _address(empty: Tensor) -> int:
    """Where a tensor without elements begins, for which `data_ptr` says 0."""
    return empty.untyped_storage().data_ptr() + int(empty.storage_offset()) * empty.element_size()
