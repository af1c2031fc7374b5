"""How sharded state is handed to a checkpoint: named, flat, contiguous slices of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class FlatSlice:
    """One rank's contiguous part of a tensor, seen flat (row-major).

    Some state is not kept as the numbers that it stands for (frozen parameters may be quantised). So elements are read
    by `read`, and written by filling what `target` gives and handing it to `commit`; ``start`` counts from the slice's
    own first element.

    Attributes:
        data: the local elements, 1-D, themselves; on the meta device where they are kept in another form.
        offset: index of its first element in the flattened whole tensor.
        shape: shape of the whole tensor.
        writes: False if another rank writes the same elements, so that this rank only reads them at load.
    """

    data: torch.Tensor
    offset: int
    shape: torch.Size
    writes: bool = True

    def read(self, start: int, numel: int) -> torch.Tensor:
        """``numel`` elements from ``start`` on: 1-D, of the dtype of ``data``. Not to be written to."""
        return self.data.detach().narrow(0, start, numel)

    def target(self, start: int, numel: int) -> torch.Tensor:
        """Memory for ``numel`` elements from ``start`` on, to be filled, casting to its dtype, and then committed."""
        return self.data.detach().narrow(0, start, numel)

    def commit(self, start: int, values: torch.Tensor) -> None:
        """``values``, from `target`, have been filled."""
