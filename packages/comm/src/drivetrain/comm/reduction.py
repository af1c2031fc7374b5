"""Summing what several ranks sent, always the same way.

The result of a reduction is defined as a left fold in rank order, ``((x0 + x1) + x2) + ...``, in fp32 for 16-bit floats, scaled (for a
mean) and rounded once at the end. It depends on nothing else: neither on timing, nor on how the tensor was cut into buckets or shards.

Large tensors are folded block by block, with an accumulator that fits in the cache: memory is read once per operand and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias

import torch

Op: TypeAlias = Literal["sum", "mean", "max", "min"]

_BLOCK: Final = 1 << 16  # elements: 256 KiB of fp32, half of a small second-level cache

_COMBINE: Final[dict[Op, Callable[..., torch.Tensor]]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def check_op(op: str, dtype: torch.dtype, allowed: Sequence[str]) -> None:
    """Refuse, in words, an operation that has no meaning for ``dtype``."""
    if op not in allowed:
        raise ValueError(f"op '{op}' is not known here; it must be one of {', '.join(allowed)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(f"op 'mean' needs a floating-point tensor, got {dtype}. Reduce with 'sum' and divide, or convert first.")
    if op == "sum" and dtype is torch.bool:
        raise TypeError("op 'sum' is not defined for torch.bool. Use 'max' for any, 'min' for all, or convert to an integer type.")
    if op in ("max", "min") and dtype.is_complex:
        raise TypeError(f"op '{op}' is not defined for {dtype}: complex numbers have no order.")


def fold(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> None:
    """Write the reduction of ``parts`` (in this order) to ``out``. All are 1-D, of one dtype and length; ``out`` may be one of the parts."""
    combine = _COMBINE[op]
    narrow = out.dtype in (torch.float16, torch.bfloat16)
    if len(parts) == 2 and op != "mean":
        combine(parts[0], parts[1], out=out)  # two narrow floats: torch adds them in fp32 and rounds once, as below
        return
    if narrow and op in ("sum", "mean"):
        _fold_blocks(out, parts, op, torch.float32)
    else:
        _fold_blocks(out, parts, op, out.dtype)


def _fold_blocks(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op, dtype: torch.dtype) -> None:
    combine, length = _COMBINE[op], out.numel()
    scratch = torch.empty(min(_BLOCK, length), dtype=dtype, device=out.device)
    for start in range(0, length, _BLOCK):
        size = min(_BLOCK, length - start)
        accumulator = scratch[:size]
        accumulator.copy_(parts[0][start : start + size])
        for part in parts[1:]:
            combine(accumulator, part[start : start + size], out=accumulator)
        if op == "mean":
            accumulator.div_(len(parts))
        out[start : start + size].copy_(accumulator)
