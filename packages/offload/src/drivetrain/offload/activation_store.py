"""Which records go, when, and which come back.

Problem: what forward saves must leave the device soon, but not before it is worth it, within budgets of host memory and
of copies under way, and must be back when backward asks.
Idea: a record is young at first, and stays where it is; the oldest young one leaves when the young are more than what
is kept. When host memory is full, the oldest record in it, which is needed last, goes on to a file. In backward,
records that are expected next are sent for while others are used, as far as the budget for that goes.
Invariant: what died is only noted by whoever collects it, in whatever thread, and taken care of by whoever has the
lock.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Final

from torch import Tensor

from .activation_order import LearnedOrders, SavePass
from .activation_records import ActivationStatistics, Handle, Mover, Record, Source, lost

__all__ = ["Budgets", "RecordStore"]


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes: `keep` stay where they are, `host` are kept in host memory (None: any number), `in_flight` are on their
    way out at once, `prefetch` on their way back or back before they are asked for."""

    keep: int
    host: int | None
    in_flight: int
    prefetch: int


class RecordStore:
    """Records of one `OffloadActivations`. All methods may be called from any thread."""

    def __init__(self, budgets: Budgets, folders: Sequence[Path], *, pin: bool) -> None:
        self._budgets = budgets
        self._mover = Mover(folders, in_flight=budgets.in_flight, pin=pin)
        self.orders: Final = LearnedOrders()
        self._lock = Lock()
        self._dead: deque[int] = deque()
        self._records: dict[int, Record] = {}
        self._numbers: dict[tuple[int, int, int, int], int] = {}
        self._young: dict[int, Record] = {}
        self._young_bytes = 0
        self._tier: dict[int, Record] = {}  # in host memory, or on the way there, and not being written; oldest first
        self._tier_bytes = 0
        self._next = 0
        self._closed = False

    # ---------------------------------------------------------------------------------------------------- for the graph

    def save(self, source: Source, saves: SavePass) -> tuple[Handle, int]:
        """Take charge of these bytes. Gives what keeps them, and the index of the save in its pass.

        Raises the failure of an earlier write, whose record is lost.
        """
        with self._locked():
            failed, self._mover.failed = self._mover.failed, None
            if failed is not None and failed.error is not None and not failed.dead:
                raise lost(failed.error)
            self._mover.counts.add("saved")
            number = self._numbers.get(source.key)
            handle = None if number is None else self._records[number].handle()
            if handle is None:
                handle = self._new_record(source)
            else:
                self._mover.counts.add("shared")
            index = saves.add(handle.number, source.flat.numel())
            while self._young_bytes > self._budgets.keep:
                number, record = next(iter(self._young.items()))
                self._grown_up(record)
                self._send_away(record)
            self._mover.poll()
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
            self._mover.poll()
            surprises = saves.surprises
            upcoming = saves.ask(index)
            self._mover.counts.add("surprises", saves.surprises - surprises)
            record = self._records[handle.number]
            flat = self._on_device(record, saves)
            self._look_ahead(record, saves, upcoming)
            return flat

    def keep(self) -> None:
        """A tensor was saved and left alone."""
        with self._locked():
            self._mover.counts.add("saved")
            self._mover.counts.add("kept")

    # ---------------------------------------------------------------------------------------------------- for the owner

    def statistics(self) -> ActivationStatistics:
        """How it stands."""
        with self._locked():
            return self._mover.statistics()

    def synchronize(self) -> None:
        """Wait for every transfer under way."""
        with self._locked():
            self._mover.wait_for_all()
            self._spill(self._budgets.host)
            self._mover.wait_for_all()

    def settle(self) -> None:
        """Start what can be started now: forward is through."""
        with self._locked():
            self._mover.poll()
            self._spill(self._budgets.host)

    def close(self) -> None:
        """Wait for every transfer and give everything back. Graphs that are still there can't be used any more."""
        self.synchronize()
        with self._locked():
            self._closed = True
            for record in list(self._records.values()):
                self._bury(record)
            self._mover.close()

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

    def _bury(self, record: Record) -> None:
        del self._records[record.number]
        if self._numbers.get(record.source_key) == record.number:
            del self._numbers[record.source_key]
        self._grown_up(record)
        self._leave_tier(record)
        self._mover.discard(record)

    # --------------------------------------------------------------------------------------------------- on the way out

    def _new_record(self, source: Source) -> Handle:
        number = self._next
        self._next += 1
        handle = Handle(number)
        weakref.finalize(handle, self.forget, number).atexit = False
        size = source.flat.numel()
        link = source.link
        record = Record(number, size, source.key, source.storage, link, link.origin(), weakref.ref(handle))
        self._mover.place(record, source.flat)
        self._records[number] = record
        self._numbers[source.key] = number
        self._young[number] = record
        self._young_bytes += size
        return handle

    def _grown_up(self, record: Record) -> None:
        if self._young.pop(record.number, None) is not None:
            self._young_bytes -= record.size

    def _send_away(self, record: Record) -> None:
        self._mover.poll()
        if not self._room_for(record.size):
            self._mover.counts.add("refused")
            return
        self._tier[record.number] = record
        self._tier_bytes += record.size
        self._mover.start_out(record)

    def _room_for(self, size: int) -> bool:
        capacity = self._budgets.host
        if capacity is None:
            return True
        mover = self._mover
        if not mover.has_files:
            return mover.held + size <= capacity
        self._spill(max(0, capacity - size))
        while mover.held and mover.held + size > capacity + self._budgets.in_flight:
            if mover.wait_for_a_write():
                continue
            if self._tier:
                self._write(next(iter(self._tier.values())))
            else:  # what is left is dead, and still being copied
                mover.wait_for_all()
        return True

    def _spill(self, capacity: int | None) -> None:
        """Start writing the oldest of what is in host memory until no more than `capacity` bytes stay."""
        if capacity is None or not self._mover.has_files:
            return
        for record in list(self._tier.values()):
            if self._tier_bytes <= capacity or record.out is not None:
                break
            self._write(record)

    def _write(self, record: Record) -> None:
        self._leave_tier(record)
        self._mover.start_write(record)

    def _leave_tier(self, record: Record) -> None:
        if self._tier.pop(record.number, None) is not None:
            self._tier_bytes -= record.size

    # -------------------------------------------------------------------------------------------------- on the way back

    def _on_device(self, record: Record, saves: SavePass) -> Tensor:
        if record.flat is None:
            self._mover.counts.add("late")
            self._mover.fetch(record)
        elif record.restored:
            self._mover.counts.add("ready")
        flat = self._mover.finish(record)
        if record.restored:
            saves.window.add(record.number)
        return flat

    def _look_ahead(self, current: Record, saves: SavePass, upcoming: Iterator[int]) -> None:
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
            self._mover.fetch(record)
        for number in saves.window - wanted:
            dropped = self._records.get(number)
            if dropped is not None and dropped.reading is not None:
                continue  # it is let go when it has come
            if dropped is not None:
                self._mover.drop(dropped)
            saves.window.discard(number)
