"""Permutations of tokens: their properties over all shapes, and the moves and gradients against one-hot matrices."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.kernels import TokenPermutation, expert_histogram, permutation, permute_tokens, unpermute_tokens


@st.composite
def _cases(draw: st.DrawFn) -> tuple[Tensor, int, int | None, int]:
    num_experts = draw(st.integers(1, 7))
    tokens, k = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    # One below and one above name no expert.
    flat = draw(st.lists(st.integers(-1, num_experts), min_size=tokens * k, max_size=tokens * k))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    capacity = draw(st.none() | st.integers(1, 6))
    return torch.tensor(flat, dtype=dtype).view(tokens, k), num_experts, capacity, draw(st.integers(1, 5))


@given(case=_cases())
@settings(max_examples=200, deadline=None)
def test_properties_of_permutations(case: tuple[Tensor, int, int | None, int]) -> None:
    experts, num_experts, capacity, alignment = case
    p = permutation(experts, num_experts, capacity=capacity, alignment=alignment)
    flat = experts.flatten().tolist()
    rows, destinations = p.assignments.tolist(), p.destinations.flatten().tolist()
    offsets = p.offsets.tolist()
    assert (p.tokens, p.k, p.num_experts, p.rows) == (*experts.shape, num_experts, len(rows))
    assert offsets[0] == 0
    for expert, (start, end) in enumerate(pairwise(offsets)):
        wanted = [i for i, e in enumerate(flat) if e == expert]
        kept = wanted[:capacity]
        assert rows[start : start + len(kept)] == kept  # each once, in order, the first up to the capacity
        assert rows[start + len(kept) : end] == [-1] * (end - start - len(kept))
        assert (end - start) % alignment == 0
        assert end - start - len(kept) < alignment  # no more padding than needed, and none for the empty
        assert all(destinations[i] == -1 for i in wanted[len(kept) :])
    assert set(rows[offsets[-1] :]) <= {-1}
    assert all(destinations[assignment] == row for row, assignment in enumerate(rows) if assignment >= 0)
    assert all(rows[row] == assignment for assignment, row in enumerate(destinations) if row >= 0)
    assert all(destinations[i] == -1 for i, e in enumerate(flat) if not 0 <= e < num_experts)
    assert torch.equal(p.dropped, p.destinations == -1)
    assert p.sources.tolist() == [a // p.k if a >= 0 else -1 for a in rows]
    assert expert_histogram(experts, num_experts).tolist() == [flat.count(e) for e in range(num_experts)]


def test_the_number_of_rows_is_known_from_shapes_and_never_too_small() -> None:
    one_expert = torch.zeros(8, 2, dtype=torch.int64)
    assert permutation(one_expert, 4).rows == 16
    assert permutation(one_expert, 4, capacity=3).rows == 12
    assert permutation(one_expert, 4, alignment=16).rows == 64
    assert permutation(one_expert, 4, capacity=3, alignment=16).rows == 64
    assert permutation(one_expert, 1000, alignment=16).rows == 256
    worst = torch.arange(16).view(8, 2)  # an expert each
    assert permutation(worst, 16, alignment=16).offsets[-1] == permutation(worst, 16, alignment=16).rows == 256


def _matrix(p: TokenPermutation) -> Tensor:
    """[tokens, k, rows]: 1 where the row holds the assignment."""
    return (p.destinations[:, :, None] == torch.arange(p.rows)).double()


PERMUTATIONS = [(None, 1), (3, 1), (None, 4), (3, 4)]
every_permutation = pytest.mark.parametrize(("capacity", "alignment"), PERMUTATIONS)


def _permutation(capacity: int | None, alignment: int) -> TokenPermutation:
    experts = torch.randint(-1, 6, (13, 3), generator=torch.Generator().manual_seed(3))
    return permutation(experts, 5, capacity=capacity, alignment=alignment)


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@every_permutation
@pytest.mark.parametrize("hidden", [1, 5, 123])
def test_moving_is_a_product_with_one_hot_matrices(capacity: int | None, alignment: int, hidden: int) -> None:
    p = _permutation(capacity, alignment)
    x, y, weights = _random(13, hidden), _random(p.rows, hidden, seed=2), _random(13, 3, seed=3)
    for tensor in (x, y, weights):
        tensor.requires_grad_()
    pairs = [
        (permute_tokens(x, p), torch.einsum("tkr,th->rh", _matrix(p), x)),
        (unpermute_tokens(y, p, weights), torch.einsum("tkr,tk,rh->th", _matrix(p), weights, y)),
        (unpermute_tokens(y, p, None), torch.einsum("tkr,rh->th", _matrix(p), y)),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        incoming = _random(*found.shape, seed=4)
        grads = torch.autograd.grad(found, (x, y, weights), incoming, allow_unused=True)
        expected_grads = torch.autograd.grad(expected, (x, y, weights), incoming, allow_unused=True)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            assert (grad is None) == (expected_grad is None)
            if grad is not None:
                torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-12)


@every_permutation
def test_gradients_are_those_of_differences(capacity: int | None, alignment: int) -> None:
    p = _permutation(capacity, alignment)
    x, y, weights = _random(13, 2), _random(p.rows, 2, seed=2), _random(13, 3, seed=3)
    for tensor in (x, y, weights):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: permute_tokens(x, p), (x,))
    assert torch.autograd.gradcheck(lambda y, weights: unpermute_tokens(y, p, weights), (y, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@every_permutation
def test_there_and_back(dtype: torch.dtype, capacity: int | None, alignment: int) -> None:
    p = _permutation(capacity, alignment)
    x = _random(13, 7, dtype=dtype)
    moved = permute_tokens(x, p)
    assert moved.dtype == dtype
    assert torch.equal(moved[p.assignments < 0], torch.zeros_like(moved[p.assignments < 0]))
    # Powers of two: every product and sum is exact.
    kept = (~p.dropped).sum(1, keepdim=True).to(dtype)
    assert torch.equal(unpermute_tokens(moved, p, torch.full((13, 3), 0.5)), 0.5 * kept * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_in_float32_in_the_order_of_choices(dtype: torch.dtype) -> None:
    p = _permutation(None, 1)
    y, weights = _random(p.rows, 7, dtype=dtype), _random(13, 3, seed=2, dtype=torch.float32)
    rows = [y[p.destinations[:, c].long()].float() * (~p.dropped[:, c, None]) for c in range(3)]
    expected = (rows[0] * weights[:, :1] + rows[1] * weights[:, 1:2]) + rows[2] * weights[:, 2:]
    tolerance = torch.finfo(dtype).eps / 2 + 2.0**-22
    torch.testing.assert_close(
        unpermute_tokens(y, p, weights).double(), expected.double(), rtol=tolerance, atol=2.0**-20
    )


def test_what_was_dropped_and_what_is_padding_never_counts() -> None:
    p = permutation(torch.tensor([[0, 1], [0, -1], [0, 1]]), 2, capacity=2, alignment=4)
    assert p.dropped.tolist() == [[False, False], [False, True], [True, False]]
    weights = torch.tensor([[1.0, 1.0], [1.0, math.nan], [math.inf, 1.0]], requires_grad=True)
    y = torch.full((p.rows, 2), math.nan)
    y[p.assignments >= 0] = torch.ones(4, 2)
    y.requires_grad_()
    summed = unpermute_tokens(y, p, weights)
    assert summed.tolist() == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
    summed.sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, (p.assignments >= 0).float()[:, None].expand(-1, 2))
    assert weights.grad is not None
    assert weights.grad.tolist() == [[2.0, 2.0], [2.0, 0.0], [0.0, 2.0]]
    moved = permute_tokens(torch.tensor([[math.nan], [1.0], [math.inf]]), p)
    assert moved[p.assignments < 0].eq(0).all()
    assert moved.isnan().sum() == 2


def test_nothing_to_move() -> None:
    p = permutation(torch.empty(0, 2, dtype=torch.int64), 3, capacity=4, alignment=8)
    assert (p.rows, p.offsets.tolist()) == (0, [0, 0, 0, 0])
    x = torch.empty(0, 5, requires_grad=True)
    out = unpermute_tokens(permute_tokens(x, p), p, torch.empty(0, 2))
    assert out.shape == (0, 5)
    out.sum().backward()
    assert x.grad is not None
    nowhere = permutation(torch.full((2, 1), -1), 3)
    assert permute_tokens(torch.ones(2, 1), nowhere).tolist() == [[0.0], [0.0]]
    assert unpermute_tokens(torch.ones(2, 1), nowhere, None).tolist() == [[0.0], [0.0]]
    assert permute_tokens(torch.ones(2, 0), nowhere).shape == (2, 0)


def test_strided_tensors_are_taken_as_they_are() -> None:
    experts = torch.randint(0, 4, (2, 9), generator=torch.Generator().manual_seed(1)).t()
    p, same = permutation(experts, 4), permutation(experts.contiguous(), 4)
    assert torch.equal(p.destinations, same.destinations)
    x = _random(6, 9).t()
    assert torch.equal(permute_tokens(x, p), permute_tokens(x.contiguous(), p))
    y, weights = _random(6, 18).t(), _random(2, 9, seed=2).t()
    assert torch.equal(unpermute_tokens(y, p, weights), unpermute_tokens(y.contiguous(), p, weights.contiguous()))


def test_arguments_that_do_not_fit_are_named() -> None:
    experts = torch.zeros(3, 2, dtype=torch.int64)
    p = permutation(experts, 4)
    with pytest.raises(FrozenInstanceError):
        p.offsets = experts  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"offsets: expected a contiguous int32 tensor of 1 dim.*; found torch.int64"):
        TokenPermutation(assignments=p.assignments, destinations=p.destinations, offsets=p.offsets.long())
    with pytest.raises(TypeError, match=r"experts have dtype torch.float32"):
        permutation(experts.float(), 4)
    with pytest.raises(ValueError, match=r"shape \(6,\); expected \[tokens, k\]"):
        permutation(experts.flatten(), 4)
    with pytest.raises(ValueError, match="capacity must be at least 1, or None to drop nothing; found 0"):
        permutation(experts, 4, capacity=0)
    with pytest.raises(ValueError, match="alignment must be at least 1"):
        permutation(experts, 4, alignment=0)
    with pytest.raises(ValueError, match="do not fit 32-bit indices"):
        permutation(experts, 4, alignment=1 << 30)
    with pytest.raises(ValueError, match="num_experts must be at least 1; found 0"):
        expert_histogram(experts, 0)
    with pytest.raises(ValueError, match=r"x has shape \(4, 5\); this permutation expects \[3, hidden\]"):
        permute_tokens(torch.zeros(4, 5), p)
    with pytest.raises(TypeError, match=r"y has dtype torch.int64"):
        unpermute_tokens(torch.zeros(6, 5, dtype=torch.int64), p, None)
    with pytest.raises(ValueError, match=r"shape \(2, 3\); expected floating-point numbers of shape \(3, 2\)"):
        unpermute_tokens(torch.zeros(6, 5), p, torch.zeros(2, 3))
