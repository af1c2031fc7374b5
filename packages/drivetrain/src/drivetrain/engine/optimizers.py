"""From the ``optimizer`` section of a configuration to a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from drivetrain.engine.config import Optimizer as OptimizerSection
from drivetrain.kernels import Lamb, Lion

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused form makes one pass over memory, on the CPU too."""


def build_optimizer(section: OptimizerSection, parameters: Parameters) -> torch.optim.Optimizer:
    """The optimizer that ``section`` names, over ``parameters`` (tensors, or parameter groups).

    Raises:
        ValueError: the type is unknown, or an argument is one that the optimizer does not have.
    """
    kind = section.type.lower()
    arguments = section.arguments()
    if kind in ("adam", "adamw"):
        return _adam(kind, arguments, parameters)
    if kind == "lion":
        return Lion(parameters, **arguments)
    if kind == "lamb":
        return Lamb(parameters, **arguments)
    chosen = torch.optim.Adagrad if kind == "adagrad" else getattr(torch.optim, section.type, None)
    if not (isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer.type '{section.type}' is neither Adam, AdamW, Adagrad, Lamb or Lion nor a class of torch.optim"
        )
    arguments.pop("fp32_optimizer_states", None)
    return _made(chosen, section.type, arguments, parameters)


def _adam(kind: str, arguments: dict[str, Any], parameters: Parameters) -> torch.optim.Optimizer:
    """Adam means AdamW unless ``adam_w_mode`` is false; AdamW always does."""
    decoupled = kind == "adamw" or arguments.pop("adam_w_mode")
    chosen = torch.optim.AdamW if decoupled else torch.optim.Adam
    if not arguments["bias_correction"]:
        raise ValueError(
            "optimizer.params.bias_correction is false, which this version's Adam does not do; leave it at true"
        )
    kept = {key: arguments[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
    return _made(chosen, chosen.__name__, kept, parameters)


def _made(
    chosen: type[torch.optim.Optimizer], name: str, arguments: dict[str, Any], parameters: Parameters
) -> torch.optim.Optimizer:
    if chosen in FUSED and not {"fused", "foreach"} & arguments.keys():
        arguments = {**arguments, "fused": True}
    try:
        return chosen(parameters, **arguments)
    except TypeError as error:
        raise ValueError(f"optimizer.params does not fit torch.optim.{name}: {error}") from error
