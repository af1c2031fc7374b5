"""The global gradient norm over shards, and the coefficient that clips to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drivetrain.zero.layout import ALIGNMENT
from drivetrain.zero.policy import HALF_TYPES

CHUNK = ALIGNMENT << 10
"""Elements that are widened at a time: small enough to stay in a core's cache."""


def own_square_sum(sums: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """The sum of `square_sum` of this rank's shards of all reduced gradients: a float64 scalar on ``device``.

    Every stage adds up the same shards, also stage 0 where the rank holds more, and padding is zero.
    """
    found = [one.to(device) for one in sums if one is not None]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)


def square_sum(flat: torch.Tensor) -> torch.Tensor:
    """The sum of squares of ``flat``, which is aligned: a float64 scalar.

    How parameters fall into buckets and ranks must not show in the result. So norms are taken of aligned runs of
    ``ALIGNMENT`` elements, which no cut divides, in fp32 (at the speed of one plain pass), and added in float64;
    rounded to fp32 in the end, the order of those additions has no say in practice.
    """
    chunks = torch.split(flat, CHUNK) if flat.dtype in HALF_TYPES else (flat,)
    norms = [torch.linalg.vector_norm(_widened(chunk).view(-1, ALIGNMENT), dim=1) for chunk in chunks]
    return torch.cat(norms).to(torch.float64).square().sum()


def _widened(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.float() if chunk.dtype in HALF_TYPES else chunk


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most ``max_norm``; 0 means no clipping.

    As ``torch.nn.utils.clip_grad_norm_`` has it, with its 1e-6 against a zero norm.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
