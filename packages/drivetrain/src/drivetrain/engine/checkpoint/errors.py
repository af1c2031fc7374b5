"""What goes wrong with checkpoints, as exceptions whose text names the file, the tensor or the rank."""

from __future__ import annotations

__all__ = ["CheckpointError", "CheckpointNotFoundError"]


class CheckpointError(Exception):
    """A checkpoint could not be written, or what was found can't be trusted or doesn't fit."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for. The text lists those that are there."""


def some(names: list[str] | tuple[str, ...], limit: int = 8) -> str:
    """The first few of many names, for an error text: `a, b, c and 12 more`."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
