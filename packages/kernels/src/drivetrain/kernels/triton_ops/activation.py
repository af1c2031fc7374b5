"""`torch_ops.activation` on GPUs: one kernel forward and one backward for each op.

Backward recomputes the activation from the inputs. Where there is a bias its gradient comes from the same pass: every
program walks down a stripe of columns and writes one row of partial sums.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.torch_ops import activation as torch_activation
from drivetrain.kernels.torch_ops.activation import Approximation, drop_threshold
from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.triton_ops.counter_random import random_bits, signed_keys
from drivetrain.kernels.triton_ops.devices import processors
from drivetrain.kernels.triton_ops.partial_sums import sum_partials
from drivetrain.kernels.triton_ops.tiles import as_rows, tile_of, warps_for

__all__ = ["bias_dropout_residual", "bias_gelu", "geglu", "swiglu"]

_TILE: Final = 2048  # elements of a program at a time
_STRIPE: Final = 1024  # columns of a program that sums over rows
_PROGRAMS: Final = 8  # of those on each multiprocessor


# The activation of x (float32), KIND being "silu", "none" (exact GELU) or "tanh" (its approximation). The latter is
# x * sigmoid(2 * u), since 1 + tanh(u) = 2 * sigmoid(2 * u).
@triton.jit
def _activate(x, KIND: tl.constexpr):
    if KIND == "none":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
    elif KIND == "tanh":
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        share = tl.sigmoid(x)
    return x * share


# The activation of x and its derivative.
@triton.jit
def _activate_with_slope(x, KIND: tl.constexpr):
    if KIND == "none":
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        slope = share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "tanh":
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = share + x * share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        share = tl.sigmoid(x)
        slope = share * (1.0 + x * (1.0 - share))
    return x * share, slope


# gate, up   [rows, columns], rows gate_stride and up_stride apart        y  [rows, columns], contiguous
@triton.jit
def glu_kernel(
    gate,
    up,
    y,
    rows,
    columns,
    gate_stride,
    up_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    g = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + col, _activate(g, KIND) * u, mask=inside)


# grad, gate, up   [rows, columns] at the row strides given        dgate, dup   the same, rows out_stride apart
@triton.jit
def glu_backward_kernel(
    grad,
    gate,
    up,
    dgate,
    dup,
    rows,
    columns,
    grad_stride,
    gate_stride,
    up_stride,
    out_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    dy = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + col, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + col, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activate_with_slope(g, KIND)
    tl.store(dgate + row * out_stride + col, dy * u * slope, mask=inside)
    tl.store(dup + row * out_stride + col, dy * value, mask=inside)


# x     [rows, columns], rows x_stride apart        bias  [columns]        y  [rows, columns], contiguous
@triton.jit
def bias_gelu_kernel(x, bias, y, rows, columns, x_stride, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (col < columns)
    h = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    h += tl.load(bias + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.store(y + row * columns + col, _activate(h, KIND), mask=inside)


# grad, x   [rows, columns] at the row strides given        bias      [columns]
# dx        [rows, columns], contiguous                     partials  float32 [programs, columns]
# Program (b, i) takes the b-th block of columns and every num_programs(1)-th group of rows.
@triton.jit
def bias_gelu_backward_kernel(
    grad,
    x,
    bias,
    dx,
    partials,
    rows,
    columns,
    grad_stride,
    x_stride,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stripe = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = stripe[None, :]
    present = col < columns
    shift = tl.load(bias + col, mask=present, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for group in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        row = (group * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = (row < rows) & present
        dy = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32) + shift
        _, slope = _activate_with_slope(h, KIND)
        dh = tl.where(inside, dy * slope, 0.0)
        total += dh
        tl.store(dx + row * columns + col, dh, mask=inside)
    own = partials + tl.program_id(1).to(tl.int64) * columns
    tl.store(own + stripe, tl.sum(total, axis=0), mask=stripe < columns)


# x, residual   [rows, columns] at the row strides given        bias  [columns] or None
# y             [rows, columns], contiguous                     key0, key1, threshold  int32, first_row integer
@triton.jit(do_not_specialize=["first_row", "key0", "key1", "threshold"])
def dropout_kernel(
    x,
    bias,
    residual,
    y,
    rows,
    columns,
    x_stride,
    residual_stride,
    first_row,
    key0,
    key1,
    threshold,
    scale,
    DROP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(columns, BLOCK)
    line = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    row = line[:, None]
    col = column[None, :]
    inside = (row < rows) & (col < columns)
    h = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        h += tl.load(bias + col, mask=col < columns, other=0.0).to(tl.float32)
    if DROP:
        kept = random_bits(line + first_row, column, key0, key1) >= threshold.to(tl.uint32)
        h = tl.where(kept, h * scale, 0.0)
    h += tl.load(residual + row * residual_stride + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + col, h, mask=inside)


# grad   [rows, columns], rows grad_stride apart        dx        [rows, columns], contiguous, or None
#                                                       partials  float32 [programs, columns], or None
# Programs as in `bias_gelu_backward_kernel`, numbers as in `dropout_kernel`.
@triton.jit(do_not_specialize=["first_row", "key0", "key1", "threshold"])
def dropout_backward_kernel(
    grad,
    dx,
    partials,
    rows,
    columns,
    grad_stride,
    first_row,
    key0,
    key1,
    threshold,
    scale,
    DROP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    stripe = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    col = stripe[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for group in range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1)):
        line = (group * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row = line[:, None]
        inside = (row < rows) & (col < columns)
        dh = tl.load(grad + row * grad_stride + col, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            kept = random_bits(line + first_row, stripe, key0, key1) >= threshold.to(tl.uint32)
            dh = tl.where(kept, dh * scale, 0.0)
        total += dh
        if dx is not None:
            tl.store(dx + row * columns + col, dh, mask=inside)
    if partials is not None:
        own = partials + tl.program_id(1).to(tl.int64) * columns
        tl.store(own + stripe, tl.sum(total, axis=0), mask=stripe < columns)


def _flat_or_rows(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors as one long row, others as rows."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(1, -1) for tensor in tensors]
    return [as_rows(tensor) for tensor in tensors]


def _glu(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """gate and up of one shape, not empty."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    first, second = _flat_or_rows(gate, up)
    rows, columns = first.shape
    tile, block = tile_of(columns, elements=_TILE, block=_TILE)
    with torch.cuda.device_of(gate):
        glu_kernel[(triton.cdiv(rows, tile) * triton.cdiv(columns, block),)](
            first,
            second,
            y,
            rows,
            columns,
            first.stride(0),
            second.stride(0),
            KIND=kind,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps_for(tile * block),
        )
    return y


