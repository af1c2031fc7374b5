"""The Triton activations against the plain ones in float64, and the same dropout mask to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.dispatch import Kind

# One rounding of the result (in the interpreter: truncation to bfloat16), and float32 sums over rows for biases.
DTYPES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [((1, 1), torch.float32), ((5, 123), torch.bfloat16), ((37, 2, 66), torch.float32), ((3, 2500), torch.float16)]
every_shape = pytest.mark.parametrize(("shape", "dtype"), SHAPES)


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _evaluate(
    op: str, kind: Kind, tensors: Mapping[str, Tensor], dtype: torch.dtype, options: Mapping[str, Any]
) -> list[Tensor]:
    """The result of one implementation in `dtype`, then the gradients of all its inputs."""
    leaves = {name: tensor.to(dtype).detach().requires_grad_() for name, tensor in tensors.items()}
    found = implementation(op, kind)(**leaves, **options)
    given = next(iter(tensors.values())).dtype
    seed = _random(*found.shape, seed=9, device=found.device.type, dtype=given).to(dtype)
    return [found.detach(), *torch.autograd.grad(found, list(leaves.values()), seed)]


def _compare(op: str, tensors: Mapping[str, Tensor], **options: Any) -> None:
    dtype = next(iter(tensors.values())).dtype
    found = _evaluate(op, "triton", tensors, dtype, options)
    exact = _evaluate(op, "torch", tensors, torch.float64, options)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == dtype
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=DTYPES[dtype], atol=DTYPES[dtype] * scale)


@every_shape
@pytest.mark.parametrize(
    ("op", "options"),
    [("swiglu", {}), ("geglu", {"approximate": "none"}), ("geglu", {"approximate": "tanh"})],
)
def test_gates(op: str, options: dict[str, str], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    gate = _random(*shape, seed=1, device=device, dtype=dtype)
    up = _random(*shape, seed=2, device=device, dtype=dtype)
    _compare(op, {"gate": gate, "up": up}, **options)
    _compare(op, {"gate": torch.cat((gate, up), dim=-1)}, **options)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the interpreter's exp
def test_gates_in_wider_and_transposed_tensors(device: str) -> None:
    wide = _random(4, 3, 40, seed=1, device=device, dtype=torch.float32)
    swiglu, reference = implementation("swiglu", "triton"), implementation("swiglu", "torch")
    for gate, up in ((wide[..., :10], wide[..., 20:30]), (wide.mT, wide.mT.contiguous())):
        torch.testing.assert_close(swiglu(gate, up), reference(gate, up))
    extreme = torch.tensor([[torch.nan, torch.inf, -300.0, 300.0, -0.0]], device=device)
    torch.testing.assert_close(swiglu(extreme, extreme), reference(extreme, extreme), equal_nan=True)


@every_shape
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu(approximate: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = _random(*shape, seed=1, device=device, dtype=dtype)
    bias = _random(shape[-1], seed=2, device=device, dtype=dtype)
    _compare("bias_gelu", {"x": x, "bias": bias}, approximate=approximate)


@every_shape
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_bias_dropout_residual(p: float, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = _random(*shape, seed=1, device=device, dtype=dtype)
    residual = _random(*shape, seed=3, device=device, dtype=dtype)
    bias = _random(shape[-1], seed=2, device=device, dtype=dtype)
    _compare("bias_dropout_residual", {"x": x, "bias": bias, "residual": residual}, p=p, seed=(1 << 62) + 77)
    _compare("bias_dropout_residual", {"x": x, "residual": residual}, bias=None, p=p, seed=3, first_row=1 << 33)


@pytest.mark.parametrize("seed", [0, 12345, (1 << 63) - 1])
@pytest.mark.parametrize("first_row", [0, (1 << 32) - 2])
def test_the_mask_is_the_same_to_the_bit(seed: int, first_row: int, device: str) -> None:
    ones, zeros = torch.ones(5, 1100, device=device), torch.zeros(5, 1100, device=device)
    drop: dict[str, Any] = {"p": 0.4, "seed": seed, "first_row": first_row}
    masks = []
    for kind in ("torch", "triton"):
        x = ones.clone().requires_grad_()
        found: Callable[..., Tensor] = implementation("bias_dropout_residual", kind)
        y = found(x, None, zeros, **drop)
        (gradient,) = torch.autograd.grad(y, x, ones)
        assert torch.equal(gradient, y)
        masks.append(y > 0)
    assert torch.equal(masks[0], masks[1])


def test_dropped_nan_empty_tensors_and_mixed_dtypes(device: str) -> None:
    op, reference = (implementation("bias_dropout_residual", kind) for kind in ("triton", "torch"))
    bad = torch.full((3, 40), torch.nan, device=device, dtype=torch.bfloat16)
    stream = _random(3, 80, seed=1, device=device, dtype=torch.float32)[:, ::2]
    found = op(bad, None, stream, p=0.5, seed=1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference(bad, None, stream, p=0.5, seed=1), equal_nan=True)
    assert op(bad[:0], None, stream[:0], p=0.5, seed=1).shape == (0, 40)
    assert torch.equal(op(stream, None, stream, p=0.5, seed=1, training=False), stream + stream)
    for name in ("swiglu", "geglu", "bias_gelu"):
        empty = torch.zeros(0, 4, device=device)
        assert implementation(name, "triton")(
            empty, torch.zeros(4, device=device) if name == "bias_gelu" else empty
        ).shape == (0, 4)
