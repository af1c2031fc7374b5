"""Tensors and files, for those who save and load them: by name, by range, or through `torch.save`.

Problem: `AsyncFile` is one open file and host memory. Checkpoints have many files, tensors on GPUs, savers that write
small pieces one after another, and many ranks that write one file.
Idea: `TensorFiles` opens files as they are named and brings tensors of devices through host memory. `share_file` makes
a file of its full size, of which each rank then writes its own range. `TensorFileWriter` is a file for `torch.save`:
it fills one buffer while the others are written.
Invariants: nothing that is there is emptied, but by a `TensorFileWriter`; what that one makes under `atomic` appears
under its name only when it is whole and on the drive.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from drivetrain.kernels import AsyncFile, AsyncFileOptions, BufferPool, Ticket, aligned_empty

from .arena import pinning
from .striped import preallocate

__all__ = ["TensorFileWriter", "TensorFiles", "TensorTransfer", "share_file"]

_BUFFER: Final = 16 << 20
_PRUNE: Final = 256

PathLike = str | os.PathLike[str]


def share_file(path: PathLike, size: int) -> None:
    """Make `path` a file of `size` bytes that have their room on the drive. What it holds already stays.

    For a file that many ranks write, each its own range: every rank may call it, or one before the others begin.
    OSError with the bytes wanted and free where there is no room.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
    preallocate(Path(path), 0, size)
    os.truncate(path, size)


class TensorTransfer:
    """A read or write of one tensor that is under way. `wait` for it before you use or change the tensor."""

    def __init__(self, ticket: Ticket, source: Tensor | None = None, target: Tensor | None = None) -> None:
        self._ticket = ticket
        self._source = source
        self._target = target
        self.waited = False  # its failure, if there was one, has been raised

    def done(self) -> bool:
        """Whether the file's part has ended, well or not."""
        return self._ticket.done()

    def wait(self) -> None:
        """Return once it is complete. OSError or EOFError, with path and offset, if it failed; the same each time."""
        self.waited = True
        self._ticket.wait()
        if self._target is not None and self._source is not None:
            with torch.no_grad():
                self._target.copy_(self._source)
        self._source = self._target = None


class TensorFiles:
    """Reads and writes of contiguous tensors on any device, in files that are named.

    `options`: how files are read and written: block size, depth, threads. `pin_memory`: the memory through which
    tensors of a GPU go, and that of `empty`, is pinned. Files stay open until `close`. One thread uses it.
    """

    def __init__(self, options: AsyncFileOptions | None = None, *, pin_memory: bool = False) -> None:
        self._options = AsyncFileOptions() if options is None else options
        self._pin = pinning(pin_memory)
        self._files: dict[tuple[str, str], AsyncFile] = {}
        self._under_way: list[TensorTransfer] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in host memory, not initialised, that is read and written without a copy."""
        return aligned_empty(*shape, dtype=dtype, pin=self._pin)

    def read(self, tensor: Tensor, path: PathLike, offset: int = 0) -> None:
        """Fill `tensor` from the file's bytes at `offset`."""
        self.start_read(tensor, path, offset).wait()

    def write(self, tensor: Tensor, path: PathLike, offset: int = 0) -> None:
        """Write `tensor`'s bytes at `offset`. The file is made where it isn't there; other bytes of it stay."""
        self.start_write(tensor, path, offset).wait()

    def start_read(self, tensor: Tensor, path: PathLike, offset: int = 0) -> TensorTransfer:
        """The same without waiting."""
        file = self._open(path, "r")
        if tensor.is_cpu:
            return self._note(TensorTransfer(file.read(tensor, offset)))
        host = self.empty(*tensor.shape, dtype=tensor.dtype)
        return self._note(TensorTransfer(file.read(host, offset), host, tensor))

    def start_write(self, tensor: Tensor, path: PathLike, offset: int = 0) -> TensorTransfer:
        """The same without waiting, but for the copy of a device's tensor to host memory."""
        file = self._open(path, "r+")
        if tensor.is_cpu:
            return self._note(TensorTransfer(file.write(tensor, offset)))
        host = self.empty(*tensor.shape, dtype=tensor.dtype)
        with torch.no_grad():
            host.copy_(tensor)
        return self._note(TensorTransfer(file.write(host, offset)))

    def _open(self, path: PathLike, mode: Literal["r", "r+"]) -> AsyncFile:
        key = (os.fspath(path), mode)
        if key not in self._files:
            if mode == "r+":
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
            self._files[key] = AsyncFile(path, mode, options=self._options)
        return self._files[key]

    def _note(self, transfer: TensorTransfer) -> TensorTransfer:
        self._under_way.append(transfer)
        if len(self._under_way) % _PRUNE == 0:
            self._under_way = [each for each in self._under_way if not each.waited]
        return transfer

    def wait(self) -> int:
        """Wait for all transfers that nobody has waited for; how many those were. Raises the first failure."""
        transfers = [transfer for transfer in self._under_way if not transfer.waited]
        self._under_way = []
        _in_order([transfer.wait for transfer in transfers])
        return len(transfers)

    def sync(self) -> None:
        """`wait`, and then for the drives to have everything for good (fsync)."""
        self.wait()
        for (_, mode), file in self._files.items():
            if mode == "r+":
                file.sync()

    def close(self) -> None:
        """Wait for all transfers and close the files; raises the first failure. Safe to call twice."""
        files, self._files = self._files, {}
        _in_order([self.wait, *(file.close for file in files.values())])

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, EOFError) if kind is not None else contextlib.nullcontext():
            self.close()


