"""From the ``optimizer`` section of a configuration to a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from drivetrain.engine.config import Optimizer as OptimizerSection
from drivetrain.kernels import FusedAdagrad, FusedAdam, FusedSgd, Lamb, Lion, Muon

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused form makes one pass over memory, on the CPU too."""


def build_optimizer(
    section: OptimizerSection, parameters: Parameters, module: nn.Module, moments: torch.dtype | None = None
) -> torch.optim.Optimizer:
    """The optimizer that ``section`` names, over ``parameters`` (tensors, or parameter groups) of ``module``.

    Args:
        moments: what it keeps its state in. torch's optimizers have it in the dtype of the master weights; those of
            `drivetrain.kernels` take any, and stand in for torch's where a dtype is asked for. None: no wish.

    Raises:
        ValueError: the type is unknown, or an argument is one that the optimizer does not have.
    """
    kind = section.type.lower()
    arguments = section.arguments()
    arguments.pop("fp32_optimizer_states", None)
    fused = not any(p.is_meta for p in module.parameters())  # torch fuses nothing on the meta device
    if kind in ("adam", "adamw"):
        return _adam(kind, arguments, parameters, moments, fused=fused)
    state_dtype = torch.float32 if moments is None else moments
    if kind == "lion":
        return Lion(parameters, **arguments, state_dtype=state_dtype)
    if kind == "lamb":
        return Lamb(parameters, **arguments, state_dtype=state_dtype)
    if kind == "muon":
        return _muon(arguments, parameters, module, state_dtype)
    if moments is not None and (kind == "adagrad" or section.type == "SGD"):
        return _made(FusedAdagrad if kind == "adagrad" else FusedSgd, arguments | {"state_dtype": moments}, parameters)
    chosen = torch.optim.Adagrad if kind == "adagrad" else getattr(torch.optim, section.type, None)
    if not (isinstance(chosen, type) and issubclass(chosen, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer.type '{section.type}' is neither one of Adam, AdamW, Adagrad, Lamb, Lion and Muon nor a class "
            "of torch.optim"
        )
    return _made(chosen, arguments, parameters, fused=fused)


def check_moments(optimizer: torch.optim.Optimizer, master: torch.dtype, wanted: torch.dtype) -> None:
    """Refuse an optimizer that would keep its moments in another dtype than the configuration says.

    Raises:
        ValueError: it would.
    """
    # As torch's do, an optimizer that says nothing makes its state like the weights that it is given.
    found = getattr(optimizer, "state_dtype", master)
    if found != wanted:
        raise ValueError(
            f"the configuration asks for optimizer moments in {wanted} over master weights in {master} "
            f"(bf16_optimizer_states, fp32_optimizer_states and *_master_weights_and_grads), and "
            f"{type(optimizer).__name__} keeps them in {found}. Name Adam, AdamW, Adagrad, SGD, Lamb, Lion or Muon in "
            'the "optimizer" section, pass an optimizer of drivetrain.kernels made with this state_dtype, or change '
            "the keys"
        )


def _adam(
    kind: str, arguments: dict[str, Any], parameters: Parameters, moments: torch.dtype | None, *, fused: bool
) -> torch.optim.Optimizer:
    """Adam means AdamW unless ``adam_w_mode`` is false; AdamW always does."""
    decoupled = kind == "adamw" or arguments.pop("adam_w_mode")
    chosen = torch.optim.AdamW if decoupled else torch.optim.Adam
    if not arguments["bias_correction"]:
        raise ValueError(
            "optimizer.params.bias_correction is false, which this version's Adam does not do; leave it at true"
        )
    kept = {key: arguments[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
    if moments is not None:
        return FusedAdam(parameters, **kept, adam_w_mode=decoupled, state_dtype=moments)
    return _made(chosen, kept, parameters, fused=fused)


def _muon(arguments: dict[str, Any], parameters: Parameters, module: nn.Module, state_dtype: torch.dtype) -> Muon:
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
    return Muon(groups, momentum=arguments["momentum"], ns_form=arguments["ns_method"], state_dtype=state_dtype)


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
    chosen: type[torch.optim.Optimizer], arguments: dict[str, Any], parameters: Parameters, *, fused: bool = False
) -> torch.optim.Optimizer:
    if fused and chosen in FUSED and not {"fused", "foreach"} & arguments.keys():
        arguments = {**arguments, "fused": True}
    try:
        return chosen(parameters, **arguments)
    except TypeError as error:
        raise ValueError(f"optimizer.params does not fit {chosen.__name__}: {error}") from error
