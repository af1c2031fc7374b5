"""What a tensor becomes on the wire: the joint at which compression is handed in.

comm moves bytes and knows no quantisation; whoever has some (``drivetrain.kernels`` does) wraps it as a `Codec` and
passes it to the collectives of ``compressed.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Codec(Protocol):
    """Encodes flat tensors into bytes and back.

    All tensors are 1-D and contiguous; ``encoded`` ones are uint8, of ``encoded_bytes(numel)`` elements. The same input
    gives the same bytes on every rank.
    """

    def encoded_bytes(self, numel: int) -> int:
        """Bytes that ``numel`` elements take, a multiple of 4."""
        ...

    def encode(self, source: torch.Tensor, encoded: torch.Tensor) -> None:
        """Write ``source`` (a floating-point tensor) to ``encoded``."""
        ...

    def decode_sum(self, encoded: Sequence[torch.Tensor], out: torch.Tensor, *, factor: float = 1.0) -> None:
        """Write ``factor`` times the sum of ``encoded``, added in this order in fp32, to ``out``."""
        ...
