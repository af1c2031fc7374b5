"""The Triton rotation against the plain one in float64: values and gradients, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.dispatch import Kind

# A product of angles and elements in float32, rounded once (in the interpreter: truncated to bfloat16).
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _table(length: int, pairs: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.arange(length)[:, None] * 100.0 ** -(torch.arange(pairs) / pairs)
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def _evaluate(
    kind: Kind, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor | None, interleaved: bool
) -> tuple[Tensor, ...]:
    """Both results and both gradients."""
    leaves = (q.detach().requires_grad_(), k.detach().requires_grad_())
    rotate = implementation("rotary_embedding", kind)
    found = rotate(*leaves, *angles, interleaved=interleaved, positions=positions)
    seeds = [_random(*x.shape, seed=7, device=x.device.type, dtype=torch.float32).to(x.dtype) for x in found]
    return (*found, *torch.autograd.grad(found, leaves, seeds))


def _compare(
    q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], positions: Tensor | None = None, interleaved: bool = False
) -> None:
    found = _evaluate("triton", q, k, angles, positions, interleaved)
    double = (angles[0].double(), angles[1].double())
    exact = _evaluate("torch", q.double(), k.double(), double, positions, interleaved)
    tolerance = DTYPES[q.dtype]
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == q.dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("q_shape", "k_heads", "pairs", "dtype"),
    [
        ((1, 1, 2), 1, 1, torch.float32),
        ((5, 3, 10), 2, 3, torch.float32),
        ((3, 2, 64), 1, 32, torch.bfloat16),
        ((2, 40, 128), 20, 64, torch.float16),
    ],
)
def test_values_and_gradients(
    q_shape: tuple[int, ...], k_heads: int, pairs: int, dtype: torch.dtype, interleaved: bool, device: str
) -> None:
    q = _random(*q_shape, seed=1, device=device, dtype=dtype)
    k = _random(q_shape[0], k_heads, q_shape[2], seed=2, device=device, dtype=dtype)
    _compare(q, k, _table(q_shape[0], pairs, device, torch.float32), interleaved=interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batches_positions_and_views(dtype: torch.dtype, device: str) -> None:
    fused = _random(2, 3, 5, 8, seed=1, device=device, dtype=dtype)
    q, k = fused[:, :, :4], fused[:, :, 4:]
    angles = _table(7, 4, device, dtype)
    few = (angles[0][:3], angles[1][:3])
    _compare(q, k, few)
    positions = torch.tensor([[0, 6, 2], [3, 3, 1]], device=device)
    _compare(q, k, angles, positions.to(torch.int32))
    _compare(q, k, (angles[0][positions], angles[1][positions]))
    heads_first = q.transpose(1, 2).contiguous()
    found = implementation("rotary_embedding", "triton")(heads_first.transpose(1, 2), k, *few)[0]
    assert found.transpose(1, 2).is_contiguous()
    assert torch.equal(found, implementation("rotary_embedding", "triton")(q, k, *few)[0])
    _compare(q.mT.contiguous().mT, k.expand(2, 3, 2, 8), few)
    _compare(q[:, None].expand(2, 2, 3, 4, 8), k[:, None].expand(2, 2, 3, 1, 8), few)


def test_positions_outside_the_table_give_nan_and_empty_tensors_nothing(device: str) -> None:
    rotate = implementation("rotary_embedding", "triton")
    q = torch.ones(4, 2, 10, device=device)
    angles = _table(3, 4, device, torch.float32)
    found = rotate(q, q, *angles, positions=torch.tensor([0, 3, -1, 2], device=device))[0]
    assert found[..., :8].isnan().any(-1).any(-1).tolist() == [False, True, True, False]
    assert rotate(q[:0], q[:0], angles[0][:0], angles[1][:0])[1].shape == (0, 2, 10)
