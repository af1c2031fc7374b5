"""The dtype in which the ops compute."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["working_dtype"]


def working_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything smaller."""
    return torch.promote_types(tensor.dtype, torch.float32)
