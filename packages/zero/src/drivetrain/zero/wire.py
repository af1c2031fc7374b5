"""Parameters that travel in fewer bits than they are kept in, because whoever reads them rounds them anyway.

The problem: under ``torch.autocast`` parameters and their gradients are fp32, so that half of what is sent are bits
that the computation has thrown away: autocast rounds a Linear's weight before it multiplies, and its gradient is a
rounded one, widened. The idea: name the classes of modules whose parameters are read in no other way, and send theirs
rounded.

Rounding twice is rounding once, so stages go on agreeing to the bit. That holds for modules that are called under
autocast and whose parameters nobody else reads. A parameter that has an owner of another class as well (an embedding
that is the output layer too) travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drivetrain.zero.classes import ModuleClass, class_name, is_class, is_known

AUTOCAST_CLASSES: tuple[ModuleClass, ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules that hand all their parameters to operations which autocast lowers."""


@dataclass(frozen=True, kw_only=True)
class WireRule:
    """What travels in fewer bits.

    Attributes:
        dtype: 16-bit format on the wire of fp32 gradients and, at stage 3, of gathered fp32 parameters.
        classes: modules whose own parameters it goes for: classes or their names, none of the classes derived from
            them. The module may lack some.
    """

    dtype: torch.dtype
    classes: tuple[ModuleClass, ...] = AUTOCAST_CLASSES

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"wire_rule: the dtype must be torch.bfloat16 or torch.float16, got {self.dtype}")

    def parameters(self, root: nn.Module) -> frozenset[int]:
        """The ids of the parameters in ``root`` that only such modules own."""
        safe: set[int] = set()
        others: set[int] = set()
        for module in root.modules():
            chosen = safe if any(is_class(type(module), wanted) for wanted in self.classes) else others
            chosen.update(id(parameter) for parameter in module.parameters(recurse=False))
        return frozenset(safe - others)

    def unknown(self, root: nn.Module) -> list[str]:
        """Names that are neither those of classes of modules in ``root`` nor of any other class, for a message."""
        found = {type(module) for module in root.modules()}
        doubtful = (wanted for wanted in self.classes if not is_known(wanted))
        return [f"'{class_name(wanted)}'" for wanted in doubtful if not any(is_class(own, wanted) for own in found)]


class CastCodec:
    """Rounding as a `drivetrain.comm.Codec`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encoded_bytes(self, numel: int) -> int:
        return -(-numel * self.dtype.itemsize // 4) * 4

    def _view(self, encoded: torch.Tensor, numel: int) -> torch.Tensor:
        return encoded[: numel * self.dtype.itemsize].view(self.dtype)

    def encode(self, source: torch.Tensor, encoded: torch.Tensor) -> None:
        self._view(encoded, source.numel()).copy_(source)

    def decode_sum(self, encoded: Sequence[torch.Tensor], out: torch.Tensor, *, factor: float = 1.0) -> None:
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        total.copy_(self._view(encoded[0], out.numel()))
        for one in encoded[1:]:
            total.add_(self._view(one, out.numel()))
        if factor != 1.0:
            total.mul_(factor)
        if total is not out:
            out.copy_(total)
