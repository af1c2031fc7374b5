"""`torch_ops.muon` on GPUs: products whose result is symmetric cost half, since one triangle is computed and mirrored.

Of the products in a Newton-Schulz step two of three have a symmetric result, and carry their addition along. The third,
`a*X + B @ X`, is a general one: cuBLAS's, which adds as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drivetrain.kernels.rules import Coefficients, NewtonSchulzForm
from drivetrain.kernels.torch_ops import muon as reference
from drivetrain.kernels.triton_ops.devices import DTYPES, float32_products, serves

__all__ = ["orthogonalize"]

# ------------------------------------------------------------------------------------------------------------- kernels


# x, y: [B, M, K], by strides; added, out: [B, M, M], contiguous; added: of the dtype of out, or None
@triton.jit
def symmetric_kernel(
    x,
    y,
    added,
    out,
    rows,
    inner,
    x_batch,
    x_row,
    x_column,
    y_batch,
    y_row,
    y_column,
    alpha,
    beta,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out = alpha * x @ y^T + beta * added`, where the result is known to be symmetric: programs cover the tiles on
    and below the diagonal, and write what they find a second time, mirrored. Every tile reads BLOCK rows of x and of y:
    M / BLOCK * (M / BLOCK + 1) * BLOCK * K elements in all, mostly from the L2 cache."""
    tiles = tl.cdiv(rows, BLOCK)
    per_matrix = tiles * (tiles + 1) // 2
    batch = (tl.program_id(0) // per_matrix).to(tl.int64)
    place = tl.program_id(0) % per_matrix
    # Tiles are counted row by row; the root finds the row, up to its rounding.
    i = ((tl.sqrt(8.0 * place + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > place, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= place, i + 1, i)
    j = place - i * (i + 1) // 2
    row = i * BLOCK + tl.arange(0, BLOCK)
    column = j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the end read others' and are not written.
    x_at = x + batch * x_batch + (row % rows).to(tl.int64)[:, None] * x_row
    y_at = y + batch * y_batch + (column % rows).to(tl.int64)[None, :] * y_row
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        inside = start + k < inner
        at = (start + k).to(tl.int64)
        left = tl.load(x_at + at[None, :] * x_column, mask=inside[None, :], other=0.0)
        right = tl.load(y_at + at[:, None] * y_column, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    total *= alpha
    corner = batch * rows * rows
    offsets = corner + row.to(tl.int64)[:, None] * rows + column[None, :]
    mask = (row < rows)[:, None] & (column < rows)[None, :]
    if added is not None:
        total += beta * tl.load(added + offsets, mask=mask, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    if i == j:
        value = tl.where(row[:, None] >= column[None, :], value, tl.trans(value))
    else:
        mirrored = corner + column.to(tl.int64)[:, None] * rows + row[None, :]
        tl.store(out + mirrored, tl.trans(value), mask=(column < rows)[:, None] & (row < rows)[None, :])
    tl.store(out + offsets, value, mask=mask)


# ----------------------------------------------------------------------------------------------------------- launchers


def _symmetric(x: Tensor, y: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    batch, rows, inner = x.shape
    out = torch.empty(batch, rows, rows, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    wide = x.dtype == torch.float32
    block = min(64 if wide else 128, max(16, triton.next_power_of_2(rows)))
    tiles = triton.cdiv(rows, block)
    with torch.cuda.device_of(x):
        symmetric_kernel[(batch * tiles * (tiles + 1) // 2,)](
            x,
            y,
            added,
            out,
            rows,
            inner,
            *x.stride(),
            *y.stride(),
            float(alpha),
            float(beta),
            BLOCK=block,
            BLOCK_K=32 if wide else 64,
            PRECISION=float32_products(),
            num_warps=8 if block == 128 else 4,
            num_stages=3,
        )
    return out


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
    """`reference.orthogonalize`. float64 takes plain torch's products."""
    if dtype not in DTYPES or not serves(matrix.device):
        return reference.orthogonalize(matrix, steps=steps, form=form, coefficients=coefficients, eps=eps, dtype=dtype)
    return reference.iterate(
        matrix, steps=steps, form=form, coefficients=coefficients, eps=eps, dtype=dtype, symmetric=_symmetric
    )
