"""Optimizers that torch lacks, correct on whole parameters and on the slices of parameters that sharded training hands
out.

Problem: under ZeRO an optimizer sees 1-D slices, one per parameter and rank, some of them empty. An elementwise
optimizer (Lion) need not care. LAMB scales each parameter by a ratio of norms over the *whole* parameter, so its slices
must be summed over ranks in the middle of a step, in the same order on every rank.
Idea: `Lamb` fills one vector of squared norms with a fixed place for every parameter that it was given, asks
`reduce_norms` to sum it over the ranks (one collective per step), and only then applies the ratios.
Invariants: states are float32 at least, whatever the parameter's dtype, and stay so through `load_state_dict`; a
parameter without a gradient keeps its place in the vector of norms and is otherwise left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import dispatch, reference
from .rules import LambRule, LionRule

__all__ = ["Lamb", "Lion"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class PreciseStateOptimizer(Optimizer):
    """Base of our optimizers: states keep their own dtype when they are loaded.

    torch's `Optimizer.load_state_dict` casts every floating-point state to its parameter's dtype, which would round
    float32 moments of a bfloat16 parameter on every resume. This base puts the saved values back at `state_dtype`.
    """

    def __init__(self, params: Params, defaults: dict[str, Any], *, state_dtype: torch.dtype = torch.float32) -> None:
        if not state_dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__}: state_dtype must be a floating-point dtype, found {state_dtype}")
        self.state_dtype = state_dtype
        super().__init__(params, defaults)

    def state_dtype_of(self, param: Tensor) -> torch.dtype:
        """Dtype of `param`'s moments: `state_dtype`, raised to float64 for a float64 parameter."""
        return torch.float64 if param.dtype == torch.float64 else self.state_dtype

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but moments come back at the dtype that this optimizer keeps, unrounded."""
        super().load_state_dict(state_dict)
        saved_order = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved_order, params, strict=True):
            for name, value in _saved_state(state_dict, key).items():
                if not isinstance(value, Tensor):
                    continue
                # torch hands over the saved tensor itself where no cast is needed; two optimizers must not share a
                # state.
                dtype = value.dtype if name == "step" else self.state_dtype_of(param)
                device = value.device if name == "step" else param.device
                self.state[param][name] = torch.empty_like(value, dtype=dtype, device=device).copy_(value)

    def gradient_of(self, param: Tensor) -> Tensor | None:
        """`param.grad`, refusing what no implementation handles."""
        grad = param.grad
        if grad is not None and grad.is_sparse:
            raise ValueError(
                f"{type(self).__name__} does not take sparse gradients; found one for a parameter of shape "
                f"{tuple(param.shape)}. Make the gradient dense (Embedding(sparse=False)) or use torch.optim.SparseAdam"
            )
        return grad

    def moment_like(self, param: Tensor) -> Tensor:
        """A zero moment for `param`: same shape, strides and device, in `state_dtype_of(param)`."""
        return torch.zeros_like(param, dtype=self.state_dtype_of(param), memory_format=torch.preserve_format)


def _saved_state(state_dict: Mapping[str, Any], key: int) -> Mapping[str, Any]:
    state: Mapping[str, Any] = state_dict["state"].get(key, {})
    return state


def next_step(state: dict[str, Any]) -> int:
    """Advance the step counter of one parameter's state, a 0-D float32 tensor on the CPU as torch keeps it, and return
    it."""
    step: Tensor = state["step"]
    step += 1
    return int(step.item())


class Lion(PreciseStateOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): sign of interpolated momentum,
    decoupled weight decay.

    `p -= lr * (sign(beta1*m + (1-beta1)*g) + weight_decay*p)`, then `m = beta2*m + (1-beta2)*g`. Elementwise, so a
    shard steps exactly as the whole. State: `exp_avg`. A good learning rate is usually 3 to 10 times smaller than
    Adam's, with weight decay larger by as much.

    Args:
        params: parameters or groups, of any shape and floating-point dtype, on any device.
        lr, betas, weight_decay: as in the formula; `betas = (beta1, beta2)`.
        state_dtype: dtype of the momentum (float64 parameters always keep float64).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        *,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        LionRule(lr=float(lr), beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, state_dtype=state_dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient. Returns the closure's loss, if one is given."""
        loss = _evaluate(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rule = LionRule(lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])
            for device, params in by_device(group["params"]).items():
                stepped: list[tuple[Tensor, Tensor, Tensor]] = []
                for param in params:
                    grad = self.gradient_of(param)
                    if grad is None:
                        continue
                    state = self.state[param]
                    if "exp_avg" not in state:
                        state["exp_avg"] = self.moment_like(param)
                    stepped.append((param, grad, state["exp_avg"]))
                if stepped:
                    ps, gs, ms = (list(column) for column in zip(*stepped, strict=True))
                    dispatch.resolve("lion_step", device)(ps, gs, ms, rule=rule)
        return loss


