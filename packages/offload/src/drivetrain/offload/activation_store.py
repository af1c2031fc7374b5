"""Records of saved bytes and their way out and back.

Problem: what forward saves must leave the device soon, but not before it is worth it, within budgets of host memory and
of copies under way, and must be back when backward asks.
Idea: a record passes through stages. It is young at first, and stays where it is; the oldest young one leaves when the
young are more than what is kept. Its bytes are copied to host memory, and when that is full the oldest there, which is
needed last, goes on to a file. In backward, the records that are expected next are brought back while others are used.

    young ─> leaving ─> in host memory ─> being written ─> in a file
                              │                               │
                on the device <─ coming <──────────── being read

Invariants: a record's bytes are whole in at least one place that nobody writes; memory and file space of a transfer are
given back only after its end, also when the record has died meanwhile; what died is only noted by whoever collects it,
in whatever thread, and taken care of by the next call.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from drivetrain.kernels import Ticket, aligned_empty

from .activation_order import LearnedOrders, SavePass
from .activation_tiers import Link, Origin, Piece, SpillFiles, Transfer
from .arena import HostArena

__all__ = ["ActivationStatistics", "Budgets", "Handle", "RecordStore", "Source"]

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


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes: `keep` stay where they are, `host` are kept in host memory (None: any number), `in_flight` are on their
    way out at once, `prefetch` on their way back or back before they are asked for."""

    keep: int
    host: int | None
    in_flight: int
    prefetch: int


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
class _Record:
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
        return bool(self.out or self.writing or self.reading or self.back)


@dataclass
class _Counts:
    """The numbers of `ActivationStatistics`, which may change."""

    values: dict[str, int] = field(default_factory=dict)
    wait_seconds: float = 0.0

    def add(self, name: str, number: int = 1) -> None:
        self.values[name] = self.values.get(name, 0) + number

    def level(self, name: str, change: int) -> None:
        self.add(name, change)
        peak = f"peak_{name}"
        self.values[peak] = max(self.values.get(peak, 0), self.values[name])


