"""Files that survive a crash and that notice damage.

Problem: a checkpoint is read by other ranks, in other cuts, long after it was written. A reader needs a small part
of a big file and still must not take a flipped bit or a half-written file for weights.
Idea: a file is a row of blocks, each with its CRC-32, computed while the block is written and kept outside of the
file (in the manifest). A reader reads whole blocks, checks them, and hands out the part that was asked for, so that
every byte that is used was checked and no second pass over the file is needed.
Invariants: a record's `checksums` has one entry per block, and the last block may be short; a written file is on
stable storage (fsync) before its record exists.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from .errors import CheckpointError

__all__ = [
    "BlockReader",
    "BlockWriter",
    "FileRecord",
    "block_size",
    "file_fault",
    "replace_file",
    "sync_directory",
    "write_file",
]

Bytes = bytes | bytearray | memoryview

_SMALLEST_BLOCK = 1 << 18
_MOST_BLOCKS = 1 << 10


def block_size(size: int) -> int:
    """Bytes per block of a file of `size` bytes: a power of two from 256 KiB up, so that a file has at most 1024
    blocks.

    The bound keeps the manifest small (8 KiB per file) at any file size.
    """
    block = _SMALLEST_BLOCK
    while block * _MOST_BLOCKS < size:
        block *= 2
    return block


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """What the manifest knows about a file: its name in the checkpoint, its bytes, and the CRC-32 of each block."""

    name: str
    size: int
    block: int
    checksums: tuple[int, ...]


def sync_directory(path: Path) -> None:
    """Makes renames and new names inside of `path` durable."""
    if os.name == "nt":  # directories can't be opened there, and the file system logs renames by itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlockWriter:
    """Writes a file of known size in one pass, and computes its record.

    Use as a context manager; call `finish()` inside of it, which checks the size and flushes to stable storage.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._block = block_size(size)
        self._written = 0
        self._open_block = 0  # CRC of the block that is being filled
        self._checksums: list[int] = []
        self._stream: BinaryIO = path.open("wb")

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def write(self, data: Bytes) -> None:
        rest = memoryview(data)
        while len(rest) > 0:
            piece = rest[: self._block - self._written % self._block]
            self._stream.write(piece)
            self._open_block = zlib.crc32(piece, self._open_block)
            self._written += len(piece)
            if self._written % self._block == 0:
                self._checksums.append(self._open_block)
                self._open_block = 0
            rest = rest[len(piece) :]

    def finish(self) -> FileRecord:
        if self._written != self._size:
            raise CheckpointError(f"{self._path}: {self._written} bytes were written, {self._size} were planned")
        if self._written % self._block != 0:
            self._checksums.append(self._open_block)
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return FileRecord(name=self._path.name, size=self._size, block=self._block, checksums=tuple(self._checksums))


def write_file(path: Path, data: Bytes) -> FileRecord:
    """Writes a whole new file durably."""
    with BlockWriter(path, len(data)) as out:
        out.write(data)
        return out.finish()


def replace_file(path: Path, data: bytes, *, suffix: str) -> None:
    """Writes `path` so that at any moment it holds either the old or the new content, whole."""
    temporary = path.with_name(f".{path.name}.{suffix}")
    write_file(temporary, data)
    os.replace(temporary, path)
    sync_directory(path.parent)


def file_fault(folder: Path, record: FileRecord) -> str | None:
    """Why the file can't be the one that was written, as far as its size tells; None if it may be."""
    path = folder / record.name
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"checkpoint {folder}: file {record.name} is missing"
    if found < record.size:
        return f"checkpoint {folder}: file {record.name} is truncated (found {found} bytes, expected {record.size})"
    if found > record.size:
        return f"checkpoint {folder}: file {record.name} is too long (found {found} bytes, expected {record.size})"
    return None


class BlockReader:
    """Random access to a recorded file; every byte handed out comes from a block whose checksum was right.

    Holds one block, so requests in ascending order read each block once. Raises CheckpointError naming the file and
    the damaged bytes.
    """

    def __init__(self, folder: Path, record: FileRecord) -> None:
        fault = file_fault(folder, record)
        if fault is not None:
            raise CheckpointError(fault)
        self._where = f"checkpoint {folder}: file {record.name}"
        self._record = record
        self._index = -1
        self._content = memoryview(bytearray(min(record.block, record.size)))
        self._stream = io.FileIO(folder / record.name)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def read_into(self, position: int, target: memoryview) -> None:
        """Fills `target` (bytes) with the file's content from byte `position` on."""
        filled = 0
        while filled < len(target):
            at = position + filled
            content = self._load(at // self._record.block)
            inside = at % self._record.block
            piece = content[inside : inside + len(target) - filled]
            if len(piece) == 0:
                raise CheckpointError(
                    f"{self._where} has {self._record.size} bytes, asked for [{position}, {position + len(target)})"
                )
            target[filled : filled + len(piece)] = piece
            filled += len(piece)

    def read_all(self) -> bytes:
        whole = bytearray(self._record.size)
        self.read_into(0, memoryview(whole))
        return bytes(whole)

    def faults(self) -> Iterator[str]:
        """Reads the whole file and tells every damaged block."""
        for index in range(len(self._record.checksums)):
            try:
                self._load(index)
            except CheckpointError as error:
                yield str(error)

    def _load(self, index: int) -> memoryview:
        start = index * self._record.block
        content = self._content[: max(min(self._record.block, self._record.size - start), 0)]
        if index == self._index or len(content) == 0:
            return content
        self._index = -1
        self._stream.seek(start)
        got = 0
        while got < len(content):
            read = self._stream.readinto(content[got:])
            if not read:
                raise CheckpointError(
                    f"{self._where} is truncated (found {start + got} bytes, expected {self._record.size})"
                )
            got += read
        found, expected = zlib.crc32(content), self._record.checksums[index]
        if found != expected:
            raise CheckpointError(
                f"{self._where} is corrupted in bytes [{start}, {start + len(content)}) (checksum {found:08x}, expected"
                f" {expected:08x}); load another checkpoint or restore the file"
            )
        self._index = index
        return content
