"""RMS and layer normalisation: equal to torch's own, to the same sum and norm in two steps, and refused in words."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drivetrain.kernels import layer_norm, rms_norm

LOW = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 123), (2, 3, 64), (4097,), (0, 8), (3, 0)]


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_torch_in_float64(shape: tuple[int, ...]) -> None:
    x, weight, bias = _random(*shape), _random(shape[-1], seed=2), _random(shape[-1], seed=3)
    torch.testing.assert_close(
        layer_norm(x, weight, bias, eps=1e-3), functional.layer_norm(x, shape[-1:], weight, bias, 1e-3)
    )
    torch.testing.assert_close(layer_norm(x, weight, None), functional.layer_norm(x, shape[-1:], weight, None, 1e-5))
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-3), functional.rms_norm(x, shape[-1:], weight, 1e-3))


@pytest.mark.parametrize("dtype", LOW)
def test_low_precision_rounds_once(dtype: torch.dtype) -> None:
    x, weight, bias = _random(5, 123, dtype=dtype), _random(123, seed=2, dtype=dtype), _random(123, seed=3)
    exact = functional.layer_norm(x.double(), (123,), weight.double(), bias.float().double())
    found = layer_norm(x, weight, bias.float())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_residual_is_the_sum_and_then_its_norm(stream: torch.dtype) -> None:
    x, weight = _random(5, 123, dtype=torch.bfloat16), _random(123, seed=2, dtype=torch.bfloat16)
    residual = _random(5, 123, seed=4, dtype=stream)
    y, total = rms_norm(x, weight, residual=residual)
    assert torch.equal(total, x + residual)
    assert total.dtype == stream
    assert torch.equal(y, rms_norm(total, weight).to(x.dtype))
    y, total = layer_norm(x, weight, weight, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, layer_norm(total, weight, weight).to(x.dtype))


def test_gradients() -> None:
    inputs = [_random(3, 7).requires_grad_(), _random(7, seed=2).requires_grad_(), _random(7, seed=3).requires_grad_()]
    other = _random(3, 7, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w, b, r: layer_norm(x, w, b, residual=r), (*inputs, other))
    assert torch.autograd.gradcheck(lambda x, w, r: rms_norm(x, w, residual=r), (*inputs[:2], other))


def test_nan_and_infinity_stay_in_their_row() -> None:
    x = _random(4, 9, dtype=torch.float32)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    for y in (rms_norm(x, torch.ones(9)), layer_norm(x, torch.ones(9), torch.zeros(9))):
        assert bool(y[[0, 3]].isfinite().all())
        assert bool(y[1].isnan().all())
        assert bool(y[2].isnan().any())


def test_rows_of_a_wider_matrix_and_transposed_ones() -> None:
    wide, weight = _random(6, 40), _random(10, seed=2)
    assert torch.equal(rms_norm(wide[:, 5:15], weight), rms_norm(wide[:, 5:15].contiguous(), weight))
    tall = wide[:, :6].t()
    assert torch.equal(rms_norm(tall, weight[:6]), rms_norm(tall.contiguous(), weight[:6]))


def test_wrong_input_is_refused_in_words() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(3,\); expected \(4,\), the size of x's last"):
        rms_norm(x, torch.zeros(3))
    with pytest.raises(ValueError, match=r"layer_norm: bias has shape \(5,\)"):
        layer_norm(x, torch.zeros(4), torch.zeros(5))
    with pytest.raises(ValueError, match="residual has shape"):
        rms_norm(x, torch.zeros(4), residual=torch.zeros(4))
    with pytest.raises(TypeError, match=r"x has dtype torch\.int64; expected float32"):
        rms_norm(x.long(), torch.zeros(4))
    with pytest.raises(ValueError, match="eps must be a finite number"):
        rms_norm(x, torch.zeros(4), eps=-1.0)
    with pytest.raises(ValueError, match="x has no dimensions"):
        rms_norm(torch.tensor(1.0), torch.zeros(1))
    with pytest.raises(ValueError, match="weight lies on meta, x on cpu"):
        rms_norm(x, torch.zeros(4, device="meta"))
