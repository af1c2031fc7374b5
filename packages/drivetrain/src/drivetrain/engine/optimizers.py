"""From the ``optimizer`` section of a configuration to a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drivetrain.engine.config import Optimizer as OptimizerSection
from drivetrain.kernels import Lamb, Lion, Muon

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused form makes one pass over memory, on the CPU too."""


def build_optimizer(section: OptimizerSection, parameters: Parameters, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that ``section`` names, over ``parameters`` (tensors, or parameter groups) of ``module``.

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
    if kind == "muon":
        return _muon(arguments, parameters, module)
    chosen = torch.optim.Adagrad if kind == "adagrad" else getattr(torch.optim, section.type, None)
    if not (isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer.type '{section.type}' is neither one of Adam, AdamW, Adagrad, Lamb, Lion and Muon nor a class "
            "of torch.optim"
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


def _muon(arguments: dict[str, Any], parameters: Parameters, module: nn.Module) -> Muon:
    """Matrices and the rest as groups of their own, out of each group that is given."""
    shared = {"weight_decay": arguments["weight_decay"]}
    matrices = {"use_muon": True, "lr": _first(arguments["muon_lr"], arguments["lr"]), **shared}
    rest = {"use_muon": False, "lr": _first(arguments["adam_lr"], arguments["lr"]), **shared}
    rest |= {"betas": arguments["betas"], "adam_eps": arguments["eps"]}
    tables = set(_tables(module))
    groups: list[dict[str, Any]] = []
    for group in _as_groups(parameters):
        chosen = group.get("use_muon")
        members = list(group["params"])
        marked = [p.dim() >= 2 and id(p) not in tables if chosen is None else bool(chosen) for p in members]
        for wanted, settings in ((True, matrices), (False, rest)):
            params = [p for p, is_matrix in zip(members, marked, strict=True) if is_matrix == wanted]
            if params:
                groups.append({**settings, **group, "params": params, "use_muon": wanted})
    return Muon(groups, momentum=arguments["momentum"], ns_form=arguments["ns_method"])


def _first(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _as_groups(parameters: Parameters) -> list[dict[str, Any]]:
    given = list(parameters)
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    return [{"params": tensors}] if tensors else [dict(one) for one in given if isinstance(one, dict)]


def _tables(module: nn.Module) -> Iterator[int]:
    """Parameters that are looked up in, or that score a vocabulary, by id: rows of them are not directions of a map."""
    for name, owner in module.named_modules():
        for own, parameter in owner.named_parameters(recurse=False):
            path = f"{name}.{own}".lower()
            if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or "embed" in path or "lm_head" in path:
                yield id(parameter)


def _made(
    chosen: type[torch.optim.Optimizer], name: str, arguments: dict[str, Any], parameters: Parameters
) -> torch.optim.Optimizer:
    if chosen in FUSED and not {"fused", "foreach"} & arguments.keys():
        arguments = {**arguments, "fused": True}
    try:
        return chosen(parameters, **arguments)
    except TypeError as error:
        raise ValueError(f"optimizer.params does not fit torch.optim.{name}: {error}") from error
