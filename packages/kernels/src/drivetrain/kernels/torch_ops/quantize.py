"""Block quantisation and sign compression in plain torch: oracle of the native ones, and fallback on any device.

Layout: the source is seen flat and cut into blocks of `rule.block_size` elements, the last of which may be shorter.
Codes are packed in element order, low bits first, into uint8: int8 and the fp8 formats one per byte, int4 two per byte,
fp6 four in three bytes. Each block has a float32 scale and, when asymmetric, a float32 zero.

Arithmetic, all in float32:
- symmetric: `scale = max|x| / limit`, code = round(x * (1 / scale)), value = code * scale, with limit 127, 7, 448
  (e4m3), 57344 (e5m2) or 28 (e3m2: no infinity, no NaN); the most negative integer is not used;
- asymmetric (integers only): `zero = min x`, `scale = (max x - min x) / (2**bits - 1)`, value = code * scale + zero;
- rounding to nearest even or, given a seed, up with the probability of the part cut off. The random number of an
  element is a hash of the seed, the index of its block and its place in it, so it depends on neither threads nor
  device, and a slice quantised with its `first_block` gives what the whole gives;
- a scale below 2**-126 is written as 0 and the block becomes zero (asymmetric: all equal to its zero);
- a block with NaN or infinity, or whose asymmetric range overflows float32, gets the scale NaN and codes 0: all of it
  is NaN when read back, so an overflow stays visible and spreads no further than its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from drivetrain.kernels.quantize_rules import QuantizationRule, SignRule
from drivetrain.kernels.torch_ops.counter_random import random_bits

__all__ = ["dequantize_reduce", "pack_signs", "quantize", "reduce_quantized", "unpack", "unpack_signs"]

Stored = tuple[Tensor, Tensor, Tensor | None]
"""Values, scales and zeros (None when symmetric)."""

_TINY: Final = 2.0**-126


def _blocks(x: Tensor, size: int) -> Tensor:
    """[blocks, size], the last block filled up with its own last element."""
    missing = -x.numel() % size
    if missing:
        x = torch.cat([x, x[-1:].expand(missing)])
    return x.view(-1, size)


def _uniform(blocks: int, size: int, seed: int, first_block: int, device: torch.device) -> Tensor:
    """float32 numbers in [0, 1) with 24 random bits, [blocks, size]."""
    random = random_bits(blocks, size, seed=seed, first_row=first_block, device=device)
    return random.to(torch.float32) * 2.0**-24


def _round(x: Tensor, uniform: Tensor | None) -> Tensor:
    if uniform is None:
        return x.round()
    floor = x.floor()
    return floor + (uniform < x - floor).to(x.dtype)


def _float_codes(x: Tensor, rule: QuantizationRule, uniform: Tensor | None) -> Tensor:
    layout = rule.layout
    # The exponent is that of the last place: nothing lies below the format's smallest normal exponent.
    least = 1 - layout.bias
    exponent = torch.where(x == 0, least, torch.frexp(x).exponent - 1).clamp(min=least)
    units = torch.ldexp(x.abs(), layout.mantissa - exponent)
    codes = ((exponent - least).long() << layout.mantissa) + _round(units, uniform).long()
    sign = torch.signbit(x).long() << (layout.bits - 1)
    return codes.clamp(max=layout.largest_code) | sign


def _values(codes: Tensor, rule: QuantizationRule) -> Tensor:
    """The numbers that codes stand for, float32."""
    layout = rule.layout
    if layout.mantissa == 0:
        half = 1 << (layout.bits - 1)
        return (((codes ^ half) - half) if rule.symmetric else codes).to(torch.float32)
    magnitude = codes & ((1 << (layout.bits - 1)) - 1)
    exponent = magnitude >> layout.mantissa
    normal = (exponent > 0).long()
    fraction = (magnitude & ((1 << layout.mantissa) - 1)) + (normal << layout.mantissa)
    value = torch.ldexp(fraction.to(torch.float32), exponent - normal + 1 - layout.bias - layout.mantissa)
    value = torch.where(magnitude > layout.largest_code, torch.full_like(value, torch.nan), value)
    return torch.where(codes >> (layout.bits - 1) > 0, -value, value)


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.to(torch.uint8)
    count = codes.numel()
    group = 2 if bits == 4 else 4
    codes = torch.nn.functional.pad(codes, (0, -count % group)).view(-1, group)
    word = (codes << (torch.arange(group, device=codes.device) * bits)).sum(dim=1)
    octets = torch.arange(group * bits // 8, device=codes.device) * 8
    return ((word[:, None] >> octets) & 255).to(torch.uint8).flatten()[: (count * bits + 7) // 8]


def _unpack(values: Tensor, bits: int, count: int) -> Tensor:
    if bits == 8:
        return values.long()
    group = 2 if bits == 4 else 4
    octets = group * bits // 8
    padded = torch.nn.functional.pad(values.long(), (0, -values.numel() % octets)).view(-1, octets)
    word = (padded << (torch.arange(octets, device=values.device) * 8)).sum(dim=1)
    places = torch.arange(group, device=values.device) * bits
    return ((word[:, None] >> places) & ((1 << bits) - 1)).flatten()[:count]


@torch.no_grad()
def quantize(
    source: Tensor, target: Stored, *, rule: QuantizationRule, seed: int | None = None, first_block: int = 0
) -> None:
    """Write the codes, scales and zeros of `source`, whose number of elements is theirs."""
    values, scales, zeros = target
    count = source.numel()
    if count == 0:
        return
    size = min(rule.block_size, count)
    x = _blocks(source.reshape(-1).to(torch.float32), size)
    if rule.symmetric:
        zero = torch.zeros_like(x[:, 0])
        extent = x.abs().amax(dim=1)
    else:
        zero = x.amin(dim=1) + 0.0  # never a negative zero
        extent = x.amax(dim=1) - zero
    finite = (extent.isfinite() & zero.isfinite())[:, None]
    # By a tensor: dividing by a number, torch multiplies by its rounded inverse on GPUs.
    scale = extent / torch.full_like(extent, rule.limit)
    scale = torch.where(scale < _TINY, 0.0, scale)
    zero = torch.where(finite[:, 0], zero, 0.0)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    scaled = torch.where(finite, (x if rule.symmetric else x - zero[:, None]) * inverse[:, None], 0.0)
    uniform = None if seed is None else _uniform(x.shape[0], size, seed, first_block, source.device)
    if rule.layout.mantissa == 0:
        low = -float(rule.limit) if rule.symmetric else 0.0
        codes = _round(scaled.clamp(low, rule.limit), uniform).long() & ((1 << rule.layout.bits) - 1)
    else:
        codes = _float_codes(scaled, rule, uniform)
    codes = torch.where(finite, codes, 0)
    scales.copy_(torch.where(finite[:, 0], scale, torch.nan))
    if zeros is not None:
        zeros.copy_(zero)
    values.copy_(_pack(codes.flatten()[:count], rule.layout.bits))


def unpack(values: Tensor, rule: QuantizationRule, count: int) -> Tensor:
    """The numbers that `count` packed codes stand for before scaling, float32."""
    return _values(_unpack(values, rule.layout.bits, count), rule)


def _dequantized(stored: Stored, rule: QuantizationRule, count: int) -> Tensor:
    values, scales, zeros = stored
    x = _blocks(unpack(values, rule, count), min(rule.block_size, count)) * scales[:, None]
    if zeros is not None:
        x = x + zeros[:, None]
    return x.flatten()[:count]


def _sum(sources: Sequence[Stored], rules: Sequence[QuantizationRule], factor: float, count: int) -> Tensor:
    total = _dequantized(sources[0], rules[0], count)
    for stored, rule in zip(sources[1:], rules[1:], strict=True):
        total = total + _dequantized(stored, rule, count)
    return total if factor == 1.0 else total * torch.tensor(factor, dtype=torch.float32)


@torch.no_grad()
def dequantize_reduce(
    sources: Sequence[Stored], target: Tensor, *, rules: Sequence[QuantizationRule], factor: float = 1.0
) -> None:
    """`target = factor * sum(sources)`, summed in their order in float32, rounded once to the target's dtype."""
    if target.numel():
        target.view(-1).copy_(_sum(sources, rules, factor, target.numel()))


