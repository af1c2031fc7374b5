"""Whole matrices for optimizers that are made of slices: each matrix meets on one rank, is worked on there, and leaves.

The problem: what Muon does to a matrix depends on all of it, and ranks hold slices. Gathering every matrix everywhere
would do the same expensive work on every rank. The idea: matrices are dealt out to ranks by the work that they make,
slices travel to their matrix's owner in one all-to-all, and the slices of the result come back in another.

Invariants: who owns what, and the order of everything on the wire, follows from the layout alone, so ranks agree
without a word. It is worked out once for the same matrices; after that a rank handles the slices that it sends or
gets, and looks at no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate

import torch

from drivetrain.comm import Axis, all_to_all
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.layout import Piece


@dataclass(frozen=True)
class Matrix:
    """A parameter as its bucket knows it."""

    bucket: Bucket
    slot_index: int

    @property
    def shape(self) -> torch.Size:
        return self.bucket.slots[self.slot_index].shape

    @property
    def numel(self) -> int:
        return self.bucket.slots[self.slot_index].numel

    @property
    def ranks(self) -> range:
        """Those that hold a part of it."""
        return self.bucket.layout.ranks_of(self.slot_index)

    def piece(self, rank: int) -> Piece:
        """What of it ``rank`` holds."""
        return self.bucket.layout.piece(self.slot_index, rank)

    @property
    def work(self) -> int:
        """Proportional to the multiplications of a product with the smaller Gram matrix."""
        short = min(self.shape) if len(self.shape) == 2 else self.shape[0]
        return self.numel * short


def deal(work: Sequence[int], ranks: int) -> list[int]:
    """An owner for each piece of work: the heaviest first, each to the rank with the least so far."""
    owners = [0] * len(work)
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, owners[index] = loads[0]
        heapreplace(loads, (load + work[index], owners[index]))
    return owners


@dataclass(frozen=True, kw_only=True)
class _Route:
    """How the slices of some matrices travel, as one rank sees it.

    Attributes:
        mine: the matrices that meet on this rank.
        sends: to each rank that needs some, which of this rank's slices.
        takes: from each rank that has some, which of ``mine`` a slice belongs to, and where in it.
        longest: the most elements that any rank sends to any other.
    """

    mine: tuple[Matrix, ...]
    sends: Mapping[int, tuple[int, ...]]
    takes: Mapping[int, tuple[tuple[int, Piece], ...]]
    longest: int


def _route(matrices: Sequence[Matrix], axis: Axis) -> _Route:
    owners = deal([matrix.work for matrix in matrices], axis.size)
    sent: Counter[tuple[int, int]] = Counter()
    sends: dict[int, list[int]] = {}
    takes: dict[int, list[tuple[int, Piece]]] = {}
    mine: list[Matrix] = []
    for index, (matrix, owner) in enumerate(zip(matrices, owners, strict=True)):
        for rank in matrix.ranks:
            piece = matrix.piece(rank)
            sent[rank, owner] += piece.numel
            if owner == axis.rank:
                takes.setdefault(rank, []).append((len(mine), piece))
        if axis.rank in matrix.ranks:
            sends.setdefault(owner, []).append(index)
        if owner == axis.rank:
            mine.append(matrix)
    return _Route(
        mine=tuple(mine),
        sends={owner: tuple(indices) for owner, indices in sends.items()},
        takes={rank: tuple(parts) for rank, parts in takes.items()},
        longest=max(sent.values(), default=0),
    )


class SlicedMatrices:
    """A `drivetrain.kernels.MatrixExchange` over the shards of ``axis``.

    Args:
        matrices: by the id of the slice that the optimizer has as its parameter.
        axis: the ranks.
    """

    def __init__(self, matrices: Mapping[int, Matrix], axis: Axis) -> None:
        self._matrices = matrices
        self._axis = axis
        self._routes: dict[tuple[int, ...], _Route] = {}

    def shape(self, param: torch.Tensor) -> torch.Size:
        return self._matrices[id(param)].shape

    def map_whole(
        self,
        params: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        route = self._route_of(params)
        wholes = [values[0].new_empty(matrix.numel) for matrix in route.mine]
        held = {rank: [values[index] for index in indices] for rank, indices in route.sends.items()}
        # Views of the wholes that are to be filled, and afterwards sent back, by the rank that has that slice.
        places = {rank: [_part(wholes[index], piece) for index, piece in parts] for rank, parts in route.takes.items()}
        self._swap(held, places, values[0].new_empty(self._axis.size, route.longest))
        done = function([whole.view(matrix.shape) for whole, matrix in zip(wholes, route.mine, strict=True)])
        for whole, result in zip(wholes, done, strict=True):
            whole.copy_(result.reshape(-1))
        found = [torch.empty_like(value) for value in values]
        wanted = {rank: [found[index] for index in indices] for rank, indices in route.sends.items()}
        self._swap(places, wanted, values[0].new_empty(self._axis.size, route.longest))
        return found

    def _route_of(self, params: Sequence[torch.Tensor]) -> _Route:
        key = tuple(map(id, params))
        if key not in self._routes:
            self._routes[key] = _route([self._matrices[id(param)] for param in params], self._axis)
        return self._routes[key]

    def _swap(
        self,
        outgoing: Mapping[int, Sequence[torch.Tensor]],
        incoming: Mapping[int, Sequence[torch.Tensor]],
        sent: torch.Tensor,
    ) -> None:
        """Send ``outgoing[r]`` to each rank r, and fill ``incoming[r]`` with what it sends: flat tensors, in order.

        ``sent`` [ranks, elements] is room for the most that any rank sends to another.
        """
        for rank, tensors in outgoing.items():
            torch.cat(list(tensors), out=sent[rank, : sum(tensor.numel() for tensor in tensors)])
        came = torch.empty_like(sent)
        all_to_all(came.view(-1), sent.view(-1), self._axis, purpose="matrices of the optimizer step").wait()
        for rank, tensors in incoming.items():
            row, ends = came[rank], accumulate(tensor.numel() for tensor in tensors)
            for tensor, end in zip(tensors, ends, strict=True):
                tensor.copy_(row[end - tensor.numel() : end])


def _part(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    return whole[piece.start : piece.start + piece.numel]
