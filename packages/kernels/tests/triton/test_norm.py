"""The Triton norms against the plain ones in float64: values and all gradients, short and long rows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.dispatch import Kind

# Tolerances: a few units in the last place of what is stored (the interpreter truncates to bfloat16 instead of
# rounding), and float32 sums over rows and columns.
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LONG = 8192 + 5

# (shape, dtype, with residual): one row of one; odd sizes; more rows than programs; rows beyond one block
CASES = [
    ((1, 1), torch.float32, False),
    ((5, 123), torch.bfloat16, True),
    ((23, 2, 257), torch.float32, True),
    ((3, 1030), torch.float16, False),
    ((9, LONG), torch.float32, True),
    ((2, LONG), torch.bfloat16, False),
]
every_case = pytest.mark.parametrize(("shape", "dtype", "with_residual"), CASES)


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _evaluate(op: str, kind: Kind, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs of one implementation in `dtype`, then gradients of a weighted sum of them."""
    given = tensors["x"].dtype
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
    bias = [leaves.get("bias")] if op == "layer_norm" else []
    residual = leaves.get("residual")
    found = implementation(op, kind)(leaves["x"], leaves["weight"], *bias, eps=1e-3, residual=residual)
    outputs = found if isinstance(found, tuple) else (found,)
    seeds = [
        _random(*output.shape, seed=9 + index, device=output.device.type, dtype=given).to(dtype)
        for index, output in enumerate(outputs)
    ]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds)
    return [tensor.detach() for tensor in (*outputs, *gradients)]


@every_case
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_values_and_gradients(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool, device: str
) -> None:
    tensors = {
        "x": _random(*shape, seed=1, device=device, dtype=dtype),
        "weight": _random(shape[-1], seed=2, device=device, dtype=dtype),
    }
    if op == "layer_norm" and dtype != torch.float16:
        tensors["bias"] = _random(shape[-1], seed=3, device=device, dtype=dtype)
    if with_residual:
        tensors["residual"] = _random(*shape, seed=4, device=device, dtype=dtype)
    found = _evaluate(op, "triton", tensors, dtype)
    exact = _evaluate(op, "torch", tensors, torch.float64)
    tolerance = DTYPES[dtype]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        assert one.shape == other.shape
        scale = max(1.0, float(other.abs().max()) / 8)
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)


def test_rows_apart_mixed_dtypes_and_frozen_parameters(device: str) -> None:
    wide = _random(6, 2, 40, seed=1, device=device, dtype=torch.float16)
    weight = _random(10, seed=2, device=device, dtype=torch.float32)
    stream = _random(6, 2, 10, seed=3, device=device, dtype=torch.float32).requires_grad_()
    x = wide[..., 5:15].detach().requires_grad_()
    y, total = implementation("rms_norm", "triton")(x, weight, residual=stream)
    expected, expected_total = implementation("rms_norm", "torch")(x, weight, residual=stream)
    assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(total, expected_total)
    seed = _random(6, 2, 10, seed=4, device=device, dtype=torch.float32)
    for outputs, reference in ((total, expected_total), (y, expected)):
        mine = torch.autograd.grad(outputs, (x, stream), seed.to(outputs.dtype), retain_graph=True)
        theirs = torch.autograd.grad(reference, (x, stream), seed.to(outputs.dtype), retain_graph=True)
        torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


def test_gradients_of_parameters_keep_the_precision_of_each(device: str) -> None:
    x = _random(40, 16, seed=1, device=device, dtype=torch.float32)
    weight = _random(16, seed=2, device=device, dtype=torch.bfloat16).requires_grad_()
    bias = _random(16, seed=3, device=device, dtype=torch.float32).requires_grad_()
    results = []
    for kind in ("triton", "torch"):
        y = implementation("layer_norm", kind)(x, weight, bias)
        results.append(torch.autograd.grad(y, (weight, bias), x))
    torch.testing.assert_close(results[0], results[1])


def test_expanded_gradients_empty_tensors_and_nan(device: str) -> None:
    layer_norm = implementation("layer_norm", "triton")
    x = _random(5, 7, seed=1, device=device, dtype=torch.float32)
    x[3, 1] = torch.nan
    weight = torch.ones(7, device=device, requires_grad=True)
    y = layer_norm(x, weight, weight)
    assert y.isnan().any(dim=1).tolist() == [False, False, False, True, False]
    y[:3].sum().backward()
    assert weight.grad is not None
    empty = layer_norm(x[:0], weight, None)
    assert empty.shape == (0, 7)
    empty.sum().backward()
