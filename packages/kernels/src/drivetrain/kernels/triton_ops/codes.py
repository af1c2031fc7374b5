"""Quantised codes in Triton: loading, decoding, rounding and storing them. What the bits mean is defined in
`torch_ops.quantize`; here they become the same bits.

Tiles are [R, W]: R runs of W elements, W a power of two from 16 on, each of which starts at a multiple of 16, so that
packed groups (two int4 codes in a byte, four fp6 codes in three) never straddle a tile. `full` says that nothing of a
tile lies outside: a mask that may end anywhere would keep loads and stores from being wide.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from drivetrain.kernels.quantize_rules import QuantizationRule

__all__ = ["decode", "encode", "format_of", "load_codes", "load_tile", "store_codes", "store_tile", "uniform"]

_ROUNDER: Final = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no room for a fraction, rounding to even


def format_of(rule: QuantizationRule) -> dict[str, Any]:
    """The compile-time constants that say what `rule`'s codes mean."""
    layout = rule.layout
    return {
        "BITS": layout.bits,
        "MANTISSA": layout.mantissa,
        "BIAS": layout.bias,
        "LARGEST": layout.largest_code,
        "SYMMETRIC": rule.symmetric,
    }


@triton.jit
def load_tile(pointer, offsets, mask, full):
    """What `pointer` has at `offsets`, zeros outside of `mask`."""
    if full:
        x = tl.load(pointer + offsets)
    else:
        x = tl.load(pointer + offsets, mask=mask, other=0)
    return x


@triton.jit
def store_tile(pointer, offsets, x, mask, full):
    """Write `x`, rounded to the pointer's dtype, inside of `mask`."""
    x = x.to(pointer.dtype.element_ty)
    if full:
        tl.store(pointer + offsets, x)
    else:
        tl.store(pointer + offsets, x, mask=mask)


@triton.jit
def _fp6_octets(count):
    """ceil(3 * count / 4), without a product that could leave int32."""
    return count // 4 * 3 + (count % 4 * 3 + 3) // 4


