"""Products with quantised weights: float64 as oracle, and equal bits of instruction sets, threads and layouts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.kernels import (
    QuantizationRule,
    QuantizedLinear,
    QuantizedWeight,
    available,
    choose_instruction_set,
    dequantize,
    instruction_sets,
    quantize,
    quantize_weight,
    quantized_linear,
    set_num_threads,
)
from drivetrain.kernels.torch_ops import matmul as reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (rule, in_features): blocks smaller than, equal to and larger than a segment of sums, and not a divisor of it.
CASES = [
    (QuantizationRule(format="int8", block_size=640), 640),
    (QuantizationRule(format="int8", block_size=16, symmetric=False), 48),
    (QuantizationRule(format="int8", block_size=1040, symmetric=False), 2080),
    (QuantizationRule(format="int4", block_size=32), 352),
    (QuantizationRule(format="int4", block_size=128, symmetric=False), 1280),
    (QuantizationRule(format="int4", block_size=16), 16),
    (QuantizationRule(format="fp8_e4m3", block_size=128), 256),
    (QuantizationRule(format="fp8_e5m2", block_size=544), 544),
    (QuantizationRule(format="fp6_e3m2", block_size=48), 144),
]
every_case = pytest.mark.parametrize(
    ("rule", "columns"), CASES, ids=lambda c: str(c) if isinstance(c, int) else c.format
)


@pytest.fixture(params=instruction_sets() or ["torch"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each usable instruction set in turn."""
    if instruction_sets():
        choose_instruction_set(request.param)
    yield request.param
    if instruction_sets():
        choose_instruction_set(instruction_sets()[-1])


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def _weight(rows: int, columns: int, rule: QuantizationRule, prepare: bool = True) -> QuantizedWeight:
    return quantize_weight(_random(rows, columns) * 0.1 + 0.02, rule, prepare=prepare)


def _dense(weight: QuantizedWeight) -> Tensor:
    return dequantize(weight.quantized).double().view(weight.out_features, weight.in_features)


def _largest(weight: QuantizedWeight) -> Tensor:
    """What the magnitudes of a block's terms are bounded by, for each element of the weight."""
    quantized = weight.quantized
    bound = quantized.scales * quantized.rule.limit
    if quantized.zeros is not None:
        bound = bound + quantized.zeros.abs()
    shape = (weight.out_features, weight.in_features)
    return bound.double().repeat_interleave(quantized.rule.block_size).view(shape)


def _reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, activations: reference.Activations) -> Tensor:
    quantized = weight.quantized
    rows = weight.out_features
    return reference.quantized_matmul(
        x, *quantized.stored, rule=quantized.rule, out_features=rows, bias=bias, activations=activations
    )


def _is_integer(rule: QuantizationRule) -> bool:
    return rule.layout.mantissa == 0


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_is_the_product_with_the_dequantised_weight(
    isa: str, rule: QuantizationRule, columns: int, dtype: torch.dtype
) -> None:
    for rows, tokens in ((1, 1), (5, 7), (123, 37)):
        weight, bias = _weight(rows, columns, rule), _random(rows, seed=3)
        x = _random(tokens, columns, seed=2).to(dtype)
        found = quantized_linear(x, weight, bias)
        assert found.dtype == dtype
        expected = x.double() @ _dense(weight).t() + bias
        # Sums of float32 whose terms are at most `bound` all together, rounded once more to the dtype.
        bound = x.double().abs() @ _largest(weight).t() + bias.abs()
        slack = 4 * torch.finfo(torch.float32).eps * bound + 0.51 * torch.finfo(dtype).eps * expected.abs()
        assert bool(((found.double() - expected).abs() <= slack + 1e-7).all()), (rows, tokens)


