"""Which rank failed first, and what to say about it.

When one rank fails, the others follow within a moment: their collectives lose a peer, or the launcher ends them. The
person who reads the terminal wants the one cause. It is found from what each rank left behind:

1. a rank that the launcher had to stop is a consequence;
2. an exception that says a peer was lost ("Connection closed by peer") is a consequence as long as there is any other
   candidate: a death by signal or another exception;
3. of what is left, the earliest is the cause. Exceptions carry the time at which they were raised. A death by signal
   is seen by polling, so its time is the last moment at which the rank was seen alive.

Pure: it reads records, it starts and stops nothing.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOST_PEER = (
    "will not do its part: its process has ended",
    "will not do its part: it gave up on a call",
    "will not do its part: it closed the group",
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "lost peer",
    "lost connection",
    "peer is gone",
    "remote process exited",  # nccl: "... or there was a network error"
    "failed to recv, got 0 bytes",  # the store, when its host is gone
    "failed to connect to",
    "connection was likely closed",
    "application timeout caused pair closure",
)
"""Fragments, in lower case, of the messages by which shared memory, gloo, NCCL and the store report that another rank
is gone."""

_FAULT_LINES = 40
_NOT_OF_THE_SCRIPT = ("<frozen runpy>", "launch/bootstrap.py", "Extension modules:")
_OTHERS_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An exception (or `sys.exit` with a status) that left a rank's script, as its bootstrap wrote it down."""

    type: str
    message: str
    traceback: str
    chain: tuple[str, ...]
    time: float
    exit: str | None = None

    @property
    def lost_peer(self) -> bool:
        """Whether it, or one of its causes, only says that another rank went away."""
        return any(fragment in link.lower() for link in self.chain for fragment in _LOST_PEER)

    @property
    def summary(self) -> str:
        """The exception in one line of bounded length."""
        line = f"{self.type}: {self.message}".splitlines()[0]
        return line if len(line) <= 120 else line[:117] + "..."


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How one rank ended, when it did not end well.

    Attributes:
        exit_code: the status as `subprocess` gives it; negative for a signal.
        alive_at: seconds since the epoch, when the rank was last seen alive.
        stopped_at: seconds since the epoch, when the launcher began to end this rank; `None` if it ended by itself.
        error: the exception it recorded, if any.
        fault: what the fault handler wrote at a fatal signal, if anything.
    """

    rank: int
    pid: int
    exit_code: int
    alive_at: float
    stopped_at: float | None = None
    error: ErrorRecord | None = None
    fault: str = ""

    @property
    def time(self) -> float:
        """When it failed, in seconds since the epoch."""
        return self.alive_at if self.error is None else self.error.time

    @property
    def was_stopped(self) -> bool:
        """Whether it was well until the launcher ended it."""
        return self.stopped_at is not None and (self.error is None or self.error.time >= self.stopped_at)

    @property
    def status(self) -> int:
        """Exit status for a shell: that of the rank, or 128 + N for signal N.

        A rank that recorded its error but had to be ended by a signal has the status that the error gives.
        """
        if self.exit_code > 0:
            return self.exit_code
        if self.error is None or self.was_stopped:
            return 128 - self.exit_code
        return int(self.error.exit) if self.error.exit is not None and self.error.exit.isdecimal() else 1


def read_error(path: Path) -> ErrorRecord | None:
    """The record in an error file; `None` if there is none. Files of torch's own `@record` are understood too."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        message = data["message"]
        extra = message["extraInfo"] if isinstance(message, dict) else {}
        head = message["message"] if isinstance(message, dict) else str(message)
        kind, _, rest = head.partition(": ")
        own = data.get("drivetrain", {})
        return ErrorRecord(
            type=own.get("type", kind),
            message=own.get("message", rest),
            traceback=str(extra.get("py_callstack", head)),
            chain=tuple(own.get("chain", [head])),
            time=float(own.get("time", extra.get("timestamp", path.stat().st_mtime))),
            exit=own.get("exit"),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that the others follow from. `failures` is not empty."""

    def order(failure: RankFailure) -> tuple[int, float, int]:
        if failure.was_stopped:
            consequence = 2
        else:
            consequence = 1 if failure.error is not None and failure.error.lost_peer else 0
        return consequence, failure.time, failure.rank

    return min(failures, key=order)


def describe(failures: Sequence[RankFailure], *, nnodes: int = 1) -> str:
    """What the person sees at the end: the cause, with its traceback, and a line about the others."""
    cause = root_cause(failures)
    parts = [_cause_text(cause)]
    if cause.error is not None and cause.error.lost_peer and not cause.was_stopped:
        parts.append(_lost_peer_hint(nnodes))
    others = _others_text([failure for failure in failures if failure is not cause])
    return "\n".join([*parts, others] if others else parts)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9, `signal 99` for what has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cause_text(cause: RankFailure) -> str:
    if cause.error is not None:
        return f"rank {cause.rank} failed:\n{cause.error.traceback.rstrip()}"
    if cause.exit_code < 0:
        name = signal_name(-cause.exit_code)
        hints = {
            "SIGKILL": " (often the out-of-memory killer: check dmesg)",
            "SIGBUS": " (often shared memory that is full: check df /dev/shm)",
        }
        text = f"rank {cause.rank} (pid {cause.pid}) was killed by {name}{hints.get(name, '')}"
        return f"{text}\n{_shorten(cause.fault)}" if cause.fault else text
    return (
        f"rank {cause.rank} (pid {cause.pid}) failed: it ended with exit code {cause.exit_code} "
        "and left no Python exception behind"
    )


def _shorten(fault: str) -> str:
    lines = [line for line in fault.rstrip().splitlines() if not any(part in line for part in _NOT_OF_THE_SCRIPT)]
    if len(lines) > _FAULT_LINES:
        lines = [*lines[:_FAULT_LINES], f"  ... {len(lines) - _FAULT_LINES} more lines"]
    return "\n".join(lines)


def _lost_peer_hint(nnodes: int) -> str:
    if nnodes > 1:
        return "(It lost the connection to another rank: the cause is most likely shown on another node.)"
    return "(It lost the connection to another rank, which ended without an error: did one leave before the others?)"


def _others_text(others: Sequence[RankFailure]) -> str:
    if not others:
        return ""
    shown = [_other_text(failure) for failure in sorted(others, key=lambda failure: failure.rank)[:_OTHERS_SHOWN]]
    if len(others) > _OTHERS_SHOWN:
        shown.append(f"{len(others) - _OTHERS_SHOWN} more")
    return f"(As a consequence: {'; '.join(shown)})"


def _other_text(failure: RankFailure) -> str:
    if failure.was_stopped:
        return f"rank {failure.rank} was stopped"
    if failure.error is not None and failure.error.lost_peer:
        return f"rank {failure.rank} lost its connection"
    if failure.error is not None:
        return f"rank {failure.rank} failed with {failure.error.summary}"
    if failure.exit_code < 0:
        return f"rank {failure.rank} was killed by {signal_name(-failure.exit_code)}"
    return f"rank {failure.rank} ended with exit code {failure.exit_code}"
