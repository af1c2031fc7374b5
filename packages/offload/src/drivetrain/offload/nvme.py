"""Records in files on NVMe drives, of which a few are in host memory at a time.

Problem: states that no memory has room for. A drive moves in a second what the host computes with in a fraction of one,
so it must be kept busy all the time: with what comes next while this record is computed with, and with what was last.
Idea: a fixed number of buffers. `expect` says what is fetched next, and it is read ahead into whatever buffer has
become free; `release` starts the write and returns. With three buffers the read of the next, the use of this and the
write of the last overlap.

    STORED --expect, fetch--> READING --> READY <--> USED --release(changed)--> WRITING --> READY or LOST
    a buffer is bound from READING to WRITING; READY ones are taken back for others, and are then STORED

Invariants: one thread uses a store, and waits only for transfers under way, which end: nothing can deadlock. A record
has its buffer to itself. The file's space for a record is given by the file system when the record is made. A record
whose write failed is LOST: whatever else is called next says so, and so does every fetch of it.
"""

from __future__ import annotations

import logging
import os
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from drivetrain.kernels import AsyncFileOptions, Ticket

from .arena import HostArena
from .buffering import Buffers, Expectation, Phase, Record
from .claim import Claim
from .extents import Extents
from .records import RecordLayout, closed, in_use, not_filled, not_in_use, unknown, whole_pages
from .striped import StripedFile

__all__ = ["NvmeStore"]

_LEAST_CHUNK: Final = 1 << 20

_log = logging.getLogger("drivetrain.offload")


def _let_go(claims: Sequence[Claim]) -> None:
    """Runs at `close`, when the store is collected, and at exit. The files may be open still: they then go later."""
    for claim in claims:
        claim.release()


