"""`torch_ops.steps` on GPUs: one launch steps any number of tensors.

Problem: a model has hundreds of parameters, most of them small; a launch for each costs more than the step.
Idea: a launch gets no tensors but a table of their addresses, and every program looks up which tensor and which block
of it are its own. The map from program to block depends on lengths alone and is made once; the table of addresses is
sent, in one copy that nobody waits for, whenever an address has changed. Tensors are grouped by their dtypes, one
launch per combination. A kernel gets one tensor of each stream only for its dtype, to which addresses are cast.
Invariants: products and sums are never contracted, quotients and roots are rounded correctly, and sums are taken in
float64 in a fixed order. So the elementwise steps do not depend on how tensors are cut into slices, and no result
depends on the order in which programs run. Tensors that the kernels do not serve (float64, not contiguous, on another
device than the first one) take the plain-torch path, one by one, within the same call.

Shapes in the blocks above the kernels: T tensors, P programs, S streams (the columns of tensors that an op takes, with
its copies last).
- places: int32 [P, 2], each program's tensor and block;
- table: int64 [1 + S, T], the tensors' lengths and the addresses of every stream, 0 where there is none;
- spans: int32 [T, 3], first program, one past the last, and place in the caller's lists;
- streams and `copy`: any tensor of the stream, or None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from drivetrain.kernels.columns import Column, Copies, check_column, pick, pick_copies
from drivetrain.kernels.rules import AdagradRule, AdamRule, LambRule, LionRule, SgdRule
from drivetrain.kernels.torch_ops import steps as reference
from drivetrain.kernels.triton_ops.devices import DTYPES, numbers_on, send, serves, stream_of

__all__ = [
    "adagrad_step",
    "adam_rollback",
    "adam_step",
    "cast",
    "lamb_apply",
    "lamb_moments",
    "lion_step",
    "sgd_step",
    "sum_of_squares",
    "unscale",
]

# ------------------------------------------------------------------------------------------------------------- kernels

_LIKE: Final = (
    *("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "total", "momenta", "copy", "x", "source", "target"),
    *("places", "spans", "partials"),
)
"""Arguments whose own alignment does not matter: kernels for each kind of it would be compiled for nothing."""


@triton.jit
def _place(places, table, BLOCK: tl.constexpr):
    """This program's tensor, the offsets of its block, the tensor's length, and whether all offsets are inside."""
    program = tl.program_id(0)
    tensor = tl.load(places + 2 * program)
    start = tl.load(places + 2 * program + 1).to(tl.int64) * BLOCK
    count = tl.load(table + tensor)
    return tensor, start + tl.arange(0, BLOCK), count, start + BLOCK <= count


@triton.jit
def _at(table, stream: tl.constexpr, tensors, tensor, like, ALIGNED: tl.constexpr):
    """The address of `tensor` in a stream, as a pointer to the elements that `like` has."""
    pointer = tl.load(table + (1 + stream) * tensors + tensor).to(like.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer, offsets, count, full):
    # A mask that may end anywhere keeps loads from being wide, so blocks that need none have none.
    if full:
        x = tl.load(pointer + offsets)
    else:
        x = tl.load(pointer + offsets, mask=offsets < count, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store(pointer, x, offsets, count, full):
    x = x.to(pointer.dtype.element_ty)
    if full:
        tl.store(pointer + offsets, x)
    else:
        tl.store(pointer + offsets, x, mask=offsets < count)


@triton.jit
def _store_copy(table, stream: tl.constexpr, tensors, tensor, copy, x, offsets, count, full, ALIGNED: tl.constexpr):
    if copy is not None:
        _store(_at(table, stream, tensors, tensor, copy, ALIGNED), x, offsets, count, full)


# places [P, 2], table [1 + 6, T]; streams: param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq or None, copy or None
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def adam_kernel(
    places,
    table,
    tensors,
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    copy,
    factor,
    decay,
    coupled_decay,
    beta1,
    rest1,
    beta2,
    rest2,
    root2,
    eps,
    rate,
    COUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Per element in float32: reads 16 bytes and writes 12 (AMSGrad: 20 and 16), and a copy's."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    p_at = _at(table, 0, tensors, tensor, param, ALIGNED)
    m_at = _at(table, 2, tensors, tensor, exp_avg, ALIGNED)
    v_at = _at(table, 3, tensors, tensor, exp_avg_sq, ALIGNED)
    p = _load(p_at, offsets, count, full)
    g = _load(_at(table, 1, tensors, tensor, grad, ALIGNED), offsets, count, full) * factor
    m = _load(m_at, offsets, count, full)
    v = _load(v_at, offsets, count, full)
    if COUPLED:
        g += coupled_decay * p
    else:
        p *= decay
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    second = v
    if max_exp_avg_sq is not None:
        top_at = _at(table, 4, tensors, tensor, max_exp_avg_sq, ALIGNED)
        second = tl.maximum(_load(top_at, offsets, count, full), v, propagate_nan=tl.PropagateNan.ALL)
        _store(top_at, second, offsets, count, full)
    p -= rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(second), root2) + eps)
    _store(m_at, m, offsets, count, full)
    _store(v_at, v, offsets, count, full)
    _store(p_at, p, offsets, count, full)
    _store_copy(table, 5, tensors, tensor, copy, p, offsets, count, full, ALIGNED)


# places [P, 2], table [1 + 5, T]; streams: param, grad, exp_avg, exp_avg_sq, copy or None
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def adam_rollback_kernel(
    places,
    table,
    tensors,
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    copy,
    factor,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    root2,
    eps,
    rate,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """`adam_kernel` solved backwards, as many bytes. FIRST, SECOND: whether beta1 and beta2 are above 0."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    p_at = _at(table, 0, tensors, tensor, param, ALIGNED)
    m_at = _at(table, 2, tensors, tensor, exp_avg, ALIGNED)
    v_at = _at(table, 3, tensors, tensor, exp_avg_sq, ALIGNED)
    p = _load(p_at, offsets, count, full)
    g = _load(_at(table, 1, tensors, tensor, grad, ALIGNED), offsets, count, full) * factor
    m = _load(m_at, offsets, count, full)
    v = _load(v_at, offsets, count, full)
    p += rate * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root2) + eps)
    p = tl.div_rn(p, decay)
    if FIRST:
        m = tl.div_rn(m - g * rest1, beta1)
    else:
        m = tl.zeros_like(m)
    if SECOND:
        v = tl.div_rn(v - g * g * rest2, beta2)
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        v = tl.zeros_like(v)
    _store(m_at, m, offsets, count, full)
    _store(v_at, v, offsets, count, full)
    _store(p_at, p, offsets, count, full)
    _store_copy(table, 4, tensors, tensor, copy, p, offsets, count, full, ALIGNED)


