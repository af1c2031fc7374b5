"""`python -m drivetrain.engine.cli`, the same as the command `drivetrain`."""

from __future__ import annotations

from drivetrain.engine.cli import main

main()
