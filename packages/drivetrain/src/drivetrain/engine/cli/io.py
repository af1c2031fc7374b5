"""`drivetrain io bench|tune`: how fast a drive is, and the `aio` section that it is fastest with."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drivetrain.engine.checkpoint.files import replace_file
from drivetrain.engine.cli.sizes import binary_bytes, human_bytes, parse_bytes
from drivetrain.engine.config import ConfigError
from drivetrain.engine.config.edit import with_section
from drivetrain.engine.file_speed import FileSetting, FileSpeed, TrialFile, best_of, grid, search

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

_USAGE_ERROR = 2
_SHOWN = 8
_FIRST_LOOK = 64 << 20
_LEAST_LOOK = 16 << 20

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder on the drive, such as `nvme_path`.")]
Size = Annotated[str, typer.Option(help="Size of the file that is made there, and removed, such as 4GiB.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def bench(
    folder: Folder,
    block_size: Annotated[str, typer.Option(help="Bytes of one request.")] = "1MiB",
    queue_depth: Annotated[int, typer.Option(min=1, help="Requests of each thread in flight.")] = 32,
    parallelism: Annotated[int, typer.Option(min=1, help="Threads.")] = 1,
    size: Size = "1GiB",
    rounds: Annotated[int, typer.Option(min=1, help="Overwrite and read the file this often.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Measure how fast tensors are written to and read from a folder.

    A file is made there, overwritten and read past the page cache, and removed. Other users of the drive slow it down.
    """
    with _errors_in_words():
        setting = FileSetting(block_size=parse_bytes(block_size), queue_depth=queue_depth, parallelism=parallelism)
        setting.options()  # refuses what can't be, before anything is written
        with TrialFile(folder, parse_bytes(size), [setting]) as file:
            speeds = [file.measure(setting) for _ in range(rounds)]
            remarks = file.remarks()
    if as_json:
        print(json.dumps(_bench_json(setting, speeds, file, remarks), indent=2))
        return
    console = Console()
    console.print(_bench_table(speeds))
    console.print(
        f"{folder}: blocks of {binary_bytes(setting.block_size)}, {queue_depth} in flight per thread, "
        f"{parallelism} thread{'' if parallelism == 1 else 's'}, {human_bytes(file.size)} by {file.engine}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    for remark in remarks:
        console.print(f"[yellow]note[/yellow]: {escape(remark)}", soft_wrap=True, highlight=False)


@app.command()
def tune(
    folder: Folder,
    seconds: Annotated[float, typer.Option(min=0, help="Measure for about so long, besides making the file.")] = 60.0,
    size: Size = "1GiB",
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Put the section into this configuration; all else in it stays."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the `aio` section with which a folder's drive is fastest, and print it.

    Block sizes, depths and numbers of threads are tried, the better ones again and again. What counts is the time to
    write and read as much of each; of settings that are as good, the one that takes fewest threads and memory is named.
    """
    with _errors_in_words():
        text = None if config is None else _text_of(config)
        if text is not None:
            with_section(text, "aio", {}, source=str(config))  # what can't be edited is refused before measuring
        settings = grid(os.cpu_count() or 1)
        with TrialFile(folder, parse_bytes(size), settings) as file:
            ranking = search(partial(file.measure, amount=_amount(file, settings, seconds)), settings, seconds)
            remarks = file.remarks()
        best = best_of(ranking)
        if config is not None and text is not None:
            _write(config, with_section(text, "aio", best.setting.section(), source=str(config)))
    section = json.dumps({"aio": best.setting.section()}, indent=2)
    if as_json:
        print(section)
        return
    console = Console()
    console.print(_tune_table(ranking, best))
    for remark in remarks:
        console.print(f"[yellow]note[/yellow]: {escape(remark)}", soft_wrap=True, highlight=False)
    print(section)
    if config is not None:
        console.print(f"written to {config}", soft_wrap=True, highlight=False, markup=False)


def _amount(file: TrialFile, settings: list[FileSetting], seconds: float) -> int:
    """Bytes to write and read in one look, so that the time is enough to halve the settings down to one."""
    first = file.measure(FileSetting(queue_depth=32), amount=_FIRST_LOOK)
    looks = 2 * len(settings)
    return max(_LEAST_LOOK, int(first.both * seconds / looks / 2))


def _text_of(config: Path) -> str:
    try:
        return config.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{config} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _write(config: Path, text: str) -> None:
    """In one step, so that a crash leaves the old file or the new one; links and the file's mode stay."""
    target = config.resolve()
    mode = target.stat().st_mode
    replace_file(target, text.encode("utf-8"), suffix="drivetrain-io")
    target.chmod(mode)


def _bench_table(speeds: list[FileSpeed]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for title in ("GB/s", "slowest", "fastest"):
        table.add_column(title, justify="right")
    for name, rates in (("write", [speed.write for speed in speeds]), ("read", [speed.read for speed in speeds])):
        table.add_row(name, *(f"{rate / 1e9:.2f}" for rate in (statistics.median(rates), min(rates), max(rates))))
    return table


def _bench_json(
    setting: FileSetting, speeds: list[FileSpeed], file: TrialFile, remarks: list[str]
) -> dict[str, object]:
    return {
        "aio": setting.section(),
        "bytes": file.size,
        "engine": file.engine,
        "direct": file.direct,
        "write_bytes_per_second": [speed.write for speed in speeds],
        "read_bytes_per_second": [speed.read for speed in speeds],
        "remarks": remarks,
    }


def _tune_table(ranking: list[FileSpeed], best: FileSpeed) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("block", "depth", "threads", "write GB/s", "read GB/s", ""):
        table.add_column(title, justify="right")
    shown = ranking[:_SHOWN]
    for speed in [*shown, *([] if best in shown else [best])]:
        table.add_row(
            binary_bytes(speed.setting.block_size),
            str(speed.setting.queue_depth),
            str(speed.setting.parallelism),
            f"{speed.write / 1e9:.2f}",
            f"{speed.read / 1e9:.2f}",
            "chosen" if speed is best else "",
        )
    return table


@contextmanager
def _errors_in_words() -> Iterator[None]:
    try:
        yield
    except (ConfigError, ValueError, OSError, RuntimeError) as error:
        print(f"drivetrain io: {error}", file=sys.stderr)
        raise typer.Exit(_USAGE_ERROR) from None
