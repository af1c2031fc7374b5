"""How fast a folder's file system takes and gives tensors, and with which settings.

Problem: what is offloaded to a drive comes and goes once per step, and the block size, depth and number of threads that
get the most out of a drive differ by drive; measuring is the only way to know, and easily measures memory instead.
Idea: a `TrialFile` of real bytes is overwritten and read through a few buffers that are used again, as offload does it,
past the page cache where the file system allows. `search` halves a set of settings by what was measured until one is
left or the time is up: every setting gets one look, good ones several, and noise seldom decides.
Invariants: nothing is written where there isn't room for it; the file is gone when its `with` block ends.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

import torch

from drivetrain.kernels import AsyncFile, AsyncFileOptions, BufferPool, Ticket

__all__ = ["FileSetting", "FileSpeed", "TrialFile", "best_of", "grid", "search"]

_LEAST_BUFFER: Final = 8 << 20
_MOST_IN_FLIGHT: Final = 256 << 20
_ROOM_TO_LEAVE: Final = 64 << 20
_RAM_DISKS: Final = ("tmpfs", "ramfs", "devtmpfs")
_AS_GOOD: Final = 0.97


@dataclass(frozen=True, kw_only=True)
class FileSetting:
    """What the section `aio` says of reads and writes.

    `block_size`: bytes of one request. `parallelism`: threads. `queue_depth`: requests of each thread in flight.
    """

    block_size: int = 1 << 20
    queue_depth: int = 8
    parallelism: int = 1

    @property
    def in_flight(self) -> int:
        """Bytes under way at once."""
        return self.block_size * self.queue_depth * self.parallelism

    def options(self) -> AsyncFileOptions:
        """The same for `AsyncFile`, whose depth is that of all threads together."""
        return AsyncFileOptions(
            block_size=self.block_size,
            queue_depth=self.queue_depth * self.parallelism,
            parallelism=self.parallelism,
        )

    def section(self) -> dict[str, int | bool]:
        """The keys of the section `aio`."""
        return {
            "block_size": self.block_size,
            "queue_depth": self.queue_depth,
            "intra_op_parallelism": self.parallelism,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }


@dataclass(frozen=True, kw_only=True)
class FileSpeed:
    """Bytes per second that one setting wrote and read."""

    setting: FileSetting
    write: float
    read: float

    @property
    def both(self) -> float:
        """Bytes per second of reading and writing as much of each, which is what a step does with states."""
        return 2 / (1 / self.write + 1 / self.read)


def grid(cores: int) -> list[FileSetting]:
    """The settings that `search` starts from on a machine with so many cores, cheap ones first."""
    settings = [
        FileSetting(block_size=block, queue_depth=depth, parallelism=threads)
        for threads in (1, 2, 4)
        if threads <= max(1, cores)
        for block in (256 << 10, 1 << 20, 4 << 20)
        for depth in (4, 8, 16, 32, 64)
    ]
    return [setting for setting in settings if 2 << 20 <= setting.in_flight <= _MOST_IN_FLIGHT]


class TrialFile:
    """A file of `size` bytes that is made for measuring and removed after it: use it in a `with` statement.

    `settings`: those that it will be asked to measure, which say how many buffers it needs. OSError with a sentence
    where the folder has no room for the file and some more, or can't be written to.
    """

    def __init__(self, folder: Path, size: int, settings: Sequence[FileSetting]) -> None:
        if not folder.is_dir():
            raise NotADirectoryError(f"{folder} is not a folder; name one on the drive to measure")
        largest = max(setting.block_size for setting in settings)
        buffer = max(_LEAST_BUFFER, largest)
        if size < largest:
            raise ValueError(f"a file of {size} bytes is less than one block of {largest}; measure with a larger one")
        free = shutil.disk_usage(folder).free
        if free < size + _ROOM_TO_LEAVE:
            raise OSError(
                f"{folder} has room for {free / 1e9:.1f} GB; measuring takes {size / 1e9:.1f} GB and leaves "
                f"{_ROOM_TO_LEAVE / 1e9:.1f} GB alone. Measure with a smaller file, or make room"
            )
        self._size = size
        self._path = folder / f".drivetrain-io-{os.getpid()}"
        self._folder = folder.resolve()
        self._pool = BufferPool(_buffers(max(setting.in_flight for setting in settings), buffer), min(buffer, size))
        self._pool.memory.view(torch.int64).random_(
            generator=torch.Generator().manual_seed(0)
        )  # drives may compress what repeats
        self._at = 0
        self.engine = ""
        self.direct = False

    def __enter__(self) -> TrialFile:
        try:
            with AsyncFile(self._path, "w", buffers=self._pool) as file:
                self.engine, self.direct = file.engine, file.direct
                self._move(file, "write", 0, self._size, self._pool.count)
                file.sync()
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def measure(self, setting: FileSetting, amount: int | None = None) -> FileSpeed:
        """Overwrite and read `amount` bytes of the file (default: all), from where the last measurement stopped.

        The amount is rounded to whole buffers, so that all of it is aligned.
        """
        whole = self._size if amount is None else max(1, amount // self._pool.size) * self._pool.size
        amount = min(self._size, whole)
        start = self._at if self._at + amount <= self._size else 0
        self._at = start + amount
        with AsyncFile(self._path, "r+", options=setting.options(), buffers=self._pool) as file:
            count = min(self._pool.count, _buffers(setting.in_flight, self._pool.size))
            write = self._move(file, "write", start, amount, count)
            read = self._move(file, "read", start, amount, count)
        return FileSpeed(setting=setting, write=amount / write, read=amount / read)

    def remarks(self) -> list[str]:
        """What to know about the figures, in sentences."""
        kind, source = file_system(self._folder)
        remarks = []
        if kind in _RAM_DISKS:
            remarks.append(f"{self._folder} is on a RAM disk ({kind}): the figures are those of memory.")
        elif not self.direct:
            remarks.append(
                f"The file system ({kind or 'unknown'} on {source or 'unknown'}) refuses to be used past the page "
                "cache (O_DIRECT): writes were timed until they were on the drive, but reads may come from memory."
            )
        if self.engine != "io_uring":
            remarks.append("io_uring is not to be had here: threads made the requests, one at a time each.")
        return remarks

    def _move(self, file: AsyncFile, op: Literal["read", "write"], start: int, amount: int, buffers: int) -> float:
        """Seconds that it takes to move so many bytes through so many buffers."""
        if op == "read" and not file.direct:
            self._forget_cache()
        begin = time.perf_counter()
        under_way: deque[tuple[Ticket, torch.Tensor]] = deque()
        for offset in range(start, start + amount, self._pool.size):
            if len(under_way) == buffers:
                self._finish(*under_way.popleft())
            buffer = self._pool.acquire()
            part = buffer[: start + amount - offset]
            under_way.append((file.read(part, offset) if op == "read" else file.write(part, offset), buffer))
        for ticket, buffer in under_way:
            self._finish(ticket, buffer)
        if op == "write" and not file.direct:
            file.sync()
        return time.perf_counter() - begin

    def _finish(self, ticket: Ticket, buffer: torch.Tensor) -> None:
        ticket.wait()
        self._pool.release(buffer)

    def _forget_cache(self) -> None:
        """Have the system drop what it keeps of the file, which is all on the drive by now."""
        if not hasattr(os, "posix_fadvise"):
            return
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _buffers(in_flight: int, buffer: int) -> int:
    """How many buffers keep so many bytes under way while one is exchanged."""
    return -(-in_flight // buffer) + 1


def file_system(folder: Path) -> tuple[str, str]:
    """Type and source of the file system of a folder, ("ext4", "/dev/vda"); empty where it can't be told."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    found = ("", "", "")
    for line in lines:
        source, point, kind = line.split(" ")[:3]
        point = point.replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind, source)
    return found[1:]


