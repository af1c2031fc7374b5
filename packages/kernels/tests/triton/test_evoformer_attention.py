"""Evoformer attention in Triton against the same in plain torch in float64, gradients by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation

# Operands of size 1; weights, dS and results are rounded to the dtype. Gradients are sums of as many terms as there are
# keys, queries or rows, so their tolerance is relative to the largest.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make(device: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, mask bias, pair bias and the gradient of the result, in float64 and exact in `dtype`."""
    batch, rows, length, heads, _ = shape
    generator = torch.Generator().manual_seed(length)
    shapes = [shape, shape, shape, (batch, rows, 1, 1, length), (batch, 1, heads, length, length), shape]
    tensors = [torch.randn(s, generator=generator).to(dtype).double() for s in shapes]
    tensors[3][tensors[3] > 0.5] = -math.inf
    tensors[3][..., :1] = 0.0
    return [x.to(device) for x in tensors]


def run(kind: str, tensors: list[Tensor], used: tuple[bool, bool]) -> list[Tensor | None]:
    """The result and the gradients of q, k, v and the two biases."""
    leaves = [x.clone().requires_grad_() for x in tensors[:5]]
    biases = [bias if use else None for bias, use in zip(leaves[3:], used, strict=True)]
    out = implementation("evoformer_attention", kind)(*leaves[:3], *biases)  # type: ignore[arg-type]
    out.backward(tensors[5])
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def compare(device: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype, used: tuple[bool, bool]) -> None:
    tensors = make(device, shape, dtype)
    found = run("triton", [x.to(dtype) for x in tensors], used)
    wanted = run("torch", tensors, used)
    for name, one, exact in zip(("out", "q", "k", "v", "mask bias", "pair bias"), found, wanted, strict=True):
        assert (one is None) == (exact is None), name
        if one is not None and exact is not None:
            assert one.dtype == dtype
            error = float((one.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0))
            assert error <= TOLERANCES[dtype], (name, error)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_result_and_gradients(device: str, dtype: torch.dtype) -> None:
    compare(device, (1, 2, 70, 2, 32), dtype, (True, True))


@pytest.mark.parametrize("used", [(False, False), (True, False), (False, True)], ids=str)
def test_without_one_or_both_biases(device: str, used: tuple[bool, bool]) -> None:
    compare(device, (2, 1, 20, 1, 8), torch.float32, used)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 16), (1, 1, 5, 1, 80), (1, 2, 33, 1, 7), (1, 1, 40, 1, 256)], ids=str)
def test_shapes(device: str, shape: tuple[int, int, int, int, int]) -> None:
    compare(device, shape, torch.float32, (True, True))


def test_biases_in_float32_get_gradients_in_float32(device: str) -> None:
    tensors = make(device, (1, 2, 20, 1, 16), torch.bfloat16)
    mixed = [x.to(torch.float32 if i in (3, 4) else torch.bfloat16) for i, x in enumerate(tensors)]
    found, wanted = run("triton", mixed, (True, True)), run("torch", tensors, (True, True))
    for one, exact in zip(found[4:], wanted[4:], strict=True):
        assert one is not None
        assert exact is not None
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), exact, atol=0.1, rtol=0.03)


def test_a_query_that_all_keys_are_hidden_from(device: str) -> None:
    tensors = [x.float() for x in make(device, (1, 2, 20, 1, 16), torch.float32)]
    tensors[3][0, 0] = -math.inf
    tensors[4][0, 0, 0, 3] = -math.inf
    found, wanted = run("triton", tensors, (True, True)), run("torch", [x.double() for x in tensors], (True, True))
    for one, exact in zip(found, wanted, strict=True):
        assert one is not None
        assert exact is not None
        torch.testing.assert_close(one.double(), exact, atol=1e-5, rtol=1e-5)
    assert found[0] is not None
    assert not bool(found[0][0, 0].any())
    assert not bool(found[0][0, 1, 3].any())


def test_gradients_are_the_same_bits_at_every_run(device: str) -> None:
    tensors = [x.float() for x in make(device, (1, 3, 40, 2, 16), torch.float32)]
    first, second = (run("triton", tensors, (True, True)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_nan_stays_in_its_row_and_head(device: str) -> None:
    tensors = [x.float() for x in make(device, (1, 2, 20, 2, 16), torch.float32)]
    tensors[1][0, 1, 0, 1, 3] = math.nan
    found = implementation("evoformer_attention", "triton")(*tensors[:5])
    assert found.isnan().all(dim=-1).all(dim=2).tolist() == [[[False, False], [False, True]]]
    assert bool(found[0, 0].isfinite().all())


def test_only_operands_result_and_one_number_per_query_are_kept(device: str) -> None:
    leaves = [x.float().requires_grad_() for x in make(device, (1, 2, 20, 2, 16), torch.float32)[:5]]
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = implementation("evoformer_attention", "triton")(*leaves)
    assert sorted(kept) == sorted([*(x.numel() for x in leaves), out.numel(), 2 * 2 * 20])


def test_strided_and_empty_operands(device: str) -> None:
    tensors = [x.float() for x in make(device, (1, 3, 7, 2, 16), torch.float32)]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors[:3]]
    serve = implementation("evoformer_attention", "triton")
    assert torch.equal(serve(*strided, *tensors[3:5]), serve(*tensors[:5]))
    for shape in ((0, 2, 3, 2, 16), (1, 0, 3, 2, 16), (1, 2, 0, 2, 16)):
        empty = [x.float() for x in make(device, shape, torch.float32)]
        for one, exact in zip(run("triton", empty, (True, True)), run("torch", empty, (True, True)), strict=True):
            assert one is not None
            assert exact is not None
            assert torch.equal(one, exact)
