"""Start a job, watch over it, and say how it ended: the body of `drivetrain run`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from drivetrain.engine.launch.agent import RankAgent, RankLogs, rank_log
from drivetrain.engine.launch.failure import RankFailure, describe, root_cause
from drivetrain.engine.launch.plan import ROLE, added_environment, command, dry_run
from drivetrain.engine.launch.relay import Relay
from drivetrain.engine.launch.rendezvous import Roster, listen
from drivetrain.engine.launch.spec import LaunchError, LaunchSpec, preflight

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # read by torch's process context

Notice = Callable[[str], None]
"""Told, in one line each, what the person should know while the job runs."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: 0, the status of the rank that failed first, or 128 + N if signal N ended it or the launcher.
        message: what to show; empty after a success.
        failures: of the last start, the ranks that did not end well.
    """

    exit_code: int
    message: str = ""
    failures: tuple[RankFailure, ...] = ()


def launch(spec: LaunchSpec, *, notice: Notice = lambda _: None) -> Outcome:
    """Run a job to its end.

    Must be called from the main thread, where signals arrive: SIGINT, SIGTERM, SIGHUP and SIGQUIT are handed on to the
    ranks, which are given `spec.grace` seconds.

    Raises:
        LaunchError: it could not be started.
    """
    preflight(spec)
    listener = listen(spec) if spec.node_rank == 0 else None
    with contextlib.ExitStack() as stack:
        if listener is not None:
            stack.callback(listener.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="drivetrain-run-")))
        relay = stack.enter_context(Relay(scratch))
        stack.enter_context(_quiet_elastic())
        stack.enter_context(_signals())

        def on_failure(failures: Sequence[RankFailure], starts: int) -> None:
            if starts <= spec.max_restarts:
                again = f"starting all ranks again ({starts} of {spec.max_restarts})"
                notice(f"{describe(failures, nnodes=spec.nnodes)}\n{again}")

        roster = Roster(spec, uuid.uuid4().hex, listener=listener, notice=notice)
        executable, *arguments = command(spec)
        agent = RankAgent(
            WorkerSpec(
                role=ROLE,
                local_world_size=spec.nproc,
                rdzv_handler=roster,
                entrypoint=executable,
                args=tuple(argument.replace("$", "$$") for argument in arguments),  # the agent fills in $-templates
                max_restarts=spec.max_restarts,
            ),
            RankLogs(spec, scratch, relay, added_environment(spec, os.environ)),
            grace=spec.grace,
            on_failure=on_failure,
        )
        # Registered last, so that it runs first: whatever happens above, no rank is left behind.
        stack.callback(agent.end, signal.SIGKILL, 0.0)
        outcome = _run(agent, spec)
    _append_tracebacks(spec, outcome.failures)
    return outcome


def plan_text(spec: LaunchSpec) -> str:
    """What `launch` would run on this node, as text; starts nothing.

    Raises:
        LaunchError: it could not be started.
    """
    preflight(spec)
    if spec.node_rank == 0:
        with listen(spec) as listener:
            port = listener.getsockname()[1]
    else:
        port = Roster(spec, "").port
    return dry_run(spec, port=port, run_id=uuid.uuid4().hex, environ=os.environ)


def _run(agent: RankAgent, spec: LaunchSpec) -> Outcome:
    try:
        result = agent.run()
    except (KeyboardInterrupt, SignalException) as error:
        number = error.sigval if isinstance(error, SignalException) else signal.SIGINT
        name = signal.Signals(number).name
        return Outcome(exit_code=128 + number, message=f"stopped by {name}; all ranks have ended")
    except DistError as error:
        raise LaunchError(f"the store of the launchers was lost: {error}") from error
    if not result.is_failed():
        return Outcome(exit_code=0)
    failures = agent.attempts[-1]
    message = describe(failures, nnodes=spec.nnodes)
    if spec.log_dir is not None:
        message += f"\n(The output of every rank is in {spec.log_dir}.)"
    return Outcome(exit_code=root_cause(failures).status, message=message, failures=tuple(failures))


def _append_tracebacks(spec: LaunchSpec, failures: Sequence[RankFailure]) -> None:
    """A rank does not print the exception that it records, so its log gets it here."""
    if spec.log_dir is None:
        return
    for failure in failures:
        if failure.error is not None:
            with rank_log(spec.log_dir, failure.rank, "stderr").open("a", encoding="utf-8") as file:
                file.write(failure.error.traceback)


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the agent's own log to itself: what it has to say, `describe` says."""
    logger = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    propagate = logger.propagate
    logger.addHandler(silence)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silence)
        logger.propagate = propagate


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let the agent handle the signals that end a job, but none that is ignored (`nohup` ignores SIGHUP)."""
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("a job must be launched from the main thread: only there do signals arrive.")
    before = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    variable = os.environ.get(_SIGNALS_VARIABLE)
    os.environ[_SIGNALS_VARIABLE] = ",".join(name for name in _SIGNALS if before[name] is not signal.SIG_IGN)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
        if variable is None:
            del os.environ[_SIGNALS_VARIABLE]
        else:
            os.environ[_SIGNALS_VARIABLE] = variable
