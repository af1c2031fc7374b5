"""The Triton softmax against the plain one in float64: masks of every kind, short and long rows, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.dispatch import Kind

# Weights are at most one and rounded once (in the interpreter: truncated to bfloat16); backward starts from them.
DTYPES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LONG = 8192 + 5


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _evaluate(
    kind: Kind, scores: Tensor, mask: Tensor | None, dtype: torch.dtype, scale: float, causal: bool
) -> list[Tensor]:
    """Weights in `dtype` and the gradient of the scores, and of the mask if it requires one."""
    leaf = scores.to(dtype).detach().requires_grad_()
    leaves = [leaf]
    if mask is not None and mask.requires_grad:
        mask = mask.detach().to(dtype).requires_grad_()
        leaves.append(mask)
    found = implementation("masked_softmax", kind)(leaf, mask, scale=scale, causal=causal)
    seed = _random(*found.shape, seed=9, device=found.device.type, dtype=scores.dtype).to(dtype)
    return [found.detach(), *torch.autograd.grad(found, leaves, seed)]


def _compare(scores: Tensor, mask: Tensor | None = None, *, scale: float = 0.8, causal: bool = False) -> None:
    found = _evaluate("triton", scores, mask, scores.dtype, scale, causal)
    exact = _evaluate("torch", scores, mask, torch.float64, scale, causal)
    tolerance = DTYPES[scores.dtype]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == scores.dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1), torch.float32),
        ((3, 5, 123), torch.bfloat16),
        ((2, 9, 3), torch.float16),
        ((2, 2100), torch.float32),
        ((3, LONG), torch.float32),
    ],
)
def test_values_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, device: str) -> None:
    _compare(_random(*shape, seed=1, device=device, dtype=dtype), causal=causal)


@pytest.mark.parametrize("mask_shape", [(5,), (4, 5), (2, 1, 1, 5), (3, 1, 1), (2, 3, 4, 5)])
def test_masks_are_broadcast(mask_shape: tuple[int, ...], device: str) -> None:
    scores = _random(2, 3, 4, 5, seed=1, device=device, dtype=torch.float32)
    bias = _random(*mask_shape, seed=2, device=device, dtype=torch.float32)
    _compare(scores, bias)
    _compare(scores, bias > -0.3, causal=True)
    _compare(scores, bias.requires_grad_())


def test_masks_of_long_rows_and_of_many_dimensions(device: str) -> None:
    scores = _random(2, 1, 2, LONG, seed=1, device=device, dtype=torch.bfloat16)
    keep = _random(2, 1, 1, LONG, seed=2, device=device, dtype=torch.float32) > 0
    keep[1] = False
    _compare(scores, keep)
    many = _random(2, 2, 1, 3, 4, 5, seed=3, device=device, dtype=torch.float32)
    _compare(many, _random(2, 1, 1, 3, 1, 5, seed=4, device=device, dtype=torch.float32))
    _compare(many[0, 0, 0, 0, 0], torch.tensor([True, False, True, True, False], device=device))


@pytest.mark.parametrize("keys", [6, LONG])
def test_rows_without_a_visible_score_and_nan(keys: int, device: str) -> None:
    scores = _random(4, keys, seed=1, device=device, dtype=torch.float32)
    scores[1] = -torch.inf
    scores[2, keys - 1] = torch.nan
    scores[3, 0] = -torch.inf
    leaf = scores.requires_grad_()
    found = implementation("masked_softmax", "triton")(leaf)
    expected = implementation("masked_softmax", "torch")(leaf)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert not found[1].any()
    (gradient,) = torch.autograd.grad(found[:2].sum(), leaf)
    assert not gradient[1].any()
    keep = torch.arange(keys, device=device) < keys - 1
    assert bool(implementation("masked_softmax", "triton")(leaf, keep)[2].isfinite().all())


def test_rows_apart_transposed_and_empty(device: str) -> None:
    wide = _random(3, 4, 12, seed=1, device=device, dtype=torch.float32)
    _compare(wide[..., 2:9])
    _compare(wide.mT)
    assert implementation("masked_softmax", "triton")(wide[:0]).shape == (0, 4, 12)
