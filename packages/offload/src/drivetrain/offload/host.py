"""Records in host memory.

Problem: states that the device has no room for, and that the host computes with or sends to it.
Idea: each record is a piece of an arena; `fetch` hands out the tensors themselves and copies nothing.
Invariant: a record stays at its place until it is dropped or replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arena import ArenaFullError, HostArena
from .records import RecordLayout, closed, in_use, not_filled, not_in_use, unknown

__all__ = ["HostStore"]


@dataclass
class _Record:
    layout: RecordLayout
    memory: Tensor
    used: bool = True
    filled: bool = False


class HostStore:
    """A store whose records live in host memory.

    `pin_memory`: lock the memory for transfers to a GPU, where there is one. `capacity`: bytes taken from the system at
    once, of which each record takes whole pages; None takes memory as records are made. With a capacity, what doesn't
    fit is refused by `create` with an `ArenaFullError`.

    A record that a GPU still reads or writes is in use: synchronise before you release it.
    """

    def __init__(self, *, pin_memory: bool = False, capacity: int | None = None) -> None:
        self._arena = HostArena(capacity, pin=pin_memory)
        self._records: dict[str, _Record] = {}
        self._closed = False

    @property
    def device(self) -> torch.device:
        """Where the tensors of a record are: in host memory."""
        return torch.device("cpu")

    @property
    def in_memory(self) -> bool:
        """Nothing reads or writes a record between `release` and `fetch`."""
        return True

    @property
    def bytes(self) -> int:
        """Bytes of the tensors of all records."""
        return sum(record.layout.bytes for record in self._records.values())

    @property
    def memory_bytes(self) -> int:
        """Bytes of host memory taken from the system."""
        return self._arena.size

    def create(self, key: str, like: Sequence[Tensor]) -> list[Tensor]:
        """A new record with tensors of these lengths and dtypes, not initialised and in use.

        One that has the key is dropped first, whether or not the new one then fits.
        """
        self._check_open()
        old = self._records.get(key)
        if old is not None:
            if old.used:
                raise in_use("create", key)
            self.drop(key)
        layout = RecordLayout.of(like)
        try:
            memory = self._arena.take(layout.room)
        except ArenaFullError as error:
            raise ArenaFullError(error.wanted, error.free, error.largest, self._arena.size, f"record {key!r}") from None
        self._records[key] = _Record(layout, memory)
        return layout.tensors(memory)

    def expect(self, keys: Sequence[str]) -> None:
        """Nothing has to be brought in: this only checks the keys."""
        self._check_open()
        for key in keys:
            self._record("expect", key)

    def fetch(self, key: str) -> list[Tensor]:
        """The tensors of the record themselves."""
        self._check_open()
        record = self._record("fetch", key)
        if record.used:
            raise in_use("fetch", key)
        record.used = True
        return record.layout.tensors(record.memory)

    def release(self, key: str, *, changed: bool) -> None:
        """The caller no longer looks at the tensors."""
        self._check_open()
        record = self._record("release", key)
        if not record.used:
            raise not_in_use(key)
        if not changed and not record.filled:
            raise not_filled(key)
        record.used, record.filled = False, True

    def branch(self, key: str, new_key: str) -> list[Tensor]:
        """A copy in memory of its own, as `create` makes it; the record itself is released as it was."""
        self._check_open()
        record = self._record("branch", key)
        if not record.used:
            raise not_in_use(key, "branch")
        if not record.filled:
            raise not_filled(key, "branch")
        if new_key in self._records and self._records[new_key].used:
            raise in_use("branch", new_key)
        found = record.layout.tensors(record.memory)
        made = self.create(new_key, found)
        self._records[new_key].memory.copy_(record.memory)
        self._records[new_key].filled = True
        record.used = False
        return made

    def rename(self, key: str, new_key: str) -> None:
        """The record is under another key from now on, in place of any that was. Nothing moves."""
        self._check_open()
        record, old = self._record("rename", key), self._records.get(new_key)
        for each, name in ((record, key), (old, new_key)):
            if each is not None and each.used:
                raise in_use("rename", name)
        if old is not None and old is not record:
            self.drop(new_key)
        self._records[new_key] = self._records.pop(key)

    def drop(self, key: str) -> None:
        """Forget the record, also one in use, at whose tensors nobody may look any more."""
        self._check_open()
        record = self._record("drop", key)
        del self._records[key]
        self._arena.give_back(record.memory)

    def flush(self) -> None:
        """Everything is where it belongs already."""
        self._check_open()

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._closed = True
        self._records.clear()
        self._arena = HostArena()

    def _check_open(self) -> None:
        if self._closed:
            raise closed("HostStore")

    def _record(self, doing: str, key: str) -> _Record:
        record = self._records.get(key)
        if record is None:
            raise unknown(doing, key, self._records)
        return record
