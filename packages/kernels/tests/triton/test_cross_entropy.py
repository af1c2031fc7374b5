"""The Triton losses against the plain ones in float64: rows beyond a block, padded rows, all options and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.dispatch import Kind

# In the interpreter numpy warns of what happens in elements that are then not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OPTIONS = [
    {},
    {"reduction": "sum", "z_loss": 0.01},
    {"reduction": "none", "label_smoothing": 0.2, "ignore_index": 0},
    {"label_smoothing": 0.1, "z_loss": 0.1},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
# Losses are float32; gradients are rounded once (in the interpreter: truncated to bfloat16).
DTYPES = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LONG = 4096 + 5


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _labels(*shape: int, vocabulary: int, device: str, ignore_index: int = -100) -> Tensor:
    labels = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(3))
    labels.view(-1)[1::4] = ignore_index
    return labels.to(device)


def _evaluate(
    op: str, kind: Kind, tensors: Mapping[str, Tensor], labels: Tensor, options: Mapping[str, Any]
) -> list[Tensor]:
    """The loss, then the gradients of all tensors."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    found = implementation(op, kind)(**leaves, labels=labels, **options)
    outside = _random(*found.shape, seed=9, device=found.device.type, dtype=torch.float32).to(found.dtype)
    return [found.detach(), *torch.autograd.grad(found, list(leaves.values()), outside)]


def _compare(
    op: str, tensors: Mapping[str, Tensor], labels: Tensor, options: Mapping[str, Any], *, loss_tolerance: float = 5e-6
) -> None:
    found = _evaluate(op, "triton", tensors, labels, options)
    exact = _evaluate(op, "torch", {name: tensor.double() for name, tensor in tensors.items()}, labels, options)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), exact[0], rtol=loss_tolerance, atol=loss_tolerance)
    dtype = next(iter(tensors.values())).dtype
    for one, other in zip(found[1:], exact[1:], strict=True):
        assert one.dtype == dtype
        largest = float(other.abs().max())
        torch.testing.assert_close(one.double(), other, rtol=DTYPES[dtype], atol=DTYPES[dtype] * largest)


@every_option
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "dtype"),
    [((1,), 1, torch.float32), ((2, 3), 123, torch.bfloat16), ((3,), LONG, torch.float32), ((3,), 17, torch.float16)],
)
def test_values_and_gradients(
    tokens: tuple[int, ...], vocabulary: int, dtype: torch.dtype, options: Mapping[str, Any], device: str
) -> None:
    logits = _random(*tokens, vocabulary, seed=1, device=device, dtype=dtype) * 3
    logits[..., -1] += 12  # the maximum moves in the last block
    ignore_index = options.get("ignore_index", -100)
    labels = _labels(*tokens, vocabulary=vocabulary, device=device, ignore_index=ignore_index)
    _compare("cross_entropy", {"logits": logits}, labels, options)
    _compare("cross_entropy", {"logits": logits}, labels.to(torch.int32), options)


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks(dtype: torch.dtype, options: Mapping[str, Any], device: str) -> None:
    tensors = {
        "hidden": _random(2, 5, 8, seed=1, device=device, dtype=dtype),
        "weight": _random(70, 8, seed=2, device=device, dtype=dtype),
        "bias": _random(70, seed=3, device=device, dtype=dtype),
    }
    labels = _labels(2, 5, vocabulary=70, device=device, ignore_index=options.get("ignore_index", -100))
    tolerance = 5e-6 if dtype == torch.float32 else 8e-3  # logits are rounded to the dtype
    _compare("linear_cross_entropy", tensors, labels, {**options, "chunk_tokens": 4}, loss_tolerance=tolerance)
    del tensors["bias"]
    _compare("linear_cross_entropy", tensors, labels, options, loss_tolerance=tolerance)


def test_chunks_of_a_vocabulary_beyond_a_block(device: str) -> None:
    tensors = {
        "hidden": _random(3, 4, seed=1, device=device, dtype=torch.float32),
        "weight": _random(LONG, 4, seed=2, device=device, dtype=torch.float32),
    }
    labels = torch.tensor([LONG - 1, -100, 7], device=device)
    _compare("linear_cross_entropy", tensors, labels, {"chunk_tokens": 2, "label_smoothing": 0.1})


def test_padded_rows_and_a_frozen_weight(device: str) -> None:
    wide = _random(4, 40, seed=1, device=device, dtype=torch.float32)
    labels = _labels(4, vocabulary=33, device=device)
    _compare("cross_entropy", {"logits": wide[:, :33]}, labels, {})
    _compare("cross_entropy", {"logits": wide[:, :32].t()[:4]}, labels.clamp(0, 3), {"ignore_index": 3})
    hidden = _random(4, 8, seed=2, device=device, dtype=torch.float32).requires_grad_()
    weight = _random(33, 8, seed=3, device=device, dtype=torch.float32)
    results = []
    for kind in ("triton", "torch"):
        loss = implementation("linear_cross_entropy", kind)(hidden, weight, labels)
        results.append(torch.autograd.grad(loss, hidden)[0])
    torch.testing.assert_close(*results)
    with torch.no_grad():
        quiet = implementation("linear_cross_entropy", "triton")(hidden, weight, labels)
    torch.testing.assert_close(quiet, implementation("cross_entropy", "torch")(hidden.detach() @ weight.t(), labels))


def test_nan_infinity_and_labels_outside_the_vocabulary(device: str) -> None:
    logits = _random(6, 9, seed=1, device=device, dtype=torch.float32)
    logits[0, 4], logits[1, 2], logits[2] = torch.nan, -torch.inf, torch.nan
    leaf = logits.requires_grad_()
    labels = torch.tensor([0, 2, -100, 9, -1, 3], device=device)
    losses = implementation("cross_entropy", "triton")(leaf, labels, reduction="none")
    assert losses.isnan().tolist() == [True, False, False, True, True, False]
    assert losses[1] == torch.inf
    assert losses[2] == 0
    (gradient,) = torch.autograd.grad(losses[[2, 3, 5]].sum(), leaf)
    assert not gradient[2].any()
    assert bool(gradient[3].isnan().any())
    assert bool(gradient[5].isfinite().all())


def test_nothing_counts_or_nothing_is_there(device: str) -> None:
    logits = _random(3, 9, seed=1, device=device, dtype=torch.float32).requires_grad_()
    nothing = torch.full((3,), -100, device=device)
    for count in (3, 0):
        loss = implementation("cross_entropy", "triton")(logits[:count], nothing[:count])
        assert loss.item() == 0.0
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not gradient.any()
        weight = torch.ones(9, 9, device=device)
        chunked = implementation("linear_cross_entropy", "triton")(logits[:count], weight, nothing[:count])
        assert chunked.item() == 0.0
