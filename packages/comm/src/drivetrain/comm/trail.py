"""What a rank issues and waits for on one axis, noted so that it can be told when something hangs.

Problem: when ranks go different ways, each sees only that a peer does not come, and the peer does not know that it is
waited for.
Idea: every collective leaves a note in the trail of its axis: its number, what it is and what it is for. Writing it
costs an append; whoever must explain a failure reads it (see ``watch.py``).
Invariants: notes hold no tensors, axes or process groups, so that they keep nothing alive; numbers count the
collectives of an axis from 0, the same on all its ranks as these issue the same ones.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

LABEL_BYTES: Final = 160
"""How much of a label ranks exchange. Longer ones are cut, and end in a checksum of the whole."""

KEPT: Final = 16
"""Collectives of an axis that a rank remembers."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a collective is for, in words for errors.

    Attributes:
        what: ranks compare it with the collective: it names what the data belong to ("gather of unit 'blocks.2'").
        during: told but not compared: ranks may come from different places ("forward").
    """

    what: str
    during: str = ""


class Issued:
    """One collective as this rank issued it."""

    __slots__ = ("detail", "dtype", "number", "numel", "op", "purpose")

    def __init__(
        self, number: int, op: str, argument: str, numel: int, dtype: torch.dtype, purpose: Purpose | str
    ) -> None:
        self.number = number
        self.op = op
        self.detail = f"{op} {argument}" if argument else op
        self.numel = numel  # of the whole buffer
        self.dtype = dtype
        self.purpose = purpose

    @property
    def what(self) -> str:
        """The part of its purpose that ranks compare."""
        return self.purpose if isinstance(self.purpose, str) else self.purpose.what

    @property
    def during(self) -> str:
        return "" if isinstance(self.purpose, str) else self.purpose.during

    @property
    def label(self) -> str:
        """What ranks must agree on, in words of at most ``LABEL_BYTES`` ASCII characters."""
        text = f"{self.detail} of {self.numel} {str(self.dtype)[6:]}"
        what = self.what
        return fitted(f"{text}: {what}" if what else text)

    @property
    def told(self) -> str:
        """The label, and during what it was issued."""
        return f"{self.label}, in {self.during}" if self.during else self.label


def fitted(text: str) -> str:
    """``text`` in ASCII. If it is too long for a label, its end makes room for a checksum of all of it."""
    plain = text if text.isascii() else text.encode("ascii", "replace").decode()
    if len(plain) <= LABEL_BYTES and plain is text:
        return text
    return f"{plain[: LABEL_BYTES - 12]}... {zlib.crc32(text.encode()):08x}"


class Trail:
    """The collectives of one axis on this rank.

    Attributes:
        title: the axis in words.
        token: the same number on all ranks of the axis, and on no other axis.
        rank, ranks: this rank and all of the axis, by their numbers in the world.
        issued, completed: how many collectives.
        recent: the last ones issued.
        waiting: what the caller is blocked in, since the time ``since`` of ``perf_counter``.
        failed: why this rank has given the axis up, if it has; ``late`` if because nothing came.
        answered: the last question of other ranks that was answered (see ``watch.py``).
    """

    def __init__(self, name: str, channel: str, rank: int, ranks: tuple[int, ...]) -> None:
        self.title = f"axis '{name}'" if channel == "main" else f"axis '{name}' (channel '{channel}')"
        self.token = ""
        self.rank = rank
        self.ranks = ranks
        self.issued = 0
        self.completed = 0
        self.recent: deque[Issued] = deque(maxlen=KEPT)
        self.waiting: Issued | None = None
        self.since = 0.0
        self.failed: str | None = None
        self.late = False
        self.answered = 0

    def add(self, op: str, argument: str, whole: torch.Tensor, purpose: Purpose | str) -> Issued:
        """Note a collective on the buffer ``whole``."""
        issued = Issued(self.issued, op, argument, whole.numel(), whole.dtype, purpose)
        self.issued += 1
        self.recent.append(issued)
        return issued

    def enter(self, issued: Issued) -> float:
        """The caller blocks until ``issued`` is complete. Returns the time."""
        self.waiting = issued
        self.since = now = perf_counter()
        return now

    def leave(self) -> None:
        self.waiting = None
        self.completed += 1