def search(
    measure: Callable[[FileSetting], FileSpeed],
    settings: Sequence[FileSetting],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[FileSpeed]:
    """Measure settings for about so many seconds, the better ones again and again; the medians, fastest first.

    Successive halving: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization" (2016). Those that were measured more often come before the others.
    """
    end = clock() + seconds
    measured: dict[FileSetting, list[FileSpeed]] = {}
    alive = list(settings)
    while alive:
        for setting in alive:
            if measured and clock() >= end:
                return _ranking(measured)
            measured.setdefault(setting, []).append(measure(setting))
        ranked = [speed.setting for speed in _ranking(measured) if speed.setting in alive]
        alive = ranked[: len(alive) // 2]
    return _ranking(measured)


def _ranking(measured: dict[FileSetting, list[FileSpeed]]) -> list[FileSpeed]:
    medians = [
        FileSpeed(
            setting=setting,
            write=statistics.median(speed.write for speed in speeds),
            read=statistics.median(speed.read for speed in speeds),
        )
        for setting, speeds in measured.items()
    ]
    return sorted(medians, key=lambda speed: speed.both, reverse=True)


def best_of(ranking: Sequence[FileSpeed]) -> FileSpeed:
    """Of the settings that are within 3 % of the fastest, the one with the fewest threads and bytes in flight."""
    good = [speed for speed in ranking if speed.both >= _AS_GOOD * ranking[0].both]
    return min(good, key=lambda speed: (speed.setting.parallelism, speed.setting.in_flight))
