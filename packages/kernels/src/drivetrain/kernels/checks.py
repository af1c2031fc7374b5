"""What ops check before an implementation is chosen.

Invariant: an implementation is only ever called with tensors that fit together, so none of them checks shapes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

__all__ = ["check_at_least", "check_floating", "check_fraction", "check_same_device", "check_shape"]

_FLOATING: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """TypeError unless every tensor that is given is float32, bfloat16, float16 or float64."""
    for role, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in _FLOATING:
            raise TypeError(
                f"{op}: {role} has dtype {tensor.dtype}; expected float32, bfloat16, float16 or float64: "
                "convert it first"
            )


def check_same_device(op: str, **tensors: Tensor | None) -> None:
    """ValueError unless all tensors that are given lie on the device of the first."""
    given = [(role, tensor) for role, tensor in tensors.items() if tensor is not None]
    first_role, first = given[0]
    for role, tensor in given[1:]:
        if tensor.device != first.device:
            raise ValueError(f"{op}: {role} lies on {tensor.device}, {first_role} on {first.device}: move one of them")


def check_shape(op: str, role: str, tensor: Tensor, expected: Sequence[int], meaning: str) -> None:
    """ValueError unless `tensor` has the shape `expected`, which `meaning` explains."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{op}: {role} has shape {tuple(tensor.shape)}; expected {tuple(expected)}, {meaning}")


def check_at_least(op: str, least: float, **values: float) -> None:
    """ValueError unless every value is finite and not below `least`."""
    for name, value in values.items():
        if not least <= value < float("inf"):
            raise ValueError(f"{op}: {name} must be a finite number >= {least}; found {value!r}")


def check_fraction(op: str, **values: float) -> None:
    """ValueError unless every value lies in [0, 1)."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{op}: {name} must lie in [0, 1); found {value!r}")
