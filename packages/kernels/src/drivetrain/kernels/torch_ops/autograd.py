"""Typed access to what torch leaves untyped."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["apply"]


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply(*arguments)`."""
    return function.apply(*arguments)
