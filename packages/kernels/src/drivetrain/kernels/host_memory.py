"""Host memory for files: aligned, of large pages, and reused.

Problem: a drive reads and writes memory directly only at pages, and each transfer costs the kernel one look-up per page
of memory; buffers that come and go cost page faults besides.
Idea: `aligned_empty` asks for large pages (512 times fewer look-ups), which made reads of small blocks up to half as
fast again where this was measured. `BufferPool` is one such piece of memory, cut into equal buffers that are handed
out and given back; an `AsyncFile` that is opened with it has the kernel hold its pages, and look nothing up at all.
Buffers of torch that come and go within a step cost more in page faults than in what is done with them (100 MB: 62 of
73 ms, measured): `prefer_large_pages` asks for large pages for those as well.
Invariant: a buffer belongs to the pool or to the one who took it, never to two.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from typing import Final

import torch
from torch import Tensor

__all__ = ["BufferPool", "aligned_empty", "prefer_large_pages"]

PAGE: Final = 4096
_LARGE_PAGE: Final = 2 << 20
_WORTH_ASKING: Final = 4 * _LARGE_PAGE
_MADVISE = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
_MADV_HUGEPAGE: Final = 14


def prefer_large_pages(tensor: Tensor) -> Tensor:
    """``tensor``, whose memory was just allocated and not written to yet: let it come in large pages.

    Only a wish, and only about whole large pages inside of the tensor's memory: it takes no more memory and changes no
    value. Does nothing for small tensors, on GPUs, and where the system has no such pages.
    """
    if _MADVISE is not None and tensor.is_cpu and tensor.nbytes >= _WORTH_ASKING:
        start = -(-tensor.data_ptr() // PAGE) * PAGE
        length = (tensor.data_ptr() + tensor.nbytes - start) // PAGE * PAGE
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return tensor


def aligned_empty(*shape: int, dtype: torch.dtype = torch.float32, pin: bool = False) -> Tensor:
    """A tensor in host memory, not initialised, that begins at a page, so that requests need no copy.

    From 2 MiB on it consists of large pages where the system gives them. `pin=True` also locks it for transfers to an
    accelerator, which must be there.
    """
    size = math.prod(shape) * dtype.itemsize
    if pin or size < _LARGE_PAGE or sys.platform != "linux":
        room = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=pin)
        start = -room.data_ptr() % PAGE
        return room[start : start + size].view(dtype).view(shape)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


class BufferPool:
    """`count` buffers of `size` bytes each in host memory, for reads and writes that reuse them.

    `acquire` hands one out and `release` takes it back. Open the file with the pool,
    `AsyncFile(path, mode, buffers=pool)`, and transfers from and to any part of its buffers are the cheapest that there
    are. A pool may serve several files. `pin=True` also locks the memory for transfers to an accelerator.
    """

    def __init__(self, count: int, size: int, *, pin: bool = False) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"BufferPool: expected at least one buffer of at least one byte; found {count} of {size}")
        self._size = size
        self._memory = aligned_empty(count, -(-size // PAGE) * PAGE, dtype=torch.uint8, pin=pin)
        self._free = list(self._memory.unbind())
        self._taken: dict[int, Tensor] = {}

    @property
    def count(self) -> int:
        """How many buffers there are."""
        return len(self._memory)

    @property
    def size(self) -> int:
        """Bytes of one buffer."""
        return self._size

    @property
    def free(self) -> int:
        """How many buffers are to be had."""
        return len(self._free)

    @property
    def memory(self) -> Tensor:
        """All of it, uint8[count, size rounded up to whole pages]."""
        return self._memory

    def acquire(self) -> Tensor:
        """A free buffer, uint8[size], with what was last in it. View it as what you need: `buffer.view(dtype)`.

        RuntimeError when all are taken, which waiting here would not change: whoever took one must give it back.
        """
        if not self._free:
            raise RuntimeError(f"all {self.count} buffers of the pool are taken; release one, or make the pool larger")
        row = self._free.pop()
        self._taken[row.data_ptr()] = row
        return row[: self._size]

    def release(self, buffer: Tensor) -> None:
        """Give back a buffer, or any view that begins where it does. Requests on it must have ended."""
        row = self._taken.pop(buffer.data_ptr(), None)
        if row is None:
            raise ValueError(
                "release: the tensor doesn't begin where a buffer does that this pool handed out and hasn't got back"
            )
        self._free.append(row)