def _glu_backward(grad: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: str) -> None:
    """Writes dgate and dup, whose strides are the same."""
    sources = _flat_or_rows(grad, gate, up, dgate, dup)
    rows, columns = sources[0].shape
    tile, block = tile_of(columns, elements=_TILE, block=_TILE)
    with torch.cuda.device_of(grad):
        glu_backward_kernel[(triton.cdiv(rows, tile) * triton.cdiv(columns, block),)](
            *sources,
            rows,
            columns,
            *[source.stride(0) for source in sources[:4]],
            KIND=kind,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps_for(tile * block),
        )


class _Glu(torch.autograd.Function):
    """(gate, up or None, kind) -> activation of gate times up. Saved: the inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(gate, up)
        first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return _glu(first, second, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if up is None:
            (first, second), (dfirst, dsecond) = gate.chunk(2, dim=-1), dgate.chunk(2, dim=-1)
            _glu_backward(grad, first, second, dfirst, dsecond, ctx.kind)
            return dgate, None, None
        dup = torch.empty_like(dgate)
        _glu_backward(grad, gate, up, dgate, dup, ctx.kind)
        return dgate, dup, None


def _stripes(x: Tensor) -> tuple[int, int, tuple[int, int]]:
    """Tile and grid of kernels that sum over the rows of x [rows, columns]."""
    rows, columns = x.shape
    tile, block = tile_of(columns, elements=_TILE, block=_STRIPE)
    blocks = triton.cdiv(columns, block)
    programs = max(1, processors(x.device) * _PROGRAMS // blocks)
    return tile, block, (blocks, min(triton.cdiv(rows, tile), programs))


def _bias_gelu(x: Tensor, bias: Tensor, kind: str) -> Tensor:
    """x [rows, columns], not empty, last stride one."""
    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tile, block = tile_of(columns, elements=_TILE, block=_TILE)
    with torch.cuda.device_of(x):
        bias_gelu_kernel[(triton.cdiv(rows, tile) * triton.cdiv(columns, block),)](
            x,
            bias.contiguous(),
            y,
            rows,
            columns,
            x.stride(0),
            KIND=kind,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps_for(tile * block),
        )
    return y


def _bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    tile, block, grid = _stripes(x)
    partials = torch.empty(1, grid[1], columns, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        bias_gelu_backward_kernel[grid](
            grad,
            x,
            bias.contiguous(),
            dx,
            partials,
            rows,
            columns,
            grad.stride(0),
            x.stride(0),
            KIND=kind,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps_for(tile * block),
        )
    return dx, sum_partials(partials, bias.dtype)[0]


class _BiasGelu(torch.autograd.Function):
    """(x, bias, kind) -> gelu(x + bias). Saved: the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        ctx.save_for_backward(x, bias)
        return _bias_gelu(as_rows(x), bias, kind).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, dbias = _bias_gelu_backward(as_rows(grad), as_rows(x), bias, ctx.kind)
        return dx.view(grad.shape), dbias, None


