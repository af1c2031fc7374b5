"""The supervisor of one node's ranks: torch's elastic agent, told when to stop and asked what happened.

torch's agent starts the processes, polls them, restarts them and waits for other nodes. Three things are done here in
its place, because they decide what the person sees when a run fails:

- before anything is stopped, it is noted which ranks ended by themselves and when each was last seen alive; afterwards
  a rank that the agent killed could not be told from one that crashed;
- ranks are stopped as whole process groups, by a ladder of signals with a bounded wait, and whatever a rank had
  started (data loader workers) does not outlive it;
- a rank that recorded its exception but does not end (a thread that waits for a peer) counts as failed after a grace
  period, where polling alone would wait forever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from drivetrain.engine.launch.failure import RankFailure, read_error
from drivetrain.engine.launch.relay import Relay, console
from drivetrain.engine.launch.spec import LaunchSpec

_SETTLE = 0.05  # seconds between the first sign of a failure and the judgement of who failed by himself
_REAP = 5.0  # seconds to wait for a killed process: one in an uninterruptible sleep may never go


@dataclass(kw_only=True)
class Attempt:
    """The processes of one start of all ranks of this node, and when each was last seen alive."""

    ranks: Sequence[int]
    processes: Sequence[subprocess.Popen[bytes]]
    error_files: Sequence[Path]
    alive_at: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.alive_at = [time.time()] * len(self.processes)

    def look(self) -> list[int | None]:
        """Exit codes by local rank, `None` for those that run; remembers when they were seen running."""
        codes = [process.poll() for process in self.processes]
        now = time.time()
        for local_rank, code in enumerate(codes):
            if code is None:
                self.alive_at[local_rank] = now
        return codes

    def stuck(self, patience: float) -> bool:
        """Whether a rank recorded its exception more than `patience` seconds ago and still runs."""
        latest = time.time() - patience
        return any(
            process.poll() is None and file.exists() and file.stat().st_mtime < latest
            for process, file in zip(self.processes, self.error_files, strict=True)
        )

    def failures(self, codes_before: Sequence[int | None], stopped_at: float) -> list[RankFailure]:
        """How the ranks ended, after `stop`. `codes_before`: the exit codes seen just before it, at `stopped_at`."""
        found = []
        for local_rank, process in enumerate(self.processes):
            if process.poll() == 0:
                continue
            file = self.error_files[local_rank]
            found.append(
                RankFailure(
                    rank=self.ranks[local_rank],
                    pid=process.pid,
                    exit_code=-signal.SIGKILL if process.returncode is None else process.returncode,
                    alive_at=self.alive_at[local_rank],
                    stopped_at=stopped_at if codes_before[local_rank] is None else None,
                    error=read_error(file),
                    fault=_read(fault_file(file)),
                )
            )
        return found


def fault_file(error_file: Path) -> Path:
    """Where a rank's fault handler writes, beside its error file."""
    return error_file.with_name(error_file.name + ".fault")


