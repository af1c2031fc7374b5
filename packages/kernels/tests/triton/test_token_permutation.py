"""Permutations in Triton: the same integers as plain torch, and moves as near as one rounding allows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import TokenPermutation, implementation, permutation


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rounding(dtype: torch.dtype, device: str) -> float:
    """The largest relative error of one rounding to `dtype`. The interpreter cuts bfloat16 off instead."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and device == "cpu" else 2)


def _experts(tokens: int, k: int, num_experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Some below and above name no expert."""
    return torch.randint(-1, num_experts + 1, (tokens, k), generator=torch.Generator().manual_seed(tokens), dtype=dtype)


def _permutation(capacity: int | None, alignment: int, device: str) -> TokenPermutation:
    return permutation(_experts(13, 3, 5).to(device), 5, capacity=capacity, alignment=alignment)


@pytest.mark.parametrize(
    ("tokens", "k", "num_experts", "capacity", "alignment"),
    [
        (0, 2, 3, None, 1),
        (1, 1, 1, 4, 1),
        (5, 3, 2, None, 1),
        (5, 3, 2, 4, 1),
        (5, 3, 2, 2, 3),
        (123, 2, 40, None, 1),
        (123, 2, 40, 4, 1),
        (123, 2, 40, None, 16),
        (123, 2, 40, 7, 5),
        (150, 8, 256, None, 16),
        (150, 8, 256, 2, 1),
        (4200, 4, 3, 2000, 64),  # more blocks of assignments than are summed up at a time
    ],
)
def test_the_integers_are_those_of_the_reference(
    device: str, tokens: int, k: int, num_experts: int, capacity: int | None, alignment: int
) -> None:
    dtype = torch.int32 if alignment == 1 else torch.int64
    experts = _experts(tokens, k, num_experts, dtype).to(device)
    p = permutation(experts.cpu(), num_experts, capacity=capacity, alignment=alignment)
    found = implementation("permutation", "triton")(
        experts, num_experts, rows=p.rows, capacity=capacity, alignment=alignment
    )
    for part, expected in zip(found, (p.assignments, p.destinations, p.offsets), strict=True):
        assert part.dtype == torch.int32
        assert torch.equal(part.cpu(), expected)
    counts = implementation("expert_histogram", "triton")(experts, num_experts)
    assert torch.equal(counts, implementation("expert_histogram", "torch")(experts, num_experts))


@pytest.mark.parametrize(
    ("capacity", "alignment", "dtype", "hidden"),
    [
        (None, 1, torch.float32, 5),
        (3, 4, torch.float32, 123),
        (None, 4, torch.float32, 1),
        (None, 1, torch.bfloat16, 123),
        (3, 4, torch.bfloat16, 1500),  # beyond a tile
        (3, 1, torch.float16, 5),
        (None, 4, torch.float16, 1030),
    ],
)
def test_moves_and_gradients_are_those_of_the_reference(
    device: str, capacity: int | None, alignment: int, dtype: torch.dtype, hidden: int
) -> None:
    p = _permutation(capacity, alignment, device)
    x = _random(13, hidden).to(device, dtype)
    y = _random(p.rows, hidden, seed=2).to(device, dtype)
    weights = _random(13, 3, seed=3).to(device)
    cases = [
        ("permute_tokens", (x,), y),
        ("unpermute_tokens", (y, weights), x),
        ("unpermute_tokens", (y, None), x),
    ]
    for op, inputs, incoming in cases:
        found = _results("triton", op, inputs, p, incoming)
        exact = [None if tensor is None else tensor.double() for tensor in inputs]
        expected = _results("torch", op, exact, p, incoming.double())
        for result, reference in zip(found, expected, strict=True):
            # One rounding of the result; sums of three products, or of `hidden` of them for the weights.
            rtol = _rounding(result.dtype, device) + 2.0**-22
            torch.testing.assert_close(result.double(), reference, rtol=rtol, atol=1e-6 * max(1, math.sqrt(hidden)))


def _results(
    kind: str, op: str, inputs: tuple[Tensor | None, ...] | list[Tensor | None], p: TokenPermutation, incoming: Tensor
) -> list[Tensor]:
    """The result, then the gradients of the inputs."""
    leaves = [None if tensor is None else tensor.detach().requires_grad_() for tensor in inputs]
    first, *rest = leaves
    found = implementation(op, kind)(first, p.assignments, p.destinations, *rest)  # type: ignore[arg-type]
    wanted = [tensor for tensor in leaves if tensor is not None]
    return [found.detach(), *torch.autograd.grad(found, wanted, incoming)]


def test_what_was_dropped_and_what_is_padding_never_counts(device: str) -> None:
    p = permutation(torch.tensor([[0, 1], [0, -1], [0, 1]], device=device), 2, capacity=2, alignment=4)
    weights = torch.tensor([[1.0, 1.0], [1.0, math.nan], [math.inf, 1.0]], device=device, requires_grad=True)
    y = torch.full((p.rows, 2), math.nan, device=device)
    y[p.assignments >= 0] = 1.0
    y.requires_grad_()
    summed = implementation("unpermute_tokens", "triton")(y, p.assignments, p.destinations, weights)
    assert summed.tolist() == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
    grad_y, grad_weights = torch.autograd.grad(summed.sum(), (y, weights))
    assert torch.equal(grad_y, (p.assignments >= 0).float()[:, None].expand(-1, 2))
    assert grad_weights.tolist() == [[2.0, 2.0], [2.0, 0.0], [0.0, 2.0]]


def test_strided_and_empty_tensors_and_float64(device: str) -> None:
    permute, unpermute = (implementation(op, "triton") for op in ("permute_tokens", "unpermute_tokens"))
    p = _permutation(None, 4, device)
    there = (p.assignments, p.destinations)
    wide, weights = _random(p.rows, 14).to(device), _random(3, 13, seed=2).to(device).t()
    for x in (wide[:13, :5], _random(5, 13).to(device).t()):
        assert torch.equal(permute(x, *there), permute(x.contiguous(), *there))
    for y in (wide[:, 3:8], wide.t().contiguous().t()):
        assert torch.equal(unpermute(y, *there, weights), unpermute(y.contiguous(), *there, weights.contiguous()))
    leaf = wide[:13].clone().requires_grad_()
    (grad,) = torch.autograd.grad(permute(leaf, *there).sum(), leaf)  # an expanded gradient
    assert torch.equal(grad, (~p.dropped).sum(1, keepdim=True).float().expand(13, 14))
    assert permute(torch.empty(13, 0, device=device), *there).shape == (p.rows, 0)
    none = permutation(torch.empty(0, 2, dtype=torch.int64, device=device), 3)
    empty = permute(torch.empty(0, 5, device=device), none.assignments, none.destinations)
    assert empty.shape == (0, 5)
    assert unpermute(empty, none.assignments, none.destinations, torch.empty(0, 2, device=device)).shape == (0, 5)
    with pytest.raises(TypeError, match=r"permute_tokens in Triton: x has dtype torch.float64"):
        permute(wide[:13].double(), *there)
