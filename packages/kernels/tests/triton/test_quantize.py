"""Quantisation in Triton: the same bits as plain torch on the host, for every format, rounding and kind of number."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import PackedSigns, QuantizationRule, Quantized, SignRule, implementation
from drivetrain.kernels.torch_ops import quantize as reference

RULES = [
    QuantizationRule(format="int8", block_size=256),
    QuantizationRule(format="int8", block_size=48, symmetric=False),
    QuantizationRule(format="int4", block_size=16),
    QuantizationRule(format="int4", block_size=4096, symmetric=False),
    QuantizationRule(format="fp8_e4m3", block_size=128),
    QuantizationRule(format="fp8_e5m2", block_size=32),
    QuantizationRule(format="fp6_e3m2", block_size=4112),
    QuantizationRule(format="fp6_e3m2", block_size=48),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.format}-{r.block_size}-{r.symmetric}")
SIZES = [0, 1, 5, 123, 4130]
LOW = [torch.float32, torch.bfloat16, torch.float16]


def _random(size: int, seed: int = 1) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    x[::7] *= 100.0
    x[3::11] = 0.0
    x[2::13] = -0.0
    return x


def _reference(x: Tensor, rule: QuantizationRule, seed: int | None = None, first_block: int = 0) -> Quantized:
    target = Quantized.empty(x.numel(), rule)
    reference.quantize(x, target.stored, rule=rule, seed=seed, first_block=first_block)
    return target


def _found(x: Tensor, rule: QuantizationRule, device: str, seed: int | None = None, first_block: int = 0) -> Quantized:
    target = Quantized.empty(x.numel(), rule, device=device)
    implementation("quantize", "triton")(x.to(device), target.stored, rule=rule, seed=seed, first_block=first_block)
    return target


def _on(q: Quantized, device: str) -> Quantized:
    zeros = None if q.zeros is None else q.zeros.to(device)
    return Quantized(values=q.values.to(device), scales=q.scales.to(device), zeros=zeros, numel=q.numel, rule=q.rule)


def _assert_same(a: Quantized, b: Quantized) -> None:
    a = _on(a, "cpu")
    assert torch.equal(a.scales.isnan(), b.scales.isnan())
    assert torch.equal(a.scales.nan_to_num(), b.scales.nan_to_num())
    if a.zeros is not None and b.zeros is not None:
        assert torch.equal(a.zeros.view(torch.int32), b.zeros.view(torch.int32))
    assert torch.equal(a.values, b.values)


def _bits(x: Tensor) -> Tensor:
    """Bit patterns, all NaN alike."""
    x = torch.where(x.isnan(), torch.full_like(x, torch.nan), x)
    return x.cpu().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@every_rule
@pytest.mark.parametrize(("dtype", "seed"), [(LOW[0], None), (LOW[0], (1 << 63) - 5), (LOW[1], 0), (LOW[2], None)])
def test_codes_scales_and_zeros_are_the_same_bits(
    rule: QuantizationRule, dtype: torch.dtype, seed: int | None, device: str
) -> None:
    for size in SIZES if dtype == torch.float32 else SIZES[1:4]:
        x = _random(size).to(dtype)
        _assert_same(_found(x, rule, device, seed, first_block=3), _reference(x, rule, seed, first_block=3))


@every_rule
def test_values_read_back_are_the_same_bits(rule: QuantizationRule, device: str) -> None:
    for size, dtype in zip(SIZES, itertools.cycle(LOW), strict=False):
        q = _reference(_random(size), rule)
        want, found = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype, device=device)
        reference.dequantize_reduce([q.stored], want, rules=[rule])
        implementation("dequantize_reduce", "triton")([_on(q, device).stored], found, rules=[rule])
        assert torch.equal(_bits(found), _bits(want))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2"])
def test_every_code_reads_back_as_the_reference_says(name: str, device: str) -> None:
    rule = QuantizationRule(format=name, block_size=16)  # type: ignore[arg-type]
    bits = rule.layout.bits
    octets = torch.arange(256 if bits == 8 else 1 << 12, dtype=torch.int64)
    values = (octets * 2654435761 >> 7).to(torch.uint8) if bits < 8 else octets.to(torch.uint8)
    count = values.numel() * 8 // bits
    q = Quantized(values=values, scales=torch.rand(rule.blocks(count)), zeros=None, numel=count, rule=rule)
    want, found = torch.empty(count), torch.empty(count, device=device)
    reference.dequantize_reduce([q.stored], want, rules=[rule])
    implementation("dequantize_reduce", "triton")([_on(q, device).stored], found, rules=[rule])
    assert torch.equal(_bits(found), _bits(want))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e5m2"])
def test_extreme_blocks(name: str, symmetric: bool, device: str) -> None:
    """Zeros, the smallest and largest floats, values on rounding boundaries, NaN and infinity, each in their block."""
    if name == "fp8_e5m2" and not symmetric:
        return
    rule = QuantizationRule(format=name, block_size=16, symmetric=symmetric)  # type: ignore[arg-type]
    big, tiny = 3.4e38, 1e-45
    blocks = [
        [0.0] * 16,
        [-0.0] * 16,
        [tiny, -tiny, 2 * tiny] + [0.0] * 13,
        [1.5e-38 * k for k in range(-8, 8)],
        [big, -big] + [1.0] * 14,
        [big] * 16,
        [k / 2 for k in range(-8, 8)],
        [127.0, *[k + 0.5 for k in range(-7, 8)]],
        [float("nan")] + [1.0] * 15,
        [1.0] * 15 + [float("inf")],
        [-float("inf")] * 16,
        [float("inf"), float("nan")] + [0.0] * 14,
        [5.0] * 16,
    ]
    x = torch.tensor(blocks, dtype=torch.float32).flatten()
    for seed in (None, 7):
        _assert_same(_found(x, rule, device, seed), _reference(x, rule, seed))


def test_a_slice_gives_what_the_whole_gives(device: str) -> None:
    rule = QuantizationRule(format="int8", block_size=64)
    x = _random(640)
    whole = _reference(x, rule, seed=11)
    part = _found(x[128:320].clone(), rule, device, seed=11, first_block=2)
    assert torch.equal(part.values.cpu(), whole.values[128:320])
    far = 1 << 33  # beyond 32 bits
    _assert_same(_found(x, rule, device, seed=11, first_block=far), _reference(x, rule, seed=11, first_block=far))


def _several(rules: list[QuantizationRule], size: int) -> list[Quantized]:
    return [_reference(_random(size, seed), rule) for seed, rule in enumerate(rules)]


SUMS = [
    [RULES[0]] * 3,
    [RULES[1]] * 2,
    [RULES[6]] * 2,
    [RULES[2], RULES[2], RULES[4], RULES[2]],  # runs of equal rules
]


@pytest.mark.parametrize("rules", SUMS, ids=["int8", "asymmetric", "long_blocks", "mixed"])
@pytest.mark.parametrize("size", [1, 4130])
def test_sums_are_the_same_bits(rules: list[QuantizationRule], size: int, device: str) -> None:
    sources = _several(rules, size)
    moved = [_on(q, device).stored for q in sources]
    for dtype in LOW[:2] if size == 1 else LOW[1:2]:
        want, found = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype, device=device)
        reference.dequantize_reduce([q.stored for q in sources], want, rules=rules, factor=1 / 3)
        implementation("dequantize_reduce", "triton")(moved, found, rules=rules, factor=1 / 3)
        assert torch.equal(_bits(found), _bits(want))
    for rule, seed in ((rules[0], None), (RULES[1], 5)):
        target, expected = Quantized.empty(size, rule, device=device), Quantized.empty(size, rule)
        options = {"count": size, "rules": rules, "rule": rule, "factor": 0.3, "seed": seed, "first_block": 1}
        reference.reduce_quantized([q.stored for q in sources], expected.stored, **options)  # type: ignore[arg-type]
        implementation("reduce_quantized", "triton")(moved, target.stored, **options)
        _assert_same(target, expected)


def test_nan_stays_in_its_block(device: str) -> None:
    rule = QuantizationRule(format="int4", block_size=16)
    sources = _several([rule] * 2, 64)
    sources[0].scales[1] = torch.nan
    moved = [_on(q, device).stored for q in sources]
    target = Quantized.empty(64, rule, device=device)
    implementation("reduce_quantized", "triton")(moved, target.stored, count=64, rules=[rule] * 2, rule=rule)
    assert target.scales.isnan().tolist() == [False, True, False, False]
    assert target.values[8:16].tolist() == [0] * 8


def test_values_at_odd_addresses(device: str) -> None:
    rule = QuantizationRule(format="fp6_e3m2", block_size=32)
    q = _reference(_random(200), rule)
    shifted = torch.zeros(q.values.numel() + 1, dtype=torch.uint8, device=device)[1:]
    shifted.copy_(q.values)
    want, found = torch.empty(200), torch.empty(200, device=device)
    reference.dequantize_reduce([q.stored], want, rules=[rule])
    implementation("dequantize_reduce", "triton")([(shifted, q.scales.to(device), None)], found, rules=[rule])
    assert torch.equal(_bits(found), _bits(want))


SIGN_RULES = [SignRule(), SignRule(scale="mean"), SignRule(block_size=48), SignRule(block_size=4112, scale="mean")]


@pytest.mark.parametrize("rule", SIGN_RULES, ids=lambda r: f"{r.block_size}-{r.scale}")
@pytest.mark.parametrize("dtype", LOW)
def test_signs(rule: SignRule, dtype: torch.dtype, device: str) -> None:
    for size in (0, 1, 123, 4130) if dtype == torch.float32 else (8, 123):
        x = _random(size).to(dtype)
        want, found = PackedSigns.empty(size, rule), PackedSigns.empty(size, rule, device=device)
        reference.pack_signs(x, want.bits, want.scales, rule=rule)
        implementation("pack_signs", "triton")(x.to(device), found.bits, found.scales, rule=rule)
        assert torch.equal(found.bits.cpu(), want.bits)
        torch.testing.assert_close(found.scales.cpu(), want.scales, atol=0.0, rtol=1.2e-7)
        one, two = torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype)
        implementation("unpack_signs", "triton")(found.bits, found.scales, one, rule=rule)
        reference.unpack_signs(want.bits, found.scales.cpu(), two, rule=rule)
        assert torch.equal(one.cpu(), two)


def test_signs_of_what_is_not_finite(device: str) -> None:
    x = torch.tensor([float("nan"), -float("inf"), -0.0, -1.0] + [1.0] * 28)
    for scale in ("mean", "rms"):
        rule = SignRule(block_size=16, scale=scale)  # type: ignore[arg-type]
        q = PackedSigns.empty(32, rule, device=device)
        implementation("pack_signs", "triton")(x.to(device), q.bits, q.scales, rule=rule)
        assert q.bits.tolist() == [0b11110101, 255, 255, 255]
        assert [bool(scale.isfinite()) for scale in q.scales] == [False, True]
