"""The ops on host memory through the native core: checks, then addresses, lengths and element types.

Problem: C++ that takes raw addresses trusts its caller with the process's memory.
Idea: every tensor passes `_plan`, which checks device, length and layout before an address is taken. Tensors that the
core has no loops for (float64, or not contiguous) take the plain-torch path, one by one, within the same call.
Invariants: signatures and results are those of `reference`, up to the rounding of the last bits: the core uses fused
multiply-add. Results do not depend on how tensors are cut into slices, on alignment, on the number of threads or on the
instruction set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from drivetrain.kernels.columns import Column, Copies, check_column, pick, pick_copies
from drivetrain.kernels.core import CORE, get_num_threads
from drivetrain.kernels.rules import AdagradRule, AdamRule, LambRule, LionRule, SgdRule
from drivetrain.kernels.torch_ops import steps as reference

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

_CODES: Final[Mapping[torch.dtype, int]] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})


def _core() -> Any:
    if CORE.module is None:
        raise RuntimeError(CORE.reason)
    return CORE.module


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """`operands` for the tensors at places `native`; the places in `rest` are for plain torch."""

    operands: Any
    native: list[int]
    rest: list[int]


def _check(op: str, role: str, column: Column, counts: Sequence[int], first: str) -> None:
    """Refuse what the core must never see. Columns with None in them are copies: None asks for none."""
    if len(column) == len(counts) and all(
        t is None or (t.is_cpu and t.numel() == count) for t, count in zip(column, counts, strict=True)
    ):
        return
    for index, tensor in enumerate(column):
        if tensor is not None and not tensor.is_cpu:
            raise ValueError(
                f"{op}: {role} {index} lies on {tensor.device}; this op works in host memory, move it there"
            )
    check_column(op, role, column, counts, first)


def _unserved(column: Column) -> set[int]:
    """Places of the tensors that the core has no loops for."""
    return {index for index, t in enumerate(column) if t is not None and not (t.dtype in _CODES and t.is_contiguous())}


def _addresses(column: Column) -> tuple[list[int], list[int]]:
    return (
        [0 if t is None else t.data_ptr() for t in column],
        [0 if t is None else _CODES[t.dtype] for t in column],
    )


def _plan(op: str, streams: Mapping[str, Sequence[Tensor]], copies: Copies = None) -> _Plan:
    """Check everything, then take addresses. The first stream is the one that autograd may have saved."""
    first, leading = next(iter(streams.items()))
    counts = [t.numel() for t in leading]
    roles: dict[str, Column] = dict(streams)
    if copies is not None:
        roles["copies"] = copies
    unserved: set[int] = set()
    for role, column in roles.items():
        _check(op, role, column, counts, first)
        unserved |= _unserved(column)
    native = [index for index in range(len(counts)) if index not in unserved]
    if unserved:
        roles = {role: pick(column, native) for role, column in roles.items()}
        counts = pick(counts, native)
    # The core writes behind autograd's back: tell it, so that a stale saved parameter is noticed in a later backward.
    torch.autograd.graph.increment_version([t for t in roles[first] if t is not None and t.requires_grad])
    copy = _addresses(roles.pop("copies", ()))
    addresses = [_addresses(column) for column in roles.values()]
    operands = _core().Operands(counts=counts, streams=addresses, copy=copy)
    return _Plan(operands=operands, native=native, rest=sorted(unserved))


def _adam(rule: AdamRule, step: int, factor: float) -> Any:
    correction1, correction2 = rule.corrections(step)
    return _core().AdamStep(
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        correction1=correction1,
        correction2=correction2,
        decoupled=rule.decoupled,
        factor=factor,
    )


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
    """`reference.adam_step`, in one pass over memory."""
    streams = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    if max_exp_avg_sqs is not None:
        streams["max_exp_avg_sqs"] = max_exp_avg_sqs
    plan = _plan("adam_step", streams, copies)
    _core().adam_step(_adam(rule, step, factor), plan.operands, get_num_threads())
    if plan.rest:
        reference.adam_step(
            *(pick(column, plan.rest) for column in (params, grads, exp_avgs, exp_avg_sqs)),
            rule=rule,
            step=step,
            max_exp_avg_sqs=None if max_exp_avg_sqs is None else pick(max_exp_avg_sqs, plan.rest),
            factor=factor,
            copies=pick_copies(copies, plan.rest),
        )


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
    """`reference.adam_rollback`, in one pass over memory."""
    if not rule.decoupled and rule.weight_decay != 0.0:
        reference.adam_rollback(params, grads, exp_avgs, exp_avg_sqs, rule=rule, step=step)  # refuses in words
    streams = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("adam_rollback", streams, copies)
    _core().adam_rollback(_adam(rule, step, factor), plan.operands, get_num_threads())
    if plan.rest:
        reference.adam_rollback(
            *(pick(column, plan.rest) for column in streams.values()),
            rule=rule,
            step=step,
            factor=factor,
            copies=pick_copies(copies, plan.rest),
        )


def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    rule: LionRule,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """`reference.lion_step`, in one pass over memory."""
    streams = {"params": params, "grads": grads, "exp_avgs": exp_avgs}
    plan = _plan("lion_step", streams, copies)
    call = _core().LionStep(
        lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2, weight_decay=rule.weight_decay, factor=factor
    )
    _core().lion_step(call, plan.operands, get_num_threads())
    if plan.rest:
        picked = (pick(column, plan.rest) for column in streams.values())
        reference.lion_step(*picked, rule=rule, factor=factor, copies=pick_copies(copies, plan.rest))


def _lamb(rule: LambRule, step: int, factor: float) -> Any:
    correction1, correction2 = rule.corrections(step)
    return _core().LambStep(
        lr=rule.lr,
        beta1=rule.beta1,
        beta2=rule.beta2,
        eps=rule.eps,
        weight_decay=rule.weight_decay,
        correction1=correction1,
        correction2=correction2,
        eps_inside_sqrt=rule.eps_inside_sqrt,
        factor=factor,
    )


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
    """`reference.lamb_moments`, in one pass over memory. Norms are summed in float64 and returned in float32."""
    streams = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("lamb_moments", streams)
    norms = torch.zeros(len(params), 2, dtype=torch.float32)
    sums = _core().lamb_moments(_lamb(rule, step, factor), plan.operands, get_num_threads())
    norms[plan.native] = torch.tensor(sums, dtype=torch.float64).view(-1, 2).float()
    if plan.rest:
        picked = (pick(column, plan.rest) for column in streams.values())
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
    """`reference.lamb_apply`, in one pass over memory."""
    if ratios.shape != (len(params),):
        raise ValueError(
            f"lamb_apply: expected one ratio for each of {len(params)} tensors, found {tuple(ratios.shape)}"
        )
    streams = {"params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    plan = _plan("lamb_apply", streams, copies)
    values = pick(ratios.tolist(), plan.native)
    _core().lamb_apply(_lamb(rule, step, 1.0), values, plan.operands, get_num_threads())
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
    """`reference.adagrad_step`, in one pass over memory."""
    streams = {"params": params, "grads": grads, "sums": sums}
    plan = _plan("adagrad_step", streams, copies)
    call = _core().AdagradStep(lr=rule.decayed_lr(step), eps=rule.eps, weight_decay=rule.weight_decay, factor=factor)
    _core().adagrad_step(call, plan.operands, get_num_threads())
    if plan.rest:
        picked = (pick(column, plan.rest) for column in streams.values())
        reference.adagrad_step(*picked, rule=rule, step=step, factor=factor, copies=pick_copies(copies, plan.rest))


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
    """`reference.sgd_step`, in one pass over memory."""
    if (momenta is not None) != (rule.momentum != 0.0):
        reference.sgd_step(params, grads, momenta, rule=rule)  # refuses in words
    streams = {"params": params, "grads": grads}
    if momenta is not None:
        streams["momenta"] = momenta
    plan = _plan("sgd_step", streams, copies)
    call = _core().SgdStep(
        lr=rule.lr,
        momentum=rule.momentum,
        dampening=rule.dampening,
        weight_decay=rule.weight_decay,
        nesterov=rule.nesterov,
        first=first,
        factor=factor,
    )
    _core().sgd_step(call, plan.operands, get_num_threads())
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


def sum_of_squares(tensors: Sequence[Tensor], *, factor: float = 1.0) -> Tensor:
    """`reference.sum_of_squares`, in one pass over memory."""
    plan = _plan("sum_of_squares", {"tensors": tensors})
    total = torch.tensor(_core().sum_of_squares(factor, plan.operands, get_num_threads()), dtype=torch.float64)
    if plan.rest:
        total += reference.sum_of_squares(pick(tensors, plan.rest), factor=factor)
    return total


def unscale(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """`reference.unscale`, in one pass over memory."""
    plan = _plan("unscale", {"tensors": tensors})
    total = torch.tensor(_core().unscale(factor, plan.operands, get_num_threads()), dtype=torch.float64)
    if plan.rest:
        total += reference.unscale(pick(tensors, plan.rest), factor)
    return total


def cast(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """`reference.cast`, on all threads."""
    plan = _plan("cast", {"sources": sources, "targets": targets})
    _core().cast(plan.operands, get_num_threads())
    if plan.rest:
        reference.cast(pick(sources, plan.rest), pick(targets, plan.rest))
