"""Time: of steps, as throughput, and of the phases of a step.

CUDA runs asynchronously, so a wall clock read without waiting for the device measures how fast work is queued. Both
timers wait for the device when they read the clock, unless told not to; on the CPU there is nothing to wait for.
A disabled `PhaseTimers` neither waits nor measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Clock = Callable[[], float]
"""A clock in seconds that never goes back."""


def synchronized_clock(device: torch.device | str, clock: Clock = time.perf_counter) -> Clock:
    """`clock`, read after the work queued on `device` is done."""
    chosen = torch.device(device)
    if chosen.type != "cuda":
        return clock

    def read() -> float:
        torch.cuda.synchronize(chosen)
        return clock()

    return read


class ThroughputTimer:
    """Samples and tokens per second over the steps of a run.

    The rates are smoothed: with each step the sums of time and of work are scaled by `1 - smoothing` before the new
    step is added, so a rate is work over time of the last 1 / smoothing steps or so, each weighted by its length. The
    first `skip` steps warm up caches and allocators and are left out.

        timer.start()
        ...                                   # one optimizer step
        timer.stop(samples=64, tokens=64 * 1024)
    """

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        synchronized: bool = True,
        smoothing: float = 0.1,
        skip: int = 1,
        clock: Clock = time.perf_counter,
    ) -> None:
        """`synchronized`: wait for the device at each reading. `smoothing`: in (0, 1]; 1 shows the last step alone."""
        if not 0.0 < smoothing <= 1.0:
            raise ValueError(f"smoothing is {smoothing}, expected a number above 0 and up to 1")
        self._clock = synchronized_clock(device, clock) if synchronized else clock
        self._keep = 1.0 - smoothing
        self._skip = skip
        self._started: float | None = None
        self._recent = [0.0, 0.0, 0.0]  # seconds, samples, tokens, smoothed
        self._total = [0.0, 0.0, 0.0]
        self.steps = 0
        """Steps seen, with those left out."""
        self.last_step_seconds = 0.0
        """Length of the last step."""

    def start(self) -> None:
        """A step begins."""
        self._started = self._clock()

    def stop(self, *, samples: int, tokens: int = 0) -> float:
        """The step ends after `samples` samples and `tokens` tokens over all ranks; returns its seconds.

        Raises RuntimeError if no step was begun.
        """
        if self._started is None:
            raise RuntimeError("stop() without start(): a step has to begin before it ends")
        self.last_step_seconds = self._clock() - self._started
        self._started = None
        self.steps += 1
        if self.steps > self._skip:
            done = (self.last_step_seconds, float(samples), float(tokens))
            self._recent = [old * self._keep + new for old, new in zip(self._recent, done, strict=True)]
            self._total = [old + new for old, new in zip(self._total, done, strict=True)]
        return self.last_step_seconds

    @property
    def samples_per_second(self) -> float:
        """Smoothed rate of samples over all ranks; 0 before anything was measured."""
        return _rate(self._recent[1], self._recent[0])

    @property
    def tokens_per_second(self) -> float:
        """Smoothed rate of tokens over all ranks; 0 before anything was measured."""
        return _rate(self._recent[2], self._recent[0])

    @property
    def average_samples_per_second(self) -> float:
        """Rate of samples over all measured steps."""
        return _rate(self._total[1], self._total[0])

    @property
    def average_tokens_per_second(self) -> float:
        """Rate of tokens over all measured steps."""
        return _rate(self._total[2], self._total[0])


class PhaseTimers:
    """Seconds spent in the named phases of a step (forward, backward, step): `wall_clock_breakdown`.

    with timers.measure("forward"):
        loss = model(batch)
    timers.take()                         # {"forward": 0.0123}, since the last take
    """

    def __init__(
        self, *, enabled: bool = True, device: torch.device | str = "cpu", clock: Clock = time.perf_counter
    ) -> None:
        self.enabled = enabled
        """Whether anything is measured."""
        self._clock = synchronized_clock(device, clock)
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time within to `phase`; also where an exception ends it. Phases may be nested and repeated."""
        if not self.enabled:
            yield
            return
        began = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - began

    def take(self) -> dict[str, float]:
        """Seconds by phase, in the order in which phases were first entered, since the last `take`."""
        taken, self._seconds = self._seconds, {}
        return taken


def _rate(work: float, seconds: float) -> float:
    return work / seconds if seconds > 0.0 else 0.0
