"""How an epoch is cut into micro-batches, and these into the parts of the ranks.

Pure arithmetic on positions in an epoch's order. `ranks` are the data-parallel ranks: those that get different samples.

    position   0                    8                    16         20
               |--------------------|--------------------|----------|        samples = 20, micro_batch_size = 4,
               ranks = 2
    rank 0     0 1 2 3              8 9 10 11            16 17
    rank 1             4 5 6 7                12 13 14 15      18 19         the last one is shorter

The position counts samples over all ranks, so it means the same at any number of ranks and any micro-batch size.

Invariants: all ranks get equally many micro-batches, of equal size. With `drop_last`, samples that don't fill a
micro-batch on every rank are left out of this epoch. Without, they are spread evenly in a last, shorter one; if they
are no multiple of `ranks`, the first samples of the epoch are used a second time to even it out (at most `ranks -
1`), and no other sample is ever seen twice in an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Split", "tail_share"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """The cut of an epoch of `samples`."""

    samples: int
    micro_batch_size: int
    ranks: int
    drop_last: bool

    @property
    def width(self) -> int:
        """Samples of one micro-batch over all ranks."""
        return self.micro_batch_size * self.ranks

    def batches(self, position: int = 0) -> int:
        """Micro-batches per rank from `position` to the end of the epoch."""
        left = max(self.samples - position, 0)
        return left // self.width if self.drop_last else -(-left // self.width)

    def positions(self, position: int, rank: int) -> npt.NDArray[np.int64]:
        """Where the samples of `rank` are, in the micro-batch that begins at `position`."""
        size = tail_share(min(self.samples - position, self.width), self.ranks)
        mine = np.arange(position + rank * size, position + (rank + 1) * size, dtype=np.int64)
        return mine % self.samples

    def walk(self, position: int) -> Iterator[tuple[int, int]]:
        """(where it begins, where the next one begins) of each micro-batch from `position` on."""
        for _ in range(self.batches(position)):
            after = min(position + self.width, self.samples)
            yield position, after
            position = after


def tail_share(samples: int, ranks: int) -> int:
    """How many of `samples` each rank gets."""
    return -(-samples // ranks)
