"""`drivetrain check`: what a configuration file comes to, or everything that is wrong with it.

Nothing is started: no process group, no model. The exit status is 0 for a configuration that can be used with the given
number of ranks, and 1 for any other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from drivetrain.engine.config import (
    BatchSizes,
    Config,
    ConfigError,
    Examination,
    Problem,
    Section,
    Status,
    describe,
    examine,
)
from drivetrain.engine.config.schema.keys import key_of
from drivetrain.engine.config.schema.tree import effective

PREVIEW = (0, 1, 2, 3, 4, 10, 100, 1000, 10_000)
"""Optimizer steps whose learning rates are shown."""


def check(
    path: Annotated[str, typer.Argument(metavar="FILE", help="The configuration: a JSON file, or base64 text of one.")],
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Ranks that see different samples.")] = 1,
    optimizer_steps: Annotated[
        int | None,
        typer.Option("--optimizer-steps", min=1, help='Optimizer steps in the run, for schedules that are "auto".'),
    ] = None,
    hint: Annotated[
        list[str] | None, typer.Option("--hint", metavar="KEY=VALUE", help='Value of a key that is "auto". Repeatable.')
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show keys that are not in this version too.")] = False,
) -> None:
    """Validate a configuration file, and show what it comes to.

    The exit status is 0 if it can be used, and 1 if not.
    """
    console = Console()
    problems: tuple[Problem, ...]
    source: str | None = None
    try:
        examination = examine(path, hints=_hints(hint or [], optimizer_steps))
        problems, source = examination.problems, examination.source
        batch, more = _batch(examination, world_size)
        problems += more
    except ConfigError as error:
        problems, source = error.problems, error.source
    if problems:
        _show_problems(console, problems, source)
        raise typer.Exit(1)
    assert batch is not None
    config = examination.config
    console.print(_settings(config, show_all))
    console.print(_batch_table(batch, world_size))
    if config.scheduler is not None:
        console.print(_schedule_table(config, optimizer_steps))
    for notice in examination.notices:
        line = f" (line {notice.line})" if notice.line is not None else ""
        console.print(f"[yellow]{notice.kind}[/yellow]{line}: {escape(str(notice))}", soft_wrap=True)
    console.print(
        f"[green]{escape(path if source else 'the configuration')} is valid[/green] for {_ranks(world_size)}.",
        soft_wrap=True,
    )


# ---------------------------------------------------------------------------------------------------------------- input


def _hints(pairs: list[str], optimizer_steps: int | None) -> dict[str, Any]:
    """`KEY=VALUE` pairs as hints. A value that is no JSON is text."""
    hints: dict[str, Any] = {}
    if optimizer_steps is not None:
        hints["scheduler.params.total_num_steps"] = optimizer_steps
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"{pair!r} is not of the form KEY=VALUE", param_hint="--hint")
        try:
            hints[key] = json.loads(text)
        except json.JSONDecodeError:
            hints[key] = text
    return hints


def _batch(examination: Examination, ranks: int) -> tuple[BatchSizes | None, tuple[Problem, ...]]:
    """The batch sizes, or what is wrong with them. Nothing is said of them while one of the three has a problem."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    if any(problem.path in names for problem in examination.problems):
        return None, ()
    try:
        return examination.config.resolve_batch(ranks), ()
    except ConfigError as error:
        lines = examination.lines
        return None, tuple(replace(problem, line=lines.get(problem.path)) for problem in error.problems)


# --------------------------------------------------------------------------------------------------------------- output


def _show_problems(console: Console, problems: tuple[Problem, ...], source: str | None) -> None:
    count = len(problems)
    name = f" in {source}" if source else ""
    console.print(f"[bold red]{count} problem{'' if count == 1 else 's'}[/bold red]{escape(name)}", soft_wrap=True)
    for problem in problems:
        first, *rest = describe(problem, source).split("\n")
        console.print(f"\n[bold]{escape(first)}[/bold]", soft_wrap=True, highlight=False)
        for line in rest:
            console.print(escape(line), soft_wrap=True, highlight=False)
    if any(problem.found == '"auto"' for problem in problems):
        console.print(
            '\nA value for "auto" can be tried with --hint KEY=VALUE, and the number of steps with --optimizer-steps.'
        )


