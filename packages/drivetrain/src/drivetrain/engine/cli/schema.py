"""`drivetrain schema`: the configuration as JSON Schema, for editors."""

from __future__ import annotations

import json

import typer

from drivetrain.engine.config import json_schema


def schema() -> None:
    """Print JSON Schema (draft 2020-12) of the configuration.

    Save it, and name the file in a configuration as "$schema": editors then complete keys and mark mistakes.
    """
    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
