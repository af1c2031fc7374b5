"""Collectives over a ``SharedGroup``, with the errors of this package.

Dtypes that the group does not fold (complex numbers) are gathered by it, and folded here when they are waited for.
"""

from __future__ import annotations

import torch

from drivetrain.comm.call import Call
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.reduction import Op, fold
from drivetrain.comm.shared_memory import SharedFailure, SharedGroup, SharedWork


class Shared:
    """A call under way in the group."""

    def __init__(self, call: Call, work: SharedWork) -> None:
        self._call = call
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            failure = self._work.failure
            if failure is None:
                raise
            raise _error(self._call, failure) from error


class Gathered:
    """A reduction whose pieces come unfolded."""

    def __init__(self, pending: Shared, output: torch.Tensor, pieces: list[torch.Tensor], op: Op) -> None:
        self._pending = pending
        self._output = output
        self._pieces = pieces
        self._op = op

    def wait(self) -> None:
        self._pending.wait()
        fold(self._output, self._pieces, self._op)
        self._pieces = []


def all_reduce(call: Call, group: SharedGroup, tensor: torch.Tensor, op: Op) -> Shared | Gathered:
    if group.folds(tensor.dtype):
        return Shared(call, group.all_reduce(tensor, op, label=call.issued.label))
    pieces = tensor.new_empty(call.axis.size, tensor.numel())
    pending = Shared(call, group.all_gather(pieces.view(-1), tensor, label=call.issued.label))
    return Gathered(pending, tensor, list(pieces.unbind()), op)


def all_gather(call: Call, group: SharedGroup, output: torch.Tensor, shard: torch.Tensor) -> Shared:
    return Shared(call, group.all_gather(output, shard, label=call.issued.label))


def reduce_scatter(
    call: Call, group: SharedGroup, output: torch.Tensor, input: torch.Tensor, op: Op
) -> Shared | Gathered:
    if group.folds(input.dtype):
        return Shared(call, group.reduce_scatter(output, input, op, label=call.issued.label))
    pieces = input.new_empty(call.axis.size, output.numel())
    pending = Shared(call, group.all_to_all(pieces.view(-1), input, label=call.issued.label))
    return Gathered(pending, output, list(pieces.unbind()), op)


def broadcast(call: Call, group: SharedGroup, tensor: torch.Tensor, src: int) -> Shared:
    return Shared(call, group.broadcast(tensor, src, label=call.issued.label))


def all_to_all(call: Call, group: SharedGroup, output: torch.Tensor, input: torch.Tensor) -> Shared:
    return Shared(call, group.all_to_all(output, input, label=call.issued.label))


def _error(call: Call, failure: SharedFailure) -> CollectiveError:
    if failure.peer is None:
        return call.error(failure.reason)
    who = call.axis.ranks[failure.peer]
    if failure.mine is not None and failure.theirs is not None:
        return call.mismatch(failure.mine.number, {call.axis.world.rank: failure.mine.label, who: failure.theirs.label})
    if failure.trouble == "late":
        return call.lost(f"nothing came from rank {who} for {call.axis.watch.timeout:g} s", failure.peer, late=True)
    return call.lost(f"rank {who} will not do its part: {failure.reason}", failure.peer, late=False)