@torch.no_grad()
def reduce_quantized(
    sources: Sequence[Stored],
    target: Stored,
    *,
    count: int,
    rules: Sequence[QuantizationRule],
    rule: QuantizationRule,
    factor: float = 1.0,
    seed: int | None = None,
    first_block: int = 0,
) -> None:
    """`dequantize_reduce`, its float32 result quantised by `rule` into `target`."""
    if count:
        quantize(_sum(sources, rules, factor, count), target, rule=rule, seed=seed, first_block=first_block)


@torch.no_grad()
def pack_signs(source: Tensor, bits: Tensor, scales: Tensor, *, rule: SignRule) -> None:
    """Bit 1 (low bits first) where an element is not negative (zeros of either sign and NaN count as positive), and per
    block the mean of |x| or the root mean square, which is not finite if an element isn't."""
    count = source.numel()
    if count == 0:
        return
    x = source.reshape(-1).to(torch.float32)
    positive = torch.nn.functional.pad((~(x < 0)).long(), (0, -count % 8)).view(-1, 8)
    bits.copy_((positive << torch.arange(8, device=x.device)).sum(dim=1).to(torch.uint8))
    size = min(rule.block_size or count, count)
    padded = torch.nn.functional.pad(x.double(), (0, -count % size)).view(-1, size)
    counts = torch.full_like(padded[:, 0], size)
    counts[-1] = count - size * (padded.shape[0] - 1)
    if rule.scale == "mean":
        scales.copy_(padded.abs().sum(dim=1) / counts)
    else:
        scales.copy_((padded.square().sum(dim=1) / counts).sqrt())


@torch.no_grad()
def unpack_signs(bits: Tensor, scales: Tensor, target: Tensor, *, rule: SignRule) -> None:
    """`target = +scale` or `-scale` of its block."""
    count = target.numel()
    if count == 0:
        return
    positive = ((bits.long()[:, None] >> torch.arange(8, device=bits.device)) & 1).flatten()[:count].bool()
    size = min(rule.block_size or count, count)
    signed = torch.where(_blocks(positive, size), scales[:, None], -scales[:, None])
    target.view(-1).copy_(signed.flatten()[:count])