class Lamb(PreciseStateOptimizer):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", 2020): Adam's direction with a trust ratio per
    parameter.

    `u = m_hat / (sqrt(v_hat) + eps) + weight_decay * p` (`sqrt(v_hat + eps)` with `eps_inside_sqrt`),
    `r = clamp(|p| / |u|, min_coeff, max_coeff)`, or 1 where a norm is 0, and `p -= lr * r * u`. State: `step`,
    `exp_avg`, `exp_avg_sq`.

    On shards: norms are those of whole parameters, so give the optimizer *every* parameter's slice on every rank, empty
    ones included and in the same order (`needs_whole_norms` says so), and set `reduce_norms` to a function that sums a
    1-D float32 tensor in place over the ranks. It is called exactly once per step on every rank, whether or not any
    gradient is there. A parameter must have its gradient on all ranks or on none.

    Args:
        params: parameters or groups, of any shape and floating-point dtype, on any device.
        lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt, max_coeff, min_coeff: as in the formulas.
        reduce_norms: see above; None when the optimizer holds whole parameters. May be set later.
        state_dtype: dtype of the moments (float64 parameters always keep float64).
    """

    needs_whole_norms: ClassVar[bool] = True

    reduce_norms: Callable[[Tensor], None] | None

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        *,
        eps_inside_sqrt: bool = False,
        reduce_norms: Callable[[Tensor], None] | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "eps_inside_sqrt": eps_inside_sqrt,
        }
        self._rule(defaults)
        self.reduce_norms = reduce_norms
        super().__init__(params, defaults, state_dtype=state_dtype)

    @staticmethod
    def _rule(group: Mapping[str, Any]) -> LambRule:
        beta1, beta2 = group["betas"]
        return LambRule(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            eps_inside_sqrt=group["eps_inside_sqrt"],
            weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
            max_coeff=group["max_coeff"],
            min_coeff=group["min_coeff"],
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over all parameters that have a gradient. Collective over the ranks of `reduce_norms`. Returns the
        closure's loss, if one is given."""
        loss = _evaluate(closure)
        params = [param for group in self.param_groups for param in group["params"]]
        if not params:
            return loss
        norms = torch.zeros(len(params), 2, dtype=torch.float32, device=params[0].device)
        batches = [batch for batch in self._batches() if batch.params]
        for batch in batches:
            local = batch.moments()
            norms[batch.places] = local.to(norms.device)
        if self.reduce_norms is not None:
            self.reduce_norms(norms.view(-1))
        for batch in batches:
            batch.apply(reference.lamb_ratios(norms[batch.places], batch.rule).to(batch.device))
        return loss

    def _batches(self) -> Iterable[_LambBatch]:
        """Parameters with a gradient, together where rule, step and device agree. Advances their step counters."""
        place = 0
        for group in self.param_groups:
            rule = self._rule(group)
            batches: dict[tuple[torch.device, int], _LambBatch] = {}
            for param in group["params"]:
                grad = self.gradient_of(param)
                if grad is not None:
                    state = self.state[param]
                    if "step" not in state:
                        state["step"] = torch.zeros((), dtype=torch.float32)
                        state["exp_avg"] = self.moment_like(param)
                        state["exp_avg_sq"] = self.moment_like(param)
                    step = next_step(state)
                    batch = batches.setdefault((param.device, step), _LambBatch(rule, step, param.device))
                    batch.add(place, param, grad, state["exp_avg"], state["exp_avg_sq"])
                place += 1
            yield from batches.values()


class _LambBatch:
    """Parameters that take the same LAMB step together, with their places in the vector of norms."""

    def __init__(self, rule: LambRule, step: int, device: torch.device) -> None:
        self.rule = rule
        self.step = step
        self.device = device
        self.places: list[int] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.exp_avgs: list[Tensor] = []
        self.exp_avg_sqs: list[Tensor] = []

    def add(self, place: int, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        self.places.append(place)
        self.params.append(param)
        self.grads.append(grad)
        self.exp_avgs.append(exp_avg)
        self.exp_avg_sqs.append(exp_avg_sq)

    def moments(self) -> Tensor:
        moments = dispatch.resolve("lamb_moments", self.device)
        norms: Tensor = moments(
            self.params, self.grads, self.exp_avgs, self.exp_avg_sqs, rule=self.rule, step=self.step
        )
        return norms

    def apply(self, ratios: Tensor) -> None:
        apply = dispatch.resolve("lamb_apply", self.device)
        apply(self.params, self.exp_avgs, self.exp_avg_sqs, ratios, rule=self.rule, step=self.step)


def by_device(params: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """`params` grouped by device, in their order."""
    grouped: dict[torch.device, list[Tensor]] = {}
    for param in params:
        grouped.setdefault(param.device, []).append(param)
    return grouped


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
