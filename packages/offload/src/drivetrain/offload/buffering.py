"""The records of an `NvmeStore`, and the memory through which they go."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto

import torch
from torch import Tensor

from drivetrain.kernels import BufferPool, Ticket

from .arena import HostArena, pinning
from .records import RecordLayout

__all__ = ["Buffers", "Expectation", "Phase", "Record"]


class Phase(Enum):
    """Where a record's content is. `nvme` has a picture of how one follows another."""

    STORED = auto()  # in the file only
    READING = auto()
    READY = auto()  # in memory as in the file
    USED = auto()
    WRITING = auto()
    LOST = auto()  # its write failed


class Record:
    """One record: where it lies, what is under way for it, and what became of it."""

    def __init__(self, key: str, layout: RecordLayout, memory: Tensor, start: int | None) -> None:
        self.key = key
        self.layout = layout
        self.memory: Tensor | None = memory
        self.start = start  # in the file; None: resident in host memory
        self.phase = Phase.USED
        self.filled = False
        self.tickets: list[Ticket] = []
        self.failure: OSError | None = None
        self.refusal: OSError | None = None  # why no transfer was started

    def finish(self) -> OSError | EOFError | None:
        """Wait for its transfers; the first failure."""
        failure: OSError | EOFError | None = self.refusal
        self.refusal = None
        for ticket in self.tickets:
            try:
                ticket.wait()
            except (OSError, EOFError) as error:
                failure = failure or error
        self.tickets.clear()
        return failure

    def lost(self) -> OSError:
        """The failure that cost its content; a new exception each time, as each is raised elsewhere."""
        cause = self.failure
        assert cause is not None
        return OSError(
            cause.errno,
            f"record {self.key!r} is lost, because it could not be written: {cause.strerror}. Make it again, or "
            "go back to a checkpoint",
            cause.filename,
        )


class Buffers:
    """`count` pieces of host memory: of `size` bytes each, or else as large as what is to be in them.

    Those of a fixed size come from a pool, whose pages the kernel holds where it agrees.
    """

    def __init__(self, count: int, size: int | None, *, pin: bool) -> None:
        self._count = count
        self._taken = 0
        self._arena = HostArena(pin=pin)
        with torch.inference_mode(False):
            self.pool = None if size is None else BufferPool(count, size, pin=pinning(pin))

    @property
    def count(self) -> int:
        return self._count

    @property
    def free(self) -> bool:
        """Whether one is to be had."""
        return self._taken < self._count

    @property
    def bytes(self) -> int:
        return self._arena.size + (0 if self.pool is None else self.pool.memory.nbytes)

    def take(self, room: int) -> Tensor:
        memory = self.pool.acquire() if self.pool is not None else self._arena.take(room)
        self._taken += 1
        return memory[:room]

    def give_back(self, memory: Tensor) -> None:
        (self._arena.give_back if self.pool is None else self.pool.release)(memory)
        self._taken -= 1


class Expectation:
    """The keys that are fetched next, in order; a key may come several times. Every operation takes constant time."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys: list[str | None] = list(keys)  # None: was met
        self._places: dict[str, deque[int]] = {}
        for place, key in enumerate(self._keys):
            if key is not None:
                self._places.setdefault(key, deque()).append(place)
        self._head = 0

    def __iter__(self) -> Iterator[str]:
        for place in range(self._head, len(self._keys)):
            key = self._keys[place]
            if key is not None:
                yield key

    def meet(self, key: str) -> None:
        """It is fetched now: it is expected once less."""
        places = self._places.get(key)
        if not places:
            return
        self._keys[places.popleft()] = None
        while self._head < len(self._keys) and self._keys[self._head] is None:
            self._head += 1

    def distance(self, key: str) -> float:
        """After how many others at most it is expected; infinity where it is not."""
        places = self._places.get(key)
        return places[0] - self._head if places else math.inf
