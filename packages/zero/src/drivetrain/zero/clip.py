"""The global gradient norm over shards, and the coefficient that clips to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drivetrain.zero.bucket import Bucket


def own_square_sum(buckets: Iterable[Bucket], device: torch.device) -> torch.Tensor:
    """The sum of squares of this rank's shards of all reduced gradients: a float64 scalar on ``device``.

    Every stage adds up the same shards, also stage 0 where the rank holds more, so that all stages find the same norm.
    Padding is zero and adds nothing. Each shard's norm is taken in fp32 or wider.
    """
    norms = []
    for bucket in buckets:
        if bucket.reduced is not None:
            own = bucket.reduced if bucket.split else bucket.reduced[bucket.own]
            wide = torch.float64 if own.dtype == torch.float64 else torch.float32
            norms.append(torch.linalg.vector_norm(own, dtype=wide).to(torch.float64))
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What gradients are multiplied by so that their norm is at most ``max_norm``; 0 means no clipping.

    As ``torch.nn.utils.clip_grad_norm_`` has it, with its 1e-6 against a zero norm.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
