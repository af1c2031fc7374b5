"""How much was communicated, over which axis, and how fast.

Two countings of bytes stand side by side, because two literatures use them:

- ``bytes``: the size S of the whole buffer of each call (all-gather: the output; reduce-scatter and all-to-all: the
  input), as in NCCL-tests;
- ``moved_bytes``: the traffic units of the ZeRO papers, in which an all-reduce counts 2 S (a reduce-scatter and an
  all-gather) and the others S.

Bandwidths follow NCCL-tests (its PERFORMANCE.md): algorithm bandwidth is S / t; bus bandwidth multiplies it by the
share of S that each rank's link must carry at least, 2 (n-1)/n for all-reduce, (n-1)/n for all-gather, reduce-scatter
and all-to-all, 1 for broadcast.

``seconds`` runs from the issue of a call to the moment its completion was observed, so it includes time in which the
caller computed something else; ``waited_seconds`` is only the part in which the caller was blocked.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

_MOVED_UNITS = MappingProxyType({"all_reduce": 2.0})


def bus_factor(op: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth for ``op`` over ``size`` ranks (NCCL-tests, PERFORMANCE.md)."""
    if op == "all_reduce":
        return 2.0 * (size - 1) / size
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (size - 1) / size
    return 1.0


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """All calls of one operation on one axis. Bandwidths are in bytes per second, 0 where no time was observed."""

    op: str
    axis: str
    calls: int
    bytes: int
    moved_bytes: int
    seconds: float
    waited_seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float


class Span(Protocol):
    """A time that may become known only later, as on a CUDA stream."""

    def over(self) -> bool:
        """Whether ``seconds`` would return at once."""

    def seconds(self) -> float:
        """The time, once it is known."""


class _Sum:
    """The running totals behind one entry."""

    __slots__ = ("bytes", "calls", "pending", "seconds", "waited")

    def __init__(self) -> None:
        self.calls = 0
        self.bytes = 0
        self.seconds = 0.0
        self.waited = 0.0
        self.pending: deque[Span] = deque()

    def settle(self, *, wait: bool) -> None:
        """Add the spans that are over; all of them if ``wait``."""
        while self.pending and (wait or self.pending[0].over()):
            self.seconds += self.pending.popleft().seconds()


class Ledger:
    """Counts what collectives cost. One ledger serves all axes of a mesh.

    Calls on axes of one rank move nothing and are not counted.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, int], _Sum] = {}
        self._lock = threading.Lock()  # backward passes issue collectives from autograd's threads

    def record(self, *, op: str, axis: str, size: int, nbytes: int, span: Span, waited: float) -> None:
        """Add one completed call on a buffer of ``nbytes`` over ``size`` ranks, for which the host waited that long."""
        with self._lock:
            key = (op, axis, size)
            total = self._sums.get(key)
            if total is None:
                total = self._sums[key] = _Sum()
            total.calls += 1
            total.bytes += nbytes
            total.waited += waited
            total.pending.append(span)
            total.settle(wait=False)

    def entries(self) -> list[LedgerEntry]:
        """One entry per operation and axis, in the order of their first call. Waits for what still runs on CUDA."""
        with self._lock:
            for total in self._sums.values():
                total.settle(wait=True)
            return [_entry(op, axis, size, total) for (op, axis, size), total in self._sums.items()]

    def total_bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """Sum of ``bytes`` over the entries of ``op`` (default: all) and ``axis`` (default: all)."""
        return sum(e.bytes for e in self.entries() if op in (None, e.op) and axis in (None, e.axis))

    def total_moved_bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """As ``total_bytes``, in the traffic units of the ZeRO papers."""
        return sum(e.moved_bytes for e in self.entries() if op in (None, e.op) and axis in (None, e.axis))

    def reset(self) -> None:
        """Forget everything counted so far."""
        with self._lock:
            self._sums.clear()


def _entry(op: str, axis: str, size: int, total: _Sum) -> LedgerEntry:
    bandwidth = total.bytes / total.seconds if total.seconds > 0 else 0.0
    return LedgerEntry(
        op=op,
        axis=axis,
        calls=total.calls,
        bytes=total.bytes,
        moved_bytes=int(total.bytes * _MOVED_UNITS.get(op, 1.0)),
        seconds=total.seconds,
        waited_seconds=total.waited,
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=bandwidth * bus_factor(op, size),
    )
