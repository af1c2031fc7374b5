"""Products with quantised weights in Triton, against the product with the dequantised weight in float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import QuantizationRule, Quantized, dequantize, quantize
from drivetrain.kernels.triton_ops import matmul as fast

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULES = [
    QuantizationRule(format="int8", block_size=64),
    QuantizationRule(format="int8", block_size=32, symmetric=False),
    QuantizationRule(format="int4", block_size=32),
    QuantizationRule(format="int4", block_size=48, symmetric=False),
    QuantizationRule(format="fp8_e4m3", block_size=16),
    QuantizationRule(format="fp8_e5m2", block_size=192),
    QuantizationRule(format="fp6_e3m2", block_size=64),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.format}-{r.block_size}-{r.symmetric}")


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(outputs: int, inputs: int, rule: QuantizationRule) -> Quantized:
    return quantize(_random((outputs, inputs), 1) + 0.25, rule)


def _run(x: Tensor, weight: Quantized, device: str, **options: Any) -> Tensor:
    zeros = None if weight.zeros is None else weight.zeros.to(device)
    y = fast.quantized_matmul(
        x.to(device), weight.values.to(device), weight.scales.to(device), zeros, rule=weight.rule, **options
    )
    assert y.dtype == x.dtype
    return y.cpu()


def _exact(x: Tensor, weight: Quantized, outputs: int, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ dequantize(weight).double().view(outputs, -1).T
    return y if bias is None else y + bias.double()


def _assert_near(found: Tensor, want: Tensor, x: Tensor, weight: Quantized, outputs: int) -> None:
    """Within float32 sums of the products' magnitudes, and one rounding to the result's dtype."""
    magnitudes = x.double().abs() @ dequantize(weight).double().abs().view(outputs, -1).T
    error = (found.double() - want).abs()
    assert bool((error <= 1e-6 * magnitudes + 0.51 * torch.finfo(found.dtype).eps * want.abs()).all())


@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_activations(rule: QuantizationRule, dtype: torch.dtype, device: str) -> None:
    """One token, a few and more than a tile; outputs that are no multiple of a tile."""
    for tokens, outputs, inputs in ((1, 5, 192), (3, 70, 192), (20, 1, 384)):
        if tokens == 20 and dtype != torch.bfloat16:
            continue
        x, weight = _random((tokens, inputs), 2).to(dtype), _weight(outputs, inputs, rule)
        bias = _random((outputs,), 3) if tokens != 3 else None
        found = _run(x, weight, device, out_features=outputs, bias=bias)
        _assert_near(found, _exact(x, weight, outputs, bias), x, weight, outputs)


@every_rule
def test_int8_activations(rule: QuantizationRule, device: str) -> None:
    """As exact as the product of what both sides were rounded to."""
    for tokens, dtype in ((1, torch.bfloat16), (19, torch.float32)):
        x, weight = _random((tokens, 192), 2).to(dtype), _weight(21, 192, rule)
        bias = _random((21,), 3).to(dtype)
        rounded = dequantize(quantize(x, QuantizationRule(format="int8", block_size=rule.block_size))).view_as(x)
        found = _run(x, weight, device, out_features=21, bias=bias, activations="int8")
        _assert_near(found, _exact(rounded, weight, 21, bias), rounded, weight, 21)
        exact = _exact(x, weight, 21, bias)
        assert float((found.double() - exact).norm() / exact.norm()) < 0.02


@pytest.mark.parametrize("activations", ["native", "int8"])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp6_e3m2"])
def test_one_block_per_row(name: str, activations: Literal["native", "int8"], device: str) -> None:
    rule = QuantizationRule(format=name, block_size=256)  # type: ignore[arg-type]
    weight = _weight(9, 256, rule)
    for tokens in (1, 4):
        x = _random((tokens, 256), 2)
        left = x if activations == "native" else dequantize(quantize(x, QuantizationRule(block_size=256))).view_as(x)
        found = _run(x, weight, device, out_features=9, activations=activations)
        _assert_near(found, _exact(left, weight, 9), left, weight, 9)


def test_integer_products_are_exact(device: str) -> None:
    """Whole numbers up to 127 and scales of one: every sum is a whole number."""
    rule = QuantizationRule(format="int8", block_size=64)
    generator = torch.Generator().manual_seed(5)
    codes, x = (torch.randint(-126, 127, shape, generator=generator) for shape in ((7, 128), (5, 128)))
    codes[:, ::64] = x[:, ::64] = 127
    weight = quantize(codes.float(), rule)
    found = _run(x.float(), weight, device, out_features=7, activations="int8")
    assert torch.equal(found, (x @ codes.T).float())


@pytest.mark.parametrize("tokens", [1, 2])
def test_splits_are_added_in_order(tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = QuantizationRule(format="int4", block_size=16)
    x, weight = _random((tokens, 240), 2), _weight(10, 240, rule)
    bias = _random((10,), 3)
    results = []
    for count in (1, 1000):
        monkeypatch.setattr(fast, "processors", lambda _device, count=count: count)
        results.append(_run(x, weight, device, out_features=10, bias=bias))
        _assert_near(results[-1], _exact(x, weight, 10, bias), x, weight, 10)
    assert torch.equal(results[1], _run(x, weight, device, out_features=10, bias=bias))


def test_rows_apart_and_nothing_at_all(device: str) -> None:
    rule = QuantizationRule(format="int8", block_size=16)
    x, weight = _random((3, 64), 2)[:, :32], _weight(4, 32, rule)
    for activations in ("native", "int8"):
        found = _run(x, weight, device, out_features=4, activations=activations)
        want = _run(x.contiguous(), weight, device, out_features=4, activations=activations)
        assert torch.equal(found, want)
    assert _run(torch.empty(0, 32), weight, device, out_features=4).shape == (0, 4)
    empty = Quantized.empty(0, rule)
    assert _run(torch.empty(2, 0), empty, device, out_features=3, bias=torch.ones(3)).tolist() == [[1.0] * 3] * 2


def test_nan_of_a_block_or_token_stays_in_its_row(device: str) -> None:
    rule = QuantizationRule(format="int8", block_size=16)
    weight = _weight(4, 32, rule)
    weight.scales[3] = torch.nan  # second block of the second output
    x = _random((3, 32), 2)
    x[2, 5] = torch.inf
    for activations in ("native", "int8"):
        found = _run(x, weight, device, out_features=4, activations=activations).isfinite()
        assert found.tolist() == [[True, False, True, True]] * 2 + [[False] * 4]
    assert _run(x[:1], weight, device, out_features=4).isfinite().tolist() == [[True, False, True, True]]


def test_what_does_not_fit_is_refused(device: str) -> None:
    rule = QuantizationRule(format="int8", block_size=32)
    weight = _weight(4, 64, rule)
    with pytest.raises(TypeError, match=r"x has dtype torch\.float64; expected float32, bfloat16 or float16"):
        _run(torch.ones(2, 64, dtype=torch.float64), weight, device, out_features=4)
    with pytest.raises(ValueError, match="in=48 is no multiple of block_size=32"):
        _run(torch.ones(2, 48), weight, device, out_features=4)
    with pytest.raises(ValueError, match="with contiguous rows"):
        _run(torch.ones(64, 2).T, weight, device, out_features=4)
    with pytest.raises(ValueError, match=r"bias of shape \(4,\); found shape \(3,\)"):
        _run(torch.ones(2, 64), weight, device, out_features=4, bias=torch.ones(3))
    with pytest.raises(ValueError, match="must be 'native' or 'int8'; found 'fp4'"):
        _run(torch.ones(2, 64), weight, device, out_features=4, activations="fp4")