class RecordStore:
    """Records of one `OffloadActivations`. All methods may be called from any thread."""

    def __init__(self, budgets: Budgets, folders: Sequence[Path], *, pin: bool) -> None:
        self._budgets = budgets
        self._files = SpillFiles(folders) if folders else None
        self._arena = HostArena(pin=pin)
        self.orders: Final = LearnedOrders()
        self._lock = Lock()
        self._dead: deque[int] = deque()
        self._records: dict[int, _Record] = {}
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        self._young: dict[int, _Record] = {}
        self._young_bytes = 0
        self._tier: dict[int, _Record] = {}  # in host memory, or on the way there, and not being written; oldest first
        self._busy: dict[int, _Record] = {}
        self._held = 0
        self._tier_bytes = 0
        self._leaving = 0
        self._counts = _Counts()
        self._failed: _Record | None = None
        self._next = 0
        self._closed = False

    # ---------------------------------------------------------------------------------------------------- for the graph

    def save(self, source: Source, saves: SavePass) -> tuple[Handle, int]:
        """Take charge of these bytes. Gives what keeps them, and the index of the save in its pass.

        Raises the failure of an earlier write, whose record is lost.
        """
        with self._locked():
            failed, self._failed = self._failed, None
            if failed is not None and failed.error is not None and not failed.dead:
                raise _lost(failed.error)
            self._counts.add("saved")
            number = self._numbers.get(source.key)
            handle = None if number is None else self._records[number].handle()
            if handle is None:
                handle = self._new_record(source)
            else:
                self._counts.add("shared")
            index = saves.add(handle.number, source.flat.numel())
            while self._young_bytes > self._budgets.keep:
                number, record = next(iter(self._young.items()))
                self._grown_up(record)
                self._send_away(record)
            self._poll()
            self._spill(self._budgets.host)
            return handle, index

    def bring(self, handle: Handle, saves: SavePass, index: int) -> Tensor:
        """The record's bytes on the device, uint8[size]. Sends for those that are expected next.

        Raises OSError or EOFError, with the path, where they could not be written or read.
        """
        with self._locked():
            if self._closed:
                raise RuntimeError(
                    "OffloadActivations was closed before the graph's backward pass; close it afterwards"
                )
            self._poll()
            surprises = saves.surprises
            upcoming = saves.ask(index)
            self._counts.add("surprises", saves.surprises - surprises)
            record = self._records[handle.number]
            flat = self._on_device(record, saves)
            self._look_ahead(record, saves, upcoming)
            return flat

    def keep(self) -> None:
        """A tensor was saved and left alone."""
        with self._locked():
            self._counts.add("saved")
            self._counts.add("kept")

    # ---------------------------------------------------------------------------------------------------- for the owner

    def statistics(self) -> ActivationStatistics:
        with self._locked():
            self._poll()
            files = self._files.taken if self._files is not None else 0
            counts = ActivationStatistics(**self._counts.values)
            return replace(counts, files=files, wait_seconds=self._counts.wait_seconds)

    def synchronize(self) -> None:
        """Wait for every transfer under way."""
        with self._locked():
            self._wait_for_all()
            self._spill(self._budgets.host)
            self._wait_for_all()

    def settle(self) -> None:
        """Start what can be started now: forward is through."""
        with self._locked():
            self._poll()
            self._spill(self._budgets.host)

    def close(self) -> None:
        """Wait for every transfer and give everything back. Graphs that are still there can't be used any more."""
        self.synchronize()
        with self._locked():
            self._closed = True
            for record in list(self._records.values()):
                self._bury(record)
            if self._files is not None:
                self._files.close()
                self._files = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            self._bury_dead()
            yield
        self._try_to_bury()

    def forget(self, number: int) -> None:
        """The graph no longer holds the record. Called by the collector: whoever has the lock may be this thread."""
        self._dead.append(number)
        self._try_to_bury()

    def _try_to_bury(self) -> None:
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._bury_dead()
            finally:
                self._lock.release()

    def _bury_dead(self) -> None:
        while self._dead:
            record = self._records.get(self._dead.popleft())
            if record is not None:
                self._bury(record)

    # --------------------------------------------------------------------------------------------------- on the way out

    def _new_record(self, source: Source) -> Handle:
        number = self._next
        self._next += 1
        handle = Handle(number)
        weakref.finalize(handle, self.forget, number).atexit = False
        size = source.flat.numel()
        link = source.link
        record = _Record(number, size, source.key, source.storage, link, link.origin(), weakref.ref(handle))
        self._set_flat(record, source.flat)
        self._records[number] = record
        self._numbers[source.key] = number
        self._young[number] = record
        self._young_bytes += size
        return handle

    def _grown_up(self, record: _Record) -> None:
        if self._young.pop(record.number, None) is not None:
            self._young_bytes -= record.size

    def _send_away(self, record: _Record) -> None:
        self._poll()
        if not self._room_for(record.size):
            self._counts.add("refused")
            return
        assert record.flat is not None
        record.held = True
        self._held += record.size
        self._tier[record.number] = record
        self._tier_bytes += record.size
        if record.link.same:
            return
        while self._leaving and self._leaving + record.size > self._budgets.in_flight:
            self._let_go(
                next(each for each in self._busy.values() if each.out and each.flat is not None and not each.restored)
            )
        self._set_buffer(record, self._arena.take(record.size))
        assert record.buffer is not None
        record.out = record.link.to_host(record.flat, record.buffer, record.origin)
        self._leaving += record.size
        self._counts.add("to_host", record.size)
        if record.out is None:
            self._let_go(record)
        else:
            self._busy[record.number] = record

    def _let_go(self, record: _Record) -> None:
        """Drop the device's memory, of which a copy is made: before it serves again, the stream waits for the copy."""
        if record.out is not None:
            record.out.order()
        self._set_flat(record, None)
        self._leaving -= record.size

    def _room_for(self, size: int) -> bool:
        capacity = self._budgets.host
        if capacity is None:
            return True
        if self._files is None:
            return self._held + size <= capacity
        self._spill(max(0, capacity - size))
        while self._held and self._held + size > capacity + self._budgets.in_flight:
            written = next((each for each in self._busy.values() if each.writing), None)
            if written is None:
                written = next(iter(self._tier.values()))
                self._write(written)
            assert written.writing is not None
            self._wait(written.writing)
            self._poll_record(written)
        return True

    def _spill(self, capacity: int | None) -> None:
        """Start writing the oldest of what is in host memory until no more than `capacity` bytes stay."""
        if capacity is None or self._files is None:
            return
        for record in list(self._tier.values()):
            if self._tier_bytes <= capacity or record.out is not None:
                break
            self._write(record)

    def _write(self, record: _Record) -> None:
        assert self._files is not None
        if record.out is not None:
            self._wait(record.out)
            self._poll_record(record)
        memory = record.flat if record.link.same else record.buffer
        assert memory is not None
        self._leave_tier(record)
        record.piece = self._files.take(record.size)
        self._counts.values["peak_files"] = max(self._counts.values.get("peak_files", 0), self._files.taken)
        record.writing = self._files.write(record.piece, memory)
        self._counts.add("to_files", record.size)
        self._busy[record.number] = record

    def _leave_tier(self, record: _Record) -> None:
        if self._tier.pop(record.number, None) is not None:
            self._tier_bytes -= record.size

    # -------------------------------------------------------------------------------------------------- on the way back

    def _on_device(self, record: _Record, saves: SavePass) -> Tensor:
        if record.flat is None:
            self._counts.add("late")
            self._fetch(record)
        elif record.restored:
            self._counts.add("ready")
        if record.reading is not None:
            self._wait(record.reading)
            self._poll_record(record)
        if record.error is not None:
            self._failed = None
            raise _lost(record.error)
        flat = record.flat
        assert flat is not None
        if record.restored:
            saves.window.add(record.number)
            if record.back is not None:
                record.back.order()
            record.link.lend(flat)
        return flat

    def _look_ahead(self, current: _Record, saves: SavePass, upcoming: Iterator[int]) -> None:
        """Send for what is expected next, as far as the budget goes, and drop what came back and is not."""
        room = self._budgets.prefetch
        wanted: set[int] = set()
        for save in upcoming:
            record = self._records.get(saves.records[save])
            if record is None or record.number in wanted:
                continue
            if record is current:
                if not wanted:  # it is in use now and next: keeping it costs nothing
                    wanted.add(record.number)
                continue
            if record.flat is not None and not record.restored:
                continue
            if record.error is not None or room <= 0 or (record.size > room and wanted - {current.number}):
                break
            room -= record.size
            wanted.add(record.number)
            saves.window.add(record.number)
            self._fetch(record)
        for number in saves.window - wanted:
            dropped = self._records.get(number)
            if dropped is not None and dropped.reading is not None:
                continue  # it is let go when it has come
            if dropped is not None and dropped.restored:
                if dropped.back is not None:
                    dropped.back.order()
                self._set_flat(dropped, None)
                dropped.restored = False
            saves.window.discard(number)

    def _fetch(self, record: _Record) -> None:
        """Start bringing it back, if that is not under way."""
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
        self._counts.add("from_files", record.size)
        self._busy[record.number] = record

    def _upload(self, record: _Record) -> None:
        assert record.buffer is not None
        if record.out is not None:
            record.out.order()
        flat, record.back = record.link.to_device(record.buffer)
        record.restored = True
        self._set_flat(record, flat)
        if record.link.same:
            self._set_buffer(record, None)
            return
        self._counts.add("to_device", record.size)
        if record.back is not None:
            self._busy[record.number] = record
        else:
            self._release_staging(record)

    # ------------------------------------------------------------------------------------------------ ends of transfers

    def _poll(self) -> None:
        for record in list(self._busy.values()):
            self._poll_record(record)

    def _poll_record(self, record: _Record) -> None:
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

    def _written(self, record: _Record) -> None:
        assert record.writing is not None
        try:
            record.writing.wait()
        except (OSError, EOFError) as error:
            record.error = _bare(error)
            if not record.dead and self._failed is None:
                self._failed = record
        record.writing = None
        self._no_longer_held(record)
        if record.link.same:
            self._set_flat(record, None)
        else:
            self._release_staging(record)

    def _was_read(self, record: _Record) -> None:
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

    def _release_staging(self, record: _Record) -> None:
        """Give back the buffer if its bytes are in a file and no transfer uses it."""
        if record.piece is not None and not record.busy:
            self._give_buffer_back(record)

    def _give_buffer_back(self, record: _Record) -> None:
        buffer = record.buffer
        if buffer is not None:
            self._set_buffer(record, None)
            if not record.link.same:
                self._arena.give_back(buffer)

    def _no_longer_held(self, record: _Record) -> None:
        if record.held:
            record.held = False
            self._held -= record.size

    def _wait_for_all(self) -> None:
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
        self._counts.add("waits")
        self._counts.wait_seconds += time.perf_counter() - start

    # ---------------------------------------------------------------------------------------------------------- the end

    def _bury(self, record: _Record) -> None:
        del self._records[record.number]
        if self._numbers.get(record.source_key) == record.number:
            del self._numbers[record.source_key]
        self._grown_up(record)
        self._leave_tier(record)
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

    def _clear(self, record: _Record) -> None:
        self._no_longer_held(record)
        self._set_flat(record, None)
        self._give_buffer_back(record)
        if record.piece is not None and self._files is not None:
            self._files.give_back(record.piece)
        record.piece = None

    def _set_flat(self, record: _Record, flat: Tensor | None) -> None:
        change = (record.size if flat is not None else 0) - (record.size if record.flat is not None else 0)
        record.flat = flat
        self._counts.level("resident", change)

    def _set_buffer(self, record: _Record, buffer: Tensor | None) -> None:
        change = (record.size if buffer is not None else 0) - (record.size if record.buffer is not None else 0)
        record.buffer = buffer
        self._counts.level("host", change)


def _bare(error: Exception) -> Exception:
    """Without the frames that it passed, and what was being handled then: those hold the graph."""
    error.__context__ = None
    return error.with_traceback(None)


def _lost(error: Exception) -> Exception:
    """The failure of a transfer, as whoever needs the record is told it."""
    text = "an activation that was offloaded is lost, and with it this backward pass"
    if isinstance(error, OSError):
        lost: Exception = OSError(error.errno, f"{text}: {error.strerror}", error.filename)
    else:
        lost = EOFError(f"{text}: {error}")
    lost.__cause__ = error
    return lost
