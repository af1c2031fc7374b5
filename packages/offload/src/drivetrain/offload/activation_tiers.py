"""Where bytes of activations go: through a link into host memory, and from there into files.

Problem: copies must run beside the computation, and memory that is still being copied must not be used again.
Idea: a link copies on streams of its own and gives back a `Transfer` for what others must wait for. Files give room
wherever a piece fits and take it back when a record is gone.
Invariants: a device's memory is let go only after the stream that computes waits for the copy out of it; a file has no
name once it is open, so that nothing of it is left however the process ends.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drivetrain.kernels import AsyncFile, Ticket

from .extents import Extents
from .records import whole_pages

__all__ = ["CopyLink", "CudaLink", "Link", "Origin", "Piece", "SameMemory", "SpillFiles", "Transfer"]


class Transfer(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether it has ended."""

    def order(self) -> None:
        """Have the streams that use the device's side of the copy go on only after it; the host doesn't wait."""

    def wait(self) -> None:
        """Have the host wait for its end."""


@dataclass(frozen=True)
class Origin:
    """The stream that computed something, and the point in it by which that was done."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event


class Link(Protocol):
    """The way between one device and host memory."""

    #: The device's memory is host memory: nothing is copied.
    same: bool

    def origin(self) -> Origin | None:
        """What a copy of what is there now must wait for."""

    def to_host(self, flat: Tensor, buffer: Tensor, origin: Origin | None) -> Transfer | None:
        """Copy from the device. None: the copy has ended."""

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Transfer | None]:
        """Copy uint8[n] to new memory of the device."""

    def lend(self, flat: Tensor) -> None:
        """What `to_device` made is about to be used by whoever computes now."""


class SameMemory:
    """Host memory as the device: activations are where they would go."""

    same = True

    def origin(self) -> Origin | None:
        return None

    def to_host(self, flat: Tensor, buffer: Tensor, origin: Origin | None) -> Transfer | None:
        raise AssertionError("nothing is copied from host memory to host memory")

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Transfer | None]:
        return buffer, None

    def lend(self, flat: Tensor) -> None:
        pass


class CopyLink:
    """Copies that are done when they return: host memory in the part of a device."""

    same = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def origin(self) -> Origin | None:
        return None

    def to_host(self, flat: Tensor, buffer: Tensor, origin: Origin | None) -> Transfer | None:
        buffer.copy_(flat)
        return None

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Transfer | None]:
        return buffer.to(self._device, copy=True), None

    def lend(self, flat: Tensor) -> None:
        pass


class _CudaTransfer:
    """The end of a copy on a side stream. `user`: the stream in whose order the device's memory is used again."""

    def __init__(self, side: torch.cuda.Stream, user: torch.cuda.Stream) -> None:
        self._event = side.record_event()
        self._user = user

    def done(self) -> bool:
        return bool(self._event.query())

    def order(self) -> None:
        self._user.wait_event(self._event)
        current = torch.cuda.current_stream(self._user.device)
        if current != self._user:
            current.wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


class CudaLink:
    """Copies of a GPU's memory on two streams, one in each direction."""

    same = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._back = torch.cuda.Stream(device)

    def origin(self) -> Origin | None:
        stream = torch.cuda.current_stream(self._device)
        return Origin(stream, stream.record_event())

    def to_host(self, flat: Tensor, buffer: Tensor, origin: Origin | None) -> Transfer | None:
        assert origin is not None
        self._out.wait_event(origin.event)
        with torch.cuda.stream(self._out):
            buffer.copy_(flat, non_blocking=True)
        return _CudaTransfer(self._out, origin.stream)

    def to_device(self, buffer: Tensor) -> tuple[Tensor, Transfer | None]:
        # The memory is the computing stream's, which may have used it for something else until now.
        user = torch.cuda.current_stream(self._device)
        flat = torch.empty_like(buffer, device=self._device)
        self._back.wait_stream(user)
        with torch.cuda.stream(self._back):
            flat.copy_(buffer, non_blocking=True)
        # Whoever drops it before the copy was waited for must not have it handed out meanwhile.
        flat.record_stream(self._back)
        return flat, _CudaTransfer(self._back, user)

    def lend(self, flat: Tensor) -> None:
        flat.record_stream(torch.cuda.current_stream(self._device))


@dataclass(frozen=True)
class Piece:
    """Bytes of one of the files."""

    file: int
    start: int
    size: int


class _SpillFile:
    def __init__(self, folder: Path) -> None:
        descriptor, name = tempfile.mkstemp(prefix="activations-", suffix=".tmp", dir=folder)
        try:
            os.close(descriptor)
            self.file = AsyncFile(name, "w")
        finally:
            os.unlink(name)
        self.extents = Extents()


class SpillFiles:
    """One file in each of several folders; pieces go to them in turn. Needs a POSIX system."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._files = [_SpillFile(folder) for folder in folders]
        self._next = 0
        self._finalizer = weakref.finalize(self, _close, [each.file for each in self._files])

    @property
    def taken(self) -> int:
        """Bytes of the pieces that are not given back."""
        return sum(each.extents.size - each.extents.free for each in self._files)

    def take(self, size: int) -> Piece:
        """Room for so many bytes. A file grows when there is none within it."""
        index = self._next
        self._next = (index + 1) % len(self._files)
        extents = self._files[index].extents
        room = whole_pages(size)
        start = extents.take(room)
        if start is None:
            extents.grow(room - extents.free_at_end)
            start = extents.take(room)
            assert start is not None
        return Piece(index, start, size)

    def give_back(self, piece: Piece) -> None:
        """Its bytes may be written over. Requests on them must have ended."""
        self._files[piece.file].extents.give_back(piece.start, whole_pages(piece.size))

    def write(self, piece: Piece, memory: Tensor) -> Ticket:
        """Start writing uint8[size]."""
        return self._files[piece.file].file.write(memory, piece.start)

    def read(self, piece: Piece, memory: Tensor) -> Ticket:
        """Start reading uint8[size]."""
        return self._files[piece.file].file.read(memory, piece.start)

    def close(self) -> None:
        """Wait for what is under way and give the drives their space back. Failures went to who waited for them."""
        self._finalizer()


def _close(files: list[AsyncFile]) -> None:
    for file in files:
        # As after an error: nobody is left to whom a failure of a record's request would matter.
        file.__exit__(OSError, None, None)
