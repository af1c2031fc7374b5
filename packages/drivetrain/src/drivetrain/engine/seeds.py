"""Where a backward pass begins, when its caller gives the gradients: checked, shared out and scaled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Outputs = torch.Tensor | Sequence[torch.Tensor]
Gradients = torch.Tensor | Sequence[torch.Tensor | None]


def seeds(
    outputs: Outputs, gradients: Gradients, *, share: int, scale: float
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and the gradients to start from: each one given, divided by ``share`` and multiplied by ``scale``.

    Raises:
        TypeError, ValueError: they do not go together.
    """
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    given = [gradients] if gradients is None or isinstance(gradients, torch.Tensor) else list(gradients)
    if len(tensors) != len(given):
        raise ValueError(f"engine.backward got {len(tensors)} outputs and {len(given)} gradients; give one for each")
    found = []
    for index, (tensor, gradient) in enumerate(zip(tensors, given, strict=True)):
        found.append(_seed(f"output {index}", tensor, gradient, share, scale))
    return tensors, found


def _seed(name: str, tensor: torch.Tensor, gradient: torch.Tensor | None, share: int, scale: float) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or not isinstance(gradient, torch.Tensor | None):
        raise TypeError(
            f"engine.backward takes tensors and their gradients; {name} is of type {type(tensor).__name__}, and its "
            f"gradient of type {type(gradient).__name__}"
        )
    if not tensor.requires_grad:
        raise ValueError(f"engine.backward: {name} does not depend on trained parameters; leave it out")
    if gradient is None:
        if tensor.numel() != 1:
            raise ValueError(
                f"engine.backward: {name} has the shape {tuple(tensor.shape)} and no gradient; only a scalar does "
                "without one"
            )
        gradient = torch.ones_like(tensor)
    if gradient.shape != tensor.shape:
        raise ValueError(
            f"engine.backward: {name} has the shape {tuple(tensor.shape)}, and its gradient {tuple(gradient.shape)}"
        )
    if share > 1:
        gradient = gradient / share
    return gradient if scale == 1.0 else gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * scale
