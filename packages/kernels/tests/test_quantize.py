"""Quantisation: error bounds in float64, agreement with torch's own fp8, and equal bits of all implementations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import (
    PackedSigns,
    QuantizationRule,
    Quantized,
    SignRule,
    choose_instruction_set,
    dequantize,
    dequantize_reduce,
    instruction_sets,
    pack_signs,
    quantize,
    reduce_quantized,
    set_num_threads,
    unpack_signs,
)
from drivetrain.kernels.torch_ops import quantize as quantize_reference

SIZES = [0, 1, 5, 123, 4097]
RULES = [
    QuantizationRule(format="int8", block_size=256),
    QuantizationRule(format="int8", block_size=48, symmetric=False),
    QuantizationRule(format="int4", block_size=16),
    QuantizationRule(format="int4", block_size=4096, symmetric=False),
    QuantizationRule(format="fp8_e4m3", block_size=128),
    QuantizationRule(format="fp8_e5m2", block_size=32),
    QuantizationRule(format="fp6_e3m2", block_size=4112),
    QuantizationRule(format="fp6_e3m2", block_size=32),
]
LOW = [torch.float32, torch.bfloat16, torch.float16]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.format}-{r.block_size}-{r.symmetric}")


@pytest.fixture(params=instruction_sets() or ["torch"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each usable instruction set in turn."""
    if instruction_sets():
        choose_instruction_set(request.param)
    yield request.param
    if instruction_sets():
        choose_instruction_set(instruction_sets()[-1])


def _random(size: int, seed: int = 1) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    x[::7] *= 100.0
    x[3::11] = 0.0
    return x


def _reference(x: Tensor, rule: QuantizationRule, seed: int | None = None, first_block: int = 0) -> Quantized:
    target = Quantized.empty(x.numel(), rule)
    quantize_reference.quantize(x, target.stored, rule=rule, seed=seed, first_block=first_block)
    return target


def _same(a: Quantized, b: Quantized) -> bool:
    pairs = [(a.values, b.values), (a.scales.view(torch.int32), b.scales.view(torch.int32))]
    if a.zeros is not None and b.zeros is not None:
        pairs.append((a.zeros, b.zeros))
    return all(torch.equal(left, right) for left, right in pairs)


def _per_element(per_block: Tensor, rule: QuantizationRule, numel: int) -> Tensor:
    return per_block.double().repeat_interleave(rule.block_size)[:numel]


def _last_place(rule: QuantizationRule) -> float:
    """The smallest difference of two codes' values, before scaling."""
    return 1.0 if not rule.layout.mantissa else 2.0 ** (1 - rule.layout.bias - rule.layout.mantissa)


@every_rule
@pytest.mark.parametrize("size", SIZES)
def test_nearest_is_within_half_a_step(rule: QuantizationRule, size: int) -> None:
    x = _random(size)
    q = quantize(x, rule)
    assert q.values.numel() == rule.packed_bytes(size)
    error = (dequantize(q).double() - x.double()).abs()
    scale = _per_element(q.scales, rule, size)
    if rule.layout.mantissa:
        step = torch.maximum(x.double().abs() * 2.0**-rule.layout.mantissa, scale * _last_place(rule))
    else:
        step = scale
    assert bool((error <= 0.5 * step * (1 + 1e-3) + 1e-6 * x.double().abs()).all())


@every_rule
@pytest.mark.parametrize(("dtype", "seed"), [(LOW[0], None), (LOW[0], (1 << 63) - 5), (LOW[1], 0), (LOW[2], None)])
def test_all_implementations_give_the_same_bits(
    isa: str, rule: QuantizationRule, dtype: torch.dtype, seed: int | None
) -> None:
    for size in SIZES:
        x = _random(size).to(dtype)
        expected = _reference(x, rule, seed, first_block=3)
        for threads in (1, 3):
            set_num_threads(threads)
            found = quantize(x, rule, seed=seed, first_block=3)
            assert _same(found, expected), (size, threads)
        for out_dtype in LOW:
            target = torch.empty(size, dtype=out_dtype)
            quantize_reference.dequantize_reduce([expected.stored], target, rules=[rule])
            assert torch.equal(dequantize(found, dtype=out_dtype), target)
    set_num_threads(None)


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_is_that_of_torch(isa: str, name: str, dtype: torch.dtype) -> None:
    rule = QuantizationRule(format=name, block_size=128)  # type: ignore[arg-type]
    x = _random(4097)
    q = quantize(x, rule)
    scaled = x * (1.0 / q.scales).repeat_interleave(128)[:4097]
    assert torch.equal(q.values.view(dtype).float(), scaled.clamp(-rule.limit, rule.limit).to(dtype).float())
    codes = Quantized(
        values=torch.arange(256, dtype=torch.uint8), scales=torch.ones(2), zeros=None, numel=256, rule=rule
    )
    assert torch.equal(
        dequantize(codes).nan_to_num(7.0, 8.0, 9.0), codes.values.view(dtype).float().nan_to_num(7.0, 8.0, 9.0)
    )


