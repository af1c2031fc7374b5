"""Block-sparse attention in Triton against the same in plain torch in float64, gradients by autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import BigBirdLayout, BlockLists, implementation

# Operands of size 1; weights, dS and results are rounded to the dtype; gradients relative to the largest.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make(device: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the result, in float64 and exact in `dtype`."""
    generator = torch.Generator().manual_seed(shape[2])
    return [torch.randn(shape, generator=generator).to(dtype).double().to(device) for _ in range(4)]


def random_layout(device: str, heads: int, blocks: int) -> BlockLists:
    """About half of the blocks; the first row and the last column are empty."""
    layout = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(blocks)) < 0.5
    layout[:, 0] = False
    layout[:, :, -1] = False
    return BlockLists.of(layout.to(device))


def run(kind: str, tensors: list[Tensor], layout: BlockLists, options: dict[str, Any]) -> list[Tensor]:
    """The result and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = implementation("block_sparse_attention", kind)(*leaves, layout, **options)  # type: ignore[arg-type]
    out.backward(tensors[3])
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def compare(tensors: list[Tensor], layout: BlockLists, dtype: torch.dtype, block: int, **options: Any) -> list[Tensor]:
    chosen = {"block": block, "causal": False, "scale": 0.3, "key_padding_mask": None} | options
    found = run("triton", [x.to(dtype) for x in tensors], layout, chosen)
    wanted = run("torch", tensors, layout, chosen)
    for name, one, exact in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        assert one.dtype == dtype
        error = float((one.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0))
        assert error <= TOLERANCES[dtype], (name, error)
    return found


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_smaller_than_a_step(device: str, dtype: torch.dtype, causal: bool) -> None:
    """Also with rows that see nothing and columns that nothing sees."""
    found = compare(make(device, (1, 2, 96, 16), dtype), random_layout(device, 2, 6), dtype, block=16, causal=causal)
    assert not bool(found[0][:, :, :16].any())
    assert not bool(found[2][:, :, -16:].any())


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_larger_than_a_tile(device: str, causal: bool) -> None:
    compare(
        make(device, (1, 1, 512, 16), torch.float32), random_layout(device, 1, 2), torch.float32, 256, causal=causal
    )


@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_head_dims(device: str, head_dim: int) -> None:
    compare(make(device, (1, 1, 64, head_dim), torch.float32), random_layout(device, 1, 2), torch.float32, 32)


def test_padding_hides_keys(device: str) -> None:
    keep = torch.rand(2, 64, generator=torch.Generator().manual_seed(0)) < 0.7
    keep[1, :40] = False
    layout = BlockLists.of(BigBirdLayout(num_heads=1, num_random_blocks=0).layout(64).to(device))
    tensors = make(device, (2, 1, 64, 16), torch.float32)
    found = compare(tensors, layout, torch.float32, 16, key_padding_mask=keep.to(device))
    assert not bool(found[2][1, :, :40].any())


def test_gradients_are_the_same_bits_at_every_run(device: str) -> None:
    tensors = [x.float() for x in make(device, (1, 1, 48, 16), torch.float32)]
    options = {"block": 16, "causal": True, "scale": 0.25, "key_padding_mask": None}
    first, second = (run("triton", tensors, random_layout(device, 1, 3), options) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_visible_nan_is_seen_and_hidden_nan_is_not(device: str) -> None:
    q, k, v, _ = (x.float() for x in make(device, (1, 1, 32, 16), torch.float32))
    k[0, 0, 20] = math.nan
    layout = BlockLists.of(torch.tensor([[[True, False], [True, True]]], device=device))
    serve = implementation("block_sparse_attention", "triton")
    found = serve(q, k, v, layout, block=16, causal=False, scale=0.25, key_padding_mask=None)
    assert bool(found[0, 0, :16].isfinite().all())
    assert bool(found[0, 0, 16:].isnan().all())


def test_strided_and_empty_operands(device: str) -> None:
    q, k, v, _ = (x.float() for x in make(device, (1, 2, 32, 16), torch.float32))
    layout = random_layout(device, 2, 2)
    serve = implementation("block_sparse_attention", "triton")
    options = {"block": 16, "causal": False, "scale": 0.25, "key_padding_mask": None}
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    assert torch.equal(serve(*strided, layout, **options), serve(q, k, v, layout, **options))
    empty = [x[:0] for x in make(device, (1, 2, 32, 16), torch.float32)]
    for gradient in run("triton", empty, layout, options):
        assert gradient.shape == (0, 2, 32, 16)
