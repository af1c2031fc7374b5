"""Rotary embedding as multiplication of complex numbers, in all its layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import rotary_embedding


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _table(length: int, pairs: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length, dtype=torch.float64)[:, None] * 100.0 ** -(torch.arange(pairs) / pairs)
    return angle.cos(), angle.sin()


def _by_complex_numbers(x: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, dim], turn complex [tokens, pairs]."""
    pairs = turn.shape[-1]
    head = x[..., : 2 * pairs]
    parts = head.unflatten(-1, (pairs, 2)) if interleaved else head.unflatten(-1, (2, pairs)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * turn[:, None, :])
    back = turned if interleaved else turned.transpose(-1, -2)
    return torch.cat((back.flatten(-2), x[..., 2 * pairs :]), dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 3, 1])
def test_pairs_turn_like_complex_numbers(interleaved: bool, pairs: int) -> None:
    q, k = _random(5, 3, 8), _random(5, 1, 8, seed=2)
    cos, sin = _table(5, pairs)
    found = rotary_embedding(q, k, cos, sin, interleaved=interleaved)
    turn = torch.complex(cos, sin)
    torch.testing.assert_close(found[0], _by_complex_numbers(q, turn, interleaved))
    torch.testing.assert_close(found[1], _by_complex_numbers(k, turn, interleaved))


def test_batches_positions_and_views() -> None:
    q, k = _random(2, 5, 4, 8), _random(2, 5, 2, 8, seed=2)
    cos, sin = _table(9, 4)
    shared = rotary_embedding(q, k, cos[:5], sin[:5])
    for one in range(2):
        alone = rotary_embedding(q[one], k[one], cos[:5], sin[:5])
        assert torch.equal(shared[0][one], alone[0])
    assert torch.equal(rotary_embedding(q, k, cos[None, :5], sin[None, :5])[0], shared[0])
    positions = torch.tensor([[0, 1, 2, 3, 4], [8, 2, 0, 1, 5]])
    picked = rotary_embedding(q, k, cos, sin, positions=positions)
    assert torch.equal(picked[1], rotary_embedding(q, k, cos[positions], sin[positions])[1])
    assert torch.equal(picked[0][0], shared[0][0])
    heads_first = rotary_embedding(q.transpose(1, 2).contiguous().transpose(1, 2), k, cos[:5], sin[:5])
    assert torch.equal(heads_first[0], shared[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_rounded_once(dtype: torch.dtype) -> None:
    q, k = _random(5, 3, 8, dtype=dtype), _random(5, 3, 8, seed=2, dtype=dtype)
    cos, sin = _table(5, 4)
    exact = rotary_embedding(q.double(), k.double(), cos.float().double(), sin.float().double())
    for one, other in zip(rotary_embedding(q, k, cos.float(), sin.float()), exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_is_the_inverse_rotation(interleaved: bool) -> None:
    q, k = _random(3, 2, 6).requires_grad_(), _random(3, 1, 6, seed=2).requires_grad_()
    cos, sin = _table(3, 2)
    assert torch.autograd.gradcheck(lambda a, b: rotary_embedding(a, b, cos, sin, interleaved=interleaved), (q, k))
    rotated = rotary_embedding(q, k, cos, sin, interleaved=interleaved)
    (back,) = torch.autograd.grad(rotated[0], q, rotated[0].detach())
    torch.testing.assert_close(back, q.detach())


def test_empty_and_nan() -> None:
    cos, sin = _table(4, 4)
    q, k = rotary_embedding(torch.zeros(0, 2, 8), torch.zeros(0, 1, 8), cos[:0], sin[:0])
    assert (q.shape, k.shape) == ((0, 2, 8), (0, 1, 8))
    x = _random(4, 1, 8)
    x[2, 0, 5] = torch.nan
    found = rotary_embedding(x, x, cos, sin)[0]
    assert found.isnan().nonzero().tolist() == [[2, 0, 1], [2, 0, 5]]


def test_wrong_input_is_refused_in_words() -> None:
    q, k = torch.zeros(4, 2, 8), torch.zeros(4, 1, 8)
    cos, sin = _table(4, 4)
    with pytest.raises(ValueError, match=r"expected \[tokens\.\.\., heads, dim\], equal but for the number of heads"):
        rotary_embedding(q, torch.zeros(3, 1, 8), cos, sin)
    with pytest.raises(TypeError, match=r"q is torch\.float32, k torch\.float64"):
        rotary_embedding(q, k.double(), cos, sin)
    with pytest.raises(ValueError, match=r"a table that repeats every angle is passed as cos\[\.\.\., :pairs\]"):
        rotary_embedding(q, k, cos.repeat(1, 2), sin.repeat(1, 2))
    with pytest.raises(ValueError, match="sin has shape"):
        rotary_embedding(q, k, cos, sin[:3])
    with pytest.raises(ValueError, match="a row of cos for every token"):
        rotary_embedding(q, k, cos[:3], sin[:3])
    with pytest.raises(ValueError, match="positions has shape"):
        rotary_embedding(q, k, cos, sin, positions=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="positions has dtype"):
        rotary_embedding(q, k, cos, sin, positions=torch.zeros(4))
    with pytest.raises(ValueError, match=r"with positions it must be a table"):
        rotary_embedding(q, k, cos[None], sin[None], positions=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"pass cos\.detach\(\)"):
        rotary_embedding(q, k, cos.requires_grad_(), sin)
    with pytest.raises(IndexError):
        rotary_embedding(q, k, cos.detach(), sin, positions=torch.tensor([0, 1, 4, 0]))