# values: uint8 [(total * BITS + 7) / 8]; starts: int64 [R], elements; result: int32 [R, W], 0 from `total` on
@triton.jit
def load_codes(values, starts, total, full, R: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    if BITS == 8:
        offsets = starts[:, None] + tl.arange(0, W)[None, :]
        codes = load_tile(values, offsets, offsets < total, full).to(tl.int32)
    elif BITS == 4:
        offsets = (starts // 2)[:, None] + tl.arange(0, W // 2)[None, :]
        octet = load_tile(values, offsets, offsets <= (total - 1) // 2, full).to(tl.int32)
        codes = tl.reshape(tl.join(octet & 15, octet >> 4), [R, W])
    else:
        offsets = (starts // 4 * 3)[:, None] + 3 * tl.arange(0, W // 4)[None, :]
        octets = _fp6_octets(total)
        word = load_tile(values, offsets, offsets < octets, full).to(tl.int32)
        word |= load_tile(values, offsets + 1, offsets + 1 < octets, full).to(tl.int32) << 8
        word |= load_tile(values, offsets + 2, offsets + 2 < octets, full).to(tl.int32) << 16
        even = tl.join(word & 63, (word >> 12) & 63)
        odd = tl.join((word >> 6) & 63, (word >> 18) & 63)
        codes = tl.reshape(tl.join(even, odd), [R, W])
    return codes


# codes: int32 [R, W]; inside: int1 [R, W], whose edge in a row is at `total` or at a multiple of 16
@triton.jit
def store_codes(values, starts, codes, inside, total, full, R: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """Write codes, packed; those outside must be 0."""
    if BITS == 8:
        store_tile(values, starts[:, None] + tl.arange(0, W)[None, :], codes, inside, full)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(codes, [R, W // 2, 2]))
        inside_low, _ = tl.split(tl.reshape(inside.to(tl.int32), [R, W // 2, 2]))
        offsets = (starts // 2)[:, None] + tl.arange(0, W // 2)[None, :]
        store_tile(values, offsets, low | (high << 4), inside_low != 0, full)
    else:
        even, odd = tl.split(tl.reshape(codes, [R, W // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        word = first | (second << 6) | (third << 12) | (fourth << 18)
        inside_even, _ = tl.split(tl.reshape(inside.to(tl.int32), [R, W // 4, 2, 2]))
        inside_first, _ = tl.split(inside_even)
        offsets = (starts // 4 * 3)[:, None] + 3 * tl.arange(0, W // 4)[None, :]
        octets = _fp6_octets(total)
        store_tile(values, offsets, word & 255, inside_first != 0, full)
        store_tile(values, offsets + 1, (word >> 8) & 255, (inside_first != 0) & (offsets + 1 < octets), full)
        store_tile(values, offsets + 2, (word >> 16) & 255, (inside_first != 0) & (offsets + 2 < octets), full)


@triton.jit
def decode(
    codes,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """The numbers that codes stand for before scaling, float32. All are exact in bfloat16 and float16 too."""
    if MANTISSA == 0:
        if SYMMETRIC:
            value = ((codes ^ (1 << (BITS - 1))) - (1 << (BITS - 1))).to(tl.float32)
        else:
            value = codes.to(tl.float32)
    else:
        # Exponent and mantissa put where float32 has them are off by a power of two, subnormal ones too.
        magnitude = codes & ((1 << (BITS - 1)) - 1)
        value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
        value = tl.where(magnitude > LARGEST, float("nan"), value)
        value *= tl.where((codes >> (BITS - 1)) != 0, -1.0, 1.0)  # Triton's minus would lose the sign of zero
    return value


@triton.jit
def _mix(x):
    """C. Wellons' lowbias32, a bijection of 32-bit numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


# block: int64 [R]; place: int32 [W]; first, second: int32, the hashed halves of the seed; result: float32 [R, W]
@triton.jit
def uniform(block, place, first, second):
    """Numbers in [0, 1) with 24 random bits, a hash of seed, block and place in it."""
    key0 = _mix(block.to(tl.uint32) ^ first.to(tl.uint32, bitcast=True))
    key1 = _mix(_mix((block >> 32).to(tl.uint32) ^ key0) ^ second.to(tl.uint32, bitcast=True))
    random = _mix(_mix(place.to(tl.uint32)[None, :] ^ key0[:, None]) + key1[:, None])
    return (random >> 8).to(tl.float32) * (2.0**-24)


@triton.jit
def _round(x, random, STOCHASTIC: tl.constexpr):
    """Whole numbers, of magnitude below 2**22."""
    if STOCHASTIC:
        floor = tl.floor(x)
        whole = floor + (random < x - floor).to(tl.float32)
    else:
        whole = (x + _ROUNDER) - _ROUNDER
    return whole.to(tl.int32)


# x: float32 [R, W], scaled; random: float32 [R, W], not looked at unless STOCHASTIC; result: int32 [R, W]
@triton.jit
def encode(
    x,
    random,
    LIMIT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    if MANTISSA == 0:
        low: tl.constexpr = -LIMIT if SYMMETRIC else 0.0
        codes = _round(tl.minimum(tl.maximum(x, low), LIMIT), random, STOCHASTIC) & ((1 << BITS) - 1)
    else:
        # The exponent is that of the last place: nothing lies below the format's smallest normal exponent.
        least: tl.constexpr = 1 - BIAS
        pattern = x.to(tl.int32, bitcast=True)
        magnitude = pattern & 0x7FFFFFFF
        exponent = tl.maximum((magnitude >> 23) - 127, least)
        power = ((MANTISSA - exponent + 127) << 23).to(tl.float32, bitcast=True)
        units = _round(magnitude.to(tl.float32, bitcast=True) * power, random, STOCHASTIC)
        codes = tl.minimum(((exponent - least) << MANTISSA) + units, LARGEST)
        codes |= ((pattern >> 31) & 1) << (BITS - 1)
    return codes