class _Call(Protocol):
    def __call__(self) -> object: ...


def _in_order(calls: Sequence[_Call]) -> None:
    """Make all calls, then raise the first failure."""
    failure: OSError | EOFError | None = None
    for call in calls:
        try:
            call()
        except (OSError, EOFError) as error:
            failure = failure or error
    if failure is not None:
        raise failure


class TensorFileWriter:
    """A file that is written from its beginning to its end, as `torch.save` does: `torch.save(state, writer)`.

    `buffer_count` buffers of `buffer_bytes`: while one is filled, the others are written. `atomic`: the file gets its
    name only at `close`, when it is whole and on the drive; after an error, or without `close`, what had that name
    before is as it was. Use it in a `with` statement.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        options: AsyncFileOptions | None = None,
        buffer_bytes: int = _BUFFER,
        buffer_count: int = 2,
        atomic: bool = True,
    ) -> None:
        self._path = Path(path)
        self._place = self._path.with_name(f".{self._path.name}.{uuid.uuid4().hex[:8]}") if atomic else self._path
        self._pool = BufferPool(buffer_count, buffer_bytes)
        self._file = AsyncFile(self._place, "w", options=options, buffers=self._pool)
        self._under_way: list[tuple[Ticket, Tensor]] = []
        self._start = 0  # of the buffer, in the file
        self._filled = 0  # bytes of the buffer
        self._closed = False
        self._finalizer = weakref.finalize(self, _remove, self._place if atomic else None, os.getpid())
        self._take_buffer()

    def _take_buffer(self) -> None:
        if not self._pool.free:
            ticket, buffer = self._under_way.pop(0)
            ticket.wait()
            self._pool.release(buffer)
        self._buffer = self._pool.acquire()
        self._bytes = memoryview((ctypes.c_char * len(self._buffer)).from_address(self._buffer.data_ptr())).cast("B")

    @property
    def closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    def writable(self) -> bool:
        """True, as files say it."""
        return True

    def tell(self) -> int:
        """How many bytes were written."""
        return self._start + self._filled

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes; how many. Raises the failure of an earlier write."""
        if self._closed:
            raise ValueError(f"write: {self._path} is closed")
        source = memoryview(data)
        if source.nbytes == 0:
            return 0
        source = source.cast("B")
        at = 0
        while at < len(source):
            part = source[at : at + len(self._buffer) - self._filled]
            self._bytes[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            at += len(part)
            if self._filled == len(self._buffer):
                try:
                    self._send()
                    self._take_buffer()
                except BaseException:
                    self._give_up()
                    raise
        return at

    def _send(self) -> None:
        ticket = self._file.write(self._buffer[: self._filled], self._start)
        self._under_way.append((ticket, self._buffer))
        self._start += self._filled
        self._filled = 0

    def flush(self) -> None:
        """Nothing: buffers are written when they are full, and all of them by `close`."""

    def close(self) -> None:
        """Write the rest, wait until the drive has everything for good, and give the file its name."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._filled:
                self._send()
            self._file.sync()
            self._file.close()
            if self._place != self._path:
                os.replace(self._place, self._path)
                _sync_folder(self._path.parent)
            self._finalizer.detach()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._file.close()
        self._finalizer()

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()


def _remove(place: Path | None, owner: int) -> None:
    """Remove what has not become a file of its own name."""
    if place is not None and os.getpid() == owner:
        place.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Have the drive keep the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
