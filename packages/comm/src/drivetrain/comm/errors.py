"""What can go wrong in a collective, said so that the reader knows where to look."""

from __future__ import annotations


class CollectiveError(RuntimeError):
    """A collective did not complete: a peer is gone, never came, or issued something else.

    After it the axis is broken: buffers that were in flight hold undefined values, and further collectives on the
    axis fail too.

    Attributes:
        op: the collective, as its public function is called.
        axis: the axis' name.
        rank: this process' rank in the world.
        peer: the rank in the world of the peer that most likely caused it, where known.
        purpose: what the collective was for, where its caller said so.
    """

    def __init__(
        self, reason: str, *, op: str, axis: str, rank: int, peer: int | None = None, purpose: str = ""
    ) -> None:
        super().__init__(f"{op} on axis '{axis}' failed on rank {rank}: {reason}")
        self.op = op
        self.axis = axis
        self.rank = rank
        self.peer = peer
        self.purpose = purpose
