"""Muon: momentum of matrices, orthogonalised, with AdamW for everything else.

Problem: a matrix's gradient is dominated by few directions; Adam, elementwise, cannot see that.
Idea (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): replace the singular values of
the momentum by ones, approximately, with a handful of products of matrices. Matrices of the same shape go through the
iteration together, as one batch. Parameters that are no matrices, and embeddings and output layers, which are tables
rather than maps, belong in groups with `use_muon=False`, which take AdamW's step in the same call.
Invariants: a step needs whole matrices, and slices of them only where somebody brings the slices together (see
`MatrixExchange`); momentum is float32 at least; state and parameter groups can be exchanged with those of
`torch.optim.Muon`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from . import dispatch
from .fused_optim import adam_state, step_adam
from .optim import Batch, Copies, Params, PreciseStateOptimizer, evaluate
from .rules import AdamRule, Coefficients, MuonRule, MuonScale, NewtonSchulzForm

__all__ = ["MatrixExchange", "Muon", "orthogonalize"]

_COEFFICIENTS: Final = MuonRule().coefficients
_BATCH_ELEMENTS: Final = 1 << 26
"""The iteration keeps three copies of its batch in the products' dtype; larger batches would gain no more speed."""


def orthogonalize(
    matrix: Tensor,
    *,
    steps: int = 5,
    form: NewtonSchulzForm = "standard",
    coefficients: Coefficients = _COEFFICIENTS,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`U @ V^T`, approximately, of each matrix `U @ S @ V^T` in `matrix` [.., m, n]: Muon's Newton-Schulz iteration.

    `form`: "gram" iterates on the small `X @ X^T` alone, about twice as fast when one side is four times the other; see
    `torch_ops.muon` for both. `dtype`: that of the products and of the result (sums are float32 at least); None for
    that of `matrix`. With the default coefficients and five steps singular values come to lie between about 0.7 and
    1.2, except those that were hundreds of times smaller than the norm. Gradients do not pass through.

    Raises ValueError for less than two dimensions, hyperparameters out of range, or a dtype that is no floating-point
    one.
    """
    rule = MuonRule(steps=steps, form=form, coefficients=coefficients, eps=eps)
    wanted = matrix.dtype if dtype is None else dtype
    if matrix.dim() < 2:
        raise ValueError(
            f"orthogonalize: expected a matrix or a stack of them, [.., m, n]; found shape {tuple(matrix.shape)}"
        )
    if not (matrix.is_floating_point() and wanted.is_floating_point):
        raise ValueError(f"orthogonalize: expected floating-point dtypes; found {matrix.dtype} and dtype={wanted}")
    return _orthogonalize(matrix, rule, wanted)


def _orthogonalize(matrix: Tensor, rule: MuonRule, dtype: torch.dtype) -> Tensor:
    found: Tensor = dispatch.resolve("orthogonalize", matrix.device)(
        matrix, steps=rule.steps, form=rule.form, coefficients=rule.coefficients, eps=rule.eps, dtype=dtype
    )
    return found


class MatrixExchange(Protocol):
    """Brings slices of matrices together, for an optimizer that is given 1-D slices of sharded parameters."""

    def shape(self, param: Tensor) -> torch.Size:
        """The shape of the whole parameter that `param` is a slice of."""
        ...

    def map_whole(
        self,
        params: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[list[Tensor]], list[Tensor]],
    ) -> list[Tensor]:
        """Slices of `function(wholes)`, where `values` are slices of the wholes, as `params` are of the parameters.

        `function` runs once for every whole in all, on one rank each, and keeps shapes. Collective.
        """
        ...


class Muon(PreciseStateOptimizer):
    """Muon for matrices, and AdamW for the groups that say `use_muon=False`. Groups of matrices are exchangeable with
    `torch.optim.Muon`.

    `b = lerp(b, g, 1 - momentum)`, `u = lerp(g, b, momentum)` (`u = b` without `nesterov`), then `p *= 1 - lr *
    weight_decay` and `p -= lr * scale * orthogonalize(u)`. State: `momentum_buffer`; in AdamW's groups `step`,
    `exp_avg`, `exp_avg_sq`. Products are bfloat16 in the standard form, as in torch, and float16 in the Gram form,
    which needs the longer mantissa more than the range; float64 for float64 parameters.

    Args:
        params: parameters or groups. Muon's have two dimensions or more: slices of sharded parameters need somebody who
            sets `matrix_exchange` (drivetrain.zero does). Dimensions after the first are flattened (convolutions); with
            `stacked=True` in a group, they are stacks of matrices in their last two (experts).
        lr, weight_decay, momentum, nesterov: as in the formula.
        ns_coefficients, eps, ns_steps, ns_form: of the iteration, see `orthogonalize`.
        adjust_lr_fn: `scale` of the formula: "original" (or None) or "match_rms_adamw", see `MuonRule`.
        state_dtype: dtype of momentum and moments (float64 parameters always keep float64).

    Groups with `use_muon=False` take `lr`, `weight_decay`, `betas` (0.9, 0.999) and `adam_eps` (1e-8).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: MuonScale | None = None,
        *,
        ns_form: NewtonSchulzForm = "standard",
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_form": ns_form,
            "use_muon": True,
            "stacked": False,
            "betas": (0.9, 0.999),
            "adam_eps": 1e-8,
        }
        self.matrix_exchange: MatrixExchange | None = None
        self.rule_of(defaults)
        super().__init__(params, defaults, state_dtype=state_dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name in ("ns_form", "use_muon", "stacked", "betas", "adam_eps"):
                group.setdefault(name, self.defaults[name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.rule_of(group)
        for index, param in enumerate(group["params"]):
            if group["use_muon"] and param.dim() < 2:
                raise ValueError(
                    f"Muon: parameter {index} of a group has shape {tuple(param.shape)}; expected a whole matrix. Put "
                    "vectors (biases, norms) into a group with use_muon=False, which AdamW steps; a slice of a sharded "
                    "matrix cannot be stepped without the rest of it"
                )

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": self.moment_like(param)} if group["use_muon"] else adam_state(self, param)

    def rule_of(self, group: Mapping[str, Any]) -> MuonRule | AdamRule:
        lr, weight_decay = float(group["lr"]), group["weight_decay"]
        if not group["use_muon"]:
            beta1, beta2 = group["betas"]
            return AdamRule(lr=lr, beta1=beta1, beta2=beta2, eps=group["adam_eps"], weight_decay=weight_decay)
        return MuonRule(
            lr=lr,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            weight_decay=weight_decay,
            coefficients=tuple(group["ns_coefficients"]),
            eps=group["eps"],
            steps=group["ns_steps"],
            form=group["ns_form"],
            scale=group["adjust_lr_fn"] or "original",
            stacked=group["stacked"],
        )

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0, copies: Copies | None = None
    ) -> Any:
        """One step over all parameters that have a gradient. Returns the closure's loss, if one is given.

        `factor` multiplies gradients on the fly; `copies[param]`, a tensor of as many elements, receives the new value
        in its own dtype.
        """
        loss = evaluate(closure)
        for batch in self.batches():
            if isinstance(batch.rule, AdamRule):
                step_adam(batch, factor=factor, copies=copies)
            else:
                _step_matrices(batch, factor, copies, self.matrix_exchange)
        return loss


def _step_matrices(
    batch: Batch[MuonRule], factor: float, copies: Copies | None, exchange: MatrixExchange | None
) -> None:
    rule, momenta = batch.rule, batch.states["momentum_buffer"]
    grads = [grad.to(momentum.dtype) for grad, momentum in zip(batch.grads, momenta, strict=True)]
    if factor != 1.0:
        grads = list(torch._foreach_mul(grads, factor))
    torch._foreach_lerp_(momenta, grads, 1.0 - rule.momentum)
    updates = list(torch._foreach_lerp(grads, momenta, rule.momentum)) if rule.nesterov else momenta
    dtype = _product_dtype(batch.params[0], rule)
    if exchange is None:
        shapes, found = [param.shape for param in batch.params], _orthogonalize_all(updates, rule, dtype)
    else:
        shapes = [exchange.shape(param) for param in batch.params]
        found = exchange.map_whole(batch.params, updates, lambda wholes: _orthogonalize_all(wholes, rule, dtype))
    for param, shape, update in zip(batch.params, shapes, found, strict=True):
        rows, columns = _stack_shape(shape, rule)[1:]
        _apply(param, update, rule, rule.scaled_lr(rows, columns), None if copies is None else copies.get(param))


def _orthogonalize_all(updates: list[Tensor], rule: MuonRule, dtype: torch.dtype) -> list[Tensor]:
    """Each of `updates`, orthogonalised, in its shape; those of one shape go through the iteration together."""
    found = [torch.empty_like(update, dtype=dtype) for update in updates]
    matrices = [update.reshape(_stack_shape(update.shape, rule)) for update in updates]
    for places in _batches(matrices):
        whole = _orthogonalize(torch.cat([matrices[place] for place in places]), rule, dtype)
        for place, part in zip(places, whole.split([matrices[place].shape[0] for place in places]), strict=True):
            found[place].copy_(part.view(updates[place].shape))
    return found


def _stack_shape(shape: torch.Size, rule: MuonRule) -> tuple[int, int, int]:
    """`shape` seen as a stack of matrices, [k, m, n]."""
    if rule.stacked and len(shape) > 2:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def _product_dtype(param: Tensor, rule: MuonRule) -> torch.dtype:
    if param.dtype == torch.float64:
        return torch.float64
    return torch.float16 if rule.form == "gram" else torch.bfloat16


def _batches(matrices: list[Tensor]) -> Iterator[list[int]]:
    """Places of matrices that go through the iteration together: of one shape and dtype, and not too many."""
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
    for place, matrix in enumerate(matrices):
        if matrix.numel():
            alike.setdefault((matrix.dtype, matrix.shape[1:]), []).append(place)
    for places in alike.values():
        stack = max(1, _BATCH_ELEMENTS // max(matrices[place].numel() for place in places))
        for start in range(0, len(places), stack):
            yield places[start : start + stack]


def _apply(param: Tensor, update: Tensor, rule: MuonRule, lr: float, copy: Tensor | None) -> None:
    value = param.to(torch.promote_types(param.dtype, torch.float32))
    value.mul_(1.0 - rule.lr * rule.weight_decay).add_(update.reshape(param.shape), alpha=-lr)
    if value is not param:
        param.copy_(value)
    if copy is not None:
        copy.copy_(value)
