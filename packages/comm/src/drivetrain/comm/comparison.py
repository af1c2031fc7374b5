"""Compares what all ranks have issued, one collective after the other: `Safeguards.check`.

Problem: where ranks part, the backend shows two of them at best (NCCL none), and only once data don't meet.
Idea: every rank leaves what it issues in the store, and reads what all others left before it waits. All ranks read the
same, so all come to the same verdict, and each raises it.
Invariants: issuing never blocks, as streams of collectives on several axes may be interleaved in different ways on
different ranks; what a rank left is deleted once all have said, in what they left later, that they have read it.
"""

from __future__ import annotations

import time
from typing import Final

from drivetrain.comm.mailbox import Mailbox
from drivetrain.comm.trail import Issued, Trail

_FIRST_SLEEP: Final = 1e-4
_LONGEST_SLEEP: Final = 5e-3


class AbsentError(RuntimeError):
    """Ranks did not issue a collective in time.

    Attributes:
        ranks: which.
    """

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"ranks {ranks} did not issue it")
        self.ranks = ranks


class Comparison:
    """The comparison on one axis.

    Args:
        trail: of the axis.
        mailbox: where its ranks leave their calls.
        timeout: seconds that a rank may be waited for.
    """

    def __init__(self, trail: Trail, mailbox: Mailbox, timeout: float) -> None:
        self._trail = trail
        self._mailbox = mailbox
        self._timeout = timeout
        self._compared = 0
        self._kept = 0  # the first call of this rank that is still in the store
        self._difference: tuple[int, dict[int, str]] | None = None

    def post(self, issued: Issued) -> None:
        """Let the others know."""
        self._mailbox.leave_call(issued.number, f"{self._compared} {issued.label}")

    def difference(self, upto: int, *, wait: bool = True) -> tuple[int, dict[int, str]] | None:
        """The first collective up to this number that is not the same on all ranks: its number, and labels by rank.

        Args:
            wait: until all ranks have issued them. Otherwise those count that all have issued by now.

        Raises:
            AbsentError: a rank did not within the timeout.
        """
        while self._difference is None and self._compared <= upto:
            number = self._compared
            calls = self._await(number) if wait else self._mailbox.calls(number, self._trail.ranks)
            if calls is None:
                return None
            read, labels = zip(*(call.split(" ", 1) for call in calls), strict=True)
            if len(set(labels)) > 1:
                self._difference = number, dict(zip(self._trail.ranks, labels, strict=True))
            self._compared += 1
            self._forget(min(map(int, read)))
        return self._difference

    def _forget(self, upto: int) -> None:
        """Delete this rank's calls that all ranks have read."""
        for number in range(self._kept, upto):
            self._mailbox.forget_call(number)
        self._kept = max(self._kept, upto)

    def _await(self, number: int) -> list[str]:
        deadline, pause = time.monotonic() + self._timeout, _FIRST_SLEEP
        while True:
            calls = self._mailbox.calls(number, self._trail.ranks)
            if calls is not None:
                return calls
            if time.monotonic() > deadline:
                raise AbsentError(self._mailbox.absent(number, self._trail.ranks))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