@cache
def _int8_case(
    rows: int, tokens: int, columns: int, rule: QuantizationRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    bias, x = _random(rows, seed=3).to(dtype), _random(tokens, columns, seed=2).to(dtype)
    return x, bias, _reference(x, _weight(rows, columns, rule), bias, "int8")


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_activations_give_the_bits_of_the_reference(
    isa: str, rule: QuantizationRule, columns: int, dtype: torch.dtype
) -> None:
    for rows, tokens in ((1, 1), (5, 7), (70, 37)):
        x, bias, expected = _int8_case(rows, tokens, columns, rule, dtype)
        found = quantized_linear(x, _weight(rows, columns, rule), bias, activations="int8")
        if _is_integer(rule):
            assert torch.equal(found, expected), (rows, tokens)
        else:
            tolerance = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@every_case
def test_int8_activations_are_near_the_exact_product(rule: QuantizationRule, columns: int) -> None:
    weight, x = _weight(40, columns, rule), _random(9, columns, seed=2)
    rounded = dequantize(quantize(x, QuantizationRule(format="int8", block_size=rule.block_size))).double()
    expected = rounded.view(9, columns) @ _dense(weight).t()
    bound = x.double().abs() @ _largest(weight).t()
    found = quantized_linear(x, weight, activations="int8").double()
    assert bool(((found - expected).abs() <= 4 * torch.finfo(torch.float32).eps * bound).all())
    exact = x.double() @ _dense(weight).t()
    assert float((found - exact).norm() / exact.norm()) < 0.02


@every_case
@pytest.mark.parametrize(
    ("dtype", "activations"), [(torch.float32, "native"), (torch.bfloat16, "native"), (torch.float32, "int8")]
)
def test_bits_depend_on_neither_threads_nor_tokens_nor_layout(
    isa: str, rule: QuantizationRule, columns: int, dtype: torch.dtype, activations: reference.Activations
) -> None:
    x = _random(67, columns, seed=2).to(dtype)
    bare = _weight(150, columns, rule, prepare=False)
    weight = QuantizedWeight(quantized=bare.quantized, out_features=150, in_features=columns)  # prepared here and now
    set_num_threads(1)
    whole = quantized_linear(x, weight, activations=activations)
    for threads in (1, 3):
        set_num_threads(threads)
        assert torch.equal(quantized_linear(x, weight, activations=activations), whole)
        assert torch.equal(quantized_linear(x, bare, activations=activations), whole)
    tiles = isa == "amx" and dtype == torch.bfloat16  # which fewer than 8 tokens are not multiplied by
    for part in (slice(0, 1), slice(3, 5), slice(7, 14), slice(20, 60)):
        if tiles and part.stop - part.start < 8:
            continue
        assert torch.equal(quantized_linear(x[part], weight, activations=activations), whole[part])
        assert torch.equal(quantized_linear(x[part], bare, activations=activations), whole[part])
    set_num_threads(None)


@pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")
@every_case
@pytest.mark.parametrize(
    ("dtype", "activations"), [(torch.bfloat16, "native"), (torch.float16, "native"), (torch.float32, "int8")]
)
def test_instruction_sets_agree_to_the_bit(
    rule: QuantizationRule, columns: int, dtype: torch.dtype, activations: reference.Activations
) -> None:
    weight = _weight(90, columns, rule)
    for tokens in (1, 3, 40):
        x = _random(tokens, columns, seed=2).to(dtype)
        found = {}
        for name in instruction_sets():
            choose_instruction_set(name)
            if name in ("avx512_bf16", "amx") and dtype == torch.bfloat16:
                continue  # their bfloat16 products are added in an order of their own
            found[name] = quantized_linear(x, weight, activations=activations)
        choose_instruction_set(instruction_sets()[-1])
        assert all(torch.equal(y, found[instruction_sets()[0]]) for y in found.values()), tokens


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 100),
    block=st.integers(1, 40),
    blocks=st.integers(1, 4),
    tokens=st.integers(1, 50),
    symmetric=st.booleans(),
    wide=st.booleans(),
    prepare=st.booleans(),
)
def test_any_shape(rows: int, block: int, blocks: int, tokens: int, symmetric: bool, wide: bool, prepare: bool) -> None:
    rule = QuantizationRule(format="int8" if wide else "int4", block_size=16 * block, symmetric=symmetric)
    weight = _weight(rows, 16 * block * blocks, rule, prepare=prepare)
    x = _random(tokens, weight.in_features, seed=2)
    assert torch.equal(quantized_linear(x, weight, activations="int8"), _reference(x, weight, None, "int8"))
    bound = 4 * torch.finfo(torch.float32).eps * (x.double().abs() @ _largest(weight).t())
    assert bool(((quantized_linear(x, weight).double() - x.double() @ _dense(weight).t()).abs() <= bound).all())


