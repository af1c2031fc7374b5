"""One range of bytes over the files of several drives.

Problem: one drive is slower than what computes with its data, and there are several.
Idea: the range is cut into chunks that go to the files in turn, so that a large transfer keeps all drives busy.
Invariants: space is given by the file system before anything is written into it, to all files or to none; what lies at
one offset stays there. With one file, chunks don't exist.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from drivetrain.kernels import AsyncFile, AsyncFileOptions, BufferPool, Ticket

__all__ = ["StripedFile", "preallocate"]

# What a file system says that gives no space in advance.
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def preallocate(path: Path, start: int, end: int) -> None:
    """Have the file system give the file space for the bytes from `start` to `end`, which it keeps at zero.

    The file must be there, and is made longer where it ends before `end`. OSError with what was wanted and what is
    free where there is no room; the file is then as long as before.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        before = os.fstat(descriptor).st_size
        try:
            if hasattr(os, "posix_fallocate") and end > start:
                os.posix_fallocate(descriptor, start, end - start)
            elif end > before:
                os.ftruncate(descriptor, end)
        except OSError as error:
            if error.errno in _CANNOT and end > before:
                os.ftruncate(descriptor, end)
                return
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            room = os.fstatvfs(descriptor)
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno or 0)}: {end - start} more bytes wanted for a file of {before}; "
                f"its file system has {room.f_bavail * room.f_frsize} free",
                str(path),
            ) from None
    finally:
        os.close(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class StripedFile:
    """Files that are made, or emptied, to hold one range of bytes in chunks of `chunk` bytes, a multiple of 4096."""

    def __init__(
        self, paths: Sequence[Path], *, chunk: int, options: AsyncFileOptions, buffers: BufferPool | None
    ) -> None:
        self._paths = list(paths)
        self._chunk = chunk
        self._size = 0
        self._files: list[AsyncFile] = []
        self._identities: list[tuple[int, int]] = []
        try:
            for path in paths:
                self._files.append(AsyncFile(path, "w", options=options, buffers=buffers))
                self._identities.append(_identity(os.stat(path)))
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Bytes of the range."""
        return self._size

    @property
    def engine(self) -> str:
        """ "io_uring" or "threads"."""
        return self._files[0].engine

    @property
    def direct(self) -> bool:
        """Whether all file systems are used past the page cache."""
        return all(file.direct for file in self._files)

    def grow(self, size: int) -> None:
        """Make the range longer, to `size`. OSError, and nothing has changed, where a file system has no room."""
        grown: list[tuple[Path, int]] = []
        try:
            for index, path in enumerate(self._paths):
                old, new = self._share(index, self._size), self._share(index, size)
                if new > old:
                    preallocate(path, old, new)
                    grown.append((path, old))
        except OSError:
            for path, old in grown:
                os.truncate(path, old)
            raise
        self._size = size

    def _share(self, index: int, size: int) -> int:
        """Bytes of the file of this index when the range has `size`."""
        count = len(self._files)
        if count == 1:
            return size
        chunks = -(-size // self._chunk)
        return (chunks + count - 1 - index) // count * self._chunk

    def check(self) -> None:
        """OSError where another program has cut off, replaced or removed a file.

        A write would make a file that was cut off as long again, and what it had read as zeros: so ask before each.
        """
        for index, (path, identity) in enumerate(zip(self._paths, self._identities, strict=True)):
            found, wanted = os.stat(path), self._share(index, self._size)
            if _identity(found) != identity:
                raise OSError(errno.EIO, "another file was put in its place", str(path))
            if found.st_size < wanted:
                raise OSError(errno.EIO, f"it was cut off: it had {wanted} bytes and has {found.st_size}", str(path))

    def read(self, memory: Tensor, offset: int) -> list[Ticket]:
        """Start filling `memory`, uint8[n], from the range's bytes at `offset`."""
        return [file.read(part, at) for file, part, at in self._pieces(memory, offset)]

    def write(self, memory: Tensor, offset: int) -> list[Ticket]:
        """Start writing `memory`, uint8[n], to the range's bytes at `offset`."""
        return [file.write(part, at) for file, part, at in self._pieces(memory, offset)]

    def _pieces(self, memory: Tensor, offset: int) -> Iterator[tuple[AsyncFile, Tensor, int]]:
        count = len(self._files)
        if count == 1:
            yield self._files[0], memory, offset
            return
        at = 0
        while at < len(memory):
            chunk, within = divmod(offset + at, self._chunk)
            length = min(self._chunk - within, len(memory) - at)
            yield self._files[chunk % count], memory[at : at + length], chunk // count * self._chunk + within
            at += length

    def close(self) -> None:
        """Close all files; raises the first failure that nobody has been told of."""
        failure: Exception | None = None
        for file in self._files:
            try:
                file.close()
            except (OSError, EOFError) as error:
                failure = failure or error
        if failure is not None:
            raise failure
