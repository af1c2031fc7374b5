"""Who owns which elements of a bucket: pure arithmetic, no tensors and no processes.

The problem: parameters of any size (also smaller than the number of ranks, also empty) must be split evenly, moved by
one collective, and handed to an optimizer parameter by parameter.

The idea: a bucket lays its parameters end to end, each starting at a multiple of ``ALIGNMENT`` elements, pads the whole
to ``world_size`` equal shards, and gives rank r the r-th shard. A rank's share of one parameter (its `Piece`) is then
the overlap of two intervals: one contiguous run of the flattened parameter, perhaps empty.

Invariants: shards cover every element exactly once; every shard has the same length; parameter starts and shard
boundaries are multiples of ``ALIGNMENT``. The last one is more than neatness: vectorised loops treat the end of an
array differently from its middle, so two ways of cutting the same parameter give the same bits only if every cut
falls on a full vector. 64 elements are four AVX-512 vectors of fp32, the longest unrolled body in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 64


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Piece:
    """One rank's part of one parameter.

    ``start`` and ``numel`` are elements of the flattened parameter; ``shard_offset`` is where the part begins in the
    rank's shard. An empty piece has ``numel`` 0.
    """

    start: int
    numel: int
    shard_offset: int


@dataclass(frozen=True)
class BucketLayout:
    """Parameters of ``numels`` elements laid end to end and cut into ``world_size`` equal shards."""

    numels: tuple[int, ...]
    world_size: int
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"a bucket is split over at least one rank, got world_size={self.world_size}")
        if any(n < 0 for n in self.numels):
            raise ValueError(f"parameter sizes cannot be negative, got {self.numels}")

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the bucket, in elements."""
        starts, position = [], 0
        for numel in self.numels:
            starts.append(position)
            position += round_up(numel, self.alignment)
        return tuple(starts)

    @cached_property
    def shard_numel(self) -> int:
        """Elements per rank, padding included."""
        used = self.starts[-1] + round_up(self.numels[-1], self.alignment) if self.numels else 0
        return round_up(-(-used // self.world_size), self.alignment)

    @property
    def padded_numel(self) -> int:
        """Elements of the whole bucket, padding included."""
        return self.shard_numel * self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """First and one-past-last element of ``rank``'s shard within the bucket."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of this bucket")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def piece(self, index: int, rank: int) -> Piece:
        """The part of parameter ``index`` that lies in ``rank``'s shard."""
        low, high = self.shard_range(rank)
        start, numel = self.starts[index], self.numels[index]
        begin, end = max(low, start), min(high, start + numel)
        if begin >= end:
            return Piece(start=0, numel=0, shard_offset=0)
        return Piece(start=begin - start, numel=end - begin, shard_offset=begin - low)

    def ranks_of(self, index: int) -> range:
        """The ranks that have a part of parameter ``index``: neighbours, none for an empty parameter."""
        start, numel = self.starts[index], self.numels[index]
        if numel == 0:
            return range(0)
        return range(start // self.shard_numel, (start + numel - 1) // self.shard_numel + 1)


def fill_buckets(numels: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a sequence of sizes into consecutive runs of at most ``limit`` elements.

    A single size above the limit gets a run of its own: a parameter is never split between buckets.
    Returns the indices of each run; every index appears exactly once, in order.
    """
    if limit < 1:
        raise ValueError(f"a bucket holds at least one element, got a limit of {limit}")
    runs: list[list[int]] = []
    filled = 0
    for index, numel in enumerate(numels):
        if not runs or filled + numel > limit:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += numel
    return runs
