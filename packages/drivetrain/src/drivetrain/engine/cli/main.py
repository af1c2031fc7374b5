"""The commands, and which module each lives in.

Problem: `drivetrain --help` and `drivetrain check` should answer at once, while other commands need torch, whose
import takes seconds. Idea: this module imports none of them. It reads the name of the wanted command from the command
line, imports that command's module and no other, and lists the rest by the help line in the table below.

The import by name in `_attach` is the one place of the package where an import is deferred on purpose.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import typer


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One command: the module and attribute that hold it (a function, or a `Typer` of subcommands), its help line."""

    module: str
    attribute: str
    help: str
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "run": Entry(
            module="drivetrain.engine.cli.run",
            attribute="run",
            help="Start a training script on several ranks.",
            # What follows the script belongs to the script, also where it looks like an option.
            settings=MappingProxyType({"allow_interspersed_args": False}),
        ),
        "check": Entry(
            module="drivetrain.engine.cli.check",
            attribute="check",
            help="Validate a configuration file.",
        ),
        "schema": Entry(
            module="drivetrain.engine.cli.schema",
            attribute="schema",
            help="Print the JSON Schema of the configuration, for editors.",
        ),
        "checkpoint": Entry(
            module="drivetrain.engine.cli.checkpoint",
            attribute="app",
            help="List, verify, inspect and export checkpoints.",
        ),
        "io": Entry(
            module="drivetrain.engine.cli.io",
            attribute="app",
            help="Measure a drive, and find the settings that it is fastest with.",
        ),
        "report": Entry(
            module="drivetrain.engine.cli.report",
            attribute="report",
            help="Show versions, devices, backends and kernels.",
        ),
    }
)

_NAMES_OF_HELP = MappingProxyType({"help_option_names": ["-h", "--help"]})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status; `arguments` defaults to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    application(given)(args=given, prog_name="drivetrain")


def application(arguments: Sequence[str]) -> typer.Typer:
    """The application for these arguments: the named command is loaded, the others are only listed."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,  # completion would have to load every command at each press of a key
        pretty_exceptions_enable=False,
        context_settings=dict(_NAMES_OF_HELP),
    )
    app.callback()(_root)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, entry in COMMANDS.items():
        if name == wanted:
            _attach(app, name, entry)
        else:
            app.command(name, help=entry.help)(_not_loaded)
    return app


def _attach(app: typer.Typer, name: str, entry: Entry) -> None:
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name, help=entry.help)
    else:
        app.command(name, context_settings={**_NAMES_OF_HELP, **entry.settings})(command)


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=lambda on: _version(on)),
    ] = False,
) -> None:
    """Train large PyTorch models on the machines that you have."""


def _version(on: bool) -> None:
    if on:
        print(f"drivetrain {installed_version()}")
        raise typer.Exit


def installed_version() -> str:
    """The version of the wheel `drivetrain`, or words that say that there is none."""
    try:
        return importlib.metadata.version("drivetrain")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


def _not_loaded() -> None:
    """Stands in the list of commands; never called, since the command that is called is loaded."""
