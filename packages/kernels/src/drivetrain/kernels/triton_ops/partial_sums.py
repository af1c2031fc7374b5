"""The second half of a sum over rows: rows of partial sums, one per program, added up in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["sum_partials"]


# partials  float32  [sums, programs, columns]
# out       any      [sums, columns]
@triton.jit
def sum_partials_kernel(partials, out, programs, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1)
    partials += which.to(tl.int64) * programs * columns
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < programs)[:, None] & (col < columns)[None, :]
        total += tl.load(partials + row[:, None] * columns + col[None, :], mask=inside, other=0.0)
    tl.store(out + which * columns + col, tl.sum(total, axis=0), mask=col < columns)


def sum_partials(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """`partials` (float32 [sums, programs, columns], contiguous) summed over programs: [sums, columns] of `dtype`."""
    sums, programs, columns = partials.shape
    out = torch.empty(sums, columns, dtype=dtype, device=partials.device)
    block = 64
    if partials.numel():
        with torch.cuda.device_of(partials):
            sum_partials_kernel[(triton.cdiv(columns, block), sums)](
                partials, out, programs, columns, ROWS=32, BLOCK=block, num_warps=4
            )
    return out
