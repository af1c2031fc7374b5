"""The symmetric product of Muon in Triton, and the whole iteration over it, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import MuonRule, implementation
from drivetrain.kernels.rules import NewtonSchulzForm
from drivetrain.kernels.triton_ops import muon as fast

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RULE = MuonRule()


def _random(shape: tuple[int, ...], seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (5, 123), (17, 64), (150, 70)])
def test_symmetric_products(dtype: torch.dtype, rows: int, inner: int, device: str) -> None:
    x = (_random((2, rows, inner), 1, device) / inner**0.5).to(dtype)
    added = _random((2, rows, rows), 2, device).to(dtype)
    added = (added + added.mT) / 2
    for operand in (x, x.mT.contiguous().mT):  # rows or columns together in memory
        found = fast._symmetric(operand, x, added, -2.0, 0.5)
        want = -2.0 * x.double() @ x.double().mT + 0.5 * added.double()
        last = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), want, atol=8 * last, rtol=2 * last)
        assert torch.equal(found, found.mT)
    torch.testing.assert_close(
        fast._symmetric(x, x, None, 1.0, 0.0).double(), x.double() @ x.double().mT, atol=8 * last, rtol=2 * last
    )


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float16, 1e-2), (torch.bfloat16, 8e-2)])
def test_iteration_stays_near_float64(
    form: NewtonSchulzForm, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    options = {"steps": 5, "form": form, "coefficients": RULE.coefficients, "eps": 1e-7}
    for shape in ((2, 20, 40), (40, 20), (5, 0), (1, 7)):
        matrix = _random(shape, 3, device)
        want = implementation("orthogonalize", "torch")(matrix, **options, dtype=torch.float64)
        found = implementation("orthogonalize", "triton")(matrix.float(), **options, dtype=dtype)
        assert found.shape == matrix.shape
        assert found.dtype == dtype
        assert float((found.double() - want).norm()) <= tolerance * float(want.norm())


def test_float64_takes_plain_torch(device: str) -> None:
    matrix = _random((6, 9), 4, device)
    options = {"steps": 5, "form": "gram", "coefficients": RULE.coefficients, "eps": 1e-7, "dtype": torch.float64}
    found, want = (implementation("orthogonalize", kind)(matrix, **options) for kind in ("triton", "torch"))  # type: ignore[arg-type]
    assert torch.equal(found, want)
