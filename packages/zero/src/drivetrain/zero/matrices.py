"""Whole matrices for optimizers that are made of slices: each matrix meets on one rank, is worked on there, and leaves.

The problem: what Muon does to a matrix depends on all of it, and ranks hold slices. Gathering every matrix everywhere
would do the same expensive work on every rank. The idea: matrices are dealt out to ranks by the work that they make,
slices travel to their matrix's owner in one all-to-all, and the slices of the result come back in another.

Invariant: who owns what, and the order of everything on the wire, follows from the layout alone, so ranks agree without
a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    load, owners = [0] * ranks, [0] * len(work)
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        owners[index] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[index]] += work[index]
    return owners


class SlicedMatrices:
    """A `drivetrain.kernels.MatrixExchange` over the shards of ``axis``.

    Args:
        matrices: by the id of the slice that the optimizer has as its parameter.
        axis: the ranks.
    """

    def __init__(self, matrices: Mapping[int, Matrix], axis: Axis) -> None:
        self._matrices = matrices
        self._axis = axis

    def shape(self, param: torch.Tensor) -> torch.Size:
        return self._matrices[id(param)].shape

    def map_whole(
        self,
        params: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> list[torch.Tensor]:
        matrices = [self._matrices[id(param)] for param in params]
        owners = deal([matrix.work for matrix in matrices], self._axis.size)
        mine = [matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == self._axis.rank]
        ranks = range(self._axis.size)
        held = [[value for value, owner in zip(values, owners, strict=True) if owner == rank] for rank in ranks]
        wholes = [values[0].new_empty(matrix.numel) for matrix in mine]
        # Views of the wholes that are to be filled, and afterwards sent back, by the rank that has that slice.
        places = [
            [_part(whole, matrix.piece(rank)) for whole, matrix in zip(wholes, mine, strict=True)] for rank in ranks
        ]
        longest = max(
            sum(matrix.piece(rank).numel for matrix, owner in zip(matrices, owners, strict=True) if owner == target)
            for rank in ranks
            for target in ranks
        )
        self._swap(held, places, longest)
        done = function([whole.view(matrix.shape) for whole, matrix in zip(wholes, mine, strict=True)])
        for whole, result in zip(wholes, done, strict=True):
            whole.copy_(result.reshape(-1))
        found = [torch.empty_like(value) for value in values]
        wanted = [[result for result, owner in zip(found, owners, strict=True) if owner == rank] for rank in ranks]
        self._swap(places, wanted, longest)
        return found

    def _swap(self, outgoing: list[list[torch.Tensor]], incoming: list[list[torch.Tensor]], longest: int) -> None:
        """Send ``outgoing[r]`` to each rank r, and fill ``incoming[r]`` with what it sends: flat tensors, in order."""
        like = next(tensor for side in (*outgoing, *incoming) for tensor in side)
        sent = like.new_zeros(self._axis.size, longest)
        for row, tensors in zip(sent, outgoing, strict=True):
            if tensors:
                flat = torch.cat(tensors)
                row[: flat.numel()].copy_(flat)
        came = torch.empty_like(sent)
        all_to_all(came.view(-1), sent.view(-1), self._axis, purpose="matrices of the optimizer step").wait()
        for row, tensors in zip(came, incoming, strict=True):
            ends = accumulate(tensor.numel() for tensor in tensors)
            for tensor, end in zip(tensors, ends, strict=True):
                tensor.copy_(row[end - tensor.numel() : end])


def _part(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    return whole[piece.start : piece.start + piece.numel]
