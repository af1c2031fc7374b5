"""Which implementation serves which op on which device: one explicit table.

Problem: "is the fast kernel used, and if not, why?" must have an answer that can be read, not one spread over `try:
import` blocks.
Idea: a table from op and device type to the implementation in use, with a reason wherever it isn't the fastest kind
that this wheel knows. `available` is what `drivetrain report` prints; `resolve` is what the optimizers call.
Invariant: every op has an entry for every known device type; a device type that isn't listed is served by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from . import native, quantize_native, quantize_reference, reference
from .core import CORE

__all__ = ["KernelStatus", "available", "resolve"]

Implementation = Callable[..., Any]

_REFERENCE: Final[Mapping[str, Implementation]] = MappingProxyType(
    {
        "adam_step": reference.adam_step,
        "adam_rollback": reference.adam_rollback,
        "lion_step": reference.lion_step,
        "lamb_moments": reference.lamb_moments,
        "lamb_apply": reference.lamb_apply,
        "adagrad_step": reference.adagrad_step,
        "sgd_step": reference.sgd_step,
        "sum_of_squares": reference.sum_of_squares,
        "unscale": reference.unscale,
        "cast": reference.cast,
        "quantize": quantize_reference.quantize,
        "dequantize_reduce": quantize_reference.dequantize_reduce,
        "reduce_quantized": quantize_reference.reduce_quantized,
        "pack_signs": quantize_reference.pack_signs,
        "unpack_signs": quantize_reference.unpack_signs,
    }
)

_NATIVE_CPU: Final[Mapping[str, Implementation]] = MappingProxyType(
    {
        "adam_step": native.adam_step,
        "adam_rollback": native.adam_rollback,
        "lion_step": native.lion_step,
        "lamb_moments": native.lamb_moments,
        "lamb_apply": native.lamb_apply,
        "adagrad_step": native.adagrad_step,
        "sgd_step": native.sgd_step,
        "sum_of_squares": native.sum_of_squares,
        "unscale": native.unscale,
        "cast": native.cast,
        "quantize": quantize_native.quantize,
        "dequantize_reduce": quantize_native.dequantize_reduce,
        "reduce_quantized": quantize_native.reduce_quantized,
        "pack_signs": quantize_native.pack_signs,
        "unpack_signs": quantize_native.unpack_signs,
    }
)

_DEVICES: Final = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class KernelStatus:
    """One line of the report: `implementation` serves `op` on `device`.

    `reason` says why it isn't a faster one, and is empty where it is the fastest.
    """

    op: str
    device: str
    implementation: str
    reason: str


def resolve(op: str, device: torch.device | str) -> Implementation:
    """The function that serves `op` (a name in `available()`) on tensors of `device`.

    It has the signature of `reference.<op>` or `quantize_reference.<op>`.
    """
    if op not in _REFERENCE:
        raise KeyError(f"no op named {op!r}; known ops: {', '.join(sorted(_REFERENCE))}")
    if CORE.module is not None and torch.device(device).type == "cpu":
        return _NATIVE_CPU[op]
    return _REFERENCE[op]


def available() -> list[KernelStatus]:
    """The whole table, for `drivetrain report`: one entry per op and device type, in a stable order.

    Touches no device.
    """
    return [_status(op, device) for op in _REFERENCE for device in _DEVICES]


def _status(op: str, device: str) -> KernelStatus:
    if device != "cpu":
        return KernelStatus(op=op, device=device, implementation="torch", reason="this version has no kernel for it")
    if CORE.module is None:
        return KernelStatus(op=op, device=device, implementation="torch", reason=CORE.reason)
    return KernelStatus(op=op, device=device, implementation=f"native ({CORE.module.instruction_set()})", reason="")
