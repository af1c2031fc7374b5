"""How far apart two results may be, measured the same way everywhere."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def relative_error(a: torch.Tensor | Iterable[torch.Tensor], b: torch.Tensor | Iterable[torch.Tensor]) -> float:
    """``norm(a - b) / norm(b)`` in float64, over one tensor or over all tensors of two equally long sequences.

    ``b`` is the reference. Where ``b`` is all zeros the result is ``norm(a)``.
    """
    left, right = _flat(a), _flat(b)
    if left.shape != right.shape:
        raise ValueError(f"relative_error compares {left.numel()} elements with {right.numel()}: they must be as many")
    reference = torch.linalg.vector_norm(right)
    difference = torch.linalg.vector_norm(left - right)
    return float(difference / reference) if reference > 0 else float(difference)


def _flat(tensors: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return (
        torch.cat([p.detach().reshape(-1).to(torch.float64) for p in parts])
        if parts
        else torch.zeros(0, dtype=torch.float64)
    )
