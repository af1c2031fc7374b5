"""What quantising gradients lost, kept to be added to the next ones (LoCo, arXiv:2407.04480).

Without it the same small gradients may be rounded away in every step; with it they add up until they count.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch

from drivetrain.kernels import QuantizationRule, Quantized, dequantize, quantize
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.codec import BlockCodec
from drivetrain.zero.policy import ErrorFeedback

_KEPT = QuantizationRule(format="int8", block_size=256)


class ErrorMemory:
    """One error per bucket, int8: a byte for each element that this rank quantises."""

    def __init__(self, rule: ErrorFeedback) -> None:
        self._rule = rule
        self._errors: WeakKeyDictionary[Bucket, Quantized] = WeakKeyDictionary()
        self._steps = 0

    def compensate(self, bucket: Bucket, pieces: torch.Tensor, codec: BlockCodec) -> None:
        """Add the kept error to ``pieces`` [pieces, elements], which ``codec`` is about to encode; keep the new one."""
        kept = self._errors.get(bucket)
        error = torch.zeros_like(pieces, dtype=torch.float32) if kept is None else dequantize(kept).view(pieces.shape)
        pieces.add_(error)
        lost = pieces.to(torch.float32, copy=True)
        for piece in lost:
            piece.sub_(codec.roundtrip(piece))
        error.mul_(self._rule.beta).add_(lost, alpha=1.0 - self._rule.beta)
        self._errors[bucket] = quantize(error, _KEPT, out=kept)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The memory of all errors."""
        for kept in self._errors.values():
            yield from (tensor for tensor in kept.stored if tensor is not None)

    def step_taken(self, *, trusted: bool) -> None:
        """Count an optimizer step. After one whose gradients were not finite, neither are the errors: forget them."""
        self._steps += 1
        every = self._rule.reset_every
        if not trusted or (every is not None and self._steps % every == 0):
            self._errors.clear()
