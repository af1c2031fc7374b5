"""The grouped product in Triton against plain torch in float64, and a whole layer of experts."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation, permutation
from drivetrain.kernels.gating_rules import GatingRule

TAIL = 3  # rows of no expert


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rounding(dtype: torch.dtype, device: str) -> float:
    """The largest relative error of one rounding to `dtype`. The interpreter cuts bfloat16 off instead."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and device == "cpu" else 2)


def _offsets(sizes: list[int], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)


def _results(
    kind: str, inputs: tuple[Tensor, Tensor, Tensor], offsets: Tensor, transposed: bool, incoming: Tensor
) -> list[Tensor]:
    """The product, then the gradients of x, weights and bias."""
    x, weights, bias = (tensor.detach().requires_grad_() for tensor in inputs)
    found = implementation("grouped_matmul", kind)(x, weights, offsets, bias=bias, transposed=transposed)
    return [found.detach(), *torch.autograd.grad(found, (x, weights, bias), incoming)]


# Segments shorter and longer than a tile, empty ones at either end and between; one dtype and layout each, then mixed.
CASES = [
    ([1], 1, 1, torch.float32, False),
    ([5, 0, 123, 2], 33, 70, torch.float32, True),
    ([0, 200, 0, 0, 150], 64, 16, torch.float32, False),
    ([0, 17, 40], 130, 200, torch.bfloat16, False),
    ([300, 1, 0], 96, 129, torch.bfloat16, True),
    ([12, 4], 20, 30, torch.float16, True),
    ([0, 0], 5, 3, torch.float16, False),
    ([1] * 37, 24, 8, torch.bfloat16, False),
]


@pytest.mark.parametrize(("sizes", "inner", "outer", "dtype", "transposed"), CASES)
def test_products_and_gradients_are_those_of_the_reference(
    device: str, sizes: list[int], inner: int, outer: int, dtype: torch.dtype, transposed: bool
) -> None:
    offsets = _offsets(sizes, device)
    rows, experts = sum(sizes) + TAIL, len(sizes)
    shape = (experts, outer, inner) if transposed else (experts, inner, outer)
    inputs = (_random(rows, inner), _random(*shape, seed=2), _random(experts, outer, seed=3))
    x, weights, bias = (tensor.to(device, dtype) for tensor in inputs)
    incoming = _random(rows, outer, seed=4).to(device, dtype)
    found = _results("triton", (x, weights, bias), offsets, transposed, incoming)
    expected = _results("torch", (x.double(), weights.double(), bias.double()), offsets, transposed, incoming.double())
    longest = max(inner, outer, rows)
    for result, exact in zip(found, expected, strict=True):
        assert result.dtype == dtype
        # One rounding of the result, and float32's in sums of up to `longest` products.
        torch.testing.assert_close(
            result.double(), exact, rtol=_rounding(dtype, device) + 1e-6, atol=1e-6 * math.sqrt(longest)
        )
    assert torch.equal(found[0][sum(sizes) :], torch.zeros(TAIL, outer, dtype=dtype, device=device))
    empty = torch.tensor(sizes, device=device) == 0
    assert not found[2][empty].any()


def test_a_row_that_is_not_finite_stays_alone(device: str) -> None:
    x = torch.ones(6, 4, device=device)
    x[2, 1], x[5] = math.nan, math.inf
    found = implementation("grouped_matmul", "triton")(
        x, torch.ones(3, 4, 2, device=device), _offsets([2, 2, 1], device)
    )
    assert found.isnan().any(1).tolist() == [False, False, True, False, False, False]
    assert found[[0, 1, 3, 4]].eq(4).all()
    assert found[5].tolist() == [0.0, 0.0]


def test_strides_offsets_that_make_no_sense_and_nothing_at_all(device: str) -> None:
    op = implementation("grouped_matmul", "triton")
    x, weights = _random(5, 8).to(device).t(), _random(6, 5, 2, seed=2).to(device).permute(2, 1, 0)
    offsets = _offsets([5, 3], device)
    expected = op(x.contiguous(), weights.contiguous(), offsets)
    assert torch.equal(op(x, weights, offsets.long()), expected)
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weights)]
    plain = [tensor.detach().contiguous().requires_grad_() for tensor in (x, weights)]
    grads = torch.autograd.grad(op(*leaves, offsets).sum(), leaves)  # an expanded gradient
    for grad, expected_grad in zip(grads, torch.autograd.grad(op(*plain, offsets).sum(), plain), strict=True):
        assert torch.equal(grad, expected_grad)
    for wrong in ([7, 3, 1], [-5, 2, 100], [0, 1 << 30, -1]):  # nothing outside the tensors is touched
        assert op(x, weights, torch.tensor(wrong, dtype=torch.int32, device=device)).shape == (8, 6)
    none = _offsets([0, 0], device)
    assert op(torch.empty(0, 5, device=device), weights, none).shape == (0, 6)
    x = torch.empty(3, 0, device=device)
    biased = op(x, torch.ones(1, 0, 2, device=device), _offsets([2], device), bias=torch.ones(1, 2, device=device))
    assert biased.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(TypeError, match=r"grouped_matmul in Triton: x has dtype torch.float64"):
        op(x.double(), weights.double(), offsets)


@pytest.mark.parametrize(("capacity", "alignment"), [(None, 1), (9, 16)])
def test_a_layer_is_that_of_the_reference(device: str, capacity: int | None, alignment: int) -> None:
    rule = GatingRule(k=2, experts=4, scoring="sigmoid", scale=2.5)
    inputs = [_random(21, 10), _random(10, 4, seed=2), _random(4, 10, 18, seed=3), _random(4, 18, 10, seed=4)]
    incoming = _random(21, 10, seed=5).to(device)

    def results(kind: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        x, router, up, down = leaves
        op = {name: implementation(name, kind) for name in ("top_k_gating", "permute_tokens", "unpermute_tokens")}  # type: ignore[arg-type]
        matmul = implementation("grouped_matmul", kind)  # type: ignore[arg-type]
        weights, experts = op["top_k_gating"](x @ router, None, rule=rule)
        p = permutation(experts, 4, capacity=capacity, alignment=alignment)
        inside = matmul(op["permute_tokens"](x, p.assignments, p.destinations), up, p.offsets).tanh()
        out = op["unpermute_tokens"](matmul(inside, down, p.offsets), p.assignments, p.destinations, weights)
        return [out.detach(), *torch.autograd.grad(out, leaves, incoming.to(dtype))]

    for found, expected in zip(results("triton", torch.float32), results("torch", torch.float64), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
