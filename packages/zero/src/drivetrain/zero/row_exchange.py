"""How rows travel: every rank's to all ranks, where they are added, if that moves less than the whole gradient.

Ranks touch different numbers of rows, so they tell each other these first, for all buckets at once; the rows of each
bucket then go in two gathers, padded to the longest rank's. Since every rank knows every count, all decide alike
whether rows pay in this backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drivetrain.comm import Axis, Handle, all_gather
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.rows import Rows, add_up

Counts = tuple[int, ...]
"""Rows of one bucket on each rank."""


def count_rows(buckets: Sequence[Bucket], axis: Axis) -> list[Counts]:
    """How many rows each rank has to send of each bucket. Collective."""
    mine = [len(bucket.local) if isinstance(bucket.local, Rows) else 0 for bucket in buckets]
    counts = torch.empty(axis.size * len(mine), dtype=torch.int64, device=axis.device)
    own = torch.tensor(mine, dtype=torch.int64, device=axis.device)
    all_gather(counts, own, axis, purpose="how many rows of gradients there are").wait()
    return [tuple(column) for column in counts.view(axis.size, -1).T.tolist()]


def _index_dtype(bucket: Bucket) -> torch.dtype:
    """What row indices are on the wire."""
    return torch.int32 if bucket.slots[0].shape[0] < 1 << 31 else torch.int64


def rows_pay(bucket: Bucket, counts: Counts, dtype: torch.dtype) -> bool:
    """Whether gathering rows moves fewer bytes than reducing the whole, an all-reduce counting twice."""
    assert bucket.row_width is not None
    row = bucket.row_width * dtype.itemsize + _index_dtype(bucket).itemsize
    whole = bucket.numel * dtype.itemsize * (1 if bucket.split else 2)
    return len(counts) * max(counts) * row < whole


class PendingRows:
    """Rows on their way. `wait` adds their sum, or mean, to ``bucket.reduced``.

    Args:
        bucket: whose rows.
        rows: this rank's, in the dtype of the wire.
        counts: how many each rank has.
        axis: the ranks.
        mean: the mean over ranks, not the sum.
        scale: what is reduced is multiplied by this.
        dtype: that gradients are kept in.
    """

    def __init__(
        self, bucket: Bucket, rows: Rows, counts: Counts, axis: Axis, *, mean: bool, scale: float, dtype: torch.dtype
    ) -> None:
        self.bucket = bucket
        self._counts = counts
        self._mean = mean
        self._scale = scale
        self._dtype = dtype
        longest, width = max(counts), rows.values.shape[1]
        self._indices = rows.indices.new_empty(axis.size, longest, dtype=_index_dtype(bucket))
        self._values = rows.values.new_empty(axis.size, longest, width)
        self._handles: list[Handle] | None = []
        for whole, own in ((self._indices, rows.indices), (self._values, rows.values)):
            padded = whole[axis.rank]
            padded[: len(rows)].copy_(own)
            padded[len(rows) :].zero_()
            if longest:
                purpose = f"rows of the gradients of {bucket.title}"
                self._handles.append(all_gather(whole.view(-1), padded.view(-1), axis, purpose=purpose))

    def drop(self) -> None:
        """Block until the rows are here, and forget them."""
        for handle in self._handles or ():
            handle.wait()
        self._handles = None

    def wait(self) -> None:
        """Block until the rows are here and added. Further calls do nothing."""
        if self._handles is None:
            return
        self.drop()
        bucket, region, width = self.bucket, self.bucket.region, self._values.shape[2]
        first, last = region.start // width, -(-region.stop // width)
        parts = [
            Rows(indices=indices[:count].to(torch.int64), values=values[:count]).between(first, last)
            for indices, values, count in zip(self._indices, self._values, self._counts, strict=True)
        ]
        total = add_up(parts, mean=self._mean)
        values = total.values.to(self._dtype)
        if self._scale != 1.0:
            values.mul_(self._scale)
        if bucket.reduced is None:
            length = region.stop - region.start
            bucket.reduced = torch.zeros(length, dtype=self._dtype, device=values.device)
        Rows(indices=total.indices, values=values).add_to(bucket.reduced, region.start)
        bucket.averaged = False