@every_case
def test_nan_and_infinity_stay_in_their_token_and_row(isa: str, rule: QuantizationRule, columns: int) -> None:
    weight = _weight(20, columns, rule)
    dense = _random(20, columns) * 0.1
    dense[4, columns // 2] = float("inf")
    broken = quantize_weight(dense, rule)
    for activations in ("native", "int8"):
        for bad in (float("nan"), float("inf"), float("-inf")):
            x = _random(10, columns, seed=2)
            x[3, 1] = bad
            y = quantized_linear(x, weight, activations=activations)
            assert not bool(y[3].isfinite().any())
            assert bool(y[:3].isfinite().all() and y[4:].isfinite().all())
        y = quantized_linear(_random(10, columns, seed=2), broken, activations=activations)
        assert bool(y[:, 4].isnan().all())
        assert bool(y[:, :4].isfinite().all() and y[:, 5:].isfinite().all())


def test_empty_operands(isa: str) -> None:
    rule = QuantizationRule(format="int4", block_size=16, symmetric=False)
    weight = _weight(3, 32, rule)
    assert quantized_linear(torch.zeros(0, 32), weight).shape == (0, 3)
    assert quantized_linear(torch.zeros(2, 0, 32), weight, activations="int8").shape == (2, 0, 3)
    assert quantized_linear(torch.zeros(2, 32), _weight(0, 32, rule)).shape == (2, 0)
    bias = torch.tensor([1.0, 2.0])
    for activations in ("native", "int8"):
        y = quantized_linear(torch.zeros(3, 0), _weight(2, 0, rule), bias, activations=activations)
        assert torch.equal(y, bias.expand(3, 2))


def test_operands_may_lie_anywhere(isa: str) -> None:
    rule = QuantizationRule(format="int4", block_size=32)
    weight, x = _weight(50, 96, rule), _random(6, 96, seed=2).bfloat16()
    expected = quantized_linear(x, weight)
    assert torch.equal(quantized_linear(x.t().contiguous().t(), weight), expected)
    assert torch.equal(quantized_linear(x.view(2, 3, 96), weight), expected.view(2, 3, 50))
    assert torch.equal(quantized_linear(x[0], weight), expected[0])
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype)
    odd[1:] = x.flatten()
    stored = weight.quantized
    moved = torch.zeros(stored.values.numel() + 1, dtype=torch.uint8)
    moved[1:] = stored.values
    other = QuantizedWeight(
        quantized=type(stored)(values=moved[1:], scales=stored.scales, zeros=None, numel=stored.numel, rule=rule),
        out_features=50,
        in_features=96,
        prepare=False,
    )
    assert torch.equal(quantized_linear(odd[1:].view(6, 96), other), expected)


