"""`drivetrain checkpoint list|verify|inspect|export`: look after checkpoints, without a model and on one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drivetrain.engine.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointSummary,
    ExportOptions,
    StoredCheckpoint,
    export_checkpoint,
    list_checkpoints,
    open_checkpoint,
    verify_checkpoint,
)
from drivetrain.engine.cli.sizes import human_bytes, parse_bytes

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

_FAULTY = 1
_USAGE_ERROR = 2
_DTYPES = MappingProxyType({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16})

Directory = Annotated[Path, typer.Argument(metavar="DIRECTORY", help="The folder that was given to save().")]
Tag = Annotated[str | None, typer.Option("--tag", "-t", help="Which checkpoint. Default: the one that `latest` names.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_command(directory: Directory, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder, oldest first; status 1 if one of them cannot be loaded."""
    with _errors_in_words():
        found = list_checkpoints(directory)
    if as_json:
        print(json.dumps([_summary_json(summary) for summary in found], indent=2))
    elif not found:
        print(f"no checkpoints in {directory}")
    else:
        Console().print(_summary_table(found))
    if any(summary.fault for summary in found):
        raise typer.Exit(_FAULTY)


@app.command()
def verify(directory: Directory, tag: Tag = None) -> None:
    """Read every byte of a checkpoint and compare it with its checksums; status 1 if something is wrong."""
    with _errors_in_words(faulty=_FAULTY):
        stored = open_checkpoint(directory, tag)
        faults = verify_checkpoint(directory, tag)
    name = stored.manifest.tag
    if faults:
        for fault in faults:
            print(fault)
        print(f"{name}: {len(faults)} fault{'s' if len(faults) > 1 else ''}; do not load it")
        raise typer.Exit(_FAULTY)
    size = human_bytes(stored.manifest.nbytes)
    print(f"{name}: all {len(stored.manifest.files)} files ({size}) are as they were written")


@app.command()
def inspect(directory: Directory, tag: Tag = None, as_json: AsJson = False) -> None:
    """Show what is in a checkpoint: who wrote it, its metadata, every tensor with shape and dtype."""
    with _errors_in_words():
        stored = open_checkpoint(directory, tag)
    if as_json:
        print(json.dumps(_manifest_json(stored), indent=2))
        return
    console = Console()
    for name, value in _heading(stored).items():
        console.print(f"[cyan]{name}[/cyan]  {escape(value)}", highlight=False, soft_wrap=True)
    console.print(_tensor_table(stored))


@app.command()
def export(
    directory: Directory,
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder for the safetensors files; made if it is missing.")
    ],
    tag: Tag = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, fp16 or bf16. Default: as they are stored.")] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Begin a new file beyond this size, such as 5GB or 500MB.")
    ] = "5GB",
) -> None:
    """Write the whole weights as safetensors files that other libraries load."""
    with _errors_in_words():
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"--dtype is {dtype!r}, expected one of {', '.join(_DTYPES)}")
        options = ExportOptions(
            dtype=None if dtype is None else _DTYPES[dtype],
            max_shard_bytes=parse_bytes(max_shard_size),
        )
        written = export_checkpoint(directory, out, tag=tag, options=options)
    files = f"{len(written.files)} file{'s' if len(written.files) != 1 else ''}"
    print(f"{written.tensors} tensors, {human_bytes(written.nbytes)}, in {files}: {written.path}")


@contextmanager
def _errors_in_words(faulty: int = _USAGE_ERROR) -> Iterator[None]:
    """Errors as a sentence and a status: `faulty` for a checkpoint that is there but cannot be used."""
    try:
        yield
    except (CheckpointError, ValueError, OSError) as error:
        print(f"drivetrain checkpoint: {error}", file=sys.stderr)
        found = isinstance(error, CheckpointError) and not isinstance(error, CheckpointNotFoundError)
        raise typer.Exit(faulty if found else _USAGE_ERROR) from None


def _summary_json(summary: CheckpointSummary) -> dict[str, Any]:
    return {
        "tag": summary.tag,
        "path": str(summary.path),
        "latest": summary.latest,
        "created": summary.created,
        "world_size": summary.world_size,
        "bytes": summary.nbytes,
        "tensors": summary.tensors,
        "fault": summary.fault,
    }


def _summary_table(found: list[CheckpointSummary]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("tag", "created", "ranks", "tensors", "size", ""):
        table.add_column(title, justify="right" if title in ("ranks", "tensors", "size") else "left", overflow="fold")
    for summary in found:
        note = summary.fault or ("latest" if summary.latest else "")
        numbers = [str(summary.world_size), str(summary.tensors), human_bytes(summary.nbytes)]
        table.add_row(escape(summary.tag), summary.created, *numbers, escape(note))
    return table


def _heading(stored: StoredCheckpoint) -> dict[str, str]:
    manifest = stored.manifest
    return {
        "tag": manifest.tag,
        "path": str(stored.path),
        "created": manifest.created,
        "written by": ", ".join(f"{name} {version}" for name, version in manifest.producer.items()),
        "ranks": str(manifest.world_size),
        "size": f"{human_bytes(manifest.nbytes)} in {len(manifest.files)} files",
        "metadata": json.dumps(dict(manifest.metadata), sort_keys=True),
        "aliases": ", ".join(f"{alias} -> {owner}" for alias, owner in manifest.aliases.items()) or "none",
    }


def _tensor_table(stored: StoredCheckpoint) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("size", justify="right")
    for name, record in sorted(stored.manifest.tensors.items()):
        shape = " x ".join(str(length) for length in record.shape) or "scalar"
        table.add_row(escape(name), shape, str(record.dtype).removeprefix("torch."), human_bytes(record.nbytes))
    return table


def _manifest_json(stored: StoredCheckpoint) -> dict[str, Any]:
    manifest = stored.manifest
    return {
        "tag": manifest.tag,
        "path": str(stored.path),
        "created": manifest.created,
        "producer": dict(manifest.producer),
        "world_size": manifest.world_size,
        "bytes": manifest.nbytes,
        "metadata": dict(manifest.metadata),
        "aliases": dict(manifest.aliases),
        "tensors": {
            name: {"shape": list(record.shape), "dtype": str(record.dtype).removeprefix("torch.")}
            for name, record in sorted(manifest.tensors.items())
        },
    }
