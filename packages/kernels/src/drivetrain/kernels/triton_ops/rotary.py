"""`torch_ops.rotary` on GPUs: one kernel for q and k, forward and, with the opposite angle, backward."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.torch_ops import rotary as torch_rotary
from drivetrain.kernels.torch_ops.autograd import apply
from drivetrain.kernels.triton_ops.tiles import power_of_two, warps_for

__all__ = ["rotary_embedding"]

_TILE: Final = 2048  # rotated elements of a program


# x, y      [batch, sequence, heads, dim] at the strides given, the last of which is one
# batch, place   indices of the program's token           cos, sin  float32 [1, PAIRS], the angles of that token
@triton.jit
def _rotate(
    x,
    y,
    cos,
    sin,
    batch,
    place,
    first_head,
    heads,
    dim,
    pairs,
    x_batch,
    x_place,
    x_head,
    y_batch,
    y_place,
    y_head,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    x += batch.to(tl.int64) * x_batch + place.to(tl.int64) * x_place
    y += batch.to(tl.int64) * y_batch + place.to(tl.int64) * y_place
    head = first_head + tl.arange(0, HEADS)
    present = (head < heads)[:, None]
    source = x + head.to(tl.int64)[:, None] * x_head
    target = y + head.to(tl.int64)[:, None] * y_head
    if INTERLEAVED:
        col = tl.arange(0, 2 * PAIRS)[None, :]
        inside = present & (col < 2 * pairs)
        both = tl.load(source + col, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
        both = tl.join(first * cos - second * sin, second * cos + first * sin)
        tl.store(target + col, tl.reshape(both, [HEADS, 2 * PAIRS]), mask=inside)
    else:
        col = tl.arange(0, PAIRS)[None, :]
        inside = present & (col < pairs)
        first = tl.load(source + col, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + pairs + col, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + col, first * cos - second * sin, mask=inside)
        tl.store(target + pairs + col, second * cos + first * sin, mask=inside)
    if REST > 0:
        col = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = present & (col < dim)
        tl.store(target + col, tl.load(source + col, mask=inside), mask=inside)


# q, q_out    [batch, sequence, q_heads, dim] at the strides given     k, k_out  the same with k_heads
# cos, sin    [rows, pairs], rows angle_stride apart
# positions   integer [batch * sequence], or None: the row of token t is then t % rows
# Program (t, b) rotates block b of the heads of token t; q's blocks come first.
@triton.jit
def rotary_kernel(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    positions,
    sequence,
    rows,
    q_heads,
    k_heads,
    dim,
    pairs,
    angle_stride,
    q_batch,
    q_place,
    q_head,
    k_batch,
    k_place,
    k_head,
    q_out_batch,
    q_out_place,
    q_out_head,
    k_out_batch,
    k_out_place,
    k_out_head,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.program_id(0)
    block = tl.program_id(1)
    batch = token // sequence
    place = token % sequence
    col = tl.arange(0, PAIRS)
    if positions is None:
        row = (token % rows).to(tl.int64)
    else:
        row = tl.load(positions + token).to(tl.int64)
    known = (row >= 0) & (row < rows)
    angle = tl.where(known, row, 0) * angle_stride + col
    c = tl.load(cos + angle, mask=col < pairs, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=col < pairs, other=0.0).to(tl.float32)[None, :]
    c = tl.where(known, c, float("nan"))
    if INVERSE:
        s = -s
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        _rotate(
            q,
            q_out,
            c,
            s,
            batch,
            place,
            block * HEADS,
            q_heads,
            dim,
            pairs,
            q_batch,
            q_place,
            q_head,
            q_out_batch,
            q_out_place,
            q_out_head,
            INTERLEAVED,
            HEADS,
            PAIRS,
            REST,
        )
    else:
        _rotate(
            k,
            k_out,
            c,
            s,
            batch,
            place,
            (block - q_blocks) * HEADS,
            k_heads,
            dim,
            pairs,
            k_batch,
            k_place,
            k_head,
            k_out_batch,
            k_out_place,
            k_out_head,
            INTERLEAVED,
            HEADS,
            PAIRS,
            REST,
        )


def _as_batches(x: Tensor) -> Tensor:
    """[batch, sequence, heads, dim], the last stride one: a view of 3- and 4-dimensional tensors whose last stride is
    one, and of others where their strides allow it."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x.unsqueeze(0)
    return x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])


def _result(x: Tensor) -> Tensor:
    """Room for the result: with x's order of dimensions in memory where the kernel can write that."""
    same = torch.empty_like(x)
    return same if x.dim() <= 4 and same.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def _rotate_all(
    q: Tensor,
    k: Tensor,
    angles: tuple[Tensor, Tensor, Tensor | None],
    *,
    interleaved: bool,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """q and k [tokens..., heads, dim], not empty. angles: cos and sin [rows, pairs], and flat positions or None."""
    cos, sin, positions = angles
    rows, pairs = cos.shape
    sources = (_as_batches(q), _as_batches(k))
    results = (_result(q), _result(k))
    targets = tuple(_as_batches(result) for result in results)
    batch, sequence, q_heads, dim = sources[0].shape
    k_heads = sources[1].shape[2]
    width = power_of_two(pairs)
    heads = min(max(1, _TILE // (2 * width)), power_of_two(max(q_heads, k_heads)))
    strides = [stride for tensor in (*sources, *targets) for stride in tensor.stride()[:3]]
    with torch.cuda.device_of(q):
        rotary_kernel[(batch * sequence, triton.cdiv(q_heads, heads) + triton.cdiv(k_heads, heads))](
            *sources,
            *targets,
            cos,
            sin,
            positions,
            sequence,
            rows,
            q_heads,
            k_heads,
            dim,
            pairs,
            cos.stride(0),
            *strides,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            HEADS=heads,
            PAIRS=width,
            REST=power_of_two(dim - 2 * pairs) if dim > 2 * pairs else 0,
            num_warps=warps_for(2 * heads * width),
        )
    return results


class _Rotary(torch.autograd.Function):
    """(q, k, cos, sin, positions, interleaved) -> rotated q and k. Saved: the angles and the positions."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        return _rotate_all(q, k, (cos, sin, positions), interleaved=interleaved, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = _rotate_all(q_grad, k_grad, ctx.saved_tensors, interleaved=ctx.interleaved, inverse=True)
        return dq, dk, None, None, None, None


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`torch_ops.rotary.rotary_embedding`."""
    if q.numel() == 0 or k.numel() == 0:
        return torch_rotary.rotary_embedding(q, k, cos, sin, interleaved=interleaved, positions=positions)
    pairs = cos.shape[-1]
    cos, sin = cos.reshape(-1, pairs).contiguous(), sin.reshape(-1, pairs).contiguous()
    where = None if positions is None else positions.reshape(-1).contiguous()
    result: tuple[Tensor, Tensor] = apply(_Rotary, q, k, cos, sin, where, interleaved)
    return result