def test_fp6_codes_by_hand(isa: str) -> None:
    rule = QuantizationRule(format="fp6_e3m2", block_size=16)
    x = torch.tensor([28.0, -28.0, 0.0, 0.0625, 0.25, 1.0, -1.25, 26.0, 0.03])
    q = quantize(x, rule)
    assert q.scales.tolist() == [1.0]
    codes = [0x1F, 0x3F, 0, 1, 4, 12, 32 + 13, 0x1E, 0]
    word = sum(code << (6 * place) for place, code in enumerate(codes))
    assert bytes(q.values.tolist()) == word.to_bytes(7, "little")
    assert dequantize(q).tolist() == [28.0, -28.0, 0.0, 0.0625, 0.25, 1.0, -1.25, 24.0, 0.0]  # 26: to even, 0x1E


def test_int_codes_by_hand(isa: str) -> None:
    x = torch.tensor([7.0, -7.0, 0.5, 1.5, -2.5])
    q = quantize(x, QuantizationRule(format="int4", block_size=16))
    assert q.values.tolist() == [0x97, 0x20, 0x0E]
    q = quantize(torch.tensor([-1.0, 14.0, 0.5]), QuantizationRule(format="int4", block_size=16, symmetric=False))
    assert q.values.tolist() == [0xF0, 0x02]
    assert q.scales.tolist() == [1.0]
    assert q.zeros is not None
    assert q.zeros.tolist() == [-1.0]


@every_rule
def test_stochastic_rounding_is_unbiased(rule: QuantizationRule) -> None:
    x = _random(2000, seed=5)
    rounds = 100
    total = sum(dequantize(quantize(x, rule, seed=seed)).double() for seed in range(rounds))
    q = quantize(x, rule)
    step = _per_element(q.scales, rule, 2000) * _last_place(rule)
    if rule.layout.mantissa:
        step = torch.maximum(step, x.double().abs() * 2.0**-rule.layout.mantissa)
    # The mean of 100 draws has a standard deviation of at most step / 20: five of them bound the largest of 2000.
    assert bool(((torch.as_tensor(total) / rounds - x.double()).abs() <= step / 4 + 1e-5 * x.abs()).all())
    assert abs(float((torch.as_tensor(total) / rounds - x.double()).mean() / step.mean())) < 0.02


@pytest.mark.parametrize("rule", [RULES[0], RULES[3], RULES[6]], ids=str)
def test_many_pieces_and_threads_change_nothing(rule: QuantizationRule) -> None:
    x = _random(150001)
    expected = _reference(x, rule, seed=1)
    for threads in (1, 2, 5):
        set_num_threads(threads)
        q = quantize(x, rule, seed=1)
        assert _same(q, expected)
        assert torch.equal(dequantize(q), dequantize_reduce([q]))
    set_num_threads(None)


def test_a_slice_gets_the_random_numbers_of_the_whole(isa: str) -> None:
    rule = QuantizationRule(format="int8", block_size=64)
    x = _random(64 * 20)
    whole, part = quantize(x, rule, seed=9), quantize(x[64 * 5 :], rule, seed=9, first_block=5)
    assert torch.equal(whole.values[64 * 5 :], part.values)
    assert not torch.equal(whole.values, quantize(x, rule, seed=10).values)


@every_rule
def test_nan_and_infinity_stay_in_their_block_and_visible(isa: str, rule: QuantizationRule) -> None:
    size = rule.block_size * 3
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = _random(size)
        x[rule.block_size + 1] = bad
        q = quantize(x, rule, seed=3)
        assert _same(q, _reference(x, rule, seed=3))
        back = dequantize(q)
        assert bool(back[rule.block_size : 2 * rule.block_size].isnan().all())
        assert bool(back[: rule.block_size].isfinite().all() and back[2 * rule.block_size :].isfinite().all())
        reduced = dequantize(reduce_quantized([quantize(_random(size, 2), rule), q]))
        assert int(reduced.isnan().sum()) == rule.block_size


def test_tiny_blocks_become_zero_and_a_constant_block_is_exact(isa: str) -> None:
    for rule in RULES:
        q = quantize(torch.full((33,), 1e-39), rule)
        assert float(dequantize(q).abs().max()) <= 1e-38
        assert torch.equal(dequantize(quantize(torch.zeros(33), rule)), torch.zeros(33))
    constant = torch.full((33,), -2.7)
    assert torch.equal(dequantize(quantize(constant, RULES[1])), constant)


