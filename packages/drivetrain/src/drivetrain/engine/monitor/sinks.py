"""Where metrics go: files that survive a crash and go on after a resume.

A metric record is a step and named scalars. Each sink writes it as one whole line and flushes, so that a run that is
killed has lost at most the line being written. Opened again on the same file, a sink goes on where the file ends: it
removes a line that a crash cut off, keeps the header that is there, and, told by `rewind` at which step the run
resumes, drops the records of steps that are about to be repeated. Rewriting goes through a temporary file and a
rename.

Files say what Python floats say: JSON has no NaN or infinity, so these are written as the strings "NaN", "Infinity" and
"-Infinity", which `float` reads; `read_jsonl` turns them back.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TextIO

_LOGGER = logging.getLogger("drivetrain.monitor")

Scalar = float | int | str | bool | None
"""What a metric may be."""

_NON_FINITE: Mapping[str, float] = MappingProxyType({"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf})

REFERENCE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "loss": "Train/Samples/train_loss",
        "lr": "Train/Samples/lr",
        "loss_scale": "Train/Samples/loss_scale",
        "forward_ms": "Train/Samples/elapsed_time_ms_forward",
        "backward_ms": "Train/Samples/elapsed_time_ms_backward",
        "step_ms": "Train/Samples/elapsed_time_ms_step",
    }
)
"""Under which event names the de-facto standard's monitors write our metrics."""


class Sink(Protocol):
    """A destination of metrics. Used by one rank."""

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Record the metrics of one step. Several records of one step are allowed (training, then validation)."""

    def rewind(self, step: int) -> None:
        """Forget what was recorded beyond `step`, because the run resumes there. A sink that cannot does nothing."""

    def close(self) -> None:
        """Finish; safe to call twice."""


class SinkGroup:
    """Several sinks as one. A sink that fails (a full disk) is reported once and left out: metrics never end a run."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Write to each sink that still works."""
        self._each(lambda sink: sink.write(step, values))

    def rewind(self, step: int) -> None:
        """Rewind each sink that still works."""
        self._each(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Close all sinks."""
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # a client of a web service may raise anything
                _LOGGER.warning("metrics are no longer written to %s: %s: %s", sink, type(error).__name__, error)
                self._sinks.remove(sink)


class JsonlSink:
    """One JSON object per line: `{"step": 3, "loss": 2.5, ...}`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens or goes on with the file at `path`; makes its folder."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Append one line."""
        record = {"step": step, **{name: _json_value(value) for name, value in values.items() if name != "step"}}
        _write_line(self._file, json.dumps(record, allow_nan=False) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the lines of later steps."""
        self._file.close()
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not line.strip() or json.loads(line).get("step", 0) <= step]
        if len(kept) < len(lines):
            _replace(self._path, "".join(kept))
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __str__(self) -> str:
        return str(self._path)


class CsvSink:
    """One table: a column per metric, a row per record, empty cells where a record lacks a metric.

    A metric that appears later adds a column on the right: the file is rewritten once with the wider header.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Opens or goes on with the file at `path`; makes its folder."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(self._path)
        rows = self._rows()
        self._columns = list(rows[0]) if rows else ["step"]
        if "step" not in self._columns:
            raise ValueError(f"{self._path} is a table without a column 'step'; it holds {', '.join(self._columns)}")
        if not rows:
            _replace(self._path, _csv_text([self._columns]))
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Append one row."""
        new = [name for name in values if name not in self._columns]
        if new:
            self._widen(new)
        cells = {**values, "step": step}
        _write_line(self._file, _csv_text([[_cell(cells.get(name)) for name in self._columns]]))

    def rewind(self, step: int) -> None:
        """Drop the rows of later steps."""
        self._file.close()
        header, *rows = self._rows()
        at = header.index("step")
        kept = [row for row in rows if int(row[at]) <= step]
        if len(kept) < len(rows):
            _replace(self._path, _csv_text([header, *kept]))
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __str__(self) -> str:
        return str(self._path)

    def _rows(self) -> list[list[str]]:
        if not self._path.exists():
            return []
        with self._path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.reader(file) if row]  # the reader gives a blank line as an empty row

    def _widen(self, new: Sequence[str]) -> None:
        self._file.close()
        _, *rows = self._rows()
        self._columns += new
        filler = [""] * len(new)
        _replace(self._path, _csv_text([self._columns, *(row + filler for row in rows)]))
        self._file = self._path.open("a", encoding="utf-8", newline="")


class EventCsvSink:
    """The layout of the configuration key `csv_monitor`: a folder with one file of (position, value) rows per metric.

    The event `Train/Samples/train_loss` is in `<output_path>/<job_name>/Train_Samples_train_loss.csv` under the header
    `step,train_loss`. Its rows are at the number of samples seen (metric "samples"), or at the step where a record does
    not tell it.
    """

    def __init__(self, output_path: str | os.PathLike[str], job_name: str) -> None:
        """An empty `output_path` means `~/csv_monitor`."""
        self._folder = (Path(output_path) if str(output_path) else Path.home() / "csv_monitor") / job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Append a row to the file of each number among the metrics."""
        position = values.get("samples", step)
        for name, value in values.items():
            if name != "samples" and isinstance(value, (int, float)) and not isinstance(value, bool):
                event = REFERENCE_NAMES.get(name, name)
                _write_line(self._file(event), _csv_text([[_cell(position), _cell(value)]]))

    def rewind(self, step: int) -> None:
        """Nothing: a row tells its number of samples, not its step."""

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __str__(self) -> str:
        return str(self._folder)

    def _file(self, event: str) -> TextIO:
        if event not in self._files:
            path = self._folder / (event.replace("/", "_").replace(" ", "_") + ".csv")
            _drop_cut_line(path)
            fresh = not path.exists() or path.stat().st_size == 0
            self._files[event] = path.open("a", encoding="utf-8", newline="")
            if fresh:
                _write_line(self._files[event], _csv_text([["step", event.rsplit("/", 1)[-1]]]))
        return self._files[event]


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Scalar]]:
    """The records of a `JsonlSink`, in order; a last line that a crash cut off is left out.

    Raises ValueError, with the number of the line, if another line is not a JSON object.
    """
    records: list[dict[str, Scalar]] = []
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.strip() or not line.endswith("\n"):
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error.msg}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: expected an object, found {type(record).__name__}")
        records.append({name: _python_value(value) for name, value in record.items()})
    return records


def _json_value(value: Scalar) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _python_value(value: Scalar) -> Scalar:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _cell(value: Scalar) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _csv_text(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _write_line(file: TextIO, line: str) -> None:
    file.write(line)
    file.flush()


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8", newline="")
    temporary.replace(path)


def _drop_cut_line(path: Path) -> None:
    """Remove what follows the last newline: a crash left it unfinished."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
