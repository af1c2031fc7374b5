"""The grouped product against one with every row's own weights, and a whole layer against its dense form."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import grouped_matmul, permutation, permute_tokens, top_k_gating, unpermute_tokens

SIZES = [[7], [0, 5, 0, 1], [3, 0, 123, 2], [0, 0]]
TAIL = 4  # rows of no expert


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _offsets(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)


def _dense(x: Tensor, weights: Tensor, sizes: list[int], bias: Tensor) -> Tensor:
    """Every row by all experts, and one of the products chosen."""
    segment = torch.tensor([e for e, size in enumerate(sizes) for _ in range(size)] + [-1] * TAIL)
    chosen = (segment[:, None] == torch.arange(len(sizes))).to(x.dtype)
    return torch.einsum("re,ri,eio->ro", chosen, x, weights) + chosen @ bias


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (5, 3), (33, 70)])
def test_it_is_a_product_with_every_rows_own_weights(
    sizes: list[int], transposed: bool, inner: int, outer: int
) -> None:
    x = _random(sum(sizes) + TAIL, inner).requires_grad_()
    weights = _random(len(sizes), *((outer, inner) if transposed else (inner, outer)), seed=2).requires_grad_()
    bias = _random(len(sizes), outer, seed=3).requires_grad_()
    found = grouped_matmul(x, weights, _offsets(sizes), bias=bias, transposed=transposed)
    expected = _dense(x, weights.mT if transposed else weights, sizes, bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[sum(sizes) :], torch.zeros(TAIL, outer, dtype=torch.float64))
    incoming = _random(*found.shape, seed=4)
    grads = torch.autograd.grad(found, (x, weights, bias), incoming)
    expected_grads = torch.autograd.grad(expected, (x, weights, bias), incoming)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)
    empty = torch.tensor(sizes) == 0
    assert torch.equal(grads[1][empty], torch.zeros_like(grads[1][empty]))


def test_gradients_are_those_of_differences() -> None:
    x, weights, bias = _random(6, 3), _random(3, 3, 2, seed=2), _random(3, 2, seed=3)
    for tensor in (x, weights, bias):
        tensor.requires_grad_()
    offsets = _offsets([2, 0, 3])
    assert torch.autograd.gradcheck(lambda *t: grouped_matmul(t[0], t[1], offsets, bias=t[2]), (x, weights, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    sizes = [40, 0, 90]
    x, weights = _random(130 + TAIL, 100, dtype=dtype), _random(3, 100, 50, seed=2, dtype=dtype) / 8
    bias = torch.zeros(3, 50, dtype=dtype)
    tensors = [tensor.requires_grad_() for tensor in (x, weights, bias)]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = grouped_matmul(x, weights, _offsets(sizes), bias=bias)
    expected = _dense(wide[0], wide[1], sizes, wide[2])
    incoming = _random(*found.shape, seed=4, dtype=dtype)
    results = [found, *torch.autograd.grad(found, tensors, incoming)]
    expected_results = [expected, *torch.autograd.grad(expected, wide, incoming.double())]
    # One rounding of the result, and float32's in a sum of about 100 terms of size 1.
    for result, exact in zip(results, expected_results, strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-4)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    x = torch.ones(6, 4)
    x[2, 1], x[5] = math.nan, math.inf
    found = grouped_matmul(x, torch.ones(3, 4, 2), _offsets([2, 2, 1]))
    assert found.isnan().any(1).tolist() == [False, False, True, False, False, False]
    assert found[5].tolist() == [0.0, 0.0]


def test_strides_index_dtypes_and_nothing_at_all() -> None:
    x, weights = _random(5, 8).t(), _random(6, 5, 2, seed=2).permute(2, 1, 0)
    offsets = _offsets([5, 3])
    expected = grouped_matmul(x.contiguous(), weights.contiguous(), offsets)
    torch.testing.assert_close(grouped_matmul(x, weights, offsets.long()), expected, rtol=1e-13, atol=1e-13)
    assert grouped_matmul(torch.empty(0, 5), torch.ones(2, 5, 6), _offsets([0, 0])).shape == (0, 6)
    assert grouped_matmul(torch.empty(3, 0), torch.ones(1, 0, 2), _offsets([2])).tolist() == [[0.0, 0.0]] * 3
    biased = grouped_matmul(torch.empty(3, 0), torch.ones(1, 0, 2), _offsets([2]), bias=torch.ones(1, 2))
    assert biased.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_arguments_that_do_not_fit_are_named() -> None:
    x, weights, offsets = torch.zeros(4, 3), torch.zeros(2, 3, 5), torch.tensor([0, 1, 4])
    for wrong in ([0, 5, 4], [1, 2, 4], [0, 2, 5]):
        with pytest.raises(ValueError, match=r"offsets must rise from 0 to at most 4, the rows of x, and never fall"):
            grouped_matmul(x, weights, torch.tensor(wrong))
    with pytest.raises(TypeError, match=r"x has dtype torch.float32, weights torch.bfloat16"):
        grouped_matmul(x, weights.bfloat16(), offsets)
    with pytest.raises(ValueError, match=r"x has 3 columns, .* take 5; pass transposed=True"):
        grouped_matmul(x, weights.mT, offsets)
    with pytest.raises(ValueError, match=r"expected \[rows, in\] and \[experts, out, in\]"):
        grouped_matmul(x, weights[0], offsets, transposed=True)
    with pytest.raises(ValueError, match=r"shape \(2,\); expected 3 numbers, one more than experts"):
        grouped_matmul(x, weights, offsets[:2])
    with pytest.raises(TypeError, match=r"offsets have dtype torch.float32"):
        grouped_matmul(x, weights, offsets.float())
    with pytest.raises(ValueError, match=r"bias is torch.float32 of shape \(5,\); expected torch.float32"):
        grouped_matmul(x, weights, offsets, bias=torch.zeros(5))


@pytest.mark.parametrize(("capacity", "alignment"), [(None, 1), (4, 1), (None, 8), (3, 2)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_is_its_dense_form(capacity: int | None, alignment: int, biased: bool) -> None:
    """GShard's form: tokens dispatched to places of experts, and combined from them, by one-hot products (einsum)."""
    tokens, experts, k, hidden = 17, 5, 2, 6
    x = _random(tokens, hidden).requires_grad_()
    router = _random(hidden, experts, seed=2).requires_grad_()
    up = _random(experts, hidden, 9, seed=3).requires_grad_()
    down = _random(experts, hidden, 9, seed=4).requires_grad_()
    bias = _random(experts, 9, seed=5).requires_grad_()
    balance = 0.1 * _random(experts, seed=6) if biased else None
    inputs = (x, router, up, down, bias)

    weights, chosen = top_k_gating(x @ router, k, bias=balance)
    p = permutation(chosen, experts, capacity=capacity, alignment=alignment)
    inside = grouped_matmul(permute_tokens(x, p), up, p.offsets, bias=bias).tanh()
    found = unpermute_tokens(grouped_matmul(inside, down, p.offsets, transposed=True), p, weights)

    scores = (x @ router).softmax(1)
    keys = scores if balance is None else scores + balance
    mask = torch.nn.functional.one_hot(keys.topk(k, dim=1).indices, experts).double()  # [tokens, k, experts]
    before = (mask.flatten(0, 1).cumsum(0) - 1).view_as(mask)
    places = tokens * k if capacity is None else capacity
    dispatch = mask[..., None] * (before[..., None] == torch.arange(places))  # [tokens, k, experts, places]
    gates = scores[:, None, :] * mask
    gates = gates / gates.sum((1, 2), keepdim=True)
    combine = torch.einsum("tke,tkec->tec", gates, dispatch)
    sent = torch.einsum("tkec,th->ech", dispatch, x)
    hidden_layer = (torch.einsum("ech,ehf->ecf", sent, up) + bias[:, None, :]).tanh()
    returned = torch.einsum("ecf,ehf->ech", hidden_layer, down)
    expected = torch.einsum("tec,ech->th", combine, returned)

    assert capacity is None or bool(p.dropped.any())
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    incoming = _random(tokens, hidden, seed=7)
    grads = torch.autograd.grad(found, inputs, incoming)
    for grad, expected_grad in zip(grads, torch.autograd.grad(expected, inputs, incoming), strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-11, atol=1e-12)