def test_wrong_operands_are_refused_in_words() -> None:
    rule = QuantizationRule(format="int4", block_size=32)
    with pytest.raises(
        ValueError, match=r"in_features=80 isn't a multiple of block_size=32; use for example block_size=16"
    ):
        quantize_weight(torch.zeros(4, 80), rule)
    with pytest.raises(ValueError, match=r"rows must be a multiple of 16 long"):
        QuantizedLinear(10, 4, rule)
    with pytest.raises(ValueError, match=r"expected a weight \[out, in\]; found the shape \(4,\)"):
        quantize_weight(torch.zeros(4), rule)
    weight = _weight(4, 64, rule)
    with pytest.raises(ValueError, match=r"256 elements can't be a weight of 4 x 32"):
        QuantizedWeight(quantized=weight.quantized, out_features=4, in_features=32)
    x = torch.zeros(2, 64)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64"):
        quantized_linear(x.double(), weight)
    with pytest.raises(ValueError, match=r"x has the shape \(2, 63\).*in_features=64"):
        quantized_linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match=r"x lies on meta, the weight on cpu"):
        quantized_linear(x.to("meta"), weight)
    with pytest.raises(ValueError, match=r"bias: expected a contiguous tensor of shape \(4,\).*found \(3,\)"):
        quantized_linear(x, weight, torch.zeros(3))
    with pytest.raises(ValueError, match=r"'native' or 'int8'; found 'int4'"):
        quantized_linear(x, weight, activations="int4")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"no gradient; call them under torch\.no_grad"):
        quantized_linear(x.requires_grad_(), weight)
    with torch.no_grad():
        quantized_linear(x, weight)


def _linear(dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    linear = torch.nn.Linear(96, 20, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(_random(20, 96))
        assert linear.bias is not None
        linear.bias.copy_(_random(20, seed=3))
    return linear


@pytest.mark.parametrize(
    "rule", [QuantizationRule(format="int4", block_size=32, symmetric=False), CASES[-1][0]], ids=str
)
def test_the_layer_is_the_function(rule: QuantizationRule) -> None:
    linear, x = _linear(), _random(2, 5, 96, seed=2)
    layer = QuantizedLinear.from_linear(linear, rule, activations="int8")
    weight = quantize_weight(linear.weight, rule)
    expected = quantized_linear(x, weight, layer.bias, activations="int8")
    assert torch.equal(layer(x), expected)
    assert not list(layer.parameters())
    assert f"96, 20, {rule.format} in blocks of {rule.block_size}" in repr(layer)

    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    fresh = QuantizedLinear(96, 20, rule, activations="int8")
    assert torch.equal(fresh(x), torch.zeros(2, 5, 20))  # prepared here: loading must make that void
    fresh.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(fresh(x), expected)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), expected)
    assert torch.equal(quantized_linear(x, copy.deepcopy(weight), layer.bias, activations="int8"), expected)


def test_the_layer_keeps_its_scales_through_a_change_of_dtype() -> None:
    rule = QuantizationRule(format="int4", block_size=32, symmetric=False)
    layer = QuantizedLinear.from_linear(_linear(torch.bfloat16), rule)
    x = _random(3, 96, seed=2).bfloat16()
    expected = layer(x)
    scales, zeros = layer.scales.clone(), layer.zeros
    layer.to(torch.bfloat16)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(layer.scales, scales)
    assert zeros is not None
    assert layer.zeros is not None
    assert torch.equal(layer.zeros, zeros)
    assert torch.equal(layer(x), expected)
    without = QuantizedLinear.from_linear(torch.nn.Linear(96, 4, bias=False), rule)
    assert without.bias is None
    assert "bias" not in without.state_dict()


def test_a_state_dict_of_another_rule_is_refused() -> None:
    state = QuantizedLinear.from_linear(_linear(), QuantizationRule(format="fp8_e4m3", block_size=96)).state_dict()
    with pytest.raises(
        ValueError, match=r"rule_numbers: the state_dict was made with .*\[2, 96, 1\], this layer with \[0, 96, 1\]"
    ):
        QuantizedLinear(96, 20, QuantizationRule(format="int8", block_size=96)).load_state_dict(state)


def test_the_table_names_the_native_product() -> None:
    status = next(entry for entry in available() if entry.op == "quantized_matmul" and entry.device == "cpu")
    assert status.implementation.startswith("native" if instruction_sets() else "torch")
