"""`drivetrain run`: start a training script on several ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from drivetrain.engine.launch import LaunchError, LaunchSpec, default_nproc, launch, plan_text
from drivetrain.engine.launch.spec import TargetKind

_USAGE_ERROR = 2
_SHOW_CURSOR = "\x1b[?25h"

_NODES = "Several machines"
_OUTPUT = "Output"


def run(  # noqa: PLR0913 - one parameter per option is how typer reads them
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python script (with -m a module, with --no-python a command).")
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Handed to it untouched.")] = None,
    *,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", "--nproc-per-node", "-n", help="Ranks on this machine. Default: one per GPU; without GPUs, one."
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in python -m.")] = False,
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a command, run without python.")] = False,
    threads_per_rank: Annotated[
        int | None,
        typer.Option(
            help="OMP_NUM_THREADS of each rank. Default: the variable if it is set, else an equal share of the cores."
        ),
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Start all ranks again this often after a failure.")] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds for ranks to end after a signal, before they are killed.")
    ] = 5.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands and environments, start nothing.")
    ] = False,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            help="Also append the output of each rank to LOG_DIR/rank<R>/{stdout,stderr}.log. "
            "Rank 0 then no longer writes to a terminal, so a live progress bar becomes plain lines.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    all_output: Annotated[
        bool,
        typer.Option(
            "--all-output",
            help="Show the standard output of every rank. Default: of rank 0; errors of all ranks are always shown.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    nnodes: Annotated[
        int, typer.Option(help="Machines in the job; run the command on each.", rich_help_panel=_NODES)
    ] = 1,
    node_rank: Annotated[int, typer.Option(help="Number of this machine, from 0.", rich_help_panel=_NODES)] = 0,
    master_addr: Annotated[
        str | None, typer.Option(help="Host name or address of machine 0, the same everywhere.", rich_help_panel=_NODES)
    ] = None,
    master_port: Annotated[
        int | None,
        typer.Option(
            help="Port on machine 0. Default: 29500 for several machines; a free one, on the loopback only, for one.",
            rich_help_panel=_NODES,
        ),
    ] = None,
) -> None:
    """Start a training script on several ranks.

    Ranks find torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ...) set.

    When one rank fails, all are stopped; the error of the first is shown.

    Options stand before SCRIPT; what follows it is the script's.
    """
    try:
        spec = LaunchSpec(
            target=target,
            args=tuple(args or ()),
            kind=_kind(module=module, no_python=no_python),
            nproc=default_nproc() if nproc is None else nproc,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            max_restarts=max_restarts,
            threads_per_rank=threads_per_rank,
            log_dir=log_dir,
            all_output=all_output,
            grace=grace,
        )
        if dry_run:
            print(plan_text(spec))
            return
        outcome = launch(spec, notice=_say)
    except LaunchError as error:
        _refuse(str(error))
    if outcome.message:
        if sys.stdout.isatty():
            sys.stdout.write(_SHOW_CURSOR)  # a progress bar that was killed had no chance to
            sys.stdout.flush()
        _say(outcome.message)
    raise typer.Exit(outcome.exit_code)


def _kind(*, module: bool, no_python: bool) -> TargetKind:
    if module and no_python:
        raise LaunchError(
            "--module and --no-python contradict each other: the first runs python -m, the second no python."
        )
    return "module" if module else "command" if no_python else "script"


def _say(text: str) -> None:
    print(f"drivetrain run: {text}", file=sys.stderr, flush=True)


def _refuse(text: str) -> NoReturn:
    _say(text)
    raise typer.Exit(_USAGE_ERROR)
