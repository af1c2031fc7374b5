"""Run a function on several local ranks, and bring back what each returned or how it failed.

Problem: importing torch takes seconds, so a suite that spawns fresh interpreters for every distributed test is slow;
and a failure in one rank usually shows up as a hang of the others.

Idea: one fork server per test process imports torch once (``PRELOAD``); every rank is a fork of it, so a second call
starts in tens of milliseconds. The parent holds the rendezvous store (as ``torchrun``'s agent does), so the port is
never guessed and the store outlives any rank.

Invariants:

- a rank sees the environment that ``torchrun`` would give it, plus the parent's environment as it is at the call;
- a test function is found again by *file*, so it may live in a module that cannot be imported by name;
- the first failure in time is the one reported, with that rank's traceback; the ranks that fail because of it are
  named after it;
- no rank survives the call;
- what the ranks printed is printed by the parent, rank by rank, so that pytest captures it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from drivetrain_testkit.rank_process import Failure, Job, Success, run_job

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch._dynamo",  # imported lazily by the first torch optimizer: a second and a half in every rank
    "pytest",
    # Not all are installed where one package is tested alone; the fork server leaves out what it cannot import.
    "drivetrain.kernels",
    "drivetrain.comm",
    "drivetrain.zero",
    "drivetrain.engine.engine",
    "drivetrain_testkit.rank_process",
)

_GRACE_SECONDS = 10.0  # how long the others may take to fail by themselves after a first failure
_DUMP_SECONDS = 1.0  # how long a stuck rank may take to write its stacks


class RankError(RuntimeError):
    """A rank raised, died or did not finish. The text holds the traceback or the stacks of the ranks concerned.

    Attributes:
        rank: the first rank that failed, in time; the lowest one still running after a timeout.
        error_type: the qualified name of the exception's type, ``"timeout"`` or ``"exit"``.
    """

    def __init__(self, message: str, *, rank: int, error_type: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.error_type = error_type


@dataclass(frozen=True, kw_only=True)
class _Rank:
    rank: int
    process: ForkServerProcess
    job: Job

    def outcome(self) -> Success | Failure | None:
        path = Path(self.job.result_path)
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def text(self, path: str) -> str:
        return Path(path).read_text(errors="replace") if Path(path).exists() else ""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    backend: str = "gloo",
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` in ``world_size`` processes and return what they returned, by rank.

    Args:
        fn: a module-level function; its module may be one that only pytest can import.
        args: picklable.
        timeout: seconds for the whole call. On expiry the stacks of the ranks still running are in the error.
        backend: set as ``DRIVETRAIN_BACKEND`` for ``fn`` to read; nothing is initialised on its behalf.
        env: laid over the parent's environment in every rank.
        may_die: ranks whose death by a signal is part of the test: they return None.

    Raises:
        RankError: a rank raised, died, or was still running at the timeout.
    """
    if "<locals>" in fn.__qualname__:
        raise ValueError(
            f"run_ranks needs a function at module level, which a rank can find by name; got {fn.__qualname__}"
        )
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory(prefix="drivetrain-ranks-") as folder:
        ranks = [
            _start(fn, rank, world_size, args, folder, _environment(rank, world_size, store.port, backend, env))
            for rank in range(world_size)
        ]
        try:
            stuck = _join(ranks, time.monotonic() + timeout, frozenset(may_die))
            stacks = {r.rank: _stacks(r) for r in stuck}
        finally:
            for r in ranks:
                r.process.kill()
            for r in ranks:
                r.process.join()
            _echo(ranks)
        return _collect(ranks, stacks, timeout, frozenset(may_die))


def _environment(
    rank: int, world_size: int, port: int, backend: str, extra: Mapping[str, str] | None
) -> dict[str, str]:
    env = dict(os.environ)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent serves the store
        OMP_NUM_THREADS="1",
        DRIVETRAIN_BACKEND=backend,
    )
    env.update(extra or {})
    return env


def _start(
    fn: Callable[..., Any], rank: int, world_size: int, args: Sequence[Any], folder: str, env: dict[str, str]
) -> _Rank:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    base = os.path.join(folder, str(rank))
    job = Job(
        module=fn.__module__,
        file=inspect.getsourcefile(inspect.unwrap(fn)) or "",
        qualname=fn.__qualname__,
        rank=rank,
        world_size=world_size,
        pickled_args=pickle.dumps(tuple(args)),
        env=env,
        result_path=base + ".result",
        output_path=base + ".output",
        stacks_path=base + ".stacks",
    )
    process = context.Process(target=run_job, args=(job,), name=f"rank{rank}", daemon=True)
    process.start()
    return _Rank(rank=rank, process=process, job=job)


def _join(ranks: Sequence[_Rank], deadline: float, may_die: frozenset[int]) -> list[_Rank]:
    """Wait until all ended, or the deadline; after a first failure the others get a short grace. Returns those still
    running.
    """
    running = {r.process.sentinel: r for r in ranks}
    while running and time.monotonic() < deadline:
        for sentinel in connection.wait(list(running), timeout=deadline - time.monotonic()):
            ended = running.pop(sentinel)  # type: ignore[arg-type]
            ended.process.join()
            died = ended.rank in may_die and (ended.process.exitcode or 0) < 0
            if not died and not isinstance(ended.outcome(), Success):
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return list(running.values())


def _stacks(rank: _Rank) -> str:
    """Ask a running rank for the stacks of all its threads. Works while it is blocked in native code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_SECONDS
    while time.monotonic() < deadline and not rank.text(rank.job.stacks_path):
        time.sleep(0.02)
    time.sleep(0.05)
    return rank.text(rank.job.stacks_path) or "(it wrote no stacks)"


def _echo(ranks: Sequence[_Rank]) -> None:
    for r in ranks:
        for line in r.text(r.job.output_path).splitlines():
            sys.stdout.write(f"[rank {r.rank}] {line}\n")


def _collect(ranks: Sequence[_Rank], stacks: Mapping[int, str], timeout: float, may_die: frozenset[int]) -> list[Any]:
    outcomes = {r.rank: r.outcome() for r in ranks}
    failures = sorted(((o.when, r, o) for r, o in outcomes.items() if isinstance(o, Failure)), key=lambda f: f[:2])
    stuck = "".join(f"\n--- rank {rank} was still running:\n{text}" for rank, text in stacks.items())
    if failures:
        _, rank, first = failures[0]
        later = "".join(f"\n--- then rank {r} failed: {f.summary}" for _, r, f in failures[1:])
        raise RankError(f"rank {rank} raised:\n{first.traceback}{later}{stuck}", rank=rank, error_type=first.error_type)
    for r in ranks:
        code = r.process.exitcode
        if outcomes[r.rank] is None and r.rank not in stacks and not (r.rank in may_die and (code or 0) < 0):
            how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with status {code}"
            tail = r.text(r.job.output_path)[-4000:]
            raise RankError(f"rank {r.rank} {how} and returned nothing.\n{tail}{stuck}", rank=r.rank, error_type="exit")
    if stacks:
        names = ", ".join(str(rank) for rank in stacks)
        raise RankError(
            f"rank {names} of {len(ranks)} still ran after {timeout:g} s.{stuck}",
            rank=min(stacks),
            error_type="timeout",
        )
    return [o.value if isinstance(o, Success) else None for o in outcomes.values()]
