"""How tensors are quantised, as frozen records that are checked when they are made.

Invariant: a rule is immutable and valid, and says how many bytes and blocks a number of elements takes, so that buffers
can be laid out before anything is quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["CodeLayout", "QuantizationRule", "QuantizedFormat", "SignRule"]

QuantizedFormat = Literal["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2"]


@dataclass(frozen=True, kw_only=True)
class CodeLayout:
    """Bits of one code. Integers have no mantissa; a float's exponent has the bias `bias`, and codes whose magnitude is
    above `largest_code` are infinities or NaN."""

    bits: int
    mantissa: int = 0
    bias: int = 0
    largest_code: int = 0
    largest_value: float = 0.0


_LAYOUTS: Final[Mapping[str, CodeLayout]] = MappingProxyType(
    {
        "int8": CodeLayout(bits=8),
        "int4": CodeLayout(bits=4),
        "fp8_e4m3": CodeLayout(bits=8, mantissa=3, bias=7, largest_code=0x7E, largest_value=448.0),
        "fp8_e5m2": CodeLayout(bits=8, mantissa=2, bias=15, largest_code=0x7B, largest_value=57344.0),
        "fp6_e3m2": CodeLayout(bits=6, mantissa=2, bias=3, largest_code=0x1F, largest_value=28.0),
    }
)
_GROUP: Final = 16


@dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """How blocks of `block_size` elements (a multiple of 16) become codes.

    `format`: "int8", "int4" (two per byte), "fp8_e4m3" (of OCP FP8: no infinity, largest 448), "fp8_e5m2", or
    "fp6_e3m2" (of OCP Microscaling: no infinity, no NaN, largest 28; four in three bytes). `symmetric=False` (integers
    only) keeps each block's minimum as its zero.
    """

    format: QuantizedFormat = "int8"
    block_size: int = 256
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.format not in _LAYOUTS:
            raise ValueError(f"format: expected one of {', '.join(_LAYOUTS)}; found {self.format!r}")
        if self.block_size < _GROUP or self.block_size % _GROUP:
            raise ValueError(f"block_size: expected a positive multiple of {_GROUP}; found {self.block_size}")
        if not self.symmetric and self.layout.mantissa:
            raise ValueError(f"symmetric=False is for int8 and int4: {self.format} has a sign and a zero of its own")

    @property
    def layout(self) -> CodeLayout:
        """The bits of a code."""
        return _LAYOUTS[self.format]

    @property
    def limit(self) -> float:
        """The largest value that a code stands for before scaling."""
        if self.layout.mantissa:
            return self.layout.largest_value
        return float((1 << (self.layout.bits - self.symmetric)) - 1)

    def blocks(self, numel: int) -> int:
        """Number of blocks of `numel` elements."""
        return -(-numel // self.block_size)

    def packed_bytes(self, numel: int) -> int:
        """Bytes of the packed codes of `numel` elements, scales not counted."""
        return (numel * self.layout.bits + 7) // 8


@dataclass(frozen=True, kw_only=True)
class SignRule:
    """Sign compression with one scale per block of `block_size` elements (a multiple of 16; None: one for all).

    `scale`: "mean" of |x|, which makes the squared error smallest, or "rms", which keeps the norm (1-bit Adam's).
    """

    block_size: int | None = None
    scale: Literal["mean", "rms"] = "rms"

    def __post_init__(self) -> None:
        if self.block_size is not None and (self.block_size < _GROUP or self.block_size % _GROUP):
            raise ValueError(f"block_size: expected a positive multiple of {_GROUP} or None; found {self.block_size}")
        if self.scale not in ("mean", "rms"):
            raise ValueError(f"scale: expected 'mean' or 'rms'; found {self.scale!r}")

    def blocks(self, numel: int) -> int:
        """Number of blocks of `numel` elements."""
        return min(numel, 1) if self.block_size is None else -(-numel // self.block_size)