@dataclass(frozen=True, kw_only=True)
class _Row:
    path: str
    value: object
    given: bool
    status: Status


def _settings(config: Config, show_all: bool) -> Table:
    """The effective settings: everything that works or was given, section by section."""
    table = Table(title="Effective settings", title_justify="left")
    for column in ("key", "value", "from", "status"):
        table.add_column(column, overflow="fold")
    before = ""
    for row in _rows(config):
        if not (show_all or row.given or row.status is Status.WORKS):
            continue
        section = row.path.rpartition(".")[0]
        if section != before:
            table.add_section()
        before = section
        style = "" if row.given else "dim"
        table.add_row(
            row.path, escape(_text(row.value)), "file" if row.given else "default", row.status.value, style=style
        )
    return table


def _rows(section: Section, path: str = "", around: Status = Status.WORKS, given: bool = True) -> Iterator[_Row]:
    """Every key with a value of its own; those of a section before the sections inside it."""
    inner = []
    for name, info in type(section).model_fields.items():
        key, value = key_of(info), getattr(section, name)
        here = f"{path}{info.alias or name}"
        status = effective(key.status, around)
        is_given = given and name in section.model_fields_set
        if isinstance(value, Section):
            inner.append((value, f"{here}.", status, is_given))
        elif isinstance(value, Mapping) and path in ("optimizer.", "scheduler."):
            yield from _argument_rows(section, here, value, status)
        elif key.listed or is_given:
            yield _Row(path=here, value="(secret)" if key.secret and value else value, given=is_given, status=status)
    for part in inner:
        yield from _rows(*part)


def _argument_rows(section: Section, path: str, given: Mapping[str, Any], status: Status) -> Iterator[_Row]:
    filled = section.arguments()  # type: ignore[attr-defined]
    for name, value in {**filled, **given}.items():
        yield _Row(path=f"{path}.{name}", value=value, given=name in given, status=status)


def _text(value: object) -> str:
    if value == sys.maxsize:
        return "no limit"
    return json.dumps(value, default=lambda other: list(other) if isinstance(other, tuple) else repr(other))


def _batch_table(batch: BatchSizes, ranks: int) -> Table:
    table = Table(title=f"Batch on {_ranks(ranks)}", title_justify="left")
    for column in ("samples per step", "micro-batch", "accumulation", "ranks"):
        table.add_column(column, justify="right")
    table.add_row(*(f"{number:,}" for number in (batch.train, batch.micro, batch.accumulation, ranks)))
    return table


def _schedule_table(config: Config, optimizer_steps: int | None) -> Group:
    """The learning rates of some steps: what the optimizer uses at that step, counted from 0."""
    section = config.scheduler
    assert section is not None
    base = config.optimizer.lr if config.optimizer is not None else None
    title = f"Learning rate by {section.type}"
    if base is None:
        title += ", as a share of the optimizer's (no rate is in the file)"
    table = Table()
    arguments = section.arguments()
    last = optimizer_steps or arguments.get("total_num_steps") or PREVIEW[-1]
    steps = sorted({*(step for step in PREVIEW if step < last), last - 1})
    # The schedules need torch, whose import takes longer than all the rest.
    rates = import_module("drivetrain.engine.lr").preview(section, 1.0 if base is None else base, steps)
    table.add_column("step")
    for step in steps:
        table.add_column(str(step), justify="right")
    table.add_row("lr", *(f"{rate:.4g}" for rate in rates))
    return Group(Text(title, style="italic"), table)  # a title of the table's own would wrap at its width


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
