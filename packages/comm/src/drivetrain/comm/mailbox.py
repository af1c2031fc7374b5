"""What the ranks of one axis leave for each other in the store that they met in. It works while collectives hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


class Mailbox:
    """The ranks' questions, answers and calls.

    All methods return at once, or raise a RuntimeError if the store is gone.

    Args:
        store: this process' own connection.
        token: of the axis.
        rank: this process.
    """

    def __init__(self, store: Any, token: str, rank: int) -> None:
        self._store = dist.PrefixStore(f"drivetrain/{token}", store)  # type: ignore[attr-defined]  # torch documents it
        self._rank = rank

    def ask(self) -> int:
        """Ask all ranks of the axis what they do. Returns the number of the question, from 1."""
        return int(self._store.add("asked", 1))

    def asked(self) -> int:
        """The number of the last question, or 0."""
        return int(self._store.add("asked", 0))

    def tell(self, state: str) -> None:
        """Leave this rank's answer, in place of an earlier one."""
        self._store.set(f"state/{self._rank}", state)

    def told(self, rank: int) -> str | None:
        """The answer of a rank, if there is one."""
        return self._read(f"state/{rank}")

    def publish(self, report: str) -> None:
        """Leave what the first rank that asked has found."""
        self._store.set("report", report)

    def published(self) -> str | None:
        return self._read("report")

    def leave_call(self, number: int, call: str) -> None:
        """Tell the others what this rank has issued as ``number``."""
        self._store.set(f"call/{number}/{self._rank}", call)

    def forget_call(self, number: int) -> None:
        self._store.delete_key(f"call/{number}/{self._rank}")

    def calls(self, number: int, ranks: Sequence[int]) -> list[str] | None:
        """What ``ranks`` have issued as ``number``; None until all have."""
        keys = [f"call/{number}/{rank}" for rank in ranks]
        if not self._store.check(keys):
            return None
        return [bytes(value).decode() for value in self._store.multi_get(keys)]

    def absent(self, number: int, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that have not issued ``number``."""
        return [rank for rank in ranks if not self._store.check([f"call/{number}/{rank}"])]

    def _read(self, key: str) -> str | None:
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None