class NvmeStore:
    """A store whose records live in files.

    `folders`: one on each drive to use; records are cut into chunks that go to them in turn. Each gets a folder
    `drivetrain-offload-<name>-<rank>` that is removed when the store is closed or collected, or the interpreter exits;
    what a killed process left is removed by the next one, and what a living one uses is refused. Stores that share a
    folder have different names or ranks.
    `buffer_count`: how many records can be in host memory at a time, those that are read ahead or being written
    included. `buffer_bytes`: of each; a larger record is refused. None: each as large as its record.
    `max_in_cpu`: bytes of records, the first that are made, that stay in host memory and are never written.
    `pin_memory`: lock buffers for transfers to a GPU, where there is one.
    `pipeline_read=False`: nothing is read ahead. `pipeline_write=False`: `release` waits for the write.
    `options`: how files are read and written.

    A record that a GPU still reads or writes is in use: synchronise before you release it.
    """

    def __init__(
        self,
        folders: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        name: str = "states",
        rank: int = 0,
        buffer_count: int = 4,
        buffer_bytes: int | None = None,
        max_in_cpu: int = 0,
        pin_memory: bool = False,
        pipeline_read: bool = True,
        pipeline_write: bool = True,
        options: AsyncFileOptions | None = None,
    ) -> None:
        if buffer_count < 1:
            raise ValueError(f"buffer_count: expected at least one; found {buffer_count}")
        if buffer_bytes is not None and buffer_bytes < 1:
            raise ValueError(f"buffer_bytes: expected at least one, or None; found {buffer_bytes}")
        if max_in_cpu < 0:
            raise ValueError(f"max_in_cpu: expected a number of bytes; found {max_in_cpu}")
        parents = [Path(folders)] if isinstance(folders, (str, os.PathLike)) else [Path(each) for each in folders]
        if not parents:
            raise ValueError("folders: expected at least one")
        chosen = AsyncFileOptions() if options is None else options
        self._rank = rank
        self._limit = None if buffer_bytes is None else whole_pages(buffer_bytes)
        self._pipeline_read = pipeline_read
        self._pipeline_write = pipeline_write
        self._max_in_cpu = max_in_cpu
        self._resident = HostArena(pin=pin_memory)
        self._resident_bytes = 0
        self._buffers = Buffers(buffer_count, self._limit, pin=pin_memory)
        self._records: dict[str, Record] = {}
        self._bound: dict[str, Record] = {}  # those that have a buffer, the latest last
        self._expected = Expectation()
        self._untold: list[Record] = []  # lost, and nobody was told yet
        self._claims: list[Claim] = []
        self._finalizer = weakref.finalize(self, _let_go, self._claims)
        run = uuid.uuid4().hex
        try:
            for parent in parents:
                self._claims.append(Claim(parent, name, rank, run))
            self._chunk = max(_LEAST_CHUNK, chosen.block_size)
            self._file = StripedFile(
                [claim.data for claim in self._claims], chunk=self._chunk, options=chosen, buffers=self._buffers.pool
            )
        except BaseException:
            self._finalizer()
            raise
        self._space = Extents()
        self._listed = False
        if not self._file.direct:
            _log.info("rank %d: %s goes through the page cache: no O_DIRECT there", rank, self._claims[0].folder)

    # ------------------------------------------------------------------------------------------------- what it holds

    @property
    def device(self) -> torch.device:
        """Where the tensors of a record are while it is in use: in host memory."""
        return torch.device("cpu")

    @property
    def in_memory(self) -> bool:
        """A record that was released is written behind."""
        return False

    @property
    def bytes(self) -> int:
        """Bytes of the tensors of all records, those that are lost left out."""
        kept = (record for record in self._records.values() if record.phase is not Phase.LOST)
        return sum(record.layout.bytes for record in kept)

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken from the system: buffers and resident records."""
        return self._buffers.bytes + self._resident.size

    @property
    def file_bytes(self) -> int:
        """Bytes that the file systems have given to the files."""
        return self._file.size

    # -------------------------------------------------------------------------------------------------- the protocol

    def create(self, key: str, like: Sequence[Tensor]) -> list[Tensor]:
        """A new record with tensors of these lengths and dtypes, not initialised and in use.

        One that has the key is dropped first, whether or not the new one then fits. ValueError where it is larger than
        a buffer, and OSError (ENOSPC, EFBIG, EDQUOT) where the drive has no room for it; the record is then not made.
        """
        self._begin()
        self._forget_for("create", key)
        layout = RecordLayout.of(like)
        record = self._make_resident(key, layout) or self._make_stored(key, layout)
        self._records[key] = record
        self._listed = False
        assert record.memory is not None
        return layout.tensors(record.memory)

    def expect(self, keys: Sequence[str]) -> None:
        """These are fetched next, in this order: read ahead as many as there is room for, and more on each release."""
        self._check_open()
        records = [self._record("expect", key) for key in keys]
        if self._pipeline_read:
            self._expected = Expectation(record.key for record in records if record.start is not None)
            self._collect()
            self._read_ahead()

    def fetch(self, key: str) -> list[Tensor]:
        """The record's tensors, which stay at their place until `release`. Waits until they are there.

        OSError or EOFError, with path and offset, where it can't be read or is lost. RuntimeError where all buffers
        are in use by the caller.
        """
        self._begin()
        record = self._record("fetch", key)
        if record.phase is Phase.USED:
            raise in_use("fetch", key)
        if record.phase is Phase.WRITING:
            self._end_transfer(record)  # it must not change while it is written
        if record.phase is Phase.LOST:
            if record in self._untold:
                self._untold.remove(record)
            raise record.lost()
        if record.phase is Phase.STORED:
            self._make_room()
            self._start_read(record)
        record.phase = Phase.USED  # keeps its buffer, whatever is read ahead
        self._expected.meet(key)
        self._read_ahead()
        failure = record.finish()
        if failure is not None:
            self._unbind(record)
            text = f"rank {self._rank}: record {key!r} could not be read: "
            if isinstance(failure, EOFError):
                raise EOFError(f"{text}{failure}") from failure
            raise OSError(failure.errno, f"{text}{failure.strerror}", failure.filename) from failure
        self._collect()
        self._read_ahead()
        assert record.memory is not None
        return record.layout.tensors(record.memory)

    def release(self, key: str, *, changed: bool) -> None:
        """The caller no longer looks at the tensors; `changed`: what they hold now is the record.

        A failure of a write before this one is raised after this record was released.
        """
        self._check_open()
        record = self._record("release", key)
        if record.phase is not Phase.USED:
            raise not_in_use(key)
        if not changed and not record.filled:
            raise not_filled(key)
        record.filled = True
        record.phase = Phase.READY
        if changed and record.start is not None:
            self._start_write(record)
            self._bound[key] = self._bound.pop(key)
            if not self._pipeline_write:
                self._end_transfer(record)
        self._collect()
        self._read_ahead()
        self._tell()

    def branch(self, key: str, new_key: str) -> list[Tensor]:
        """A record with the values of one that is in use, which is released as it was; nobody may have written to it.

        Its buffer, and with it the tensors that were fetched, pass on to the new record, which is in use: nothing is
        copied, but for a record that stays in host memory. Errors as of `create`; then the old one is in use still.
        """
        self._begin()
        record = self._record("branch", key)
        if record.phase is not Phase.USED:
            raise not_in_use(key, "branch")
        if not record.filled:
            raise not_filled(key, "branch")
        memory = record.memory
        assert memory is not None
        self._forget_for("branch", new_key)
        if record.start is None:
            found = record.layout.tensors(memory)
            made = self.create(new_key, found)
            for tensor, value in zip(made, found, strict=True):
                tensor.copy_(value)
            self._records[new_key].filled = True
            record.phase = Phase.READY
            return made
        made_record = Record(new_key, record.layout, memory, self._take_space(new_key, record.layout.room))
        made_record.filled = True
        record.memory, record.phase = None, Phase.STORED
        del self._bound[key]
        self._records[new_key] = self._bound[new_key] = made_record
        self._listed = False
        return record.layout.tensors(memory)

    def rename(self, key: str, new_key: str) -> None:
        """The record is under another key from now on, in place of any that was. Nothing is read or written."""
        self._check_open()
        record = self._record("rename", key)
        if record.phase is Phase.USED:
            raise in_use("rename", key)
        if key == new_key:
            return
        self._forget_for("rename", new_key)
        record.key = new_key
        self._records[new_key] = self._records.pop(key)
        if key in self._bound:
            self._bound[new_key] = self._bound.pop(key)
        self._listed = False
        self._read_ahead()

    def drop(self, key: str) -> None:
        """Forget the record, also one in use, at whose tensors nobody may look any more."""
        self._check_open()
        self._forget(self._record("drop", key))
        self._read_ahead()

    def flush(self) -> None:
        """Wait until everything is written, and bring the manifest up to date. Raises the first failure."""
        self._check_open()
        for record in list(self._bound.values()):
            if record.phase is Phase.WRITING:
                self._end_transfer(record)
        if not self._listed:
            self._write_manifest()
            self._listed = True
        self._tell()

    def close(self) -> None:
        """Wait for everything, give the memory back and remove the files; then raise the first failure, if any.

        Safe to call twice.
        """
        if not self._finalizer.alive:
            return
        try:
            for record in self._bound.values():
                if record.phase is Phase.WRITING:
                    self._end_transfer(record, bound=False)
                record.finish()
            self._file.close()
        finally:
            self._finalizer()
            self._records.clear()
            self._bound.clear()
            self._buffers, self._resident = Buffers(1, None, pin=False), HostArena()
        self._tell()

    # ------------------------------------------------------------------------------------------- making and forgetting

    def _make_resident(self, key: str, layout: RecordLayout) -> Record | None:
        if self._resident_bytes + layout.room > self._max_in_cpu:
            return None
        self._resident_bytes += layout.room
        return Record(key, layout, self._resident.take(layout.room), None)

    def _make_stored(self, key: str, layout: RecordLayout) -> Record:
        if self._limit is not None and layout.room > self._limit:
            raise ValueError(
                f"rank {self._rank}: record {key!r} takes {layout.room} bytes, a buffer has {self._limit}; set "
                f"buffer_bytes to at least {layout.room}, or to None"
            )
        self._make_room()
        start = self._take_space(key, layout.room)
        record = Record(key, layout, self._buffers.take(layout.room), start)
        self._bound[key] = record
        return record

    def _take_space(self, key: str, room: int) -> int:
        """A place for a record in the file, which grows if it must."""
        start = self._space.take(room)
        if start is None:
            more = room - self._space.free_at_end
            self._file.check()  # growing would make a file that was cut off whole again, with zeros
            try:
                self._file.grow(self._file.size + more)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"rank {self._rank}: record {key!r} takes {room} bytes, for which there is no room: "
                    f"{error.strerror}. Free some, name another folder, or keep more in host memory",
                    error.filename,
                ) from None
            self._space.grow(more)
            start = self._space.take(room)
            assert start is not None
        return start

    def _forget_for(self, doing: str, key: str) -> None:
        """Make way for a new record."""
        old = self._records.get(key)
        if old is not None:
            if old.phase is Phase.USED:
                raise in_use(doing, key)
            self._forget(old)

    def _forget(self, record: Record) -> None:
        record.finish()
        if record.start is None:
            assert record.memory is not None
            self._resident.give_back(record.memory)
            self._resident_bytes -= record.layout.room
        else:
            if record.memory is not None:
                self._unbind(record)
            self._space.give_back(record.start, record.layout.room)
        if record in self._untold:
            self._untold.remove(record)
        del self._records[record.key]
        self._listed = False

    def _write_manifest(self) -> None:
        records = {
            record.key: {
                "offset": record.start,
                "bytes": record.layout.room,
                "tensors": [
                    {"start": start, "numel": numel, "dtype": str(dtype).removeprefix("torch.")}
                    for start, numel, dtype in zip(
                        record.layout.starts, record.layout.numels, record.layout.dtypes, strict=True
                    )
                ],
            }
            for record in self._records.values()
            if record.start is not None
        }
        files = [str(claim.data) for claim in self._claims]
        for claim in self._claims:
            try:
                claim.write_manifest({"files": files, "chunk_bytes": self._chunk, "records": records})
            except OSError as error:  # it informs people; no record depends on it
                _log.warning("rank %d: the manifest in %s stays as it was: %s", self._rank, claim.folder, error)

    # --------------------------------------------------------------------------------------------- transfers and errors

    def _begin(self) -> None:
        self._check_open()
        self._collect()
        self._tell()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise closed("NvmeStore")

    def _record(self, doing: str, key: str) -> Record:
        record = self._records.get(key)
        if record is None:
            raise unknown(doing, key, self._records)
        return record

    def _tell(self) -> None:
        """Raise what went wrong since the last call, once."""
        if not self._untold:
            return
        first, *others = self._untold
        self._untold.clear()
        if others:
            _log.error("rank %d: lost as well: %s", self._rank, ", ".join(repr(record.key) for record in others))
        raise first.lost()

    def _start_read(self, record: Record) -> None:
        assert record.start is not None
        record.memory = self._buffers.take(record.layout.room)
        record.phase = Phase.READING
        self._bound[record.key] = record
        self._start(self._file.read, record)

    def _start_write(self, record: Record) -> None:
        record.phase = Phase.WRITING
        self._start(self._file.write, record)

    def _start(self, transfer: Callable[[Tensor, int], list[Ticket]], record: Record) -> None:
        """Start a transfer. What forbids it is the transfer's failure."""
        assert record.memory is not None
        assert record.start is not None
        try:
            self._file.check()
            record.tickets = transfer(record.memory, record.start)
        except OSError as error:
            record.refusal = error

    def _end_transfer(self, record: Record, *, bound: bool = True) -> None:
        """Wait for a record's transfer. Its buffer is then READY; after a failure it is free."""
        writing = record.phase is Phase.WRITING
        failure = record.finish()
        record.phase = Phase.READY
        if failure is None:
            return
        if bound:
            self._unbind(record)
        if writing:
            assert isinstance(failure, OSError)
            record.failure = failure
            record.phase = Phase.LOST
            self._untold.append(record)

    def _collect(self) -> None:
        """Take note of transfers that have ended by themselves."""
        for record in list(self._bound.values()):
            moving = record.phase in (Phase.READING, Phase.WRITING)
            if moving and all(ticket.done() for ticket in record.tickets):
                self._end_transfer(record)

    # -------------------------------------------------------------------------------------------------------- buffers

    def _unbind(self, record: Record) -> None:
        assert record.memory is not None
        self._buffers.give_back(record.memory)
        record.memory = None
        record.phase = Phase.STORED
        del self._bound[record.key]

    def _farthest(self, phase: Phase, but: Iterable[str] = ()) -> Record | None:
        """Of the records that have a buffer and are in this phase, the one that is expected last."""
        found = [record for record in self._bound.values() if record.phase is phase and record.key not in but]
        return max(found, key=lambda record: self._expected.distance(record.key), default=None)

    def _make_room(self) -> None:
        """Have a buffer free for a caller, who waits as long as that takes.

        Taken is one that is not needed soon; then the one whose write ends first; then one that was read ahead.
        """
        if self._buffers.free:
            return
        victim = self._farthest(Phase.READY)
        if victim is None or self._expected.distance(victim.key) < self._buffers.count:
            writing = next((record for record in self._bound.values() if record.phase is Phase.WRITING), None)
            if writing is not None:
                self._end_transfer(writing)
                if self._buffers.free:
                    return
                victim = self._farthest(Phase.READY)
        if victim is None:
            victim = self._farthest(Phase.READING)
            if victim is None:
                holders = ", ".join(repr(key) for key in self._bound)
                raise RuntimeError(
                    f"rank {self._rank}: all {self._buffers.count} buffers are in use, by {holders}; release one, or "
                    f"set buffer_count to at least {self._buffers.count + 1}"
                )
            self._end_transfer(victim)
            if self._buffers.free:
                return
        self._unbind(victim)

    def _read_ahead(self) -> None:
        """Start reading what is expected next, as far as buffers are free, or hold what is needed later or never."""
        near: set[str] = set()
        for key in self._expected:
            near.add(key)
            record = self._records.get(key)
            if record is None or record.start is None or record.phase is not Phase.STORED:
                continue
            if not self._buffers.free:
                victim = self._farthest(Phase.READY, but=near)
                if victim is None:
                    return
                self._unbind(victim)
            self._start_read(record)
