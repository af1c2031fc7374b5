"""Several systems are alive at once, and each makes a step when it is told to.

What else a machine does comes and goes within seconds, so systems that run one after another see different machines.
Here the step of one stands beside the step of the other, and those that wait use no core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

PATIENCE = timedelta(seconds=900)
LOOK = 0.02  # seconds between two looks


class Turns:
    """The side of the ranks.

    Args:
        port: of the caller's store.
        system: its name among those that take turns.
        rank: of this process within the system.
    """

    def __init__(self, port: int, system: str, rank: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", port, None, False, timeout=PATIENCE)
        self._system = system
        self._rank = rank

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """Begins when this system is called for the turn, and tells when it is over."""
        self._store.wait([f"{self._system}/{index}"], PATIENCE)
        yield
        self._store.set(f"{self._system}/{index}/{self._rank}", "over")


class Caller:
    """The side of the benchmark: calls one system at a time."""

    def __init__(self, ranks: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._ranks = ranks

    @property
    def port(self) -> int:
        return int(self._store.port)

    def call(self, systems: Sequence[str], index: int, running: Sequence[Future[object]]) -> None:
        """Let each system have its turn, one after the other; the first one changes from turn to turn."""
        first = index % len(systems)
        for system in [*systems[first:], *systems[:first]]:
            self._store.set(f"{system}/{index}", "begin")
            self._wait([f"{system}/{index}/{rank}" for rank in range(self._ranks)], running)

    def _wait(self, keys: list[str], running: Sequence[Future[object]]) -> None:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while not self._store.check(keys):  # waiting in the store would fill the screen with warnings
            for future in running:
                if future.done():
                    future.result()  # raises what the rank raised
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {PATIENCE}: {', '.join(keys)}")
            time.sleep(LOOK)
