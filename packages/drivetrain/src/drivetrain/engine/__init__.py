"""The Drivetrain engine: configure, launch, train, checkpoint, observe. Start reading in `assemble.py` and `engine.py`.

Names are imported when they are first used: ``drivetrain --help`` and the launcher need none of them, and torch takes
seconds.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.engine.checkpoint import (
        CheckpointError,
        CheckpointNotFoundError,
        ExportOptions,
        LoadReport,
        SafetensorsSource,
        SaveOptions,
    )
    from drivetrain.engine.config import Config, ConfigError
    from drivetrain.engine.engine import Engine, initialize
    from drivetrain.engine.record import StepRecord
    from drivetrain.engine.snapshot import MODULE_ONLY, LoadParts

_HOMES = MappingProxyType(
    {
        "CheckpointError": "checkpoint",
        "CheckpointNotFoundError": "checkpoint",
        "Config": "config",
        "ConfigError": "config",
        "Engine": "engine",
        "ExportOptions": "checkpoint",
        "LoadParts": "snapshot",
        "LoadReport": "checkpoint",
        "MODULE_ONLY": "snapshot",
        "SafetensorsSource": "checkpoint",
        "SaveOptions": "checkpoint",
        "StepRecord": "record",
        "initialize": "engine",
    }
)

__all__ = [
    "MODULE_ONLY",
    "CheckpointError",
    "CheckpointNotFoundError",
    "Config",
    "ConfigError",
    "Engine",
    "ExportOptions",
    "LoadParts",
    "LoadReport",
    "SafetensorsSource",
    "SaveOptions",
    "StepRecord",
    "initialize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