# places [P, 2], table [1 + 4, T]; streams: param, grad, exp_avg, copy or None
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def lion_kernel(
    places,
    table,
    tensors,
    param,
    grad,
    exp_avg,
    copy,
    factor,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    rate,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Per element in float32: reads 12 bytes and writes 8, and a copy's."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    p_at = _at(table, 0, tensors, tensor, param, ALIGNED)
    m_at = _at(table, 2, tensors, tensor, exp_avg, ALIGNED)
    p = _load(p_at, offsets, count, full)
    g = _load(_at(table, 1, tensors, tensor, grad, ALIGNED), offsets, count, full) * factor
    m = _load(m_at, offsets, count, full)
    mixed = m * beta1 + g * rest1
    sign = (mixed > 0).to(tl.float32) - (mixed < 0).to(tl.float32)  # of NaN, as torch's: 0
    p = p * decay - rate * sign
    _store(m_at, m * beta2 + g * rest2, offsets, count, full)
    _store(p_at, p, offsets, count, full)
    _store_copy(table, 3, tensors, tensor, copy, p, offsets, count, full, ALIGNED)


@triton.jit
def _lamb_update(p, m, v, correction1, correction2, eps, weight_decay, INSIDE: tl.constexpr):
    v_hat = tl.div_rn(v, correction2)
    if INSIDE:
        denominator = tl.sqrt_rn(v_hat + eps)
    else:
        denominator = tl.sqrt_rn(v_hat) + eps
    return tl.div_rn(tl.div_rn(m, correction1), denominator) + weight_decay * p


@triton.jit
def _square_sum(x, offsets, count):
    wide = tl.where(offsets < count, x, 0.0).to(tl.float64)
    return tl.sum(wide * wide, axis=0)


# places [P, 2], table [1 + 4, T]; streams: param, grad, exp_avg, exp_avg_sq; partials: float64 [P, 2]
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def lamb_moments_kernel(
    places,
    table,
    tensors,
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    partials,
    factor,
    beta1,
    rest1,
    beta2,
    rest2,
    correction1,
    correction2,
    eps,
    weight_decay,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Per element in float32: reads 16 bytes and writes 8; every program writes its sums of |p|^2 and |u|^2."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    m_at = _at(table, 2, tensors, tensor, exp_avg, ALIGNED)
    v_at = _at(table, 3, tensors, tensor, exp_avg_sq, ALIGNED)
    p = _load(_at(table, 0, tensors, tensor, param, ALIGNED), offsets, count, full)
    g = _load(_at(table, 1, tensors, tensor, grad, ALIGNED), offsets, count, full) * factor
    m = _load(m_at, offsets, count, full) * beta1 + g * rest1
    v = _load(v_at, offsets, count, full) * beta2 + g * g * rest2
    _store(m_at, m, offsets, count, full)
    _store(v_at, v, offsets, count, full)
    update = _lamb_update(p, m, v, correction1, correction2, eps, weight_decay, INSIDE)
    program = tl.program_id(0)
    tl.store(partials + 2 * program, _square_sum(p, offsets, count))
    tl.store(partials + 2 * program + 1, _square_sum(update, offsets, count))


# partials: float64 [P, 2]; spans [T, 3]; norms: float32 [the caller's tensors, 2]
@triton.jit
def fold_kernel(partials, spans, norms, BLOCK: tl.constexpr):
    """The sums of every tensor's programs, one program per tensor."""
    tensor = tl.program_id(0)
    first = tl.load(spans + 3 * tensor)
    last = tl.load(spans + 3 * tensor + 1)
    place = tl.load(spans + 3 * tensor + 2)
    total_p = tl.zeros([BLOCK], dtype=tl.float64)
    total_u = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(first, last, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        total_p += tl.load(partials + 2 * rows, mask=rows < last, other=0.0)
        total_u += tl.load(partials + 2 * rows + 1, mask=rows < last, other=0.0)
    tl.store(norms + 2 * place, tl.sum(total_p, axis=0).to(tl.float32))
    tl.store(norms + 2 * place + 1, tl.sum(total_u, axis=0).to(tl.float32))


# places [P, 2], table [1 + 4, T]; streams: param, exp_avg, exp_avg_sq, copy or None; spans [T, 3]; ratios: float32, one
# for each of the caller's tensors
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def lamb_apply_kernel(
    places,
    table,
    tensors,
    param,
    exp_avg,
    exp_avg_sq,
    copy,
    spans,
    ratios,
    correction1,
    correction2,
    eps,
    weight_decay,
    lr,
    INSIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Per element in float32: reads 12 bytes and writes 4, and a copy's."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    p_at = _at(table, 0, tensors, tensor, param, ALIGNED)
    p = _load(p_at, offsets, count, full)
    m = _load(_at(table, 1, tensors, tensor, exp_avg, ALIGNED), offsets, count, full)
    v = _load(_at(table, 2, tensors, tensor, exp_avg_sq, ALIGNED), offsets, count, full)
    rate = tl.load(ratios + tl.load(spans + 3 * tensor + 2)) * lr
    p -= rate * _lamb_update(p, m, v, correction1, correction2, eps, weight_decay, INSIDE)
    _store(p_at, p, offsets, count, full)
    _store_copy(table, 3, tensors, tensor, copy, p, offsets, count, full, ALIGNED)


# places [P, 2], table [1 + 4, T]; streams: param, grad, sum, copy or None
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def adagrad_kernel(
    places,
    table,
    tensors,
    param,
    grad,
    total,
    copy,
    factor,
    weight_decay,
    eps,
    rate,
    COUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Per element in float32: reads 12 bytes and writes 8, and a copy's."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    p_at = _at(table, 0, tensors, tensor, param, ALIGNED)
    s_at = _at(table, 2, tensors, tensor, total, ALIGNED)
    p = _load(p_at, offsets, count, full)
    g = _load(_at(table, 1, tensors, tensor, grad, ALIGNED), offsets, count, full) * factor
    if COUPLED:
        g += weight_decay * p
    s = _load(s_at, offsets, count, full) + g * g
    p -= rate * tl.div_rn(g, tl.sqrt_rn(s) + eps)
    _store(s_at, s, offsets, count, full)
    _store(p_at, p, offsets, count, full)
    _store_copy(table, 3, tensors, tensor, copy, p, offsets, count, full, ALIGNED)


# places [P, 2], table [1 + 4, T]; streams: param, grad, momentum or None, copy or None
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def sgd_kernel(
    places,
    table,
    tensors,
    param,
    grad,
    momenta,
    copy,
    factor,
    weight_decay,
    momentum,
    undamped,
    rate,
    COUPLED: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Per element in float32: reads 12 bytes and writes 8 (without momentum: 8 and 4), and a copy's."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    p_at = _at(table, 0, tensors, tensor, param, ALIGNED)
    p = _load(p_at, offsets, count, full)
    g = _load(_at(table, 1, tensors, tensor, grad, ALIGNED), offsets, count, full) * factor
    if COUPLED:
        g += weight_decay * p
    direction = g
    if momenta is not None:
        b_at = _at(table, 2, tensors, tensor, momenta, ALIGNED)
        if FIRST:
            direction = g
        else:
            direction = _load(b_at, offsets, count, full) * momentum + g * undamped
        _store(b_at, direction, offsets, count, full)
        if NESTEROV:
            direction = g + direction * momentum
    p -= rate * direction
    _store(p_at, p, offsets, count, full)
    _store_copy(table, 3, tensors, tensor, copy, p, offsets, count, full, ALIGNED)


# places [P, 2], table [1 + 1, T]; stream: x; partials: float64 [P]
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def squares_kernel(
    places, table, tensors, x, partials, factor, WRITE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    """Per element in float32: reads 4 bytes, and writes 4 when the scaled tensors are wanted back. Squares are taken in
    float64, where those of float32 cannot overflow: cheap where float64 runs at half speed or a quarter, and what
    bounds this kernel on parts made for graphics."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    x_at = _at(table, 0, tensors, tensor, x, ALIGNED)
    scaled = _load(x_at, offsets, count, full) * factor
    if WRITE:
        _store(x_at, scaled, offsets, count, full)
    tl.store(partials + tl.program_id(0), _square_sum(scaled, offsets, count))


# places [P, 2], table [1 + 2, T]; streams: source, target
@triton.jit(do_not_specialize=["tensors"], do_not_specialize_on_alignment=_LIKE)
def cast_kernel(places, table, tensors, source, target, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Reads every source and writes every target once."""
    tensor, offsets, count, full = _place(places, table, BLOCK)
    x = _load(_at(table, 0, tensors, tensor, source, ALIGNED), offsets, count, full)
    _store(_at(table, 1, tensors, tensor, target, ALIGNED), x, offsets, count, full)


# ----------------------------------------------------------------------------------------------------------- launchers

_BLOCK: Final = 1024


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What depends on lengths alone; see the module's docstring."""

    places: Tensor
    spans: Tensor
    programs: int


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Tensors that one launch steps: `like` holds one of each stream, `aligned` says that all addresses are multiples
    of 16."""

    like: list[Tensor | None]
    layout: _Layout
    table: Tensor
    aligned: bool

    @property
    def device(self) -> torch.device:
        return self.table.device


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """`groups` for the kernels, and the places of the tensors in `rest` for plain torch."""

    groups: list[_Group]
    rest: list[int]


@lru_cache(maxsize=64)
def _layout(counts: tuple[int, ...], members: tuple[int, ...], device: torch.device, stream: int) -> _Layout:
    blocks = (torch.tensor(counts, dtype=torch.int64) + (_BLOCK - 1)) // _BLOCK
    last = blocks.cumsum(0)
    first = last - blocks
    programs = int(last[-1])
    tensor = torch.arange(len(counts)).repeat_interleave(blocks)
    places = torch.stack([tensor, torch.arange(programs) - first[tensor]], dim=1)
    spans = torch.stack([first, last, torch.tensor(members)], dim=1)
    both = send(torch.cat([places.flatten(), spans.flatten()]).to(torch.int32), device)
    return _Layout(places=both[: 2 * programs], spans=both[2 * programs :], programs=programs)


def _kinds(column: Column, device: torch.device) -> list[torch.dtype | bool | None]:
    """Per tensor its dtype, or False where the kernels do not serve it; None where there is none."""
    return [
        None if t is None else t.device == device and t.is_contiguous() and t.dtype in DTYPES and t.dtype
        for t in column
    ]


def _group(
    columns: Sequence[Column], addresses: Sequence[Sequence[int]], counts: list[int], places: list[int]
) -> _Group:
    like = [column[places[0]] for column in columns]
    picked = [number for stream in addresses for number in pick(stream, places)]
    lengths = tuple(pick(counts, places))
    leading = like[0]
    assert leading is not None
    device = leading.device
    return _Group(
        like=like,
        layout=_layout(lengths, tuple(places), device, stream_of(device)),
        table=numbers_on(device, (*lengths, *picked)),
        aligned=all(address % 16 == 0 for address in picked),
    )


def _plan(op: str, streams: Mapping[str, Sequence[Tensor]], **others: Column | None) -> _Plan:
    """Check everything, then take addresses. In `others`, tensors may be missing, or whole streams. The kernels serve
    the device of the first tensor."""
    first, leading = next(iter(streams.items()))
    counts = [t.numel() for t in leading]
    columns: list[Column] = [*streams.values(), *([None] * len(counts) if c is None else c for c in others.values())]
    for role, column in zip((*streams, *others), columns, strict=True):
        check_column(op, role, column, counts, first)
    if not counts or not serves(leading[0].device):
        return _Plan(groups=[], rest=list(range(len(counts))))
    members: dict[tuple[torch.dtype | bool | None, ...], list[int]] = {}
    for index, key in enumerate(zip(*(_kinds(column, leading[0].device) for column in columns), strict=True)):
        members.setdefault(key, []).append(index)
    addresses = [[0 if t is None else t.data_ptr() for t in column] for column in columns]
    served = [places for key, places in members.items() if False not in key and any(pick(counts, places))]
    rest = sorted(index for key, places in members.items() if False in key for index in places)
    return _Plan(groups=[_group(columns, addresses, counts, places) for places in served], rest=rest)


def _launch(kernel: Any, group: _Group, *arguments: Any, **constants: Any) -> None:
    layout, table = group.layout, group.table
    tensors = layout.spans.numel() // 3
    with torch.cuda.device_of(table):
        kernel[(layout.programs,)](
            layout.places,
            table,
            tensors,
            *group.like,
            *arguments,
            **constants,
            BLOCK=_BLOCK,
            ALIGNED=group.aligned,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _written(tensors: Sequence[Tensor]) -> None:
    """Kernels write behind autograd's back: tell it, so that a stale saved tensor is noticed in a later backward."""
    torch.autograd.graph.increment_version([t for t in tensors if t.requires_grad])


def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    rule: AdamRule,
    step: int,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """`reference.adam_step`, in one launch per combination of dtypes."""
    moments = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("adam_step", moments, max_exp_avg_sqs=max_exp_avg_sqs, copies=copies)
    correction1, correction2 = rule.corrections(step)
    for group in plan.groups:
        _launch(
            adam_kernel,
            group,
            float(factor),
            1.0 - rule.lr * rule.weight_decay,
            float(rule.weight_decay),
            *_betas(rule),
            math.sqrt(correction2),
            float(rule.eps),
            rule.lr / correction1,
            COUPLED=not rule.decoupled and rule.weight_decay != 0.0,
        )
    if plan.rest:
        reference.adam_step(
            *(pick(column, plan.rest) for column in moments.values()),
            rule=rule,
            step=step,
            max_exp_avg_sqs=None if max_exp_avg_sqs is None else pick(max_exp_avg_sqs, plan.rest),
            factor=factor,
            copies=pick_copies(copies, plan.rest),
        )
    _written(params)


def _betas(rule: AdamRule | LambRule | LionRule) -> tuple[float, float, float, float]:
    return float(rule.beta1), 1.0 - rule.beta1, float(rule.beta2), 1.0 - rule.beta2


def adam_rollback(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    rule: AdamRule,
    step: int,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """`reference.adam_rollback`, in one launch per combination of dtypes."""
    if not rule.decoupled and rule.weight_decay != 0.0:
        reference.adam_rollback(params, grads, exp_avgs, exp_avg_sqs, rule=rule, step=step)  # refuses in words
    moments = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("adam_rollback", moments, copies=copies)
    correction1, correction2 = rule.corrections(step)
    for group in plan.groups:
        _launch(
            adam_rollback_kernel,
            group,
            float(factor),
            1.0 - rule.lr * rule.weight_decay,
            *_betas(rule),
            math.sqrt(correction2),
            float(rule.eps),
            rule.lr / correction1,
            FIRST=rule.beta1 > 0.0,
            SECOND=rule.beta2 > 0.0,
        )
    if plan.rest:
        reference.adam_rollback(
            *(pick(column, plan.rest) for column in moments.values()),
            rule=rule,
            step=step,
            factor=factor,
            copies=pick_copies(copies, plan.rest),
        )
    _written(params)


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    rule: LionRule,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """`reference.lion_step`, in one launch per combination of dtypes."""
    moments = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    plan = _plan("lion_step", moments, copies=copies)
    decay = 1.0 - rule.lr * rule.weight_decay
    for group in plan.groups:
        _launch(lion_kernel, group, float(factor), decay, *_betas(rule), float(rule.lr))
    if plan.rest:
        picked = (pick(column, plan.rest) for column in moments.values())
        reference.lion_step(*picked, rule=rule, factor=factor, copies=pick_copies(copies, plan.rest))
    _written(params)


def lamb_moments(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    rule: LambRule,
    step: int,
    factor: float = 1.0,
) -> Tensor:
    """`reference.lamb_moments`, in two launches per combination of dtypes: the second adds the sums of the programs."""
    moments = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("lamb_moments", moments)
    norms = torch.zeros(len(params), 2, dtype=torch.float32, device=params[0].device if params else None)
    corrections = rule.corrections(step)
    for group in plan.groups:
        partials = torch.empty(group.layout.programs, 2, dtype=torch.float64, device=group.device)
        _launch(
            lamb_moments_kernel,
            group,
            partials,
            float(factor),
            *_betas(rule),
            *corrections,
            float(rule.eps),
            float(rule.weight_decay),
            INSIDE=rule.eps_inside_sqrt,
        )
        with torch.cuda.device_of(partials):
            fold_kernel[(group.layout.spans.numel() // 3,)](partials, group.layout.spans, norms, BLOCK=_BLOCK)
    if plan.rest:
        picked = (pick(column, plan.rest) for column in moments.values())
        norms[plan.rest] = reference.lamb_moments(*picked, rule=rule, step=step, factor=factor)
    return norms


def lamb_apply(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    ratios: Tensor,
    *,
    rule: LambRule,
    step: int,
    copies: Copies = None,
) -> None:
    """`reference.lamb_apply`, in one launch per combination of dtypes."""
    if ratios.shape != (len(params),):
        raise ValueError(
            f"lamb_apply: expected one ratio for each of {len(params)} tensors, found {tuple(ratios.shape)}"
        )
    moments = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("lamb_apply", moments, copies=copies)
    corrections = rule.corrections(step)
    for group in plan.groups:
        _launch(
            lamb_apply_kernel,
            group,
            group.layout.spans,
            ratios.to(device=group.device, dtype=torch.float32).contiguous(),
            *corrections,
            float(rule.eps),
            float(rule.weight_decay),
            float(rule.lr),
            INSIDE=rule.eps_inside_sqrt,
        )
    if plan.rest:
        reference.lamb_apply(
            pick(params, plan.rest),
            pick(exp_avgs, plan.rest),
            pick(exp_avg_sqs, plan.rest),
            ratios[plan.rest],
            rule=rule,
            step=step,
            copies=pick_copies(copies, plan.rest),
        )
    _written(params)


def adagrad_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    *,
    rule: AdagradRule,
    step: int,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """`reference.adagrad_step`, in one launch per combination of dtypes."""
    streams = {"params": params, "grads": grads, "sums": sums}
    plan = _plan("adagrad_step", streams, copies=copies)
    for group in plan.groups:
        numbers = (float(factor), float(rule.weight_decay), float(rule.eps), rule.decayed_lr(step))
        _launch(adagrad_kernel, group, *numbers, COUPLED=rule.weight_decay != 0.0)
    if plan.rest:
        picked = (pick(column, plan.rest) for column in streams.values())
        reference.adagrad_step(*picked, rule=rule, step=step, factor=factor, copies=pick_copies(copies, plan.rest))
    _written(params)


def sgd_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor] | None,
    *,
    rule: SgdRule,
    first: bool = False,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """`reference.sgd_step`, in one launch per combination of dtypes."""
    if (momenta is not None) != (rule.momentum != 0.0):
        reference.sgd_step(params, grads, momenta, rule=rule)  # refuses in words
    plan = _plan("sgd_step", {"params": params, "grads": grads}, momenta=momenta, copies=copies)
    for group in plan.groups:
        _launch(
            sgd_kernel,
            group,
            float(factor),
            float(rule.weight_decay),
            float(rule.momentum),
            1.0 - rule.dampening,
            float(rule.lr),
            COUPLED=rule.weight_decay != 0.0,
            FIRST=first,
            NESTEROV=rule.nesterov,
        )
    if plan.rest:
        reference.sgd_step(
            pick(params, plan.rest),
            pick(grads, plan.rest),
            None if momenta is None else pick(momenta, plan.rest),
            rule=rule,
            first=first,
            factor=factor,
            copies=pick_copies(copies, plan.rest),
        )
    _written(params)


def _squares(op: str, tensors: Sequence[Tensor], factor: float, *, write: bool) -> tuple[Tensor, list[int]]:
    """The sum over the tensors that kernels serve, and the places of the others."""
    plan = _plan(op, {"tensors": tensors})
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for group in plan.groups:
        partials = torch.empty(group.layout.programs, dtype=torch.float64, device=group.device)
        _launch(squares_kernel, group, partials, float(factor), WRITE=write)
        total += partials.sum()
    return total, plan.rest


def sum_of_squares(tensors: Sequence[Tensor], *, factor: float = 1.0) -> Tensor:
    """`reference.sum_of_squares`, in one launch per dtype and a sum over the programs."""
    total, rest = _squares("sum_of_squares", tensors, factor, write=False)
    return total + reference.sum_of_squares(pick(tensors, rest), factor=factor) if rest else total


def unscale(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """`reference.unscale`, in one launch per dtype and a sum over the programs."""
    total, rest = _squares("unscale", tensors, factor, write=True)
    if rest:
        total += reference.unscale(pick(tensors, rest), factor)
    _written(tensors)
    return total


def cast(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """`reference.cast`, in one launch per pair of dtypes."""
    plan = _plan("cast", {"sources": sources, "targets": targets})
    for group in plan.groups:
        _launch(cast_kernel, group)
    if plan.rest:
        reference.cast(pick(sources, plan.rest), pick(targets, plan.rest))
    _written(targets)