def stop(processes: Sequence[subprocess.Popen[bytes]], first: signal.Signals, grace: float) -> None:
    """End processes and all that they started: `first`, then SIGTERM, then SIGKILL, each as far as it is needed.

    Each process leads a process group of its own. Returns when all have ended, at the latest after `grace` seconds
    and a few more for the kernel to reap what was killed.
    """
    ladder = [(first, grace)]
    if first is not signal.SIGTERM and first is not signal.SIGKILL:
        # A rank inside a collective cannot run its handler for SIGINT; the default action of SIGTERM needs none.
        ladder = [(first, grace / 2), (signal.SIGTERM, grace / 2)]
    for number, patience in [*ladder, (signal.SIGKILL, _REAP)]:
        running = [process for process in processes if process.poll() is None]
        for process in running:
            _signal_group(process.pid, number)
        _wait(running, patience)
    for process in processes:
        _signal_group(process.pid, signal.SIGKILL)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # the group is empty, or (macOS) holds nothing but a process about to be reaped


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class RankLogs(LogsSpecs):  # type: ignore[misc, unused-ignore]
    """Decides for each rank and stream: inherited by the rank, relayed with a prefix, kept in a file, or dropped."""

    def __init__(self, spec: LaunchSpec, scratch: Path, relay: Relay, added: Mapping[str, str]) -> None:
        """`scratch`: a folder for error files; `added`: variables that every rank gets."""
        super().__init__(log_dir=str(scratch))
        self._spec = spec
        self._scratch = scratch
        self._relay = relay
        self._added = dict(added)

    @property
    def root_log_dir(self) -> str:
        """The folder of the error files."""
        return str(self._scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The destinations of the ranks that are about to start; completes their environments."""
        stdouts, stderrs, error_files = {}, {}, {}
        for local_rank, environment in envs.items():
            rank = int(environment["RANK"])
            error_file = self._scratch / f"rank{rank}.error.json"
            for old in (error_file, fault_file(error_file)):
                old.unlink(missing_ok=True)
            environment.update(self._added)
            environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            error_files[local_rank] = str(error_file)
            stdouts[local_rank] = self._destination(rank, "stdout")
            stderrs[local_rank] = self._destination(rank, "stderr")
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=error_files)

    def _destination(self, rank: int, stream: str) -> str:
        """A path to write to; empty where the rank inherits the stream of the launcher."""
        log = None
        if self._spec.log_dir is not None:
            log = rank_log(self._spec.log_dir, rank, stream)
            log.parent.mkdir(parents=True, exist_ok=True)
        shown = rank == 0 or stream == "stderr" or self._spec.all_output
        if log is None and rank == 0:
            return ""  # rank 0 keeps the terminal: a live progress bar works
        if log is None and not shown:
            return os.devnull
        return self._relay.open(
            f"rank{rank}.{stream}",
            show=console(1 if stream == "stdout" else 2) if shown else None,
            prefix="" if rank == 0 else f"[rank{rank}] ",
            log=log,
        )


def rank_log(log_dir: Path, rank: int, stream: str) -> Path:
    """The log file of a rank's `stdout` or `stderr`."""
    return log_dir / f"rank{rank}" / f"{stream}.log"


class RankAgent(LocalElasticAgent):  # type: ignore[misc, unused-ignore]
    """torch's agent for local processes, with the three differences that the module's docstring names.

    `attempts` holds, for each start that failed, the failures of its ranks.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogsSpecs,
        *,
        grace: float,
        on_failure: Callable[[Sequence[RankFailure], int], None],
    ) -> None:
        """`on_failure(failures, starts)` is called after each failed start, once all ranks have ended."""
        super().__init__(spec, logs)
        self.attempts: list[list[RankFailure]] = []
        self._grace = grace
        self._on_failure = on_failure
        self._attempt: Attempt | None = None

    def end(self, first: signal.Signals = signal.SIGTERM, grace: float | None = None) -> None:
        """End all ranks of this node, if any run."""
        if self._attempt is not None:
            stop(self._attempt.processes, first, self._grace if grace is None else grace)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert isinstance(context, SubprocessContext)  # what the agent makes for a command line
        order = sorted(context.subprocess_handlers)
        self._attempt = Attempt(
            ranks=[worker_group.workers[local_rank].global_rank for local_rank in order],
            processes=[context.subprocess_handlers[local_rank].proc for local_rank in order],
            error_files=[Path(context.error_files[local_rank]) for local_rank in order],
        )
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        attempt = self._attempt
        assert attempt is not None
        codes = attempt.look()
        if any(codes) or attempt.stuck(self._grace):
            time.sleep(_SETTLE)
            codes = attempt.look()
            stopped_at = time.time()
            self.end()
            self.attempts.append(attempt.failures(codes, stopped_at))
            self._on_failure(self.attempts[-1], len(self.attempts))
        elif None in codes:
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        self.end(death_sig)
        super()._shutdown(death_sig, *args, **kwargs)
