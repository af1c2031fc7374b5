"""The progress of a run on the terminal: one live line, or from time to time a plain one.

On a terminal a bar is drawn by rich, and whatever else is printed appears above it. Where the output is a file or a
pipe, a live bar would be rubbish, so a plain line is written at the first step, at the last one, and at most every
`period` seconds between. Only one rank shows anything; on the others the same calls do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

_RANKS_SHOWN = 4
_SMOOTHING = 0.1  # of the time per step, for the time left


class ProgressBar:
    """Shows step, loss, learning rate, tokens/s, peak memory per rank and time left. Use as a context manager."""

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        title: str = "train",
        show: bool = True,
        period: float = 10.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`total`: the step at which the run ends; `start`: the last step done before (after a resume)."""
        if total < 1 or not 0 <= start <= total:
            raise ValueError(f"total is {total} and start is {start}, expected 0 <= start <= total and total >= 1")
        self._total = total
        self._title = title
        self._show = show
        self._period = period
        self._console = console or Console()
        self._clock = clock
        self._left = _TimeLeft(step=start, total=total, now=clock())
        self._last_line: float | None = None
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> ProgressBar:
        if self._show and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", style="bold"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[text]}"),
                console=self._console,
                expand=True,
            )
            self._task = self._bar.add_task(self._title, total=self._total, completed=self._left.step, text="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        lr: float | None = None,
        tokens_per_second: float | None = None,
        peak_bytes: Sequence[int] = (),
    ) -> None:
        """Step `step` is done. `peak_bytes`: peak memory by rank. What is left out is not shown."""
        if not self._show:
            return
        now = self._clock()
        self._left.update(step, now)
        text = " ".join(
            part
            for part in (
                "" if loss is None else f"loss {loss:.4f}",
                "" if lr is None else f"lr {lr:.2e}",
                "" if tokens_per_second is None else f"{human_count(tokens_per_second)} tok/s",
                peak_text(peak_bytes),
                "" if self._left.seconds is None or step >= self._total else f"{human_time(self._left.seconds)} left",
            )
            if part
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif self._last_line is None or step >= self._total or now - self._last_line >= self._period:
            self._last_line = now
            self._print(f"{self._title} {step}/{self._total} {text}".rstrip())

    def message(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._show:
            self._print(text)

    def _print(self, line: str) -> None:
        # No wrapping and no markup: a line in a file stays a line, and brackets are brackets.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class _TimeLeft:
    """Seconds to the end, from the smoothed time per step."""

    def __init__(self, *, step: int, total: int, now: float) -> None:
        self.step = step
        self._total = total
        self._then = now
        self._measured = 0
        self._per_step = 0.0

    def update(self, step: int, now: float) -> None:
        if step <= self.step:
            return
        # The first step compiles, allocates and connects: the second replaces it, later ones are blended in.
        weight = 1.0 if self._measured < 2 else _SMOOTHING
        self._per_step += weight * ((now - self._then) / (step - self.step) - self._per_step)
        self._measured += 1
        self.step, self._then = step, now

    @property
    def seconds(self) -> float | None:
        """`None` before the first step."""
        return max(0, self._total - self.step) * self._per_step if self._measured else None


def peak_text(peak_bytes: Sequence[int]) -> str:
    """Peak memory by rank: each of a few ranks, the range of many."""
    if not peak_bytes:
        return ""
    if len(peak_bytes) <= _RANKS_SHOWN:
        return f"peak {' '.join(human_bytes(size) for size in peak_bytes)}"
    low, high = human_bytes(min(peak_bytes)), human_bytes(max(peak_bytes))
    return f"peak {high}" if low == high else f"peak {low}..{high}"


def human_bytes(size: float) -> str:
    """`412 MiB`, `1.5 GiB`."""
    mib = size / (1 << 20)
    return f"{mib:.0f} MiB" if round(mib) < 1024 else f"{mib / 1024:.1f} GiB"


def human_count(number: float) -> str:
    """`950`, `12.3k`, `4.5M`."""
    for unit, digits in (("", 0), ("k", 1), ("M", 1)):
        if round(number, digits) < 1000:
            return f"{number:.{digits}f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def human_time(seconds: float) -> str:
    """`0:42`, `12:05`, `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
