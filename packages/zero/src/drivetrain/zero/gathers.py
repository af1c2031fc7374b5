"""Buckets that the nodes of compiled graphs send for, wait for and let go.

The hooks bring parameters in by unit; compiled graphs do it by bucket, and a bucket is theirs until it is let go. A
parameter itself stays a placeholder throughout: readers are given the whole tensors by the node that waits.

Invariant: what is whole here is so on all ranks, since all run the same nodes in the same order. So whether a start
sends anything is the same decision everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

from drivetrain.comm import Waitable
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.fetch import ParameterExchange
from drivetrain.zero.unit import Unit


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """Where to wait, so that a fault shows where it is made.

    Attributes:
        before_gather, before_reduction: for the device, before a gather starts or a gradient is handed on.
        after_gather, after_reduction: for the communication itself.
    """

    before_gather: bool = False
    after_gather: bool = False
    before_reduction: bool = False
    after_reduction: bool = False


NOWHERE = Synchronous()
"""Wait only for what is needed."""


def wait_for(device: torch.device) -> None:
    """Block until ``device`` has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Gathers:
    """The state of all buckets, by their number, as far as compiled graphs use them.

    Attributes:
        kept: those that stay whole until the step.
        live_bytes, peak_bytes: what is whole or on its way now, and the most that was.
        seconds: while ``timed``, how long the fastest gather of each took.
        timed: every gather is waited for where it starts, and measured.
        synchronous: where to wait besides.
    """

    def __init__(self, units: tuple[Unit, ...], exchange: ParameterExchange, synchronous: Synchronous) -> None:
        self._buckets: list[Bucket] = [bucket for unit in units for bucket in unit.buckets]
        self._units = [unit for unit in units for _ in unit.buckets]
        self._exchange = exchange
        self._whole: set[int] = set()
        self._pending: dict[int, Waitable] = {}
        self.kept: set[int] = set()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.seconds: dict[int, float] = {}
        self.timed = False
        self.synchronous = synchronous

    def sizes(self) -> dict[int, int]:
        """Bytes of each bucket that is split, whole."""
        return {
            number: bucket.numel * bucket.full.element_size()
            for number, bucket in enumerate(self._buckets)
            if not bucket.resident
        }

    def start(self, group: int, during: str) -> None:
        """Send for a bucket, unless it is here or on its way; ``during`` says what asks for it, for errors."""
        if group in self._whole or group in self._pending or self._units[group].live:
            return
        bucket = self._buckets[group]
        if self.synchronous.before_gather:
            wait_for(bucket.full.device)
        began = perf_counter()
        self._pending[group] = self._exchange.start(bucket, during=during)
        self.live_bytes += bucket.numel * bucket.full.element_size()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.timed or self.synchronous.after_gather:
            self._arrive(group)
        if self.timed:
            wait_for(bucket.full.device)
            seconds = perf_counter() - began
            self.seconds[group] = min(seconds, self.seconds.get(group, seconds))

    def _arrive(self, group: int) -> None:
        self._pending.pop(group).wait()
        self._whole.add(group)

    def wait(self, group: int) -> tuple[torch.Tensor, ...]:
        """The parameters of a bucket that was sent for, by slot."""
        if group in self._pending:
            self._arrive(group)
        if group not in self._whole and not self._units[group].live:
            raise RuntimeError(f"bucket {group} is waited for by a graph that has not sent for it")
        return tuple(slot.whole for slot in self._buckets[group].slots)

    def keep(self, group: int) -> None:
        """Let nobody release a bucket until the step."""
        if group in self._whole:
            self.kept.add(group)

    def release(self, group: int) -> None:
        """Let a bucket go, unless it is kept."""
        if group in self._whole and group not in self.kept:
            self._drop(group)

    def _drop(self, group: int) -> None:
        bucket = self._buckets[group]
        self._whole.discard(group)
        self.kept.discard(group)
        self.live_bytes -= bucket.numel * bucket.full.element_size()
        if not self._units[group].live:
            bucket.drop()

    def release_kept(self, group: int) -> None:
        """Let a bucket go, kept or not."""
        if group in self._whole:
            self._drop(group)

    def release_all(self) -> None:
        """Nothing stays; gathers under way are completed first, since their buffers are in use."""
        for group in list(self._pending):
            self._arrive(group)
        for group in list(self._whole):
            self._drop(group)


class ForwardGathers:
    """What nodes of forward graphs do."""

    def __init__(self, gathers: Gathers) -> None:
        self._gathers = gathers
        self.wait = gathers.wait
        self.release = gathers.release
        self.keep = gathers.keep

    def start(self, group: int) -> None:
        """Send for a bucket."""
        self._gathers.start(group, "compiled forward")

    def begin(self) -> None:
        """Nothing: that is for backward."""

    def take(self, group: int, slot: int, gradient: torch.Tensor) -> None:
        """Not called: forward makes no gradients."""


class BackwardGathers:
    """What nodes of backward graphs do: as those of forward, and gradients go into their buckets.

    Args:
        gathers: the buckets.
        begin: tells that a backward pass is under way.
        take: takes the gradient of a parameter, by bucket and slot.
        closes: whether this is the last backward pass of the step.
    """

    def __init__(
        self,
        gathers: Gathers,
        begin: Callable[[], None],
        take: Callable[[int, int, torch.Tensor], None],
        closes: Callable[[], bool],
    ) -> None:
        self._gathers = gathers
        self._closes = closes
        self.begin = begin
        self.take = take
        self.wait = gathers.wait
        self.release = gathers.release

    def start(self, group: int) -> None:
        """Send for a bucket."""
        self._gathers.start(group, "compiled backward")

    def keep(self, group: int) -> None:
        """What was kept for the step goes where the step's last backward pass has read it."""
        if self._closes():
            self._gathers.release_kept(group)
        else:
            self._gathers.keep(group)
