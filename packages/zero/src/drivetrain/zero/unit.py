"""A unit: the parameters that are gathered and released together, and where it stands in the current pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from drivetrain.comm import Axis, Handle
from drivetrain.zero.bucket import Bucket


class Unit:
    """Buckets of one block (or of the root), with the modules whose forward needs them.

    Attributes:
        live: the parameters are whole and readable.
        open_calls: forward calls whose backward has not reached the unit's inputs yet.
        missing: buckets' gradients still to come in this backward pass, by parameter count.
    """

    def __init__(self, index: int, name: str, modules: Sequence[nn.Module], buckets: Sequence[Bucket]) -> None:
        self.index = index
        self.name = name
        self.modules = tuple(modules)
        self.buckets = tuple(buckets)
        self.resident = all(b.resident for b in buckets)
        self.live = self.resident
        self.open_calls = 0
        self.missing = 0
        self._handles: list[Handle] | None = None

    @property
    def numel(self) -> int:
        """Elements that gathering this unit brings in."""
        return sum(b.numel for b in self.buckets)

    @property
    def in_flight(self) -> bool:
        return self._handles is not None

    @property
    def trainable_count(self) -> int:
        return sum(len(b.slots) for b in self.buckets if b.trainable)

    def start_gather(self, axis: Axis) -> None:
        """Send for the parameters unless they are here or under way."""
        if not self.live and self._handles is None:
            self._handles = [bucket.gather(axis) for bucket in self.buckets]

    def finish_gather(self) -> None:
        """Block until the parameters are here, and make them readable."""
        if self._handles is None:
            return
        handles, self._handles = self._handles, None
        for handle in handles:
            handle.wait()
        for bucket in self.buckets:
            bucket.attach()
        self.live = True

    def release(self) -> None:
        """Let the parameters go (a gather under way is completed first: its buffer is in use)."""
        if self.resident:
            return
        self.finish_gather()
        if self.live:
            for bucket in self.buckets:
                bucket.release()
            self.live = False
