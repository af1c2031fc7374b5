"""When Python looks for cyclic garbage: where all ranks are at the same point, instead of in the middle of a step.

The problem: the interpreter looks for garbage in cycles whenever enough objects were made, on each rank at a moment of
its own. A full search takes a large part of a second in a process that has imported a few libraries, and every other
rank waits for it at the next collective, so with many ranks somebody always waits. The idea: no automatic search while
the engine works, and searches of its own at the end of steps: of young objects, which costs next to nothing, and of all
objects before a save or an evaluation, where ranks wait anyway.

Invariants: nothing is switched off between two calls of the engine, whatever the calls raise, so there is nothing to
undo in the end; and whoever switched the automatic search off finds it off, since a call restores what it found. Calls
within calls (of another engine, too) find it off, and the outermost switches it on again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


class GarbageCollection:
    """What one engine has to do with Python's garbage collector.

    Args:
        managed: do as the module says; False leaves everything to the interpreter.
        interval: optimizer steps from one search of young objects to the next.
    """

    def __init__(self, *, managed: bool, interval: int = 1) -> None:
        self._managed = managed
        self._interval = interval
        self._steps = 0
        self._thorough = False  # all objects were searched since the last step

    @contextmanager
    def held(self) -> Iterator[None]:
        """No automatic search within the context."""
        if not (self._managed and gc.isenabled()):
            yield
            return
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def stepped(self) -> None:
        """An optimizer step is over, on all ranks."""
        self._thorough = False
        self._steps += 1
        if self._managed and self._steps % self._interval == 0:
            gc.collect(1)

    def boundary(self) -> None:
        """Training pauses, on all ranks: search all objects, unless that was done since the last step."""
        if self._managed and not self._thorough:
            gc.collect()
        self._thorough = True
