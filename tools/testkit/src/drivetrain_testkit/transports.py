"""The two carriers of host tensors, for tests that must pass on both."""

from __future__ import annotations

import importlib
from typing import Any

TRANSPORTS = ("gloo", "shared memory")


def shared_memory() -> Any:
    """What ``Mesh.create`` takes as ``shared_memory``, or None where drivetrain-kernels is not installed."""
    kernels = _kernels()
    return None if kernels is None else kernels.SharedMemoryGroup


def refusal(transport: str) -> str:
    """Why a transport cannot be tested here; empty where it can."""
    if transport == "gloo":
        return ""
    kernels = _kernels()
    return "drivetrain-kernels is not installed" if kernels is None else str(kernels.shared_memory_refusal())


def setting(transport: str) -> dict[str, str]:
    """The environment of ranks in which a mesh made with `shared_memory` uses this transport."""
    return {"DRIVETRAIN_SHARED_MEMORY": "0" if transport == "gloo" else "1"}


def _kernels() -> Any:
    try:
        return importlib.import_module("drivetrain.kernels")
    except ModuleNotFoundError:
        return None
