"""Optimizer steps, norms and casts in plain torch: the oracle of the tests, and the fallback on any device.

Problem: a fast kernel is worth nothing without a slow one to compare it with, and a device without a fast kernel must
still train.
Idea: each op is written once in the most direct torch that works on every device and dtype. Fast implementations have
exactly the same signatures (see `dispatch`), so that the tests run one body over all of them.

Conventions shared by all step functions:
- they take parallel lists, one entry per tensor; tensors may have any shape, including zero elements, and any one
  rank's slice of a parameter is as good as the whole (except for LAMB's norms, which its caller sums over ranks);
- parameters, gradients and states may each be float64, float32, bfloat16 or float16. Arithmetic is done in float32, or
  in float64 where the parameter is float64, and rounded once on writing;
- `factor` multiplies the gradient on the fly (inverse loss scale times clip coefficient); gradients are never written;
- `copies[i]`, where given and not None, receives the new parameter in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from drivetrain.kernels.rules import AdagradRule, AdamRule, LambRule, LionRule, SgdRule

__all__ = [
    "adagrad_step",
    "adam_rollback",
    "adam_step",
    "cast",
    "lamb_apply",
    "lamb_moments",
    "lamb_ratios",
    "lion_step",
    "sgd_step",
    "sum_of_squares",
    "unscale",
]

Copies = Sequence[Tensor | None] | None


def _working_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _gradient(grad: Tensor, work: torch.dtype, factor: float) -> Tensor:
    loaded = grad.to(work)
    return loaded if factor == 1.0 else loaded * factor


def _store(target: Tensor, value: Tensor) -> None:
    if target is not value:
        target.copy_(value)


def _store_copy(copies: Copies, index: int, value: Tensor) -> None:
    target = None if copies is None else copies[index]
    if target is not None:
        target.copy_(value)


@torch.no_grad()
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
    """One Adam or AdamW step, in place on `params`, `exp_avgs` and `exp_avg_sqs` (and `max_exp_avg_sqs`, whose presence
    means AMSGrad).

    `p -= lr * m_hat / (sqrt(v_hat) + eps)` with `m_hat = m / (1 - beta1**step)`, `v_hat = v / (1 - beta2**step)`.
    """
    correction1, correction2 = rule.corrections(step)
    root2 = math.sqrt(correction2)
    for index, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        work = _working_dtype(param)
        p, g, m, v = param.to(work), _gradient(grad, work, factor), exp_avg.to(work), exp_avg_sq.to(work)
        if rule.weight_decay != 0.0:
            if rule.decoupled:
                p.mul_(1.0 - rule.lr * rule.weight_decay)
            else:
                g = g.add(p, alpha=rule.weight_decay)
        m.mul_(rule.beta1).add_(g, alpha=1.0 - rule.beta1)
        v.mul_(rule.beta2).addcmul_(g, g, value=1.0 - rule.beta2)
        second = v
        if max_exp_avg_sqs is not None:
            second = torch.maximum(max_exp_avg_sqs[index].to(work), v)
            max_exp_avg_sqs[index].copy_(second)
        p.addcdiv_(m, second.sqrt().div_(root2).add_(rule.eps), value=-rule.lr / correction1)
        _store(exp_avg, m)
        _store(exp_avg_sq, v)
        _store(param, p)
        _store_copy(copies, index, p)


@torch.no_grad()
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
    """Undo `adam_step` with the same gradients, `rule`, `step` and `factor`: what `step` did to parameter and moments
    is solved backwards.

    The inverse is algebraic: values come back to within a few units in the last place of the larger of old and new
    value (rounding lost the rest), so a caller that needs the same bits keeps a copy. Gradients must be finite. With
    `decoupled=False` and a weight decay the equations couple parameter and moments and have no direct solution:
    refused.
    """
    if not rule.decoupled and rule.weight_decay != 0.0:
        raise ValueError(
            "adam_rollback: a step with weight decay added to the gradient (decoupled=False) cannot be solved "
            f"backwards; found weight_decay={rule.weight_decay!r}. Use decoupled weight decay, or keep a copy"
        )
    correction1, correction2 = rule.corrections(step)
    root2 = math.sqrt(correction2)
    for index, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        work = _working_dtype(param)
        p, g, m, v = param.to(work), _gradient(grad, work, factor), exp_avg.to(work), exp_avg_sq.to(work)
        p.addcdiv_(m, v.sqrt().div_(root2).add_(rule.eps), value=rule.lr / correction1)
        p.div_(1.0 - rule.lr * rule.weight_decay)
        m.sub_(g, alpha=1.0 - rule.beta1)
        m = m.div_(rule.beta1) if rule.beta1 > 0.0 else m.zero_()
        # A second moment is never negative; rounding in the subtraction could make it so.
        v.addcmul_(g, g, value=rule.beta2 - 1.0)
        v = v.div_(rule.beta2).clamp_(min=0.0) if rule.beta2 > 0.0 else v.zero_()
        _store(exp_avg, m)
        _store(exp_avg_sq, v)
        _store(param, p)
        _store_copy(copies, index, p)


@torch.no_grad()
def lion_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    rule: LionRule,
    factor: float = 1.0,
    copies: Copies = None,
) -> None:
    """One Lion step, in place: `p -= lr * (sign(beta1*m + (1-beta1)*g) + weight_decay*p)`, then `m = beta2*m +
    (1-beta2)*g`."""
    for index, (param, grad, exp_avg) in enumerate(zip(params, grads, exp_avgs, strict=True)):
        work = _working_dtype(param)
        p, g, m = param.to(work), _gradient(grad, work, factor), exp_avg.to(work)
        direction = (m * rule.beta1).add_(g, alpha=1.0 - rule.beta1).sign_()
        if rule.weight_decay != 0.0:
            p.mul_(1.0 - rule.lr * rule.weight_decay)
        p.add_(direction, alpha=-rule.lr)
        m.mul_(rule.beta2).add_(g, alpha=1.0 - rule.beta2)
        _store(exp_avg, m)
        _store(param, p)
        _store_copy(copies, index, p)


def _lamb_update(p: Tensor, m: Tensor, v: Tensor, rule: LambRule, step: int) -> Tensor:
    correction1, correction2 = rule.corrections(step)
    v_hat = v / correction2
    denominator = v_hat.add_(rule.eps).sqrt_() if rule.eps_inside_sqrt else v_hat.sqrt_().add_(rule.eps)
    return (m / correction1).div_(denominator).add_(p, alpha=rule.weight_decay)


def _square_sum(tensor: Tensor) -> Tensor:
    # vector_norm with a dtype accumulates in it without a converted copy of the input.
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square_()


@torch.no_grad()
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
    """First phase of LAMB: update the moments in place and return squared norms, float32 of shape `[len(params), 2]`:
    `|p|^2, |u|^2`.

    `u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p` (`sqrt(v_hat + eps)` with `eps_inside_sqrt`). Parameters are
    only read. Where they are slices, the caller sums the result over the ranks before `lamb_ratios`.
    """
    norms = torch.zeros(len(params), 2, dtype=torch.float32, device=params[0].device if params else None)
    for index, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
        work = _working_dtype(param)
        p, g, m, v = param.to(work), _gradient(grad, work, factor), exp_avg.to(work), exp_avg_sq.to(work)
        m.mul_(rule.beta1).add_(g, alpha=1.0 - rule.beta1)
        v.mul_(rule.beta2).addcmul_(g, g, value=1.0 - rule.beta2)
        _store(exp_avg, m)
        _store(exp_avg_sq, v)
        norms[index, 0] = _square_sum(p)
        norms[index, 1] = _square_sum(_lamb_update(p, m, v, rule, step))
    return norms


@torch.no_grad()
def lamb_ratios(norms: Tensor, rule: LambRule) -> Tensor:
    """Trust ratios `[n]` from squared norms `[n, 2]`: `clamp(|p| / |u|, min_coeff, max_coeff)`, and 1 where either norm
    is 0."""
    roots = norms.sqrt()
    p_norm, u_norm = roots[:, 0], roots[:, 1]
    ratios = (p_norm / u_norm).clamp_(rule.min_coeff, rule.max_coeff)
    return torch.where((p_norm == 0) | (u_norm == 0), torch.ones_like(ratios), ratios)


@torch.no_grad()
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
    """Second phase of LAMB: `p -= lr * ratios[i] * u`, with `u` computed again from the moments instead of being
    kept."""
    for index, (param, exp_avg, exp_avg_sq) in enumerate(zip(params, exp_avgs, exp_avg_sqs, strict=True)):
        work = _working_dtype(param)
        p = param.to(work)
        update = _lamb_update(p, exp_avg.to(work), exp_avg_sq.to(work), rule, step)
        p.sub_(update.mul_(ratios[index].to(device=p.device, dtype=work) * rule.lr))
        _store(param, p)
        _store_copy(copies, index, p)


@torch.no_grad()
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
    """One Adagrad step, in place: `sum += g*g`, then `p -= lr_t * g / (sqrt(sum) + eps)`."""
    for index, (param, grad, total) in enumerate(zip(params, grads, sums, strict=True)):
        work = _working_dtype(param)
        p, g, s = param.to(work), _gradient(grad, work, factor), total.to(work)
        if rule.weight_decay != 0.0:
            g = g.add(p, alpha=rule.weight_decay)
        s.addcmul_(g, g)
        p.addcdiv_(g, s.sqrt().add_(rule.eps), value=-rule.decayed_lr(step))
        _store(total, s)
        _store(param, p)
        _store_copy(copies, index, p)


@torch.no_grad()
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
    """One SGD step, in place: `b = momentum*b + (1-dampening)*g` (`b = g` when `first`), then `p -= lr * b`, or `g +
    momentum*b` (Nesterov).

    `momenta` must be given exactly when `rule.momentum` is not 0.
    """
    if (momenta is not None) != (rule.momentum != 0.0):
        raise ValueError(
            f"sgd_step: momentum buffers go with a momentum above 0 and only then; found momentum={rule.momentum!r} "
            f"and {'no ' if momenta is None else ''}buffers"
        )
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        work = _working_dtype(param)
        p, g = param.to(work), _gradient(grad, work, factor)
        if rule.weight_decay != 0.0:
            g = g.add(p, alpha=rule.weight_decay)
        if momenta is not None:
            buffer = momenta[index].to(work)
            if first:
                buffer.copy_(g)
            else:
                buffer.mul_(rule.momentum).add_(g, alpha=1.0 - rule.dampening)
            _store(momenta[index], buffer)
            g = g.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
        p.add_(g, alpha=-rule.lr)
        _store(param, p)
        _store_copy(copies, index, p)


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor], *, factor: float = 1.0) -> Tensor:
    """Sum over all elements of `(factor * x)**2`, a 0-D float64 tensor on the tensors' device.

    Squares of float32 values cannot overflow float64, so the result is finite exactly when every scaled element is: it
    answers "did anything overflow?" and "what is the norm?" in one reading of memory.
    """
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        total += _square_sum(_gradient(tensor, _working_dtype(tensor), factor))
    return total


@torch.no_grad()
def unscale(tensors: Sequence[Tensor], factor: float) -> Tensor:
    """Multiply every tensor by `factor` in place and return `sum_of_squares` of the result as it was before rounding to
    a low dtype."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device if tensors else None)
    for tensor in tensors:
        scaled = tensor.to(_working_dtype(tensor)) * factor
        total += _square_sum(scaled)
        tensor.copy_(scaled)
    return total


@torch.no_grad()
def cast(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, which has the same number of elements, rounding to nearest even."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source.view_as(target) if source.shape != target.shape else source)
