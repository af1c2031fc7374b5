"""Optimizers over the ops of this wheel, correct on whole parameters and on the slices of parameters that sharded
training hands
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

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import dispatch
from .rules import LambRule, LionRule
from .torch_ops.steps import lamb_ratios

__all__ = ["Batch", "Copies", "Lamb", "Lion", "PreciseStateOptimizer"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Copies = Mapping[Tensor, Tensor]

Rule = TypeVar("Rule")


@dataclass(kw_only=True)
class Batch(Generic[Rule]):
    """Parameters that take the same step together: one rule, one step count, one device; states by name, parallel to
    `params`. `fresh`: their states were made for this step."""

    rule: Rule
    step: int
    device: torch.device
    fresh: bool
    places: list[int] = field(default_factory=list)  # each parameter's position among all parameters of the optimizer
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, place: int, param: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> None:
        """Take one more parameter along."""
        self.places.append(place)
        self.params.append(param)
        self.grads.append(grad)
        for name, value in state.items():
            if name != "step":
                self.states.setdefault(name, []).append(value)

    def copies_of(self, copies: Copies | None) -> list[Tensor | None] | None:
        """The targets in `copies` for this batch's parameters, or None if there are none at all."""
        return None if not copies else [copies.get(param) for param in self.params]


class PreciseStateOptimizer(Optimizer):
    """Base of our optimizers: states keep their own dtype when they are loaded.

    torch's `Optimizer.load_state_dict` casts every floating-point state to its parameter's dtype, which would round
    float32 moments of a bfloat16 parameter on every resume. This base puts the saved values back at `state_dtype`.
    """

    takes_factor: ClassVar[bool] = True
    """`step(factor=...)` multiplies gradients on the fly: nobody need do it before."""

    def __init__(self, params: Params, defaults: dict[str, Any], *, state_dtype: torch.dtype = torch.float32) -> None:
        if not state_dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__}: state_dtype must be a floating-point dtype, found {state_dtype}")
        self.state_dtype = state_dtype
        super().__init__(params, defaults)

    def state_dtype_of(self, param: Tensor) -> torch.dtype:
        """Dtype of `param`'s moments: `state_dtype`, raised to float64 for a float64 parameter."""
        return torch.float64 if param.dtype == torch.float64 else self.state_dtype

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if any(group.get("maximize") for group in self.param_groups):
            raise ValueError(
                f"{type(self).__name__} only minimises; the loaded parameter group has maximize=True. "
                "Negate the loss instead"
            )

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

    def gradient_of(self, param: Tensor) -> Tensor:
        """`param.grad`, which must be there, refusing what no implementation handles."""
        grad = param.grad
        if grad is None:
            raise ValueError(f"a parameter of shape {tuple(param.shape)} has no gradient")
        if grad.is_sparse:
            raise ValueError(
                f"{type(self).__name__} does not take sparse gradients; found one for a parameter of shape "
                f"{tuple(param.shape)}. Make the gradient dense (Embedding(sparse=False)) or use torch.optim.SparseAdam"
            )
        return grad

    def moment_like(self, param: Tensor) -> Tensor:
        """A zero moment for `param`: same shape, strides and device, in `state_dtype_of(param)`."""
        return torch.zeros_like(param, dtype=self.state_dtype_of(param), memory_format=torch.preserve_format)

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """The state that `param` starts with. Subclasses define it."""
        raise TypeError(f"{type(self).__name__} must define fresh_state")

    def rule_of(self, group: Mapping[str, Any]) -> Any:
        """The hyperparameters of `group` as a checked record. Subclasses define it."""
        raise TypeError(f"{type(self).__name__} must define rule_of")

    def batches(self, *, advance: int = 1) -> Iterator[Batch[Any]]:
        """Parameters with a gradient, together where group, step, device and having stepped before agree.

        Makes missing states and moves step counters by `advance`; `Batch.step` is the count of the step being made (or
        undone).
        """
        place = 0
        for group in self.param_groups:
            rule = self.rule_of(group)
            places = [index for index, param in enumerate(group["params"]) if param.grad is not None]
            params = [group["params"][index] for index in places]
            states = [self.state[param] for param in params]
            fresh = [not state for state in states]
            for param, state in zip(params, states, strict=True):
                if not state:
                    state.update(self.fresh_state(param, group))
            steps = _move_steps(states, advance)
            found: dict[tuple[torch.device, int, bool], Batch[Any]] = {}
            for row, (param, state) in enumerate(zip(params, states, strict=True)):
                key = (param.device, steps[row], fresh[row])
                if key not in found:
                    found[key] = Batch(rule=rule, step=steps[row], device=param.device, fresh=fresh[row])
                found[key].add(place + places[row], param, self.gradient_of(param), state)
            place += len(group["params"])
            yield from found.values()


