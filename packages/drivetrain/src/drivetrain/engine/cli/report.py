"""`drivetrain report`: versions, devices, backends and kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drivetrain.engine.report import Fact, Report, collect


def report(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts and bug reports.")] = False,
) -> None:
    """Show versions, devices, backends, and which kernels are available and why not.

    Always ends with status 0: what cannot be found out is shown as unknown, with the reason.
    """
    collected = collect()
    if as_json:
        print(json.dumps(collected.as_json(), indent=2))
        return
    console = Console()
    for table in tables(collected):
        console.print(table)


def tables(collected: Report) -> list[Table]:
    """One table per section of the report."""
    made = []
    for section in collected.sections:
        table = Table(
            title=section.title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False
        )
        table.add_column(style="cyan", overflow="fold", min_width=16, ratio=1)
        table.add_column(overflow="fold")
        table.add_column(style="dim", overflow="fold")
        for fact in merged(section.facts):
            table.add_row(escape(fact.name), escape(fact.value), escape(fact.reason))
        made.append(table)
    return made


def merged(facts: Sequence[Fact]) -> list[Fact]:
    """One line for all facts with the same value for the same reason: twenty ops without a kernel say it once."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for fact in facts:
        names.setdefault((fact.value, fact.reason, "" if fact.reason else fact.name), []).append(fact.name)
    return [Fact(name=", ".join(group), value=value, reason=reason) for (value, reason, _), group in names.items()]
