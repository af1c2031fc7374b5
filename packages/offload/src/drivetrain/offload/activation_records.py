"""One piece of saved bytes, and what moves it.

Problem: several transfers of one record may be under way at once, and its graph may die meanwhile.
Idea: a record says where its bytes are and which transfers use them; `Mover` starts transfers and does what is due at
their ends.

    on the device ── start_out ──> in host memory ── start_write ──> in a file
          ^                              │                               │
          └───────── being copied <──────┴──────── being read <── fetch ─┘

Invariants: a record's bytes are whole in at least one place that nobody writes; memory and file space of a transfer are
given back only after its end, also when the record is dead by then.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from drivetrain.kernels import Ticket, aligned_empty

from .activation_tiers import Link, Origin, Piece, SpillFiles, Transfer
from .arena import HostArena

__all__ = ["ActivationStatistics", "Handle", "Mover", "Record", "Source", "lost"]

_BYTES: Final = torch.uint8


@dataclass(frozen=True, kw_only=True)
class ActivationStatistics:
    """What has been done so far, and how it stands. Sizes are bytes.

    `saved`, `shared`, `kept`: tensors that autograd saved, those of them whose bytes were there already, and those that
    were left alone. `refused`: records that stayed on the device because host memory was full.
    `to_host`, `to_files`, `from_files`, `to_device`: bytes moved, each time that they were.
    `resident`: bytes of records on the device now, those of what was left alone not among them; `host`: in host memory
    of the store's own; `files`: in files. `peak_*`: the most of each at one moment.
    `ready`, `late`: how often backward asked for a record that had to come back and found it on the device or on its
    last way there, or did not. `surprises`: how often it asked in another order than expected.
    `waits`, `wait_seconds`: how often, and how long in all, the process stood still for a transfer.
    """

    saved: int = 0
    shared: int = 0
    kept: int = 0
    refused: int = 0
    to_host: int = 0
    to_files: int = 0
    from_files: int = 0
    to_device: int = 0
    resident: int = 0
    peak_resident: int = 0
    host: int = 0
    peak_host: int = 0
    files: int = 0
    peak_files: int = 0
    ready: int = 0
    late: int = 0
    surprises: int = 0
    waits: int = 0
    wait_seconds: float = 0.0


class Handle:
    """What the graph holds of a record, which lives as long."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class Source:
    """Bytes of a storage at one time. `key` says which, as long as `storage` is held. `flat` is uint8[size]."""

    key: tuple[int, int, int, int]
    storage: StorageWeakRef
    flat: Tensor
    link: Link


@dataclass
class Record:
    """Where the bytes are, and on which ways."""

    number: int
    size: int
    source_key: tuple[int, int, int, int]
    storage: StorageWeakRef
    link: Link
    origin: Origin | None
    handle: weakref.ref[Handle]
    flat: Tensor | None = None
    restored: bool = False  # `flat` is a copy that came back
    buffer: Tensor | None = None
    piece: Piece | None = None
    out: Transfer | None = None
    writing: Ticket | None = None
    reading: Ticket | None = None
    back: Transfer | None = None
    held: bool = False  # counts among what is in host memory to stay, or to be written
    error: Exception | None = None
    dead: bool = False

    @property
    def busy(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self.out or self.writing or self.reading or self.back)


@dataclass
class Counts:
    """The numbers of `ActivationStatistics`, which may change."""

    values: dict[str, int] = field(default_factory=dict)
    wait_seconds: float = 0.0

    def add(self, name: str, number: int = 1) -> None:
        self.values[name] = self.values.get(name, 0) + number

    def raise_peak(self, name: str, level: int) -> None:
        peak = f"peak_{name}"
        self.values[peak] = max(self.values.get(peak, 0), level)

    def level(self, name: str, change: int) -> None:
        self.add(name, change)
        self.raise_peak(name, self.values[name])


