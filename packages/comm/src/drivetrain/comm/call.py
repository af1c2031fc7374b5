"""One collective as its ranks must agree on it, and the errors that say that they don't, or that one is lost."""

from __future__ import annotations

import contextlib

from drivetrain.comm.comparison import AbsentError
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.mesh import Axis
from drivetrain.comm.report import differing, mismatch_text, ranks_text
from drivetrain.comm.trail import Issued


def timed_out(error: RuntimeError) -> bool:
    """Whether torch says that nothing came in time, rather than that something is gone."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


class Call:
    """A collective on its axis."""

    __slots__ = ("axis", "issued")

    def __init__(self, axis: Axis, issued: Issued) -> None:
        self.axis = axis
        self.issued = issued

    def error(self, reason: str, peer: int | None = None) -> CollectiveError:
        """``reason`` as an error that names ``peer``, a rank of the world."""
        axis, issued = self.axis, self.issued
        return CollectiveError(
            reason, op=issued.op, axis=axis.name, rank=axis.world.rank, peer=peer, purpose=issued.what
        )

    def mismatch(self, number: int, labels: dict[int, str]) -> CollectiveError:
        """The error of ranks that issued different collectives as ``number``: labels by rank in the world."""
        axis, issued = self.axis, self.issued
        during = issued.during if number == issued.number else ""
        text = mismatch_text(axis.trail.title, number, labels, during=during)
        with contextlib.suppress(RuntimeError):  # the store may be gone
            axis.watch.reporter.give_up(axis.trail, issued, text, late=False)
        return self.error(text, differing(labels, axis.world.rank))

    def lost(self, reason: str, peer: int | None, *, late: bool) -> CollectiveError:
        """The error of a collective that does not complete, with what all ranks do.

        Args:
            peer: the rank of the axis that it is said of, if of one.
            late: nothing came for too long. Otherwise a connection, or a rank, is gone.
        """
        axis = self.axis
        if axis.comparison is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                found = axis.comparison.difference(self.issued.number, wait=False)
                if found is not None:
                    return self.mismatch(*found)
        text = axis.watch.reporter.explain(axis.trail, self.issued, reason, late=late)
        return self.error(text, None if peer is None else axis.ranks[peer])

    def compare(self) -> None:
        """Where the mesh asks for it: block until all ranks have issued this collective, and refuse other ones."""
        comparison = self.axis.comparison
        if comparison is None:
            return
        try:
            found = comparison.difference(self.issued.number)
        except AbsentError as absent:
            reason = f"nothing came from {ranks_text(absent.ranks)} for {self.axis.watch.timeout:g} s"
            raise self.lost(reason, self.axis.ranks.index(absent.ranks[0]), late=True) from None
        if found is not None:
            raise self.mismatch(*found)