@every_rule
def test_reduction_equals_its_parts(isa: str, rule: QuantizationRule) -> None:
    for size in SIZES:
        sources = [quantize(_random(size, k), RULES[k]) for k in range(len(RULES))]
        summed = torch.zeros(size)
        for index, source in enumerate(sources):
            summed = dequantize(source) if index == 0 else summed + dequantize(source)
        summed = summed * torch.tensor(0.3)
        assert torch.equal(dequantize_reduce(sources, factor=0.3), summed)
        assert _same(reduce_quantized(sources, rule=rule, factor=0.3, seed=4), _reference(summed, rule, seed=4))
        by_torch = torch.empty(size, dtype=torch.bfloat16)
        stored = [source.stored for source in sources]
        quantize_reference.dequantize_reduce(stored, by_torch, rules=[s.rule for s in sources], factor=0.3)
        assert torch.equal(dequantize_reduce(sources, factor=0.3, dtype=torch.bfloat16), by_torch)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("scale", ["mean", "rms"])
@pytest.mark.parametrize("block_size", [None, 16, 33 * 16, 40000])
def test_signs(isa: str, dtype: torch.dtype, scale: str, block_size: int | None) -> None:
    rule = SignRule(block_size=block_size, scale=scale)  # type: ignore[arg-type]
    for size in SIZES:
        x = _random(size).to(dtype)
        packed = pack_signs(x, rule)
        blocks = x.double().split(block_size or max(size, 1)) if size else []
        expected = [b.abs().mean() if scale == "mean" else b.square().mean().sqrt() for b in blocks]
        torch.testing.assert_close(
            packed.scales.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-7, atol=0
        )
        by_torch = PackedSigns.empty(size, rule)
        quantize_reference.pack_signs(x, by_torch.bits, by_torch.scales, rule=rule)
        assert torch.equal(packed.bits, by_torch.bits)
        signs = torch.where(x < 0, -1.0, 1.0)
        per_element = packed.scales.repeat_interleave(block_size or max(size, 1))[:size]
        assert torch.equal(unpack_signs(packed), signs * per_element)
        target = torch.empty(size, dtype=dtype)
        quantize_reference.unpack_signs(packed.bits, packed.scales, target, rule=rule)
        assert torch.equal(unpack_signs(packed, dtype=dtype), target)


def test_signs_do_not_depend_on_threads_and_show_overflow(isa: str) -> None:
    x = _random(200001)
    set_num_threads(1)
    one = pack_signs(x).scales
    set_num_threads(4)
    assert torch.equal(pack_signs(x).scales, one)
    set_num_threads(None)
    x[7] = float("inf")
    assert not bool(unpack_signs(pack_signs(x)).isfinite().any())
    assert pack_signs(torch.tensor([0.0, -0.0, float("nan"), -1.0])).bits.tolist() == [0b0111]


def test_wrong_input_is_refused_in_words() -> None:
    rule = QuantizationRule()
    with pytest.raises(TypeError, match=r"source has dtype torch\.float64; expected float32"):
        quantize(torch.zeros(3, dtype=torch.float64), rule)
    with pytest.raises(ValueError, match=r"isn't contiguous.*\.contiguous\(\)"):
        quantize(torch.zeros(4, 4).t(), rule)
    with pytest.raises(ValueError, match=r"block_size: expected a positive multiple of 16"):
        QuantizationRule(block_size=100)
    with pytest.raises(ValueError, match="symmetric=False is for int8 and int4"):
        QuantizationRule(format="fp8_e4m3", symmetric=False)
    with pytest.raises(ValueError, match="format: expected one of int8"):
        QuantizationRule(format="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must lie in"):
        quantize(torch.zeros(3), rule, seed=-1)
    with pytest.raises(ValueError, match="values: expected a contiguous 1-D tensor of 3"):
        Quantized(values=torch.zeros(2, dtype=torch.uint8), scales=torch.zeros(1), zeros=None, numel=3, rule=rule)
    with pytest.raises(ValueError, match="input 1 has 4"):
        reduce_quantized([quantize(torch.zeros(3), rule), quantize(torch.zeros(4), rule)])
    with pytest.raises(ValueError, match="out was made for"):
        quantize(torch.zeros(3), rule, out=Quantized.empty(3, QuantizationRule(format="int4")))
    with pytest.raises(ValueError, match="at least one"):
        dequantize_reduce([])
    with pytest.raises(ValueError, match="scale: expected"):
        SignRule(scale="max")  # type: ignore[arg-type]
