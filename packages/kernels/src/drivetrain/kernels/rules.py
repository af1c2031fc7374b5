"""Hyperparameters of the optimizer steps, as frozen records that are checked when they are made.

Problem: every implementation of a step (plain torch, C++, GPU) needs the same handful of numbers, and several scalars
derived from them (bias corrections, decayed learning rates) must be the same number everywhere, or implementations
drift apart.
Idea: one small record per optimizer holds the numbers and derives the scalars in double precision; implementations only
round them to their working precision.
Invariant: a rule is immutable and valid; an implementation never checks a hyperparameter again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = [
    "AdagradRule",
    "AdamRule",
    "Coefficients",
    "LambRule",
    "LionRule",
    "MuonRule",
    "MuonScale",
    "NewtonSchulzForm",
    "SgdRule",
]

Coefficients = tuple[float, float, float]
NewtonSchulzForm = Literal["standard", "gram"]
MuonScale = Literal["original", "match_rms_adamw"]


def _at_least_zero(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{owner}: {name} must be a finite number >= 0, found {value!r}")


def _fraction(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{owner}: {name} must lie in [0, 1), found {value!r}")


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019); AMSGrad after Reddi et al., 2018.

    `decoupled=True` shrinks the parameter by `lr * weight_decay` (AdamW); False adds `weight_decay * p` to the gradient
    (Adam with L2).
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    decoupled: bool = True

    def __post_init__(self) -> None:
        _at_least_zero("Adam", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _fraction("Adam", beta1=self.beta1, beta2=self.beta2)

    def corrections(self, step: int) -> tuple[float, float]:
        """`(1 - beta1**step, 1 - beta2**step)`, or ones without bias correction. `step` counts from 1."""
        return _corrections(self.beta1, self.beta2, step, self.bias_correction)


@dataclass(frozen=True, kw_only=True)
class LionRule:
    """Lion (Chen et al., 2023): the sign of an interpolation of momentum and gradient, with decoupled weight decay."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero("Lion", lr=self.lr, weight_decay=self.weight_decay)
        _fraction("Lion", beta1=self.beta1, beta2=self.beta2)


@dataclass(frozen=True, kw_only=True)
class LambRule:
    """LAMB (You et al., 2020): Adam's direction, scaled per parameter by a clamped ratio of norms."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    eps_inside_sqrt: bool = False
    weight_decay: float = 0.0
    bias_correction: bool = True
    max_coeff: float = 10.0
    min_coeff: float = 0.01

    def __post_init__(self) -> None:
        _at_least_zero(
            "Lamb",
            lr=self.lr,
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_coeff=self.max_coeff,
            min_coeff=self.min_coeff,
        )
        _fraction("Lamb", beta1=self.beta1, beta2=self.beta2)
        if self.min_coeff > self.max_coeff:
            raise ValueError(
                "Lamb: min_coeff must not be above max_coeff, "
                f"found min_coeff={self.min_coeff!r}, max_coeff={self.max_coeff!r}"
            )

    def corrections(self, step: int) -> tuple[float, float]:
        """`(1 - beta1**step, 1 - beta2**step)`, or ones without bias correction. `step` counts from 1."""
        return _corrections(self.beta1, self.beta2, step, self.bias_correction)


@dataclass(frozen=True, kw_only=True)
class AdagradRule:
    """Adagrad (Duchi et al., 2011) with torch's learning-rate decay: `lr / (1 + (step - 1) * lr_decay)`."""

    lr: float = 1e-2
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _at_least_zero("Adagrad", lr=self.lr, lr_decay=self.lr_decay, eps=self.eps, weight_decay=self.weight_decay)

    def decayed_lr(self, step: int) -> float:
        """The learning rate at `step`, which counts from 1."""
        return self.lr / (1.0 + (step - 1) * self.lr_decay)


@dataclass(frozen=True, kw_only=True)
class SgdRule:
    """Stochastic gradient descent with momentum, dampening and Nesterov's variant, as torch defines them (Sutskever et
    al., 2013)."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _at_least_zero("SGD", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                "SGD: nesterov needs momentum above 0 and dampening 0, "
                f"found momentum={self.momentum!r}, dampening={self.dampening!r}"
            )


@dataclass(frozen=True, kw_only=True)
class MuonRule:
    """Muon (Jordan et al., 2024): momentum, orthogonalised by `steps` of Newton-Schulz with these `coefficients`.

    `scale`: "original" for `sqrt(max(1, rows / columns))`, "match_rms_adamw" for `0.2 * sqrt(max(rows, columns))`,
    which gives updates the size of AdamW's (Liu et al., "Muon is Scalable for LLM Training", 2025). `stacked`:
    parameters of more than two dimensions hold matrices in their last two; else dimensions after the first are
    flattened.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    coefficients: Coefficients = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    steps: int = 5
    form: NewtonSchulzForm = "standard"
    scale: MuonScale = "original"
    stacked: bool = False

    def __post_init__(self) -> None:
        _at_least_zero("Muon", lr=self.lr, weight_decay=self.weight_decay, eps=self.eps)
        _fraction("Muon", momentum=self.momentum)
        if len(self.coefficients) != 3 or not all(math.isfinite(value) for value in self.coefficients):
            raise ValueError(f"Muon: coefficients must be three finite numbers, found {self.coefficients!r}")
        if self.steps < 0:
            raise ValueError(f"Muon: steps must not be negative, found {self.steps!r}")
        for name, kinds in (("form", NewtonSchulzForm), ("scale", MuonScale)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"Muon: {name} must be one of {', '.join(get_args(kinds))}; found {getattr(self, name)!r}"
                )

    def scaled_lr(self, rows: int, columns: int) -> float:
        """The learning rate of a matrix of this shape, which may have no elements."""
        if self.scale == "match_rms_adamw":
            return self.lr * 0.2 * math.sqrt(max(rows, columns))
        return self.lr * math.sqrt(max(1.0, rows / max(1, columns)))


def _corrections(beta1: float, beta2: float, step: int, wanted: bool) -> tuple[float, float]:
    if step < 1:
        raise ValueError(f"an optimizer's step counts from 1, found {step}")
    return (1.0 - beta1**step, 1.0 - beta2**step) if wanted else (1.0, 1.0)
