"""Which implementation serves which op on which device: one explicit table.

Problem: "is the fast kernel used, and if not, why?" must have an answer that can be read, not one spread over `try:
import` blocks.
Idea: a table from op to its implementations: in plain torch always, native for host memory and in Triton for GPUs where
there is one. They are imported when they are first used, so that importing the package costs little and needs neither a
compiler nor Triton. `available` is what `drivetrain report` prints; `resolve` is what the public functions call.
Invariant: every op has a torch implementation, which serves every device that has nothing faster.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from torch import Tensor

from .core import CORE

__all__ = ["Implementation", "KernelStatus", "Kind", "available", "implementation", "resolve"]

Implementation = Callable[..., Any]
Kind = Literal["torch", "native", "triton"]


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Modules under `torch_ops`, `native_ops` and `triton_ops` that hold a function of the op's name."""

    torch: str
    native: str | None = None
    triton: str | None = None

    def module(self, kind: Kind) -> str | None:
        return {"torch": self.torch, "native": self.native, "triton": self.triton}[kind]


_TOKENS: Final = _Row(torch="token_permutation", triton="token_permutation")
_NORM: Final = _Row(torch="norm", triton="norm")
_CROSS_ENTROPY: Final = _Row(torch="cross_entropy", triton="cross_entropy")
_ACTIVATION: Final = _Row(torch="activation", triton="activation")
_STEP: Final = _Row(torch="steps", native="steps", triton="steps")
_QUANTIZE: Final = _Row(torch="quantize", native="quantize", triton="quantize")
_PAGED: Final = _Row(torch="paged_attention", triton="paged_attention")

_TABLE: Final[Mapping[str, _Row]] = MappingProxyType(
    {
        "adam_step": _STEP,
        "adam_rollback": _STEP,
        "lion_step": _STEP,
        "lamb_moments": _STEP,
        "lamb_apply": _STEP,
        "adagrad_step": _STEP,
        "sgd_step": _STEP,
        "sum_of_squares": _STEP,
        "unscale": _STEP,
        "cast": _STEP,
        "orthogonalize": _Row(torch="muon", triton="muon"),
        "quantize": _QUANTIZE,
        "dequantize_reduce": _QUANTIZE,
        "reduce_quantized": _QUANTIZE,
        "pack_signs": _QUANTIZE,
        "unpack_signs": _QUANTIZE,
        "top_k_gating": _Row(torch="gating", triton="gating"),
        "expert_histogram": _TOKENS,
        "permutation": _TOKENS,
        "permute_tokens": _TOKENS,
        "unpermute_tokens": _TOKENS,
        "grouped_matmul": _Row(torch="grouped_matmul", triton="grouped_matmul"),
        "rms_norm": _NORM,
        "layer_norm": _NORM,
        "rotary_embedding": _Row(torch="rotary", triton="rotary"),
        "swiglu": _ACTIVATION,
        "geglu": _ACTIVATION,
        "bias_gelu": _ACTIVATION,
        "bias_dropout_residual": _ACTIVATION,
        "masked_softmax": _Row(torch="softmax", triton="softmax"),
        "cross_entropy": _CROSS_ENTROPY,
        "linear_cross_entropy": _CROSS_ENTROPY,
        "paged_decode": _PAGED,
        "ragged_attention": _PAGED,
        "write_cache": _PAGED,
        "evoformer_attention": _Row(torch="evoformer_attention", triton="evoformer_attention"),
        "block_sparse_attention": _Row(torch="sparse_attention", triton="sparse_attention"),
        "prepare_weight": _Row(torch="matmul", native="matmul"),
        "quantized_matmul": _Row(torch="matmul", native="matmul", triton="matmul"),
    }
)

_FASTEST: Final[Mapping[str, Kind]] = MappingProxyType({"cpu": "native", "cuda": "triton"})
_NO_TRITON: Final = "Triton is not installed; pip install 'drivetrain-kernels[triton]'"


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
    """The fastest function that serves `op` (a name in `available()`) on tensors of `device`.

    All implementations of an op have the signature of the one in `torch_ops`.
    """
    return _resolve(op, (device if isinstance(device, torch.device) else torch.device(device)).type)


def resolve_for(op: str, tensor: Tensor) -> Implementation:
    """`resolve` on the device of `tensor`; for float64, which kernels are not written for, the one in plain torch."""
    return implementation(op, "torch") if tensor.dtype == torch.float64 else resolve(op, tensor.device)


def implementation(op: str, kind: Kind) -> Implementation:
    """The implementation of `op` of one kind, for tests and comparisons. RuntimeError, with the reason, without it."""
    refusal = _refusal(op, kind)
    if refusal:
        raise RuntimeError(f"{op}: no {kind} implementation: {refusal}")
    return _load(op, kind)


def available() -> list[KernelStatus]:
    """The whole table, for `drivetrain report`: one entry per op and device type, in a stable order.

    Touches no device.
    """
    return [_status(op, device) for op in _TABLE for device in _FASTEST]


@cache
def _resolve(op: str, device: str) -> Implementation:
    kind = _FASTEST.get(device, "torch")
    return _load(op, "torch" if _refusal(op, kind) else kind)


def _load(op: str, kind: Kind) -> Implementation:
    module = importlib.import_module(f"{__package__}.{kind}_ops.{_row(op).module(kind)}")
    found: Implementation = getattr(module, op)
    return found


def _row(op: str) -> _Row:
    if op not in _TABLE:
        raise KeyError(f"no op named {op!r}; known ops: {', '.join(sorted(_TABLE))}")
    return _TABLE[op]


def _refusal(op: str, kind: Kind) -> str:
    """Why `op` has no implementation of this kind here; empty where it has one."""
    if _row(op).module(kind) is None:
        return "this version has no kernel for it"
    if kind == "native" and CORE.module is None:
        return CORE.reason
    if kind == "triton" and not _has_triton():
        return _NO_TRITON
    return ""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _status(op: str, device: str) -> KernelStatus:
    kind = _FASTEST[device]
    reason = _refusal(op, kind)
    if reason:
        kind = "torch"
    detail = f" ({CORE.module.instruction_set()})" if kind == "native" and CORE.module is not None else ""
    return KernelStatus(op=op, device=device, implementation=kind + detail, reason=reason)
