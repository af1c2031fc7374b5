"""How sharded state is handed to a checkpoint: named, flat, contiguous slices of whole tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class FlatSlice:
    """One rank's contiguous part of a tensor, seen flat (row-major).

    Attributes:
        data: the local elements, 1-D. Loading writes into it, casting to its dtype.
        offset: index of its first element in the flattened whole tensor.
        shape: shape of the whole tensor.
        writes: False if another rank writes the same elements, so that this rank only reads them at load.
    """

    data: torch.Tensor
    offset: int
    shape: torch.Size
    writes: bool = True
