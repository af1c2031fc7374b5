"""The command `drivetrain`. Each command parses its options, calls one function of the engine, prints what it says."""

from __future__ import annotations

from drivetrain.engine.cli.main import main

__all__ = ["main"]
