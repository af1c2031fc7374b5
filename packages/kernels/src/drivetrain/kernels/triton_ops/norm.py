"""`torch_ops.norm` on GPUs: one kernel forward, one kernel backward and one small sum.

Rows of up to 8192 elements stay in registers between the statistics and the result. Longer ones are read twice in
blocks, the second time from the cache. Backward runs one program per place on the GPU, each of which walks over many
rows and keeps its own partial sums of the gradients of weight and bias, so that these cost no second reading of x and
no atomics.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.torch_ops import norm as torch_norm
from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.triton_ops.devices import processors
from drivetrain.kernels.triton_ops.partial_sums import sum_partials
from drivetrain.kernels.triton_ops.tiles import as_rows, tile_of, warps_for

__all__ = ["layer_norm", "rms_norm"]

_LONGEST: Final = 8192  # elements of a row that are kept in registers
_SHORT: Final = 2048  # elements of a tile of short rows
_BLOCK: Final = 4096  # columns at a time of longer rows
_GROUP: Final = 4  # longer rows that share one update of the partial sums
_WARPS: Final = 16  # warps of backward on one multiprocessor: at least 128 registers a thread


# x         [rows, hidden], rows x_stride apart        residual  like x, rows residual_stride apart, or None
# weight    [hidden]                                   bias      [hidden] or None
# y         [rows, hidden], contiguous                 total     like y, or None without residual
# mean      float32 [rows], written if CENTRED         rstd      float32 [rows]
@triton.jit
def norm_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    rows,
    hidden,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    far = row.to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)
    present = col < hidden
    inside = (row < rows)[:, None] & present[None, :]
    h = tl.load(x + far * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + far * residual_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(total.dtype.element_ty)
        tl.store(total + far * hidden + col[None, :], rounded, mask=inside)
        h = rounded.to(tl.float32)
    if CENTRED:
        middle = tl.sum(h, axis=1) / hidden
        tl.store(mean + row, middle, mask=row < rows)
        h = tl.where(inside, h - middle[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(h * h, axis=1) / hidden + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    out = h * scale[:, None] * tl.load(weight + col, mask=present, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        out += tl.load(bias + col, mask=present, other=0.0).to(tl.float32)[None, :]
    tl.store(y + far * hidden + col[None, :], out, mask=inside)


# Pointers as in `norm_kernel`; one row per program.
@triton.jit
def norm_long_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    total,
    mean,
    rstd,
    hidden,
    x_stride,
    residual_stride,
    eps,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    x += row.to(tl.int64) * x_stride
    y += row.to(tl.int64) * hidden
    lane = tl.arange(0, BLOCK)
    middles = tl.zeros([BLOCK], dtype=tl.float32)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    if residual is not None:
        residual += row.to(tl.int64) * residual_stride
        total += row.to(tl.int64) * hidden
    # Welford's mean and sum of squared distances in every lane. Lanes past the end of the row keep what they have.
    count = 0.0
    for start in range(0, hidden, BLOCK):
        col = start + lane
        inside = col < hidden
        h = tl.load(x + col, mask=inside, other=0.0).to(tl.float32)
        if residual is not None:
            h += tl.load(residual + col, mask=inside, other=0.0).to(tl.float32)
            rounded = h.to(total.dtype.element_ty)
            tl.store(total + col, rounded, mask=inside)
            h = rounded.to(tl.float32)
        if CENTRED:
            count += 1.0
            before = tl.where(inside, h - middles, 0.0)
            middles += before / count
            squares += before * tl.where(inside, h - middles, 0.0)
        else:
            squares += h * h
    if CENTRED:
        counts = ((hidden - lane + BLOCK - 1) // BLOCK).to(tl.float32)
        middle = tl.sum(middles * counts, axis=0) / hidden
        tl.store(mean + row, middle)
        squares += counts * (middles - middle) * (middles - middle)
    else:
        middle = 0.0
    scale = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(rstd + row, scale)
    if residual is not None:
        x = total
        tl.debug_barrier()  # the sum is read below by other threads than wrote it
    for start in range(0, hidden, BLOCK):
        col = start + lane
        inside = col < hidden
        h = tl.load(x + col, mask=inside, other=0.0).to(tl.float32) - middle
        out = h * scale * tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            out += tl.load(bias + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + col, out, mask=inside)


# grad        [rows, hidden], rows grad_stride apart: gradient of y
# total_grad  like grad, rows total_grad_stride apart: gradient of h itself, or None
# h           [rows, hidden], rows h_stride apart: what was normalised
# weight      [hidden]                               mean, rstd  float32 [rows], mean only read if CENTRED
# dh          [rows, hidden], contiguous             partials    float32 [2 or 1, programs, hidden], or None
@triton.jit
def norm_backward_kernel(
    grad,
    total_grad,
    h,
    weight,
    mean,
    rstd,
    dh,
    partials,
    rows,
    hidden,
    grad_stride,
    total_grad_stride,
    h_stride,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK)
    present = col < hidden
    w = tl.load(weight + col, mask=present, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for group in tl.range(program, tl.cdiv(rows, ROWS), programs, num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        far = row.to(tl.int64)[:, None]
        inside = (row < rows)[:, None] & present[None, :]
        x = tl.load(h + far * h_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + far * grad_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if CENTRED:
            x = tl.where(inside, x - tl.load(mean + row, mask=row < rows, other=0.0)[:, None], 0.0)
        x *= scale
        if partials is not None:
            weight_sum += g * x
            if HAS_BIAS:
                bias_sum += g
        g *= w
        along = tl.sum(g * x, axis=1)[:, None] / hidden
        dx = g - x * along
        if CENTRED:
            dx -= tl.sum(g, axis=1)[:, None] / hidden
        dx *= scale
        if total_grad is not None:
            through = tl.load(total_grad + far * total_grad_stride + col[None, :], mask=inside, other=0.0)
            dx += through.to(tl.float32)
        tl.store(dh + far * hidden + col[None, :], dx, mask=inside)
    if partials is not None:
        own = partials + program.to(tl.int64) * hidden + col
        tl.store(own, tl.sum(weight_sum, axis=0), mask=present)
        if HAS_BIAS:
            tl.store(own + programs.to(tl.int64) * hidden, tl.sum(bias_sum, axis=0), mask=present)


# Pointers as in `norm_backward_kernel`, but partials starts as zeros.
@triton.jit
def norm_long_backward_kernel(
    grad,
    total_grad,
    h,
    weight,
    mean,
    rstd,
    dh,
    partials,
    rows,
    hidden,
    grad_stride,
    total_grad_stride,
    h_stride,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    if partials is not None:
        partials += program.to(tl.int64) * hidden
    for group in range(program, tl.cdiv(rows, ROWS), programs):
        row = group * ROWS + tl.arange(0, ROWS)
        far = row.to(tl.int64)[:, None]
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        middle = tl.zeros([ROWS, 1], dtype=tl.float32)
        if CENTRED:
            middle = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        along = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        level = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
        for start in range(0, hidden, BLOCK):
            col = start + lane
            inside = (row < rows)[:, None] & (col < hidden)[None, :]
            x = tl.load(h + far * h_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
            g = tl.load(grad + far * grad_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
            g *= tl.load(weight + col, mask=col < hidden, other=0.0).to(tl.float32)[None, :]
            along += g * (x - middle) * scale
            if CENTRED:
                level += g
        towards = tl.sum(along, axis=1)[:, None] / hidden
        shift = tl.sum(level, axis=1)[:, None] / hidden
        for start in range(0, hidden, BLOCK):
            col = start + lane
            present = col < hidden
            inside = (row < rows)[:, None] & present[None, :]
            x = tl.load(h + far * h_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
            g = tl.load(grad + far * grad_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
            x = (x - middle) * scale
            if partials is not None:
                tl.debug_barrier()  # other threads may have written what is read here
                own = partials + col
                tl.store(own, tl.load(own, mask=present, other=0.0) + tl.sum(g * x, axis=0), mask=present)
                if HAS_BIAS:
                    own += programs.to(tl.int64) * hidden
                    tl.store(own, tl.load(own, mask=present, other=0.0) + tl.sum(g, axis=0), mask=present)
            g *= tl.load(weight + col, mask=present, other=0.0).to(tl.float32)[None, :]
            dx = (g - x * towards - shift) * scale
            if total_grad is not None:
                through = tl.load(total_grad + far * total_grad_stride + col[None, :], mask=inside, other=0.0)
                dx += through.to(tl.float32)
            tl.store(dh + far * hidden + col[None, :], dx, mask=inside)


def _normalise(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalised rows, the rows that were normalised, their means (empty if not centred) and inverse deviations.

    x and residual [rows, hidden], not empty, last stride one.
    """
    rows, hidden = x.shape
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty(rows, hidden, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if centred else rstd.new_empty(0)
    residual_stride = 0 if residual is None else residual.stride(0)
    weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    tensors = (x, residual, weight, bias, y, total, mean, rstd)
    with torch.cuda.device_of(x):
        if hidden <= _LONGEST:
            tile, block = tile_of(hidden, elements=_SHORT, block=_LONGEST)
            norm_kernel[(triton.cdiv(rows, tile),)](
                *tensors,
                rows,
                hidden,
                x.stride(0),
                residual_stride,
                eps,
                CENTRED=centred,
                ROWS=tile,
                BLOCK=block,
                num_warps=warps_for(tile * block),
            )
        else:
            norm_long_kernel[(rows,)](
                *tensors,
                hidden,
                x.stride(0),
                residual_stride,
                eps,
                CENTRED=centred,
                BLOCK=_BLOCK,
                num_warps=warps_for(_BLOCK),
            )
    return y, x if total is None else total, mean, rstd


def _backward(
    grad: Tensor,
    total_grad: Tensor | None,
    h: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    sums: int,
    dtype: torch.dtype,
    centred: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradient of h, and the gradients of weight (and bias) [sums, hidden] in `dtype`; None if sums is 0."""
    rows, hidden = h.shape
    dh = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    long = hidden > _LONGEST
    tile, block = (_GROUP, _BLOCK // 2) if long else tile_of(hidden, elements=_SHORT, block=_LONGEST)
    warps = warps_for(tile * block)
    programs = min(triton.cdiv(rows, tile), processors(h.device) * max(1, _WARPS // warps))
    make = torch.zeros if long else torch.empty
    partials = make(sums, programs, hidden, dtype=torch.float32, device=h.device) if sums else None
    arguments: tuple[Any, ...] = (
        grad,
        total_grad,
        h,
        weight.contiguous(),
        mean,
        rstd,
        dh,
        partials,
        rows,
        hidden,
        grad.stride(0),
        0 if total_grad is None else total_grad.stride(0),
        h.stride(0),
        centred,
        sums == 2,
        tile,
        block,
    )
    with torch.cuda.device_of(h):
        if long:
            norm_long_backward_kernel[(programs,)](*arguments, num_warps=warps)
        else:
            norm_backward_kernel[(programs,)](*arguments, STAGES=2, num_warps=warps)
    return dh, None if partials is None else sum_partials(partials, dtype)


class _Norm(torch.autograd.Function):
    """(x, residual, weight, bias, eps, centred) -> normalised h, and h where there is a residual.

    Saved: h (which is x without a residual), weight, and a float32 number or two per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        rows = as_rows(x)
        other = None if residual is None else as_rows(residual)
        y, h, mean, rstd = _normalise(rows, other, weight, bias, eps, centred)
        ctx.centred = centred
        ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h, weight, mean, rstd)
        return y.view(x.shape) if residual is None else (y.view(x.shape), h.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, total_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
        h, weight, mean, rstd = ctx.saved_tensors
        x_dtype, bias_dtype = ctx.dtypes
        if grad is None:
            dx = None if total_grad is None else total_grad.to(x_dtype)
            return dx, total_grad, None, None, None, None
        wants = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        sums = (1 if bias_dtype is None else 2) if wants else 0
        through = None if total_grad is None else as_rows(total_grad)
        dtype = weight.dtype if bias_dtype in (None, weight.dtype) else torch.float32
        dh, parameters = _backward(
            as_rows(grad), through, h, weight, mean, rstd, sums=sums, dtype=dtype, centred=ctx.centred
        )
        dh = dh.view(grad.shape)
        dweight = None if parameters is None else parameters[0].to(weight.dtype)
        dbias = parameters[1].to(bias_dtype) if parameters is not None and bias_dtype is not None else None
        return dh.to(x_dtype), dh if ctx.needs_input_grad[1] else None, dweight, dbias, None, None


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_ops.norm.rms_norm`."""
    if x.numel() == 0:
        return torch_norm.rms_norm(x, weight, eps=eps, residual=residual)
    result: Tensor | tuple[Tensor, Tensor] = apply(_Norm, x, residual, weight, None, eps, False)
    return result


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float = 1e-5, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`torch_ops.norm.layer_norm`."""
    if x.numel() == 0:
        return torch_norm.layer_norm(x, weight, bias, eps=eps, residual=residual)
    result: Tensor | tuple[Tensor, Tensor] = apply(_Norm, x, residual, weight, bias, eps, True)
    return result
