"""What goes into a module and comes out of it: nested tensors, and the loss among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a module returned: itself, its ``loss``, or its first item.

    Raises:
        TypeError: there is none.
        ValueError: it is no scalar.
    """
    loss: Any = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        loss = getattr(output, "loss", None)
        if loss is None and isinstance(output, (tuple, list)) and output:
            loss = output[0]
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"no loss tensor was found in what the module returned, {_contents(output)}; return the loss, or something "
            "whose 'loss' or first item it is"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"the module returned a tensor of shape {tuple(loss.shape)} where its loss was expected, a scalar: compute "
            "the loss in the module's forward, or call engine(...), engine.backward(loss) and engine.step() yourself"
        )
    return loss


def _contents(output: object) -> str:
    """What an output is made of, in a few words."""
    if isinstance(output, Mapping):
        return f"a mapping with the keys {listed(output)}" if output else "an empty mapping"
    if is_dataclass(output):
        found = [field.name for field in fields(output) if getattr(output, field.name, None) is not None]
        return f"the dataclass {type(output).__name__} with {listed(found) or 'nothing'} in it"
    return f"something of type {type(output).__name__}"


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within the context, and each part of ``module`` in its own mode again after it."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def listed(values: Iterable[object]) -> str:
    """Values in words, sorted."""
    return ", ".join(sorted(str(value) for value in values))


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor in its mappings, tuples and lists changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        mapped = [map_tensors(item, change) for item in value]
        if isinstance(value, list):
            return mapped
        return type(value)(*mapped) if type(value) is not tuple else tuple(mapped)
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors on ``device``."""
    return map_tensors(value, lambda t: t.to(device, non_blocking=True))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
