"""Turns a hang into an error that tells what every rank of the axis does.

Problem: a rank that waits in vain knows nothing but that. Where the others are can't be asked by collectives, which are
what hangs, and a rank that computes, sleeps or loops looks into no mailbox.
Idea: the backend ends a wait that makes no progress for ``timeout``. The rank that was waiting then asks the others of
the axis through the store that they met in, and each has a thread that answers for it: what it is blocked in or issued
last, and in which line of the program it is. The first rank that asks collects the answers for all.
Invariants:

- while collectives go on, nothing is sent: the thread looks for questions only once this rank has begun or completed
  none for a quarter of ``timeout``;
- the thread holds notes (``trail.py``) and a connection to the store, nothing that keeps axes or groups alive; it ends
  when the mesh and its axes are dropped, and at exit;
- a rank that gives up says so before it raises, so that others can quote it though it may be gone.

On backends whose waits don't block the host (NCCL), the thread looks for collectives that the device does not get
through, logs the report, and lets every further collective raise it; ending the process is left to torch's own
watchdog, which comes later. For that, ``timeout`` is cut to nine tenths there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final

from torch.distributed.distributed_c10d import _get_default_store

from drivetrain.comm.mailbox import Mailbox
from drivetrain.comm.place import place_of
from drivetrain.comm.report import RankState, hang_text
from drivetrain.comm.trail import Issued, Trail

_LOG = logging.getLogger("drivetrain.comm")

_LOOK_SECONDS: Final = 0.02  # how often a rank that asked looks for answers
_QUOTED: Final = 300  # characters of a failure that others quote
_ENQUEUED: Final = 4096  # collectives that are remembered until a device gets through them


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How patient a watch is, in seconds."""

    timeout: float

    @property
    def quiet(self) -> float:
        """Without collectives for that long, a rank looks for questions."""
        return self.timeout / 4

    @property
    def tick(self) -> float:
        """Between two looks."""
        return min(max(self.timeout / 20, 0.05), 5.0)

    @property
    def patience(self) -> float:
        """How long answers are waited for after nothing came from a peer."""
        return min(max(self.timeout / 2, 1.0), 15.0)

    @property
    def moment(self) -> float:
        """The same after a connection was lost: a rank that gave up tells so at once, one that died never will."""
        return 0.25


@dataclass(frozen=True)
class _Account:
    """One axis, and where its ranks talk."""

    trail: Trail
    mailbox: Mailbox


@dataclass(frozen=True)
class _Enqueued:
    """A collective that a device still has to get through."""

    account: _Account
    issued: Issued
    over: Callable[[], bool]


