"""Optimizers and schedulers that are named in a file and live in torch.

A name is checked against torch itself, and so are the arguments: by the signature of the class, then by making one on a
parameter of one element. So a wrong argument is a problem of the configuration, before any model is built.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from drivetrain.engine.config.problems import show
from drivetrain.engine.config.suggest import NEAR, nearest

UNFIT_OPTIMIZERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "LBFGS": (
            "LBFGS evaluates the model several times within a step, which the engine does not do",
            'use "AdamW" or "SGD"',
        ),
        "SparseAdam": ("SparseAdam takes sparse gradients, and the engine makes dense ones", 'use "AdamW"'),
        "Optimizer": ("Optimizer is the base class, not an optimizer", 'use "AdamW" or "SGD"'),
    }
)
"""Names in torch.optim that can't be used, with the reason and the way out."""

UNFIT_SCHEDULERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ReduceLROnPlateau": (
            "ReduceLROnPlateau follows a metric, which a file can't give",
            "pass the scheduler to initialize together with its metric, or use a schedule of steps",
        ),
        **{
            name: (f"{name} takes a function, which a file can't give", "pass the scheduler to initialize")
            for name in ("LambdaLR", "MultiplicativeLR")
        },
        **{
            name: (f"{name} takes other schedulers, which a file can't give", "pass the scheduler to initialize")
            for name in ("SequentialLR", "ChainedScheduler")
        },
        **{
            name: (f"{name} is the base class, not a schedule", 'use "WarmupCosineLR"')
            for name in ("LRScheduler", "_LRScheduler")
        },
    }
)
"""Names in torch.optim.lr_scheduler that can't be used from a file, with the reason and the way out."""


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """What is wrong with a type or one of its arguments."""

    argument: str
    """Name of the argument; "" when it is the type, or all arguments together."""
    message: str
    hint: str = ""
    missing: bool = False
    """The argument is not there at all."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer] | None:
    """The class of torch.optim with this exact name."""
    found = getattr(torch.optim, name, None)
    return found if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) else None


def scheduler_class(name: str) -> type[LRScheduler] | None:
    """The class of torch.optim.lr_scheduler with this exact name."""
    found = getattr(torch.optim.lr_scheduler, name, None)
    return found if isinstance(found, type) and issubclass(found, LRScheduler) else None


def optimizer_names() -> tuple[str, ...]:
    """Names in torch.optim that a file can use."""
    names = (name for name in vars(torch.optim) if optimizer_class(name) is not None)
    return tuple(sorted(name for name in names if name not in UNFIT_OPTIMIZERS))


def scheduler_names() -> tuple[str, ...]:
    """Names in torch.optim.lr_scheduler that a file can use."""
    names = (name for name in vars(torch.optim.lr_scheduler) if scheduler_class(name) is not None)
    return tuple(sorted(name for name in names if name not in UNFIT_SCHEDULERS))


def check_optimizer(name: str, arguments: Mapping[str, Any]) -> list[Complaint]:
    """What is wrong with a torch optimizer and its arguments."""
    if name in UNFIT_OPTIMIZERS:
        return [Complaint(argument="", message=UNFIT_OPTIMIZERS[name][0], hint=UNFIT_OPTIMIZERS[name][1])]
    found = optimizer_class(name)
    if found is None:
        raise KeyError(name)
    special = {"max_grad_norm": 'clipping is not the optimizer\'s here: set "gradient_clipping" at the top level'}
    complaints = _signature(found, arguments, hidden=("params",), special=special)
    return complaints or _made(lambda: found([_parameter()], **arguments), arguments)


def check_scheduler(name: str, arguments: Mapping[str, Any]) -> list[Complaint]:
    """What is wrong with a torch scheduler and its arguments."""
    if name in UNFIT_SCHEDULERS:
        return [Complaint(argument="", message=UNFIT_SCHEDULERS[name][0], hint=UNFIT_SCHEDULERS[name][1])]
    found = scheduler_class(name)
    if found is None:
        raise KeyError(name)
    complaints = _signature(found, arguments, hidden=("optimizer", "last_epoch", "verbose"), special={})
    # Adam has `betas`, which the cyclic ones move; they would refuse an optimizer without momentum.
    optimizer = torch.optim.Adam([_parameter()], lr=1e-3)
    return complaints or _made(lambda: found(optimizer, **arguments), arguments)


def _parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def _signature(
    found: type[object], arguments: Mapping[str, Any], *, hidden: tuple[str, ...], special: Mapping[str, str]
) -> list[Complaint]:
    known = {
        name: parameter
        for name, parameter in inspect.signature(found).parameters.items()
        if name not in hidden and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    complaints = []
    for name in arguments:
        if name not in known:
            near = nearest(name, known, NEAR)
            hint = special.get(name) or (f'did you mean "{near}"?' if near else "it takes " + ", ".join(known))
            complaints.append(Complaint(argument=name, message=f"{found.__name__} takes no such argument", hint=hint))
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in arguments:
            message = f"{found.__name__} needs the argument {name!r}, which is not given"
            complaints.append(Complaint(argument=name, message=message, hint=f'add "{name}" to "params"', missing=True))
    return complaints


def _made(make: Any, arguments: Mapping[str, Any]) -> list[Complaint]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make()
    except (TypeError, ValueError, ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError) as error:
        text = str(error) or type(error).__name__
        # torch does not name the argument; a value that its message quotes points to it.
        culprit = next((n for n in arguments if n in text), None) or next(
            (n for n, value in arguments.items() if text.rstrip(".").endswith(show(value))), ""
        )
        return [Complaint(argument=culprit, message=f"torch refuses the arguments: {text}")]
    return []