def _saved_state(state_dict: Mapping[str, Any], key: int) -> Mapping[str, Any]:
    state: Mapping[str, Any] = state_dict["state"].get(key, {})
    return state


def _move_steps(states: list[dict[str, Any]], advance: int) -> list[int]:
    """Move step counters, 0-D float32 tensors on the CPU as torch keeps them, and return the steps made or undone.

    All counters at once, since one small tensor operation per parameter would cost more than the step of a small
    parameter. Optimizers that keep no counter get zeros.
    """
    counters = [state["step"] for state in states if "step" in state]
    if not counters:
        return [0] * len(states)
    before: list[float] = torch.stack(counters).tolist()
    torch._foreach_add_(counters, advance)
    return [max(int(count), int(count) + advance) for count in before]


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """The closure's loss, computed with gradients on; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"exp_avg": self.moment_like(param)}

    def rule_of(self, group: Mapping[str, Any]) -> LionRule:
        beta1, beta2 = group["betas"]
        return LionRule(lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"])

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0, copies: Copies | None = None
    ) -> Any:
        """One step over all parameters that have a gradient. Returns the closure's loss, if one is given.

        `factor` multiplies gradients on the fly; `copies[param]` receives the new value in its own dtype, in the same
        pass.
        """
        loss = evaluate(closure)
        for batch in self.batches():
            lion_step = dispatch.resolve("lion_step", batch.device)
            momenta = batch.states["exp_avg"]
            lion_step(
                batch.params, batch.grads, momenta, rule=batch.rule, factor=factor, copies=batch.copies_of(copies)
            )
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
        self.rule_of(defaults)
        self.reduce_norms = reduce_norms
        super().__init__(params, defaults, state_dtype=state_dtype)

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": self.moment_like(param),
            "exp_avg_sq": self.moment_like(param),
        }

    def rule_of(self, group: Mapping[str, Any]) -> LambRule:
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
    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0, copies: Copies | None = None
    ) -> Any:
        """One step over all parameters that have a gradient. Collective over the ranks of `reduce_norms`.

        `factor` multiplies gradients on the fly; `copies[param]` receives the new value in its own dtype, in the same
        pass. Returns the closure's loss, if one is given.
        """
        loss = evaluate(closure)
        params = [param for group in self.param_groups for param in group["params"]]
        if not params:
            return loss
        norms = torch.zeros(len(params), 2, dtype=torch.float32, device=params[0].device)
        batches = list(self.batches())
        for batch in batches:
            norms[batch.places] = _moments(batch, factor).to(norms.device)
        if self.reduce_norms is not None:
            self.reduce_norms(norms.view(-1))
        for batch in batches:
            ratios = lamb_ratios(norms[batch.places], batch.rule).to(batch.device)
            _apply(batch, ratios, copies)
        return loss


def _moments(batch: Batch[LambRule], factor: float) -> Tensor:
    first, second = batch.states["exp_avg"], batch.states["exp_avg_sq"]
    lamb_moments = dispatch.resolve("lamb_moments", batch.device)
    norms: Tensor = lamb_moments(
        batch.params, batch.grads, first, second, rule=batch.rule, step=batch.step, factor=factor
    )
    return norms


def _apply(batch: Batch[LambRule], ratios: Tensor, copies: Copies | None) -> None:
    first, second = batch.states["exp_avg"], batch.states["exp_avg_sq"]
    lamb_apply = dispatch.resolve("lamb_apply", batch.device)
    lamb_apply(batch.params, first, second, ratios, rule=batch.rule, step=batch.step, copies=batch.copies_of(copies))