class Reporter:
    """Asks other ranks, and answers them, about all axes of a mesh.

    Args:
        rank: this process.
        thread: the thread whose place in the program is told.
        pace: how patient it is.
    """

    def __init__(self, rank: int, thread: int, pace: Pace) -> None:
        self._rank = rank
        self._thread = thread
        self.pace = pace
        self._accounts: list[_Account] = []
        self._enqueued: deque[_Enqueued] = deque(maxlen=_ENQUEUED)
        self._device_since = perf_counter()

    def follow(self, trail: Trail, store: Any) -> Mailbox:
        """Answer for ``trail`` too. Returns where its ranks talk."""
        account = _Account(trail, Mailbox(store, trail.token, self._rank))
        self._accounts.append(account)
        return account.mailbox

    @property
    def beats(self) -> int:
        """Grows with every collective that is issued or completed."""
        return sum(account.trail.issued + account.trail.completed for account in self._accounts)

    def answer(self, quiet: float) -> None:
        """Answer what was asked since the last time; this rank has done nothing for ``quiet`` seconds."""
        for account in self._accounts:
            asked = account.mailbox.asked()
            if asked > account.trail.answered:
                account.trail.answered = asked
                account.mailbox.tell(self._state(account.trail, asked, quiet).to_json())

    def give_up(self, trail: Trail, issued: Issued, failure: str, *, late: bool) -> None:
        """Let the others, of all axes, know why this rank gives one up; it may be gone when they ask."""
        trail.failed = trail.failed or " ".join(failure.split())[:_QUOTED]
        trail.late = trail.late or late
        for account in self._accounts:
            state = self._state(account.trail, account.trail.answered, 0.0, (trail, issued))
            account.mailbox.tell(replace(state, failed=trail.failed, late=trail.late).to_json())

    def explain(self, trail: Trail, issued: Issued, reason: str, *, late: bool) -> str:
        """``reason``, and what all ranks of the axis do. Takes as long as the slowest answer, within bounds."""
        mailbox = self._account(trail).mailbox
        try:
            self.give_up(trail, issued, reason, late=late)
            mine = self._state(trail, trail.answered, 0.0, (trail, issued))
            first = mailbox.ask() == 1
            states = self._collect(mine, trail, mailbox) if first else self._collected(trail, mailbox)
        except RuntimeError as error:
            return f"{reason}. What the other ranks do can't be asked: {str(error).splitlines()[0]}"
        states[self._rank] = replace(mine, failed=None)
        return f"{reason}. {hang_text(trail.title, issued.number, issued.told, states)}"

    def _account(self, trail: Trail) -> _Account:
        return next(account for account in self._accounts if account.trail is trail)

    def _collect(self, mine: RankState, trail: Trail, mailbox: Mailbox) -> dict[int, RankState | None]:
        """Wait for the answers of all ranks, and leave them for the others that ask."""
        states: dict[int, RankState | None] = {**dict.fromkeys(trail.ranks), self._rank: mine}
        start, late = perf_counter(), mine.late
        while True:
            for rank in [rank for rank, state in states.items() if state is None]:
                text = mailbox.told(rank)
                if text is not None:
                    states[rank] = state = RankState.from_json(text)
                    late = late or state.late
            patience = self.pace.patience if late else self.pace.moment
            if None not in states.values() or perf_counter() - start > patience:
                break
            time.sleep(_LOOK_SECONDS)
        mailbox.publish(
            json.dumps({rank: None if state is None else state.to_json() for rank, state in states.items()})
        )
        return states

    def _collected(self, trail: Trail, mailbox: Mailbox) -> dict[int, RankState | None]:
        """What the first rank that asked has found."""
        start = perf_counter()
        while perf_counter() - start < self.pace.patience + 1.0:
            text = mailbox.published()
            if text is not None:
                found = json.loads(text).items()
                return {int(rank): None if state is None else RankState.from_json(state) for rank, state in found}
            time.sleep(_LOOK_SECONDS)
        return dict.fromkeys(trail.ranks)

    def _state(self, trail: Trail, ask: int, quiet: float, failing: tuple[Trail, Issued] | None = None) -> RankState:
        """What this rank does, told to the ranks of ``trail``; ``failing``: the collective that has just failed."""
        trails = [trail, *(account.trail for account in self._accounts if account.trail is not trail)]
        # Each is read once: the thread that waits goes on meanwhile.
        blocked = next(((each, issued, each.since) for each in trails if (issued := each.waiting) is not None), None)
        if failing is not None:
            blocked = *failing, failing[0].since if failing[0].waiting is failing[1] else perf_counter()
        seconds = quiet if blocked is None else perf_counter() - blocked[2]
        return RankState(
            ask=ask,
            issued=trail.issued,
            recent={issued.number: issued.label for issued in tuple(trail.recent)},
            waits="" if blocked is None else f"number {blocked[1].number} of {blocked[0].title}, {blocked[1].told}",
            waits_here=blocked[1].number if blocked is not None and blocked[0] is trail else None,
            seconds=seconds,
            where=place_of(self._thread),
            failed=trail.failed,
            late=trail.late,
        )

    # what a device works off ------------------------------------------------------------------------------------------

    def enqueued(self, trail: Trail, issued: Issued, over: Callable[[], bool]) -> None:
        """The device will get to ``issued``; ``over`` asks whether it has."""
        self._enqueued.append(_Enqueued(self._account(trail), issued, over))

    def watch_device(self, now: float) -> None:
        """Report the collective that the device has not got through for too long, once."""
        while self._enqueued and self._enqueued[0].over():
            self._enqueued.popleft()
            self._device_since = now
        if not self._enqueued:
            self._device_since = now
        elif now - self._device_since > self.pace.timeout:
            stuck = self._enqueued[0]
            self._enqueued.clear()
            reason = f"the device has not completed it for {self.pace.timeout:g} s"
            report = self.explain(stuck.account.trail, stuck.issued, reason, late=True)
            stuck.account.trail.failed = report
            _LOG.error("rank %d: %s: %s", self._rank, stuck.issued.op, report)


class Attendant:
    """Answers for a rank that issues nothing; does nothing for one that does."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._beats = -1
        self._since = perf_counter()

    def look(self, now: float) -> None:
        """Called now and then, at the time ``now`` of ``perf_counter``. Raises a RuntimeError if the store is gone."""
        beats = self._reporter.beats
        if beats != self._beats:
            self._beats, self._since = beats, now
        self._reporter.watch_device(now)
        if now - self._since >= self._reporter.pace.quiet:
            self._reporter.answer(now - self._since)


def _attend(attendant: Attendant, tick: float, stop: threading.Event) -> None:
    """The thread."""
    with contextlib.suppress(RuntimeError):  # without the store nobody can ask
        while not stop.wait(tick):
            attendant.look(perf_counter())


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # which may be the one that collects garbage
        thread.join(timeout=2.0)


class Watch:
    """What guards the axes of one mesh. Held by them and by the mesh.

    Attributes:
        timeout: seconds without progress after which a collective fails.
    """

    def __init__(self, rank: int, timeout: float) -> None:
        self.timeout = timeout
        self.reporter = Reporter(rank, threading.get_ident(), Pace(timeout=timeout))
        self._store: Any = None

    def follow(self, trail: Trail) -> Mailbox:
        """Answer for an axis too, whose token is agreed on. Returns where its ranks talk.

        The first call starts the thread.
        """
        if self._store is None:
            store: Any = _get_default_store()
            self._store = store.clone()  # its own connection: others may be blocked in theirs
            stop = threading.Event()
            work = (Attendant(self.reporter), self.reporter.pace.tick, stop)
            thread = threading.Thread(target=_attend, args=work, name="drivetrain watch", daemon=True)
            weakref.finalize(self, _end, stop, thread)
            thread.start()
        return self.reporter.follow(trail, self._store)
