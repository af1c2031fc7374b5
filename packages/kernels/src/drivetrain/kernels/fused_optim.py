"""Adam, Adagrad and SGD over the ops of this wheel: one pass over memory per step, on any device.

Problem: a step is bound by memory traffic, and on GPUs, with many small parameters, by launches: unscaling, clipping,
stepping and writing the low-precision parameters in separate passes moves half as much again as doing it all at once.
Idea: `step(factor=..., copies=...)` fuses them: gradients are multiplied on the fly by `factor` (inverse loss scale
times clip coefficient), and `copies[param]` receives the new value in its own dtype in the same pass. The op that
serves the parameters' device does it: C++ in host memory, Triton on GPUs (one launch for all parameters of a group),
plain torch elsewhere.
Invariants: states have torch's names and can be exchanged with those of `torch.optim.AdamW`, `Adam`, `Adagrad` and
`SGD`; they are float32 whatever the parameter's dtype, unless `state_dtype` says otherwise, and keep their dtype
through `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .optim import Batch, Copies, Params, PreciseStateOptimizer, evaluate
from .rules import AdagradRule, AdamRule, SgdRule

__all__ = ["FusedAdagrad", "FusedAdam", "FusedSgd", "adam_state", "step_adam"]


class FusedAdam(PreciseStateOptimizer):
    """Adam and AdamW (AMSGrad on request) in one pass; state compatible with `torch.optim.AdamW` and
    `torch.optim.Adam`.

    `p -= lr * m_hat / (sqrt(v_hat) + eps)` after `p *= 1 - lr * weight_decay` (`adam_w_mode`), or with `weight_decay *
    p` added to the gradient. State: `step`, `exp_avg`, `exp_avg_sq`, and `max_exp_avg_sq` with AMSGrad.

    Args:
        params: parameters or groups, of any shape and floating-point dtype, on any device.
        lr, betas, eps, weight_decay, bias_correction, amsgrad: as in the formula.
        adam_w_mode: True for decoupled weight decay (AdamW), False for Adam with L2. Kept in the group as
            `decoupled_weight_decay`, torch's name for it.
        state_dtype: dtype of the moments: float32, bfloat16 or float16 (float64 parameters always keep float64).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        *,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
            "decoupled_weight_decay": adam_w_mode,
        }
        self.rule_of(defaults)
        super().__init__(params, defaults, state_dtype=state_dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("bias_correction", True)
            group.setdefault("amsgrad", False)
            group.setdefault("decoupled_weight_decay", True)

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        state = adam_state(self, param)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = self.moment_like(param)
        return state

    def rule_of(self, group: Mapping[str, Any]) -> AdamRule:
        beta1, beta2 = group["betas"]
        return AdamRule(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            bias_correction=group["bias_correction"],
            decoupled=group["decoupled_weight_decay"],
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
            step_adam(batch, factor=factor, copies=copies)
        return loss

    @torch.no_grad()
    def rollback(self, *, factor: float = 1.0, copies: Copies | None = None) -> None:
        """Undo the last `step(factor=factor)`: gradients and hyperparameters must be those of that step.

        Values come back up to rounding (see `torch_ops.steps.adam_rollback`, which also says what is refused);
        AMSGrad cannot be undone.
        """
        if any(group["amsgrad"] for group in self.param_groups):
            raise ValueError(
                f"{type(self).__name__}.rollback: a maximum cannot be undone; build the optimizer with amsgrad=False"
            )
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                if param.grad is not None and not int(self.state.get(param, {}).get("step", 0)):
                    raise ValueError(
                        f"{type(self).__name__}.rollback: parameter {index} of a group has taken no step that could "
                        "be undone"
                    )
        for batch in self.batches(advance=-1):
            rollback = dispatch.resolve("adam_rollback", batch.device)
            rollback(*_moments(batch), rule=batch.rule, step=batch.step, factor=factor, copies=batch.copies_of(copies))


def adam_state(optimizer: PreciseStateOptimizer, param: Tensor) -> dict[str, Tensor]:
    """The state that `param` starts with under Adam, AMSGrad's maximum apart."""
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": optimizer.moment_like(param),
        "exp_avg_sq": optimizer.moment_like(param),
    }


def step_adam(batch: Batch[AdamRule], *, factor: float, copies: Copies | None) -> None:
    """Adam's step of the parameters in `batch`."""
    adam_step = dispatch.resolve("adam_step", batch.device)
    adam_step(
        *_moments(batch),
        rule=batch.rule,
        step=batch.step,
        max_exp_avg_sqs=batch.states.get("max_exp_avg_sq"),
        factor=factor,
        copies=batch.copies_of(copies),
    )


def _moments(batch: Batch[AdamRule]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    return batch.params, batch.grads, batch.states["exp_avg"], batch.states["exp_avg_sq"]


class FusedAdagrad(PreciseStateOptimizer):
    """Adagrad in one pass; state compatible with `torch.optim.Adagrad`: `step`, `sum`.

    `sum += g*g`, then `p -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)`, with `weight_decay * p` added to
    `g` first.

    Args:
        params: parameters or groups, of any shape and floating-point dtype, on any device.
        lr, lr_decay, weight_decay, eps: as in the formula.
        initial_accumulator_value: what `sum` starts from.
        state_dtype: dtype of `sum` (float64 parameters always keep float64).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if initial_accumulator_value < 0.0:
            raise ValueError(f"Adagrad: initial_accumulator_value must be >= 0, found {initial_accumulator_value!r}")
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        self.rule_of(defaults)
        super().__init__(params, defaults, state_dtype=state_dtype)

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        total = self.moment_like(param).fill_(group["initial_accumulator_value"])
        return {"step": torch.zeros((), dtype=torch.float32), "sum": total}

    def rule_of(self, group: Mapping[str, Any]) -> AdagradRule:
        return AdagradRule(
            lr=float(group["lr"]), lr_decay=group["lr_decay"], eps=group["eps"], weight_decay=group["weight_decay"]
        )

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0, copies: Copies | None = None
    ) -> Any:
        """One step over all parameters that have a gradient; `factor` and `copies` as in `FusedAdam.step`."""
        loss = evaluate(closure)
        for batch in self.batches():
            adagrad_step = dispatch.resolve("adagrad_step", batch.device)
            adagrad_step(
                batch.params,
                batch.grads,
                batch.states["sum"],
                rule=batch.rule,
                step=batch.step,
                factor=factor,
                copies=batch.copies_of(copies),
            )
        return loss


class FusedSgd(PreciseStateOptimizer):
    """SGD with momentum (Sutskever et al., 2013, as torch defines it) in one pass; state compatible with
    `torch.optim.SGD`: `momentum_buffer` where there is momentum.

    `g += weight_decay * p`, `b = momentum * b + (1 - dampening) * g` (`b = g` at a parameter's first step), then
    `p -= lr * b`, or `p -= lr * (g + momentum * b)` with `nesterov`.

    Args:
        params: parameters or groups, of any shape and floating-point dtype, on any device.
        lr, momentum, dampening, weight_decay, nesterov: as in the formula.
        state_dtype: dtype of the momentum (float64 parameters always keep float64).
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        self.rule_of(defaults)
        super().__init__(params, defaults, state_dtype=state_dtype)

    def fresh_state(self, param: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        return {"momentum_buffer": self.moment_like(param)} if group["momentum"] != 0.0 else {}

    def rule_of(self, group: Mapping[str, Any]) -> SgdRule:
        return SgdRule(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=group["nesterov"],
        )

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, factor: float = 1.0, copies: Copies | None = None
    ) -> Any:
        """One step over all parameters that have a gradient; `factor` and `copies` as in `FusedAdam.step`."""
        loss = evaluate(closure)
        for batch in self.batches():
            sgd_step = dispatch.resolve("sgd_step", batch.device)
            sgd_step(
                batch.params,
                batch.grads,
                batch.states["momentum_buffer"] if batch.rule.momentum != 0.0 else None,
                rule=batch.rule,
                first=batch.fresh,
                factor=factor,
                copies=batch.copies_of(copies),
            )
        return loss
