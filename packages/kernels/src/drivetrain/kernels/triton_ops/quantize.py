"""`torch_ops.quantize` on GPUs: every op is one pass over memory.

Programs take R whole blocks each, as a tile [R, W] with W the power of two from the block size on; a block longer than
4096 elements is one program's, which walks over it twice, the second time mostly in the L2 cache. Sums of quantised
tensors read them through a table of addresses, so that any number of them takes one launch.
Invariant: the same bits as the reference, but for the scales of signs, whose sums round differently in the last place.
To that end products and sums are never contracted, quotients are rounded correctly, and maxima are taken over bit
patterns, which order magnitudes and put infinity and NaN above them.

Shapes in the blocks above the kernels: N elements in B blocks, S quantised sources.
- table: int64 [S, 3], the addresses of each source's values, scales and zeros (0 where there are none).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from drivetrain.kernels.quantize_rules import QuantizationRule, SignRule
from drivetrain.kernels.torch_ops.quantize import Stored
from drivetrain.kernels.triton_ops.codes import (
    decode,
    encode,
    format_of,
    load_codes,
    load_tile,
    store_codes,
    store_tile,
    uniform,
)
from drivetrain.kernels.triton_ops.devices import numbers_on

__all__ = ["dequantize_reduce", "pack_signs", "quantize", "reduce_quantized", "spread", "unpack_signs"]

_INFINITY: Final = tl.constexpr(0x7F800000)
_TINY: Final = tl.constexpr(2.0**-126)

# ------------------------------------------------------------------------------------------------------------- kernels


# starts: int64 [R], elements, multiples of 16; per_block: float32 [blocks of SIZE elements]; result: float32 [R, W]
@triton.jit
def spread(per_block, starts, total, full, R: tl.constexpr, W: tl.constexpr, SIZE: tl.constexpr):
    """The entry of each element's block, read once per 16 elements."""
    elements = starts[:, None] + 16 * tl.arange(0, W // 16)[None, :]
    entries = load_tile(per_block, elements // SIZE, elements < total, full)
    return tl.reshape(tl.broadcast_to(entries[:, :, None], [R, W // 16, 16]), [R, W])


@triton.jit
def _nothing(R: tl.constexpr, W: tl.constexpr):
    """Negative zeros, which change nothing that they are added to (zeros would make a negative zero positive)."""
    return tl.full([R, W], -(2**31), dtype=tl.int32).to(tl.float32, bitcast=True)


# table [S, 3]; sum_: float32 [R, W]
@triton.jit
def _add_sources(
    sum_,
    table,
    sources,
    starts,
    total,
    full,
    R: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    for source in range(sources):
        values = tl.load(table + 3 * source).to(tl.pointer_type(tl.uint8))
        scales = tl.load(table + 3 * source + 1).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            values = tl.multiple_of(values, 16)
        codes = load_codes(values, starts, total, full, R, W, BITS)
        x = decode(codes, BITS, MANTISSA, BIAS, LARGEST, SYMMETRIC) * spread(scales, starts, total, full, R, W, SIZE)
        if not SYMMETRIC:
            zeros = tl.load(table + 3 * source + 2).to(tl.pointer_type(tl.float32))
            x += spread(zeros, starts, total, full, R, W, SIZE)
        sum_ += x
    return sum_


# table [S, 3]; carried: float32 [N] that the sum starts from, or None; out [N]
@triton.jit(do_not_specialize=["sources"])
def dequantize_kernel(
    table,
    carried,
    out,
    total,
    sources,
    factor,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Reads the sources and writes `out`: per element S * (BITS / 8 + 4 / SIZE, twice that 4 if asymmetric) bytes and
    those of its dtype. SIZE: the sources' block size."""
    starts = tl.program_id(0).to(tl.int64) * W + tl.arange(0, 1)
    offsets = starts[:, None] + tl.arange(0, W)[None, :]
    full = (tl.program_id(0).to(tl.int64) + 1) * W <= total
    if carried is None:
        sum_ = _nothing(1, W)
    else:
        sum_ = load_tile(carried, offsets, offsets < total, full)
    sum_ = _add_sources(
        sum_, table, sources, starts, total, full, 1, W, SIZE, BITS, MANTISSA, BIAS, LARGEST, SYMMETRIC, ALIGNED
    )
    store_tile(out, offsets, sum_ * factor, offsets < total, full)


# dense [N] or None; table [S, 3] where dense is None
@triton.jit
def _source_tile(
    dense,
    table,
    sources,
    factor,
    starts,
    offsets,
    inside,
    total,
    full,
    R: tl.constexpr,
    W: tl.constexpr,
    S_SIZE: tl.constexpr,
    S_BITS: tl.constexpr,
    S_MANTISSA: tl.constexpr,
    S_BIAS: tl.constexpr,
    S_LARGEST: tl.constexpr,
    S_SYMMETRIC: tl.constexpr,
    S_ALIGNED: tl.constexpr,
):
    if dense is not None:
        x = load_tile(dense, offsets, inside, full).to(tl.float32)
    else:
        x = _nothing(R, W)
        x = _add_sources(
            x,
            table,
            sources,
            starts,
            total,
            full,
            R,
            W,
            S_SIZE,
            S_BITS,
            S_MANTISSA,
            S_BIAS,
            S_LARGEST,
            S_SYMMETRIC,
            S_ALIGNED,
        )
        x *= factor
    return x


# dense [N] or None; table [S, 3] where dense is None; values: uint8 [(N * BITS + 7) / 8]; scales: float32 [B]; zeros:
# float32 [B] or None when symmetric
@triton.jit(do_not_specialize=["sources", "first", "second", "first_block"])
def quantize_kernel(
    dense,
    table,
    values,
    scales,
    zeros,
    total,
    blocks,
    sources,
    factor,
    first,
    second,
    first_block,
    R: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    S_SIZE: tl.constexpr,
    S_BITS: tl.constexpr,
    S_MANTISSA: tl.constexpr,
    S_BIAS: tl.constexpr,
    S_LARGEST: tl.constexpr,
    S_SYMMETRIC: tl.constexpr,
    S_ALIGNED: tl.constexpr,
):
    """Reads the dense tensor or the quantised sources (of block size S_SIZE, ...) once, and writes BITS / 8 bytes per
    element and 4 or 8 per block. R is 1 where CHUNKS is above 1."""
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    end = tl.minimum(block * SIZE + SIZE, total)
    full = (tl.program_id(0).to(tl.int64) * R + R) * SIZE <= total
    exact: tl.constexpr = CHUNKS * W == SIZE  # no lanes beyond the block
    top = tl.zeros([R], dtype=tl.int32)
    low = tl.full([R], float("inf"), dtype=tl.float32)
    high = tl.full([R], -float("inf"), dtype=tl.float32)
    x = tl.zeros([R, W], dtype=tl.float32)  # a short block's elements stay in registers between the loops
    for chunk in range(CHUNKS):
        starts = block * SIZE + chunk * W
        offsets = starts[:, None] + tl.arange(0, W)[None, :]
        inside = offsets < end[:, None]
        x = _source_tile(
            dense,
            table,
            sources,
            factor,
            starts,
            offsets,
            inside,
            total,
            full & exact,
            R,
            W,
            S_SIZE,
            S_BITS,
            S_MANTISSA,
            S_BIAS,
            S_LARGEST,
            S_SYMMETRIC,
            S_ALIGNED,
        )
        magnitude = tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        top = tl.maximum(top, tl.max(magnitude, axis=1))
        if not SYMMETRIC:
            low = tl.minimum(low, tl.min(tl.where(inside, x, float("inf")), axis=1))
            high = tl.maximum(high, tl.max(tl.where(inside, x, -float("inf")), axis=1))
    zero = tl.zeros([R], dtype=tl.float32)
    extent = top.to(tl.float32, bitcast=True)
    if not SYMMETRIC:
        zero = low + 0.0  # never a negative zero
        extent = high - zero
    finite = (top < _INFINITY) & ((extent.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < _INFINITY)
    scale = tl.div_rn(extent, tl.full([R], LIMIT, dtype=tl.float32))
    scale = tl.where(scale < _TINY, 0.0, scale)
    inverse = tl.where(scale > 0, tl.div_rn(tl.full([R], 1.0, dtype=tl.float32), scale), 0.0)
    live = block < blocks
    tl.store(scales + block, tl.where(finite, scale, float("nan")), mask=live)
    if not SYMMETRIC:
        zero = tl.where(finite, zero, 0.0)
        tl.store(zeros + block, zero, mask=live)
    for chunk in range(CHUNKS):
        starts = block * SIZE + chunk * W
        offsets = starts[:, None] + tl.arange(0, W)[None, :]
        inside = offsets < end[:, None]
        if CHUNKS > 1:
            x = _source_tile(
                dense,
                table,
                sources,
                factor,
                starts,
                offsets,
                inside,
                total,
                full & exact,
                R,
                W,
                S_SIZE,
                S_BITS,
                S_MANTISSA,
                S_BIAS,
                S_LARGEST,
                S_SYMMETRIC,
                S_ALIGNED,
            )
        scaled = tl.where(finite[:, None] & inside, (x - zero[:, None]) * inverse[:, None], 0.0)
        random = tl.zeros([R, W], dtype=tl.float32)
        if STOCHASTIC:
            random = uniform(block + first_block, chunk * W + tl.arange(0, W), first, second)
        codes = encode(scaled, random, LIMIT, STOCHASTIC, BITS, MANTISSA, BIAS, LARGEST, SYMMETRIC)
        store_codes(values, starts, codes, inside, total, full & exact, R, W, BITS)


# source [N]; bits: uint8 [(N + 7) / 8]; scales: float32 [B]; partials: float64 [B, C], for C chunks of W elements a
# block, or None when there is one
@triton.jit
def pack_signs_kernel(
    source, bits, scales, partials, total, blocks, size, R: tl.constexpr, W: tl.constexpr, RMS: tl.constexpr
):
    """Reads the source and writes a bit per element and a scale or partial sum per program and block."""
    block = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    chunk = tl.program_id(1).to(tl.int64)
    starts = block * size + chunk * W
    end = tl.minimum(block * size + size, total)
    offsets = starts[:, None] + tl.arange(0, W)[None, :]
    inside = offsets < end[:, None]
    x = tl.load(source + offsets, mask=inside, other=0.0).to(tl.float32)
    positive = (inside & ~(x < 0)).to(tl.int32)
    octets = tl.reshape(positive, [R, W // 8, 8]) << tl.arange(0, 8)[None, None, :]
    places = 8 * tl.arange(0, W // 8)[None, :]
    tl.store(
        bits + (starts // 8)[:, None] + places // 8,
        tl.sum(octets, axis=2).to(tl.uint8),
        mask=starts[:, None] + places < end[:, None],
    )
    wide = x.to(tl.float64)
    if RMS:
        sums = tl.sum(wide * wide, axis=1)
    else:
        sums = tl.sum(tl.abs(wide), axis=1)
    live = block < blocks
    if partials is None:
        mean = sums / (end - block * size).to(tl.float64)
        if RMS:
            mean = tl.sqrt(mean)
        tl.store(scales + block, mean.to(tl.float32), mask=live)
    else:
        tl.store(partials + block * tl.num_programs(1) + chunk, sums, mask=live)


# bits: uint8 [(N + 7) / 8]; scales: float32 [B]; out [N]
@triton.jit
def unpack_signs_kernel(bits, scales, out, total, size, GROUPS: tl.constexpr):
    """Reads a bit and writes an element, in groups of 16."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    last = (total - 1) // 8
    word = tl.load(bits + 2 * group, mask=2 * group <= last, other=0).to(tl.int32)
    word |= tl.load(bits + 2 * group + 1, mask=2 * group + 1 <= last, other=0).to(tl.int32) << 8
    scale = tl.load(scales + 16 * group // size, mask=16 * group < total, other=0.0)[:, None]
    place = tl.arange(0, 16)[None, :]
    positive = ((word[:, None] >> place) & 1) != 0
    offsets = 16 * group[:, None] + place
    full = (tl.program_id(0).to(tl.int64) + 1) * GROUPS * 16 <= total
    store_tile(out, offsets, scale * tl.where(positive, 1.0, -1.0), offsets < total, full)


# ----------------------------------------------------------------------------------------------------------- launchers

_TILE: Final = 2048
_WIDEST: Final = 4096
_WORD: Final = 0xFFFFFFFF


def _tile(size: int) -> tuple[int, int]:
    """Blocks per program, and the width of the tile, for blocks of `size` elements."""
    width = min(_WIDEST, triton.next_power_of_2(size))
    return max(1, _TILE // width), width


def _mix(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def _signed(x: int) -> int:
    """The same 32 bits as a signed number: whatever the seed, arguments keep the type that was compiled for."""
    return x - (1 << 32) if x >> 31 else x


def _seed_words(seed: int) -> tuple[int, int]:
    first = _mix(((seed & _WORD) + 0x9E3779B9) & _WORD)
    return _signed(first), _signed(_mix((seed >> 32) ^ first))


def _sources(sources: Sequence[Stored], device: torch.device) -> tuple[Tensor, bool]:
    """Table of addresses, and whether all values start at multiples of 16."""
    addresses = tuple(0 if part is None else part.data_ptr() for stored in sources for part in stored)
    return numbers_on(device, addresses), all(address % 16 == 0 for address in addresses[::3])


def _no_source() -> dict[str, Any]:
    names = ("SIZE", "BITS", "MANTISSA", "BIAS", "LARGEST", "SYMMETRIC", "ALIGNED")
    return {f"S_{name}": 1 for name in names}


def _quantize(
    dense: Tensor | None,
    table: Tensor | None,
    target: Stored,
    *,
    count: int,
    sources: int,
    factor: float,
    rule: QuantizationRule,
    seed: int | None,
    first_block: int,
    constants: dict[str, Any],
) -> None:
    if count == 0:
        return
    values, scales, zeros = target
    rows, width = _tile(rule.block_size)
    blocks = rule.blocks(count)
    with torch.cuda.device_of(values):
        quantize_kernel[(triton.cdiv(blocks, rows),)](
            dense,
            table,
            values,
            scales,
            zeros,
            count,
            blocks,
            sources,
            float(factor),
            *_seed_words(seed or 0),
            first_block,
            R=rows,
            W=width,
            CHUNKS=triton.cdiv(rule.block_size, width),
            SIZE=rule.block_size,
            LIMIT=rule.limit,
            STOCHASTIC=seed is not None,
            **format_of(rule),
            **constants,
            num_warps=4 if rows * width <= _TILE else 8,
            enable_fp_fusion=False,
        )


def quantize(
    source: Tensor, target: Stored, *, rule: QuantizationRule, seed: int | None = None, first_block: int = 0
) -> None:
    """`torch_ops.quantize.quantize`: reads the source once."""
    _quantize(
        source,
        None,
        target,
        count=source.numel(),
        sources=0,
        factor=1.0,
        rule=rule,
        seed=seed,
        first_block=first_block,
        constants=_no_source(),
    )


def dequantize_reduce(
    sources: Sequence[Stored], target: Tensor, *, rules: Sequence[QuantizationRule], factor: float = 1.0
) -> None:
    """`torch_ops.quantize.dequantize_reduce`: one launch for sources that share a rule; where rules differ, one for
    each run of equal ones, with a float32 sum carried between them."""
    count = target.numel()
    if count == 0:
        return
    runs = [
        (rule, [stored for stored, _ in pairs])
        for rule, pairs in groupby(zip(sources, rules, strict=True), key=lambda pair: pair[1])
    ]
    carried: Tensor | None = None
    for place, (rule, members) in enumerate(runs):
        last = place == len(runs) - 1
        out = target if last else torch.empty(count, dtype=torch.float32, device=target.device)
        table, aligned = _sources(members, target.device)
        with torch.cuda.device_of(target):
            dequantize_kernel[(triton.cdiv(count, _TILE),)](
                table,
                carried,
                out,
                count,
                len(members),
                float(factor) if last else 1.0,
                W=_TILE,
                SIZE=rule.block_size,
                **format_of(rule),
                ALIGNED=aligned,
                num_warps=4,
                enable_fp_fusion=False,
            )
        carried = out


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
    """`torch_ops.quantize.reduce_quantized`: one launch, and no float32 array, where the sources share a rule."""
    device = target[0].device
    if len(set(rules)) > 1:
        total = torch.empty(count, dtype=torch.float32, device=device)
        dequantize_reduce(sources, total, rules=rules, factor=factor)
        quantize(total, target, rule=rule, seed=seed, first_block=first_block)
        return
    table, aligned = _sources(sources, device)
    constants = {"SIZE": rules[0].block_size, **format_of(rules[0]), "ALIGNED": aligned}
    _quantize(
        None,
        table,
        target,
        count=count,
        sources=len(sources),
        factor=factor,
        rule=rule,
        seed=seed,
        first_block=first_block,
        constants={f"S_{name}": value for name, value in constants.items()},
    )


def _sign_size(rule: SignRule, count: int) -> int:
    return rule.block_size or triton.cdiv(count, 16) * 16


def pack_signs(source: Tensor, bits: Tensor, scales: Tensor, *, rule: SignRule) -> None:
    """`torch_ops.quantize.pack_signs`: reads the source once. Blocks longer than 4096 elements are many programs' work,
    whose sums are added in a fixed order afterwards."""
    count = source.numel()
    if count == 0:
        return
    size = _sign_size(rule, count)
    rows, width = _tile(size)
    blocks, chunks = scales.numel(), triton.cdiv(size, width)
    partials = None
    if chunks > 1:
        partials = torch.empty(blocks, chunks, dtype=torch.float64, device=source.device)
    with torch.cuda.device_of(source):
        pack_signs_kernel[(triton.cdiv(blocks, rows), chunks)](
            source, bits, scales, partials, count, blocks, size, R=rows, W=width, RMS=rule.scale == "rms", num_warps=4
        )
    if partials is not None:
        counts = torch.full((blocks,), size, dtype=torch.float64, device=source.device)
        counts[-1] = count - size * (blocks - 1)
        mean = partials.sum(dim=1) / counts
        scales.copy_(mean.sqrt() if rule.scale == "rms" else mean)


def unpack_signs(bits: Tensor, scales: Tensor, target: Tensor, *, rule: SignRule) -> None:
    """`torch_ops.quantize.unpack_signs`."""
    count = target.numel()
    if count == 0:
        return
    groups = _TILE // 16
    with torch.cuda.device_of(target):
        unpack_signs_kernel[(triton.cdiv(count, _TILE),)](
            bits, scales, target, count, _sign_size(rule, count), GROUPS=groups, num_warps=4
        )
