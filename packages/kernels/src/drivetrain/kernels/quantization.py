"""Block quantisation and sign compression of tensors, for the wire and for memory.

Problem: sharded training sends gradients and parameters that need far fewer bits than they have (ZeRO++,
arXiv:2306.10209; 1-bit Adam, arXiv:2102.02888), and inference keeps weights so.
Idea: `Quantized` holds packed codes and one scale per block, in plain tensors that a collective can send; every
function checks its tensors here and then calls the implementation of their device. Layout, rounding and what becomes of
NaN and infinity are defined in `torch_ops.quantize`.
Invariant: codes, scales and zeros are the same bits on every device, instruction set and number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .dispatch import resolve
from .quantize_rules import QuantizationRule, SignRule
from .torch_ops.quantize import Stored

__all__ = [
    "PackedSigns",
    "Quantized",
    "dequantize",
    "dequantize_reduce",
    "pack_signs",
    "quantize",
    "reduce_quantized",
    "unpack_signs",
]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def _check_part(what: str, tensor: Tensor, dtype: torch.dtype, numel: int) -> None:
    if tensor.dtype != dtype or tensor.numel() != numel or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{what}: expected a contiguous 1-D tensor of {numel} {dtype}; found {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}"
        )


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """`numel` elements as codes: `values` uint8 [rule.packed_bytes(numel)], `scales` float32 [rule.blocks(numel)], and
    `zeros` like `scales` when the rule is asymmetric, else None."""

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    numel: int
    rule: QuantizationRule

    def __post_init__(self) -> None:
        blocks = self.rule.blocks(self.numel)
        _check_part("values", self.values, torch.uint8, self.rule.packed_bytes(self.numel))
        _check_part("scales", self.scales, torch.float32, blocks)
        if (self.zeros is None) != self.rule.symmetric:
            raise ValueError("zeros: expected for asymmetric rules and None for symmetric ones")
        parts = [self.values, self.scales]
        if self.zeros is not None:
            _check_part("zeros", self.zeros, torch.float32, blocks)
            parts.append(self.zeros)
        if len({part.device for part in parts}) > 1:
            raise ValueError(f"values, scales and zeros lie on different devices: {[str(p.device) for p in parts]}")

    @classmethod
    def empty(cls, numel: int, rule: QuantizationRule, *, device: torch.device | str = "cpu") -> Quantized:
        """Room for `numel` elements, not initialised."""
        scales = torch.empty(rule.blocks(numel), dtype=torch.float32, device=device)
        return cls(
            values=torch.empty(rule.packed_bytes(numel), dtype=torch.uint8, device=device),
            scales=scales,
            zeros=None if rule.symmetric else torch.empty_like(scales),
            numel=numel,
            rule=rule,
        )

    @property
    def stored(self) -> Stored:
        """The tensors alone."""
        return (self.values, self.scales, self.zeros)


@dataclass(frozen=True, kw_only=True)
class PackedSigns:
    """`numel` signs: `bits` uint8 [ceil(numel / 8)], low bits first, and `scales` float32 [rule.blocks(numel)]."""

    bits: Tensor
    scales: Tensor
    numel: int
    rule: SignRule

    def __post_init__(self) -> None:
        _check_part("bits", self.bits, torch.uint8, -(-self.numel // 8))
        _check_part("scales", self.scales, torch.float32, self.rule.blocks(self.numel))
        if self.bits.device != self.scales.device:
            raise ValueError(f"bits lie on {self.bits.device}, scales on {self.scales.device}")

    @classmethod
    def empty(cls, numel: int, rule: SignRule, *, device: torch.device | str = "cpu") -> PackedSigns:
        """Room for `numel` signs, not initialised."""
        return cls(
            bits=torch.empty(-(-numel // 8), dtype=torch.uint8, device=device),
            scales=torch.empty(rule.blocks(numel), dtype=torch.float32, device=device),
            numel=numel,
            rule=rule,
        )


def _check_dense(op: str, role: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{op}: {role} has dtype {tensor.dtype}; expected float32, bfloat16 or float16: convert it first"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op}: {role} of shape {tuple(tensor.shape)} has strides {tensor.stride()} and isn't contiguous; "
            "blocks run over memory, so pass a contiguous tensor (.contiguous() makes a copy)"
        )


def _check_same(op: str, numel: int, device: torch.device, other: str, found: int, found_device: torch.device) -> None:
    if found != numel:
        raise ValueError(f"{op}: {numel} elements expected, but {other} has {found}")
    if found_device != device:
        raise ValueError(f"{op}: {other} lies on {found_device}, the first operand on {device}")


def _check_seed(op: str, seed: int | None, first_block: int) -> None:
    if seed is not None and not 0 <= seed < 1 << 63:
        raise ValueError(f"{op}: seed must lie in [0, 2**63) or be None for rounding to nearest; found {seed}")
    if first_block < 0:
        raise ValueError(f"{op}: first_block must not be negative; found {first_block}")


def quantize(
    source: Tensor,
    rule: QuantizationRule,
    *,
    seed: int | None = None,
    first_block: int = 0,
    out: Quantized | None = None,
) -> Quantized:
    """Quantise `source` (float32, bfloat16 or float16, contiguous, of any shape, seen flat).

    `seed` asks for stochastic rounding and fixes it: the same seed gives the same codes. `first_block` is the index of
    the first block when `source` is a slice of something larger. `out` receives the result if given.
    """
    _check_dense("quantize", "source", source)
    _check_seed("quantize", seed, first_block)
    target = Quantized.empty(source.numel(), rule, device=source.device) if out is None else out
    if target.rule != rule:
        raise ValueError(f"quantize: out was made for {target.rule}, not for {rule}")
    _check_same("quantize", source.numel(), source.device, "out", target.numel, target.values.device)
    resolve("quantize", source.device)(source, target.stored, rule=rule, seed=seed, first_block=first_block)
    return target


def _check_sources(op: str, sources: Sequence[Quantized]) -> tuple[int, torch.device]:
    if not sources:
        raise ValueError(f"{op}: needs at least one quantised input")
    numel, device = sources[0].numel, sources[0].values.device
    for index, source in enumerate(sources):
        _check_same(op, numel, device, f"input {index}", source.numel, source.values.device)
    return numel, device


def dequantize(source: Quantized, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """The values as a 1-D tensor of `dtype`, or written into `out` (contiguous, of any shape)."""
    return dequantize_reduce([source], dtype=dtype, out=out)


def dequantize_reduce(
    sources: Sequence[Quantized],
    *,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """`factor` times the sum of `sources`, in one pass: added in their order in float32, rounded once to `dtype`.

    The rules of the sources may differ.
    """
    numel, device = _check_sources("dequantize_reduce", sources)
    target = torch.empty(numel, dtype=dtype, device=device) if out is None else out
    _check_dense("dequantize_reduce", "out", target)
    _check_same("dequantize_reduce", numel, device, "out", target.numel(), target.device)
    rules = [source.rule for source in sources]
    resolve("dequantize_reduce", device)([s.stored for s in sources], target, rules=rules, factor=factor)
    return target


def reduce_quantized(
    sources: Sequence[Quantized],
    *,
    rule: QuantizationRule | None = None,
    factor: float = 1.0,
    seed: int | None = None,
    first_block: int = 0,
    out: Quantized | None = None,
) -> Quantized:
    """`quantize(dequantize_reduce(sources), rule)` in one pass, without the float32 array between.

    `rule`: that of the first source if None. `out` must not share memory with a source.
    """
    numel, device = _check_sources("reduce_quantized", sources)
    _check_seed("reduce_quantized", seed, first_block)
    wanted = sources[0].rule if rule is None else rule
    target = Quantized.empty(numel, wanted, device=device) if out is None else out
    if target.rule != wanted:
        raise ValueError(f"reduce_quantized: out was made for {target.rule}, not for {wanted}")
    _check_same("reduce_quantized", numel, device, "out", target.numel, target.values.device)
    resolve("reduce_quantized", device)(
        [source.stored for source in sources],
        target.stored,
        count=numel,
        rules=[source.rule for source in sources],
        rule=wanted,
        factor=factor,
        seed=seed,
        first_block=first_block,
    )
    return target


def pack_signs(source: Tensor, rule: SignRule | None = None, *, out: PackedSigns | None = None) -> PackedSigns:
    """One bit per element of `source` (float32, bfloat16 or float16, contiguous) and one scale per block.

    Zeros count as positive. The scale of a block with NaN or infinity is not finite.
    """
    wanted = SignRule() if rule is None else rule
    _check_dense("pack_signs", "source", source)
    target = PackedSigns.empty(source.numel(), wanted, device=source.device) if out is None else out
    if target.rule != wanted:
        raise ValueError(f"pack_signs: out was made for {target.rule}, not for {wanted}")
    _check_same("pack_signs", source.numel(), source.device, "out", target.numel, target.bits.device)
    resolve("pack_signs", source.device)(source, target.bits, target.scales, rule=wanted)
    return target


def unpack_signs(source: PackedSigns, *, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """`+scale` or `-scale` for every element, as a 1-D tensor of `dtype` or written into `out`."""
    device = source.bits.device
    target = torch.empty(source.numel, dtype=dtype, device=device) if out is None else out
    _check_dense("unpack_signs", "out", target)
    _check_same("unpack_signs", source.numel, device, "out", target.numel(), target.device)
    resolve("unpack_signs", device)(source.bits, source.scales, target, rule=source.rule)
    return target
