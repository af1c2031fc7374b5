"""Fused activations against their parts, and dropout's mask as a function of seed and place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.kernels import bias_dropout_residual, bias_gelu, geglu, swiglu
from drivetrain.kernels.torch_ops.counter_random import random_bits

SHAPES = [(1, 1), (5, 123), (2, 3, 4), (0, 3), (4097,)]


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_gates_equal_their_parts(shape: tuple[int, ...]) -> None:
    gate, up = _random(*shape), _random(*shape, seed=2)
    together = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(swiglu(gate, up), functional.silu(gate) * up)
    torch.testing.assert_close(swiglu(together), swiglu(gate, up))
    for approximate in ("none", "tanh"):
        expected = functional.gelu(gate, approximate=approximate) * up
        torch.testing.assert_close(geglu(gate, up, approximate=approximate), expected)
        torch.testing.assert_close(geglu(together, approximate=approximate), expected)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu_rounds_once(approximate: str) -> None:
    x, bias = _random(5, 123, dtype=torch.bfloat16), _random(123, seed=2, dtype=torch.bfloat16)
    exact = functional.gelu(x.double() + bias.double(), approximate=approximate)
    found = bias_gelu(x, bias, approximate=approximate)  # type: ignore[arg-type]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-6)


def test_gradients() -> None:
    x, y = _random(3, 4).requires_grad_(), _random(3, 4, seed=2).requires_grad_()
    bias = _random(4, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(swiglu, (x, y))
    assert torch.autograd.gradcheck(lambda a: geglu(a, approximate="tanh"), (x,))
    assert torch.autograd.gradcheck(bias_gelu, (x, bias))
    assert torch.autograd.gradcheck(lambda a, b, c: bias_dropout_residual(a, b, c, p=0.4, seed=5), (x, bias, y))
    assert torch.autograd.gradgradcheck(lambda a, c: bias_dropout_residual(a, None, c, p=0.4, seed=5), (x, y))


def test_dropout_keeps_the_expected_share_and_value() -> None:
    x, bias, residual = _random(64, 512).abs() + 1, torch.ones(512, dtype=torch.float64), _random(64, 512, seed=2)
    found = bias_dropout_residual(x, bias, residual, p=0.25, seed=(1 << 63) - 1) - residual
    kept = found.abs() > 0.5
    torch.testing.assert_close(found[kept], (x + bias)[kept] / 0.75)
    assert not found[~kept].any()
    # Five standard deviations of a binomial share.
    assert abs(float(kept.double().mean()) - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5
    assert abs(float((kept[:, 1:] == kept[:, :-1]).double().mean()) - 0.625) < 5 * (0.24 / kept.numel()) ** 0.5
    other = bias_dropout_residual(x, bias, residual, p=0.25, seed=4) - residual
    assert abs(float(((other.abs() > 0.5) == kept).double().mean()) - 0.625) < 5 * (0.24 / kept.numel()) ** 0.5
    for off in ({"p": 0.0}, {"p": 0.5, "training": False}):
        torch.testing.assert_close(bias_dropout_residual(x, bias, residual, seed=3, **off), x + bias + residual)  # type: ignore[arg-type]


def test_slices_drop_what_the_whole_drops_and_nothing_is_saved() -> None:
    x, residual = _random(10, 3, 7).requires_grad_(), _random(10, 3, 7, seed=2)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        whole = bias_dropout_residual(x, None, residual, p=0.5, seed=9)
    assert saved == []
    part = bias_dropout_residual(x[4:], None, residual[4:], p=0.5, seed=9, first_row=4 * 3)
    assert torch.equal(whole[4:], part)
    far = random_bits(2, 5, seed=9, first_row=(1 << 32) + 1, device=x.device)
    near = random_bits(2, 5, seed=9, first_row=1, device=x.device)
    assert not torch.equal(far, near)
    assert torch.equal(far[1], random_bits(1, 5, seed=9, first_row=(1 << 32) + 2, device=x.device)[0])


def test_nan_spreads_no_further_and_dropped_nan_is_zero() -> None:
    x = _random(3, 64, dtype=torch.float32)
    x[1, 2], x[1, 3] = torch.nan, torch.inf
    found = swiglu(x, torch.ones_like(x))
    assert found.isnan().nonzero().tolist() == [[1, 2]]
    assert found[1, 3] == torch.inf
    bad = torch.full((1, 64), torch.nan)
    found = bias_dropout_residual(bad, None, torch.zeros(1, 64), p=0.5, seed=1)
    assert 0 < int(found.isnan().sum()) < 64
    assert not found[~found.isnan()].any()


def test_residual_stream_may_be_wider() -> None:
    x, residual = _random(3, 5, dtype=torch.bfloat16).requires_grad_(), _random(3, 5, seed=2, dtype=torch.float32)
    found = bias_dropout_residual(x, None, residual, p=0.0, seed=0)
    assert found.dtype == torch.float32
    assert torch.equal(found, x.float() + residual)
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_wrong_input_is_refused_in_words() -> None:
    x, bias = torch.zeros(2, 5), torch.zeros(5)
    with pytest.raises(ValueError, match=r"swiglu: up has shape \(2, 4\); expected \(2, 5\), the shape of gate"):
        swiglu(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="its last dimension must be even"):
        swiglu(x)
    with pytest.raises(TypeError, match=r"gate is torch\.float32, up torch\.float16"):
        geglu(x, x.half())
    with pytest.raises(ValueError, match="approximate must be 'none' or 'tanh'; found 'erf'"):
        geglu(x, x, approximate="erf")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias has shape"):
        bias_gelu(x, torch.zeros(4))
    with pytest.raises(TypeError, match=r"x has dtype torch\.int32"):
        bias_gelu(x.int(), bias)
    with pytest.raises(ValueError, match="x has no dimensions"):
        bias_gelu(torch.tensor(1.0), bias)
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\); found 1\.0"):
        bias_dropout_residual(x, bias, x, p=1.0, seed=0)
    with pytest.raises(ValueError, match="seed must lie in"):
        bias_dropout_residual(x, bias, x, p=0.1, seed=-1)
    with pytest.raises(ValueError, match="first_row must not be negative"):
        bias_dropout_residual(x, bias, x, p=0.1, seed=0, first_row=-1)
    with pytest.raises(ValueError, match="residual has shape"):
        bias_dropout_residual(x, bias, torch.zeros(5), p=0.1, seed=0)
