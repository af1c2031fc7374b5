"""Muon's orthogonalisation in plain torch: the oracle of the tests, the fallback on any device, and the sequence of
products that the Triton implementation shares.

Newton-Schulz (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): with `X` divided by its
Frobenius norm and `X <- a*X + (b*A + c*A@A) @ X`, `A = X @ X^T`, every singular value `s` becomes `a*s + b*s^3 + c*s^5`
while the singular vectors stay, and after a few steps all but the smallest lie near 1.

Gram form: all the factors that multiply `X` are polynomials in `A`, so they commute, and the next `A` follows from the
last without `X`: `A <- p(A) A p(A)` with `p(A) = a*I + b*A + c*A@A`. Several steps cost one product with `X` instead of
one each. But the small eigenvalues of `A` are squares, and drown in the rounding of the large ones: after some steps
`X` is formed and `A` taken from it anew. With three steps between, the error is that of the standard form in the same
dtype on matrices of every kind that was tried (random, and with spectra that fall by six orders or have one step of
three); with five it is hundreds of times larger in bfloat16.

For an m x n matrix with m <= n and products of symmetric results at half price, five steps cost `15 m^2 n + 5 m^3`
multiplications in the standard form and `6 m^2 n + 14 m^3` in the Gram form: as many when square, and about half when
n = 4 m.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from drivetrain.kernels.rules import Coefficients, NewtonSchulzForm

__all__ = ["Symmetric", "iterate", "orthogonalize"]

Symmetric = Callable[[Tensor, Tensor, Tensor | None, float, float], Tensor]
"""`(x, y, added, alpha, beta) -> alpha * x @ y^T + beta * added`, [b, m, m], known to be symmetric; x, y [b, m, k]."""

_RESTART: Final = 3


def _symmetric(x: Tensor, y: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    if added is None:
        return (x @ y.mT).mul_(alpha)
    return torch.baddbmm(added, x, y.mT, alpha=alpha, beta=beta)


def _standard(x: Tensor, steps: int, coefficients: Coefficients, symmetric: Symmetric) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        gram = symmetric(x, x, None, 1.0, 0.0)
        x = torch.baddbmm(x, symmetric(gram, gram, gram, c, b), x, beta=a)
    return x


def _gram(x: Tensor, steps: int, coefficients: Coefficients, symmetric: Symmetric) -> Tensor:
    a, b, c = coefficients
    for start in range(0, steps, _RESTART):
        gram = symmetric(x, x, None, 1.0, 0.0)
        factor = torch.zeros_like(gram)
        factor.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        for left in reversed(range(min(_RESTART, steps - start))):
            rest = symmetric(gram, gram, gram, c, b)  # p(A) - a*I
            factor = symmetric(rest, factor, factor, 1.0, a)
            if left:
                half = symmetric(rest, gram, gram, 1.0, a)
                gram = symmetric(half, rest, half, 1.0, a)
        x = factor @ x
    return x


def iterate(
    matrix: Tensor,
    *,
    steps: int,
    form: NewtonSchulzForm,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
    symmetric: Symmetric,
) -> Tensor:
    """`orthogonalize` over a given product of symmetric results."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=eps)
    x: Tensor = (wide / norm).to(dtype)
    if x.numel() == 0:
        return x
    x = x.reshape(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    run = _gram if form == "gram" else _standard
    x = run(x.mT if tall else x, steps, coefficients, symmetric)
    return (x.mT if tall else x).reshape(matrix.shape)


@torch.no_grad()
def orthogonalize(
    matrix: Tensor,
    *,
    steps: int,
    form: NewtonSchulzForm,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Each matrix of `matrix` [.., m, n] with its singular values brought near 1, in `dtype`, that of the products.

    The norm is taken and divided by in float32 at least, and is never below `eps`.
    """
    return iterate(
        matrix, steps=steps, form=form, coefficients=coefficients, eps=eps, dtype=dtype, symmetric=_symmetric
    )