class Mover:
    """Moves the records of one store. Not for several threads at a time.

    `held`: bytes that went to host memory and are not in a file yet. `failed`: the first record since it was last None
    that could not be written.
    """

    def __init__(self, folders: Sequence[Path], *, in_flight: int, pin: bool) -> None:
        self._files = SpillFiles(folders) if folders else None
        self._arena = HostArena(pin=pin)
        self._in_flight = in_flight
        self._busy: dict[int, Record] = {}
        self._leaving = 0
        self.held = 0
        self.failed: Record | None = None
        self.counts = Counts()

    @property
    def has_files(self) -> bool:
        """Whether records can go further than to host memory."""
        return self._files is not None

    @property
    def empty(self) -> bool:
        """Whether all host memory is free."""
        return self._arena.free == self._arena.size

    def statistics(self) -> ActivationStatistics:
        """The counts, after a look at what has ended."""
        self.poll()
        files = self._files.taken if self._files is not None else 0
        return replace(ActivationStatistics(**self.counts.values), files=files, wait_seconds=self.counts.wait_seconds)

    def close(self) -> None:
        """Give the files back. Nothing may be under way."""
        if self._files is not None:
            self._files.close()
            self._files = None

    # --------------------------------------------------------------------------------------------------- on the way out

    def place(self, record: Record, flat: Tensor) -> None:
        """Its bytes are these, on the device."""
        self._set_flat(record, flat)

    def start_out(self, record: Record) -> None:
        """Copy it to host memory, unless it is there already."""
        assert record.flat is not None
        record.held = True
        self.held += record.size
        if record.link.same:
            return
        while self._leaving and self._leaving + record.size > self._in_flight:
            self._let_go(
                next(each for each in self._busy.values() if each.out and each.flat is not None and not each.restored)
            )
        self._set_buffer(record, self._arena.take(record.size))
        assert record.buffer is not None
        record.out = record.link.to_host(record.flat, record.buffer, record.origin)
        self._leaving += record.size
        self.counts.add("to_host", record.size)
        if record.out is None:
            self._let_go(record)
        else:
            self._busy[record.number] = record

    def _let_go(self, record: Record) -> None:
        """Drop the device's memory, of which a copy is made: before it serves again, the stream waits for the copy."""
        if record.out is not None:
            record.out.order()
        self._set_flat(record, None)
        self._leaving -= record.size

    def start_write(self, record: Record) -> None:
        """Write it from host memory to a file, which frees the memory in the end."""
        assert self._files is not None
        if record.out is not None:
            self._wait(record.out)
            self._poll_record(record)
        memory = record.flat if record.link.same else record.buffer
        assert memory is not None
        record.piece = self._files.take(record.size)
        self.counts.raise_peak("files", self._files.taken)
        record.writing = self._files.write(record.piece, memory)
        self.counts.add("to_files", record.size)
        self._busy[record.number] = record

    def wait_for_a_write(self) -> bool:
        """Until the oldest write has ended. False if there is none."""
        record = next((each for each in self._busy.values() if each.writing), None)
        if record is None or record.writing is None:
            return False
        self._wait(record.writing)
        self._poll_record(record)
        return True

    # -------------------------------------------------------------------------------------------------- on the way back

    def fetch(self, record: Record) -> None:
        """Start bringing it back, if that is not under way or done."""
        if record.flat is not None or record.reading is not None or record.error is not None:
            return
        if record.buffer is not None:
            self._upload(record)
            return
        assert self._files is not None
        assert record.piece is not None
        same = record.link.same
        self._set_buffer(record, aligned_empty(record.size, dtype=_BYTES) if same else self._arena.take(record.size))
        assert record.buffer is not None
        record.reading = self._files.read(record.piece, record.buffer)
        self.counts.add("from_files", record.size)
        self._busy[record.number] = record

    def finish(self, record: Record) -> Tensor:
        """Its bytes on the device, after `fetch`: what computes next waits for them, the host only for a file."""
        if record.reading is not None:
            self._wait(record.reading)
            self._poll_record(record)
        if record.error is not None:
            self.failed = None
            raise lost(record.error)
        flat = record.flat
        assert flat is not None
        if record.restored:
            if record.back is not None:
                record.back.order()
            record.link.lend(flat)
        return flat

    def drop(self, record: Record) -> None:
        """Give the device's memory back of what came back; it can come again."""
        if record.restored:
            if record.back is not None:
                record.back.order()
            self._set_flat(record, None)
            record.restored = False

    def _upload(self, record: Record) -> None:
        assert record.buffer is not None
        if record.out is not None:
            record.out.order()
        flat, record.back = record.link.to_device(record.buffer)
        record.restored = True
        self._set_flat(record, flat)
        if record.link.same:
            self._set_buffer(record, None)
            return
        self.counts.add("to_device", record.size)
        if record.back is not None:
            self._busy[record.number] = record
        else:
            self._release_staging(record)

    # ------------------------------------------------------------------------------------------------ ends of transfers

    def poll(self) -> None:
        """Do what is due at the end of transfers that have ended."""
        for record in list(self._busy.values()):
            self._poll_record(record)

    def _poll_record(self, record: Record) -> None:
        if record.out is not None and record.out.done():
            if record.flat is not None and not record.restored:
                self._let_go(record)
            record.out = None
        if record.writing is not None and record.writing.done():
            self._written(record)
        if record.reading is not None and record.reading.done():
            self._was_read(record)
        if record.back is not None and record.back.done():
            record.back = None
            self._release_staging(record)
        if not record.busy:
            self._busy.pop(record.number, None)
            if record.dead:
                self._clear(record)

    def _written(self, record: Record) -> None:
        assert record.writing is not None
        try:
            record.writing.wait()
        except (OSError, EOFError) as error:
            record.error = _bare(error)
            if not record.dead and self.failed is None:
                self.failed = record
        record.writing = None
        self._no_longer_held(record)
        if record.link.same:
            self._set_flat(record, None)
        else:
            self._release_staging(record)

    def _was_read(self, record: Record) -> None:
        assert record.reading is not None
        ticket, record.reading = record.reading, None
        try:
            ticket.wait()
        except (OSError, EOFError) as error:
            record.error = _bare(error)
            self._give_buffer_back(record)
            return
        if not record.dead:
            self._upload(record)

    def _release_staging(self, record: Record) -> None:
        """Give back the buffer if its bytes are in a file and no transfer uses it."""
        if record.piece is not None and not record.busy:
            self._give_buffer_back(record)

    def _give_buffer_back(self, record: Record) -> None:
        buffer = record.buffer
        if buffer is not None:
            self._set_buffer(record, None)
            if not record.link.same:
                self._arena.give_back(buffer)

    def _no_longer_held(self, record: Record) -> None:
        if record.held:
            record.held = False
            self.held -= record.size

    def wait_for_all(self) -> None:
        """Until nothing is under way."""
        while self._busy:
            record = next(iter(self._busy.values()))
            transfer = record.out or record.writing or record.reading or record.back
            if transfer is not None:
                self._wait(transfer)
            self._poll_record(record)

    def _wait(self, transfer: Transfer | Ticket) -> None:
        if transfer.done():
            return
        start = time.perf_counter()
        with contextlib.suppress(OSError, EOFError):  # said by whoever looks at what became of the record
            transfer.wait()
        self.counts.add("waits")
        self.counts.wait_seconds += time.perf_counter() - start

    def discard(self, record: Record) -> None:
        """Nobody will ask for it. What it has is given back at the ends of its transfers."""
        record.dead = True
        for transfer in (record.out, record.back):
            if transfer is not None:
                transfer.order()
        if record.out is not None and record.flat is not None and not record.restored:
            self._leaving -= record.size
        if record.writing is None or not record.link.same:
            self._set_flat(record, None)
        if record.busy:
            self._poll_record(record)
        else:
            self._clear(record)

    def _clear(self, record: Record) -> None:
        self._no_longer_held(record)
        self._set_flat(record, None)
        self._give_buffer_back(record)
        if record.piece is not None and self._files is not None:
            self._files.give_back(record.piece)
        record.piece = None

    def _set_flat(self, record: Record, flat: Tensor | None) -> None:
        change = (record.size if flat is not None else 0) - (record.size if record.flat is not None else 0)
        record.flat = flat
        self.counts.level("resident", change)

    def _set_buffer(self, record: Record, buffer: Tensor | None) -> None:
        change = (record.size if buffer is not None else 0) - (record.size if record.buffer is not None else 0)
        record.buffer = buffer
        self.counts.level("host", change)


def _bare(error: Exception) -> Exception:
    """Without the frames that it passed, and what was being handled then: those hold the graph."""
    error.__context__ = None
    return error.with_traceback(None)


def lost(error: Exception) -> Exception:
    """The failure of a transfer, as whoever needs the record is told it."""
    text = "an activation that was offloaded is lost, and with it this backward pass"
    if isinstance(error, OSError):
        failure: Exception = OSError(error.errno, f"{text}: {error.strerror}", error.filename)
    else:
        failure = EOFError(f"{text}: {error}")
    failure.__cause__ = error
    return failure
