"""One collective as its ranks must agree on it, and the errors that say that they don't, or that one is lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.mesh import Axis
from drivetrain.comm.shared_memory import IssuedCall


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all ranks of the axis must agree on for one exchange."""

    axis: Axis
    op: str
    detail: str  # the operation with its argument, as in "all_reduce sum"
    dtype: torch.dtype

    def error(self, reason: str, peer: int | None) -> CollectiveError:
        """``reason`` as an error that names ``peer``, a rank of the axis."""
        rank = self.axis.world.rank
        who = None if peer is None else self.axis.ranks[peer]
        return CollectiveError(reason, op=self.op, axis=self.axis.name, rank=rank, peer=who)

    def mismatch(self, mine: IssuedCall, theirs: IssuedCall, peer: int) -> CollectiveError:
        """The error of ranks that issued different collectives."""
        who = self.axis.ranks[peer]
        return self.error(
            f"the ranks issued different collectives. Here, number {mine.number} on this axis is "
            f"'{mine.label}', which takes {mine.nbytes} bytes of {mine.dtype} from rank {who}. "
            f"Rank {who} issued '{theirs.label}' as number {theirs.number}, with {theirs.nbytes} bytes of "
            f"{theirs.dtype}. "
            "All ranks of an axis must issue the same collectives on tensors of the same size, in the same order.",
            peer,
        )
