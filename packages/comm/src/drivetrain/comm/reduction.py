"""Summing what several ranks sent, always the same way.

The result of a reduction is defined as a left fold in rank order, ``((x0 + x1) + x2) + ...``, in fp32 for 16-bit
floats, scaled (for a mean) and rounded once at the end. It depends on nothing else: neither on timing, nor on how the
tensor was cut into buckets or shards.

Large tensors are folded block by block, with an accumulator that fits in the cache: memory is read once per operand
and written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import torch

Op: TypeAlias = Literal["sum", "mean", "max", "min"]

# Elements. Small enough for a cache, and below the 32768 from which torch would share one operation among its threads:
# folding may run beside a computation that uses them.
_BLOCK: Final = 28672

_COMBINE: Final[Mapping[Op, Callable[..., torch.Tensor]]] = MappingProxyType(
    {
        "sum": torch.add,
        "mean": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
    }
)


def check_op(op: str, dtype: torch.dtype, allowed: Sequence[str]) -> None:
    """Refuse, in words, an operation that has no meaning for ``dtype``."""
    if op not in allowed:
        raise ValueError(f"op '{op}' is not known here; it must be one of {', '.join(allowed)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"op 'mean' needs a floating-point tensor, got {dtype}. Reduce with 'sum' and divide, or convert first."
        )
    if op == "sum" and dtype is torch.bool:
        raise TypeError(
            "op 'sum' is not defined for torch.bool. Use 'max' for any, 'min' for all, or convert to an integer type."
        )
    if op in ("max", "min") and dtype.is_complex:
        raise TypeError(f"op '{op}' is not defined for {dtype}: complex numbers have no order.")


def fold(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op) -> None:
    """Write the reduction of ``parts``, in this order, to ``out``.

    All are 1-D, of one dtype and length; ``out`` may be one of the parts, but may not overlap one otherwise.
    """
    if out.numel() == 0:
        return
    narrow = out.dtype in (torch.float16, torch.bfloat16) and op in ("sum", "mean")
    # Two narrow floats are added by torch in fp32 and rounded once, which is the definition: they need no accumulator.
    fold_block = _fold_wide if narrow and (op == "mean" or len(parts) > 2) else _fold
    dtype = torch.float32 if fold_block is _fold_wide else out.dtype
    accumulator = torch.empty(min(_BLOCK, out.numel()), dtype=dtype, device=out.device)
    if out.numel() <= _BLOCK:
        fold_block(out, parts, op, accumulator)
        return
    for out_block, *blocks in zip(*(torch.split(t, _BLOCK) for t in (out, *parts)), strict=True):
        fold_block(out_block, blocks, op, accumulator[: out_block.numel()])


def _fold(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op, accumulator: torch.Tensor) -> None:
    combine, total = _COMBINE[op], parts[0]
    for part in parts[1:-1]:
        total = combine(total, part, out=accumulator)
    if op == "mean":
        torch.div(combine(total, parts[-1], out=accumulator), len(parts), out=out)
    else:
        combine(total, parts[-1], out=out)


def _fold_wide(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Op, accumulator: torch.Tensor) -> None:
    accumulator.copy_(parts[0])
    for part in parts[1:]:
        accumulator.add_(part)
    if op == "mean":
        accumulator.div_(len(parts))
    out.copy_(accumulator)
