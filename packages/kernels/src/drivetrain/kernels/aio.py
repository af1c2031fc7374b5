"""Asynchronous reads and writes between files and tensors.

Problem: states that live on NVMe must come and go at the drive's speed while the processor computes; that takes many
large requests under way at once, past the page cache, and tensors that are not aligned as such requests must be.
Idea: `AsyncFile` hands a request to the native file queue (io_uring with O_DIRECT; threads where a container forbids
io_uring; the page cache where the file system refuses O_DIRECT) and gives back a `Ticket`. Heads, tails and unaligned
memory are taken care of; memory of `aligned_empty` is read and written without a copy between, and that of a
`BufferPool` without the kernel looking up its pages.
Invariants: a tensor is kept alive until its request has ended, whatever its owner drops; every failure is raised at
`wait`, with path and offset, and again by the file's `wait` or `close` if nobody waited for the ticket; nothing is
started at import.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .core import CORE
from .host_memory import PAGE, BufferPool

__all__ = ["AsyncFile", "AsyncFileOptions", "Ticket"]

_SHORT: Final = -1  # FileRequest::kShortFile
_LARGEST_BLOCK: Final = 1 << 30
_MODES: Final = ("r", "w", "r+")  # in the order of OpenMode


@dataclass(frozen=True, kw_only=True)
class AsyncFileOptions:
    """How a file is read and written.

    `block_size`: bytes of one request to the drive, a multiple of 4096. `queue_depth`: requests under way at once.
    `parallelism`: threads that make them; None: one with io_uring, eight without. `engine`: "io_uring" insists on it,
    "auto" falls back on threads. `direct=False` goes through the page cache.
    """

    block_size: int = 1 << 20
    queue_depth: int = 32
    parallelism: int | None = None
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    direct: bool = True

    def __post_init__(self) -> None:
        if not PAGE <= self.block_size <= _LARGEST_BLOCK or self.block_size % PAGE:
            raise ValueError(
                f"block_size: expected a multiple of {PAGE} up to {_LARGEST_BLOCK}; found {self.block_size}"
            )
        if not 1 <= self.queue_depth <= 4096:
            raise ValueError(f"queue_depth: expected 1 to 4096; found {self.queue_depth}")
        if self.parallelism is not None and not 1 <= self.parallelism <= self.queue_depth:
            raise ValueError(
                f"parallelism: expected None or 1 to queue_depth ({self.queue_depth}); found {self.parallelism}"
            )
        if self.engine not in ("auto", "io_uring", "threads"):
            raise ValueError(f"engine: expected 'auto', 'io_uring' or 'threads'; found {self.engine!r}")


class Ticket:
    """One request under way."""

    def __init__(self, request: Any, tensor: Tensor, what: str, path: str, owner: int) -> None:
        self._request = request
        self._tensor: Tensor | None = tensor
        self._what = what
        self._path = path
        self._owner = owner
        self._reported = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._request.done())

    def settled(self) -> bool:
        """Whether it has ended and its failure, if there was one, has been raised."""
        return self.done() and (self._reported or self._request.wait() == 0)

    def wait(self) -> None:
        """Return once the transfer is complete; the tensor may then be used.

        Raises OSError, with its errno, the path and the offset, if it failed, and EOFError where the file ends before
        the tensor is full. Calling it again gives the same.
        """
        if os.getpid() != self._owner and not self.done():
            raise RuntimeError(f"{self._what}: the request belongs to the process that forked this one; wait there")
        error = self._request.wait()
        self._tensor = None
        if error == 0:
            return
        self._reported = True
        place = self._request.failed_at()
        if error == _SHORT:
            raise EOFError(f"{self._what}: the file ends at offset {place}; was it written whole?")
        raise OSError(error, f"{self._what} failed at offset {place}: {os.strerror(error)}", self._path)


def _finish(native: Any, tickets: list[Ticket], owner: int, held: Tensor | None) -> None:
    """Runs when the file is dropped and at exit.

    `tickets` keep their tensors alive until nothing is under way, and `held` the pool's memory: the kernel goes by its
    addresses, behind which nothing else may come to lie.
    """
    native.close()
    if os.getpid() == owner:
        tickets.clear()


class AsyncFile:
    """One file, open for asynchronous reads and writes of contiguous tensors in host memory.

    `mode`: "r" reads; "w" makes the file or empties it, and may read too; "r+" reads and writes one that is there.
    Requests that overlap have no order: wait for the first before making the second. Offsets are bytes. Not usable in
    a forked child, which opens its own.

    `buffers`: a pool whose memory the kernel is to hold while the file is open. Where it refuses (without io_uring, or
    beyond the limit of locked memory, `ulimit -l`), `holds_buffers` is False and the buffers work as any memory does.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["r", "w", "r+"] = "r",
        *,
        options: AsyncFileOptions | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        chosen = AsyncFileOptions() if options is None else options
        if mode not in _MODES:
            raise ValueError(f"mode: expected 'r', 'w' or 'r+'; found {mode!r}")
        if CORE.module is None:
            raise RuntimeError(f"AsyncFile needs the native core: {CORE.reason}")
        self._path = str(Path(path))
        self._mode = mode
        self._owner = os.getpid()
        self._tickets: list[Ticket] = []
        held = None if buffers is None else buffers.memory
        self._native: Any = CORE.module.OpenFile(
            path=self._path,
            mode=_MODES.index(mode),
            block_bytes=chosen.block_size,
            queue_depth=chosen.queue_depth,
            workers=chosen.parallelism or 0,
            direct=chosen.direct,
            ring=chosen.engine != "threads",
            memory=[] if held is None else [(held.data_ptr(), held.nbytes)],
        )
        self._finalizer = weakref.finalize(self, _finish, self._native, self._tickets, self._owner, held)
        self._engine = "io_uring" if self._native.uses_ring() else "threads"
        self._direct = bool(self._native.uses_direct())
        self._holds_buffers = bool(self._native.holds_memory())
        if chosen.engine == "io_uring" and self._engine != "io_uring":
            reason = self._native.ring_refusal()
            self._finalizer()
            raise RuntimeError(f"{self._path}: io_uring is not usable here ({reason}); use engine='auto' or 'threads'")

    @property
    def engine(self) -> str:
        """ "io_uring" or "threads", as the probe decided."""
        return self._engine

    @property
    def direct(self) -> bool:
        """Whether the file system took O_DIRECT."""
        return self._direct

    @property
    def holds_buffers(self) -> bool:
        """Whether the kernel holds the memory of `buffers`."""
        return self._holds_buffers

    def read(self, tensor: Tensor, offset: int = 0) -> Ticket:
        """Start filling `tensor` from the file's bytes at `offset`."""
        return self._submit("read", tensor, offset)

    def write(self, tensor: Tensor, offset: int = 0) -> Ticket:
        """Start writing `tensor`'s bytes at `offset`. It must not change before the ticket is done."""
        if self._mode == "r":
            raise ValueError(f"write to {self._path!r}, which is open for reading only; open it with 'r+' or 'w'")
        return self._submit("write", tensor, offset)

    def _check_open(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{self._path!r} was opened by process {self._owner}, from which this one was forked; "
                "open it again here"
            )
        if not self._finalizer.alive:
            raise ValueError(f"{self._path!r} is closed")

    def _submit(self, op: Literal["read", "write"], tensor: Tensor, offset: int) -> Ticket:
        self._check_open()
        if not tensor.is_cpu:
            raise ValueError(f"{op}: the tensor lies on {tensor.device}; files exchange data with host memory only")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: the tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()} and isn't contiguous"
            )
        if offset < 0:
            raise ValueError(f"{op}: offset must not be negative; found {offset}")
        size = tensor.numel() * tensor.element_size()
        if op == "read":
            # The core writes behind autograd's back: tell it.
            torch.autograd.graph.increment_version(tensor)
        request = self._native.submit(writes=op == "write", data=tensor.data_ptr(), bytes=size, offset=offset)
        what = f"{op} of {size} bytes at offset {offset} of {self._path!r}"
        ticket = Ticket(request, tensor, what, self._path, self._owner)
        self._tickets.append(ticket)
        if len(self._tickets) % 256 == 0:
            self._tickets[:] = [each for each in self._tickets if not each.settled()]
        return ticket

    def wait(self) -> None:
        """Wait for every request made so far, then raise the first failure that no ticket's `wait` has raised."""
        self._check_open()
        failure: Exception | None = None
        for ticket in self._tickets:
            if ticket.settled():
                continue
            try:
                ticket.wait()
            except (OSError, EOFError) as error:
                failure = failure or error
        self._tickets.clear()
        if failure is not None:
            raise failure

    def sync(self) -> None:
        """Wait for every request, then for the drive to have the data for good (fsync)."""
        self.wait()
        error = self._native.sync()
        if error:
            raise OSError(error, os.strerror(error), self._path)

    def close(self) -> None:
        """Wait for every request and close the file; raises the first failure. Safe to call twice."""
        if not self._finalizer.alive or os.getpid() != self._owner:
            return
        try:
            self.wait()
        finally:
            self._finalizer()

    def __enter__(self) -> AsyncFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the error that is on its way says more than one of a request
            self._finalizer()
