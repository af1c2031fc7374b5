"""Gradients of embeddings as the rows that a batch has touched.

The problem: a batch looks up a few rows of an embedding, and its gradient is zero in all others; laid into a bucket and
reduced as a whole, a large table costs its size in memory and on the wire. The idea: keep (row indices, values) until
the reduction is over, and add only these into the optimizer's region.

Invariants:
- Indices are ascending and each is there once. So where a row lies is found by bisection, and every addition below is
  of different rows: its result depends on no order but that of the ranks.
- Rows that came several times in one gradient are added by the operation that makes a whole gradient dense, and ranks
  are added in their order, in fp32 where values are 16 bits wide, and rounded once. So the sum is that of the whole
  gradients, bit for bit where these are added in rank order too (``drivetrain.comm`` does on CPUs), but for the sign of
  a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drivetrain.zero.policy import HALF_TYPES


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a matrix; all others are zero. Shares no memory with what it was made of."""

    indices: torch.Tensor  # [rows] int64, ascending, each once
    values: torch.Tensor  # [rows, width]

    @classmethod
    def none(cls, width: int, dtype: torch.dtype, device: torch.device) -> Rows:
        """No row at all."""
        indices = torch.empty(0, dtype=torch.int64, device=device)
        return cls(indices=indices, values=torch.empty(0, width, dtype=dtype, device=device))

    @classmethod
    def of(cls, gradient: torch.Tensor, dtype: torch.dtype) -> Rows:
        """The rows of ``gradient`` [rows, width], in ``dtype``.

        Those that it names if it is sparse over its rows; those that are not all zero if it is dense.
        """
        if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            indices = (dense != 0).any(dim=1).nonzero().squeeze(1)
            return cls(indices=indices, values=dense[indices].to(dtype))
        indices, places = torch.unique(gradient._indices()[0], return_inverse=True)
        size = (indices.numel(), gradient.shape[1])
        renumbered = torch.sparse_coo_tensor(places[None], gradient._values(), size, check_invariants=False)
        return cls(indices=indices, values=renumbered.to_dense().to(dtype))

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.indices.untyped_storage().size() + self.values.untyped_storage().size()

    def plus(self, other: Rows) -> Rows:
        """The sum of two gradients."""
        return add_up([self, other], mean=False)

    def between(self, first: int, last: int) -> Rows:
        """Those with ``first <= index < last``; a view."""
        edges = torch.tensor([first, last], device=self.indices.device)
        low, high = torch.searchsorted(self.indices, edges).tolist()
        return Rows(indices=self.indices[low:high], values=self.values[low:high])

    def add_to(self, flat: torch.Tensor, start: int) -> None:
        """Add what lies in it to ``flat`` [numel], the elements from ``start`` on of the matrix, flattened.

        ``flat`` may begin and end within a row, and beyond the matrix.
        """
        width, stop = self.values.shape[1], start + flat.numel()
        first, last = -(-start // width), stop // width  # rows that lie in it as a whole
        if first < last:
            inside = self.between(first, last)
            matrix = flat[first * width - start : last * width - start].view(-1, width)
            matrix.index_add_(0, inside.indices - first, inside.values)
        for row in {first - 1, last}:
            begin, end = max(start, row * width), min(stop, (row + 1) * width)
            cut = self.between(row, row + 1)
            if begin < end and len(cut):
                flat[begin - start : end - start].add_(cut.values[0, begin - row * width : end - row * width])


def add_up(parts: Sequence[Rows], *, mean: bool) -> Rows:
    """The sum of ``parts``, added in this order, or their mean; all have one width and dtype."""
    indices = torch.unique(torch.cat([part.indices for part in parts]))
    dtype = parts[0].values.dtype
    wide = torch.float32 if dtype in HALF_TYPES else dtype
    total = parts[0].values.new_zeros(indices.numel(), parts[0].values.shape[1], dtype=wide)
    for part in parts:
        total.index_add_(0, torch.searchsorted(indices, part.indices), part.values.to(wide))
    if mean:
        total.div_(len(parts))
    return Rows(indices=indices, values=total.to(dtype))