def _mask_arguments(p: float, seed: int, first_row: int) -> tuple[int | float, ...]:
    return (first_row, *signed_keys(seed), drop_threshold(p), 1 / (1 - p))


def _dropout(x: Tensor, bias: Tensor | None, residual: Tensor, *, p: float, seed: int, first_row: int) -> Tensor:
    """x and residual [rows, columns], not empty, last stride one."""
    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=residual.dtype, device=x.device)
    tile, block = tile_of(columns, elements=_TILE, block=_TILE)
    with torch.cuda.device_of(x):
        dropout_kernel[(triton.cdiv(rows, tile) * triton.cdiv(columns, block),)](
            x,
            None if bias is None else bias.contiguous(),
            residual,
            y,
            rows,
            columns,
            x.stride(0),
            residual.stride(0),
            *_mask_arguments(p, seed, first_row),
            DROP=p > 0,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps_for(tile * block),
        )
    return y


def _dropout_backward(
    grad: Tensor, x_dtype: torch.dtype, bias_dtype: torch.dtype | None, *, p: float, seed: int, first_row: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x [rows, columns] and, given its dtype, of the bias."""
    if p == 0 and bias_dtype is None:
        return grad.to(x_dtype), None
    rows, columns = grad.shape
    dx = None if p == 0 else torch.empty(rows, columns, dtype=x_dtype, device=grad.device)
    tile, block, grid = _stripes(grad)
    partials = None
    if bias_dtype is not None:
        partials = torch.empty(1, grid[1], columns, dtype=torch.float32, device=grad.device)
    with torch.cuda.device_of(grad):
        dropout_backward_kernel[grid](
            grad,
            dx,
            partials,
            rows,
            columns,
            grad.stride(0),
            *_mask_arguments(p, seed, first_row),
            DROP=p > 0,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps_for(tile * block),
        )
    dbias = None if partials is None or bias_dtype is None else sum_partials(partials, bias_dtype)[0]
    return grad.to(x_dtype) if dx is None else dx, dbias


class _BiasDropoutResidual(torch.autograd.Function):
    """(x, bias or None, residual, p, seed, first_row) -> residual + dropout(x + bias). Saved: no tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int, first_row: int
    ) -> Tensor:
        ctx.mask = {"p": p, "seed": seed, "first_row": first_row}
        ctx.dtypes = (x.dtype, None if bias is None else bias.dtype)
        return _dropout(as_rows(x), bias, as_rows(residual), **ctx.mask).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, bias_dtype = ctx.dtypes
        wanted = bias_dtype if ctx.needs_input_grad[1] else None
        dx, dbias = _dropout_backward(as_rows(grad), x_dtype, wanted, **ctx.mask)
        return dx.view(grad.shape), dbias, grad, None, None, None


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`torch_ops.activation.swiglu`."""
    if gate.numel() == 0:
        return torch_activation.swiglu(gate, up)
    result: Tensor = apply(_Glu, gate, up, "silu")
    return result


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: Approximation = "none") -> Tensor:
    """`torch_ops.activation.geglu`."""
    if gate.numel() == 0:
        return torch_activation.geglu(gate, up, approximate=approximate)
    result: Tensor = apply(_Glu, gate, up, approximate)
    return result


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: Approximation = "none") -> Tensor:
    """`torch_ops.activation.bias_gelu`."""
    if x.numel() == 0:
        return torch_activation.bias_gelu(x, bias, approximate=approximate)
    result: Tensor = apply(_BiasGelu, x, bias, approximate)
    return result


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    p: float,
    training: bool = True,
    seed: int,
    first_row: int = 0,
) -> Tensor:
    """`torch_ops.activation.bias_dropout_residual`."""
    if x.numel() == 0:
        return torch_activation.bias_dropout_residual(x, bias, residual, p=p, training=training, seed=seed)
    dropped = p if training else 0.0
    result: Tensor = apply(_BiasDropoutResidual, x, bias, residual, dropped, seed, first_row)
    return result
