"""Evoformer attention against torch's own attention with the biases written out, and what it keeps in memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drivetrain.kernels import evoformer_attention
from drivetrain.kernels.torch_ops import evoformer_attention as torch_evoformer

TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(
    batch: int, rows: int, length: int, heads: int, size: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """q, k, v, mask bias and pair bias; the mask hides about a third of the keys but never the first."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = normal(batch, rows, 1, 1, length)
    mask[mask > 0.5] = -1e4
    mask[..., :1] = 0.0
    operands = [normal(batch, rows, length, heads, size) for _ in range(3)]
    return (*operands, mask, normal(batch, 1, heads, length, length))


def expected(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    q, k, v = (x.double().transpose(2, 3) for x in (q, k, v))
    bias = torch.zeros((), dtype=torch.float64)
    for one in biases:
        bias = bias + (0.0 if one is None else one.double())
    mask = bias.expand(*q.shape[:-1], q.shape[-2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(2, 3)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("used", [(), (True,), (False, True), (True, True)], ids=str)
def test_equals_attention_with_the_biases_added(dtype: torch.dtype, used: tuple[bool, ...]) -> None:
    for shape in ((2, 3, 17, 2, 8), (1, 1, 1, 1, 1), (1, 2, 123, 4, 32)):
        q, k, v, *biases = make(*shape, dtype=dtype)
        chosen = [bias if use else None for bias, use in zip(biases, used, strict=False)]
        found = evoformer_attention(q, k, v, chosen)
        assert found.dtype == dtype
        wanted = expected(q, k, v, *chosen)
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_low_precision_takes_biases_in_float32() -> None:
    q, k, v, *_ = make(1, 2, 9, 2, 8, dtype=torch.bfloat16)
    *_, mask, pair = make(1, 2, 9, 2, 8, dtype=torch.float32)
    found = evoformer_attention(q, k, v, [mask, pair])
    torch.testing.assert_close(found.double(), expected(q, k, v, mask, pair), atol=2e-2, rtol=2e-2)


def test_gradients_by_differences_whole_and_in_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = make(2, 3, 4, 2, 3)
    arguments[3].copy_(arguments[3].clamp(min=-2.0))
    inputs = tuple(x.requires_grad_() for x in arguments)
    for scores in (1 << 22, 2 * 2 * 16 * 2, 1):  # all rows, two rows, one row at a time
        monkeypatch.setattr(torch_evoformer, "_SCORES", scores)
        assert torch.autograd.gradcheck(lambda *x: evoformer_attention(*x[:3], x[3:]), inputs)


def test_what_is_kept_for_backward_does_not_grow_with_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows times heads times length squared would be 1,228,800 numbers; kept are the five operands, of 171,000."""
    monkeypatch.setattr(torch_evoformer, "_SCORES", 1)
    inputs = [x.requires_grad_() for x in make(1, 12, 160, 4, 8)]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = evoformer_attention(*inputs[:3], inputs[3:])
    assert sum(kept.values()) <= sum(x.numel() for x in inputs) < 12 * 4 * 160**2 / 4
    found.sum().backward()
    pair = inputs[4].grad
    assert pair is not None
    assert pair.shape == inputs[4].shape


def test_a_query_that_all_keys_are_hidden_from_gives_zeros_and_finite_gradients() -> None:
    q, k, v, mask, pair = make(1, 2, 6, 2, 8)
    mask[0, 0] = -math.inf
    pair[0, 0, 1, 3] = -math.inf
    inputs = [x.requires_grad_() for x in (q, k, v, mask, pair)]
    found = evoformer_attention(*inputs[:3], inputs[3:])
    assert not bool(found[0, 0].any())
    assert not bool(found[0, 1, 3, 1].any())
    torch.testing.assert_close(found[0, 1, :3], expected(*inputs)[0, 1, :3])
    found.square().sum().backward()
    for x in inputs:
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


def test_nan_stays_in_its_row_and_head() -> None:
    q, k, v, *biases = make(1, 2, 6, 2, 8)
    k[0, 1, 2, 1, 3] = math.nan
    found = evoformer_attention(q, k, v, biases).isnan().all(dim=-1).all(dim=2)
    assert found.tolist() == [[[False, False], [False, True]]]


@pytest.mark.parametrize("shape", [(0, 2, 3, 2, 8), (1, 0, 3, 2, 8), (1, 2, 0, 2, 8), (1, 2, 3, 0, 8)])
def test_empty_operands(shape: tuple[int, int, int, int, int]) -> None:
    inputs = [x.requires_grad_() for x in make(*shape)]
    found = evoformer_attention(*inputs[:3], inputs[3:])
    assert found.shape == shape
    found.sum().backward()


def test_strided_operands_are_taken_as_they_are() -> None:
    q, k, v, *biases = make(1, 3, 7, 2, 8)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    torch.testing.assert_close(evoformer_attention(*swapped, biases), evoformer_attention(q, k, v, biases))


def test_bad_arguments_are_refused_by_name() -> None:
    q, k, v, mask, pair = make(1, 2, 6, 2, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"q has shape \(2, 6, 2, 8\); expected \[batch, rows, length, heads"):
        evoformer_attention(q[0], k, v)
    with pytest.raises(ValueError, match=r"v is torch.float32 of shape \(1, 2, 5, 2, 8\)"):
        evoformer_attention(q, k, v[:, :, 1:])
    with pytest.raises(TypeError, match=r"q has dtype torch.int32"):
        evoformer_attention(q.int(), k, v)
    with pytest.raises(ValueError, match=r"head_dim must lie in 1..256; found 300"):
        evoformer_attention(*[torch.zeros(1, 1, 2, 1, 300)] * 3)
    with pytest.raises(ValueError, match=r"the mask bias has shape .*; expected \(1, 2, 1, 1, 6\)"):
        evoformer_attention(q, k, v, [pair])
    with pytest.raises(ValueError, match=r"the pair bias has shape .*; expected \(1, 1, 2, 6, 6\)"):
        evoformer_attention(q, k, v, [None, mask])
    with pytest.raises(TypeError, match=r"the mask bias has dtype torch.float16; expected torch.float32 or"):
        evoformer_attention(q, k, v, [mask.half()])
    with pytest.raises(ValueError, match=r"biases has 3 entries; expected at most 2: the mask bias and the pair bias"):
        evoformer_attention(q, k, v, [mask, pair, pair])
