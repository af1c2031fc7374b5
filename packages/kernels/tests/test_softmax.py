"""Masked softmax: equal to torch's where that is defined, zero where it isn't."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import masked_softmax


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(1, 1), (5, 123), (2, 3, 4, 5), (7,), (0, 3), (3, 0)])
def test_without_a_mask_it_is_softmax_of_scaled_scores(shape: tuple[int, ...]) -> None:
    x = _random(*shape)
    torch.testing.assert_close(masked_softmax(x, scale=0.3), torch.softmax(0.3 * x, dim=-1))


@pytest.mark.parametrize("mask_shape", [(5,), (4, 5), (1, 1, 5), (2, 1, 1, 5), (3, 1, 1), (2, 3, 4, 5), (1,)])
def test_masks_are_broadcast_and_hide(mask_shape: tuple[int, ...]) -> None:
    x, bias = _random(2, 3, 4, 5), _random(*mask_shape, seed=2)
    torch.testing.assert_close(masked_softmax(x, bias, scale=2.0), torch.softmax(2 * x + bias, dim=-1))
    keep = bias > -0.5
    hidden = ~keep.expand(x.shape)
    expected = torch.softmax((2 * x).masked_fill(hidden, -torch.inf), dim=-1).masked_fill(hidden, 0.0)
    torch.testing.assert_close(masked_softmax(x, keep, scale=2.0), expected)
    low = torch.zeros_like(bias).masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(masked_softmax(x, low, scale=2.0), expected)


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (5, 2), (1, 3)])
def test_causal_lets_the_last_query_see_everything(queries: int, keys: int) -> None:
    x = _random(3, queries, keys)
    found = masked_softmax(x, causal=True)
    for query in range(queries):
        seen = query + keys - queries + 1
        assert not found[:, query, max(seen, 0) :].any()
        if seen > 0:
            torch.testing.assert_close(found[:, query, :seen], torch.softmax(x[:, query, :seen], dim=-1))


def test_rows_without_a_visible_score_are_zero_and_so_are_their_gradients() -> None:
    x = _random(4, 6).requires_grad_()
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[1] = False
    low = torch.zeros(4, 6, dtype=torch.float64)
    low[1] = -torch.inf
    hard = x.detach().clone()
    hard[1] = -torch.inf
    outside = _random(4, 6, seed=3)
    for scores, mask in ((x, keep), (x, low), (hard.requires_grad_(), None)):
        found = masked_softmax(scores, mask)
        assert not found[1].any()
        (gradient,) = torch.autograd.grad(found, scores, outside)
        assert not gradient[1].any()
        assert bool(gradient.isfinite().all())
        torch.testing.assert_close(found[[0, 2, 3]], torch.softmax(x, dim=-1)[[0, 2, 3]])


def test_gradients_of_scores_and_mask() -> None:
    x, bias = _random(2, 3, 4).requires_grad_(), _random(3, 1, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: masked_softmax(a, b, scale=0.7, causal=True), (x, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_nan_behind_a_mask_is_not_seen(dtype: torch.dtype) -> None:
    x = _random(3, 5, dtype=dtype)
    exact = torch.softmax(x.double() * 0.5, dim=-1)
    found = masked_softmax(x, scale=0.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    x[0, 3], x[1, 2], x[2, 1] = torch.nan, torch.nan, torch.inf
    keep = torch.tensor([True, True, True, False, True])
    found = masked_softmax(x, keep)
    assert bool(found[0].isfinite().all())
    assert bool(found[1, keep].isnan().all())
    assert bool(found[2].isnan().any())


def test_wrong_input_is_refused_in_words() -> None:
    x = torch.zeros(2, 3, 4)
    with pytest.raises(
        ValueError, match=r"mask has shape \(2, 4\), which can't be broadcast to that of scores, \(2, 3, 4\)"
    ):
        masked_softmax(x, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="can't be broadcast"):
        masked_softmax(x, torch.zeros(1, 2, 3, 4))
    with pytest.raises(TypeError, match=r"mask has dtype torch\.uint8"):
        masked_softmax(x, torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="expected at least 2 dimensions"):
        masked_softmax(torch.zeros(3), causal=True)
    with pytest.raises(ValueError, match="scale must be finite"):
        masked_softmax(x, scale=float("nan"))
    with pytest.raises(ValueError, match="mask lies on meta"):
        masked_softmax(x, torch.zeros(4, device="meta"))
