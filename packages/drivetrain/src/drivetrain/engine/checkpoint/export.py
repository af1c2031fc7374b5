"""Whole weights in safetensors files that other libraries load, from a checkpoint on disk or from live shards.

Problem: the weights may be larger than the memory of one machine, and are cut over ranks or files. `transformers`
expects one file `model.safetensors`, or several with an index, each tensor once.
Idea: a source hands out one tensor after the other, flat and in windows of at most 16 MiB, and each window goes
straight to the file. Which tensor goes into which file follows from the shapes alone, before anything is read.
Invariants: a tied weight is stored once, under the name of its owner, and the other names are in the file's metadata
(alias -> owner, where `safetensors.torch.save_model` puts them too); an export that fails leaves the files of an
earlier one as they were.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from drivetrain.comm import Axis, broadcast
from drivetrain.zero import FlatSlice

from .agreement import agree
from .errors import CheckpointError
from .extents import Extent, coverage_fault
from .files import BlockWriter, sync_directory, write_file
from .planner import TensorKind, check_slices
from .stored import StoredCheckpoint, open_checkpoint
from .tensorfile import DTYPES, TensorEntry, TensorFileLayout, as_bytes, dtype_name, plan_tensor_file

__all__ = ["ExportOptions", "Exported", "export_checkpoint", "export_tensors"]

_WINDOW_BYTES = 1 << 24
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export.

    Attributes:
        dtype: what floating point tensors are cast to; None keeps theirs. Integers and booleans are never cast.
        max_shard_bytes: how large a file may get before the next one is begun. A larger tensor has a file of its own.
        config: written to `config.json` (`transformers` needs the model's); None writes none, but the offline export
            takes what the checkpoint's metadata has under "model_config".
        prefix: tensors whose names start with it are exported, under the rest of their names.
    """

    dtype: torch.dtype | None = None
    max_shard_bytes: int = 5_000_000_000
    config: Mapping[str, Any] | None = None
    prefix: str = "model/"

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, found {self.max_shard_bytes}")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point dtype, found {self.dtype}")

    def target(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: the folder, its weight files, how many tensors and bytes of elements they hold."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int


class _Source(Protocol):
    """Whole tensors by the names they are exported under. `windows` may be collective: all ranks walk through all of
    them in order.
    """

    @property
    def kinds(self) -> Mapping[str, TensorKind]: ...

    def windows(self, name: str) -> Iterator[torch.Tensor]: ...


def export_checkpoint(
    directory: str | Path, out: str | Path, *, tag: str | None = None, options: ExportOptions | None = None
) -> Exported:
    """Exports the weights of a checkpoint. One process, no process group, no model.

    Raises CheckpointError for what `load` would raise it for, and if no tensor of the checkpoint starts with the
    prefix.
    """
    options = ExportOptions() if options is None else options
    stored = open_checkpoint(directory, tag)
    faults = stored.size_faults()
    if faults:
        raise CheckpointError("; ".join(faults))
    if options.config is None:
        options = replace(options, config=stored.manifest.metadata.get("model_config"))
    source = _StoredSource(stored, options.prefix)
    plan = _plan(source.kinds, _strip_aliases(stored.manifest.aliases, options.prefix), options)
    return _write(Path(out), plan, _stream(plan, source), options)


def export_tensors(
    tensors: Mapping[str, FlatSlice],
    out: str | Path,
    *,
    axis: Axis,
    aliases: Mapping[str, str] | None = None,
    options: ExportOptions | None = None,
) -> Exported:
    """Exports live weights, cut over the ranks of `axis`. Collective; the first rank writes.

    Costs one broadcast of every exported element, and about 32 MiB of memory on each rank. `tensors` and `aliases`
    are as in `save`.
    """
    options = ExportOptions() if options is None else options
    source = _LiveSource(tensors, axis, options.prefix)
    tied = _strip_aliases({} if aliases is None else aliases, options.prefix)
    plan: list[_ExportFile] = []
    agree(lambda: plan.extend(_plan(source.kinds, tied, options)), axis, "export: the plan of the files")
    stream = _stream(plan, source)
    failure: Exception | None = None
    if axis.rank == 0:
        try:
            _write(Path(out), plan, stream, options)
        except Exception as error:  # told to the others below, once they have walked through all windows too
            failure = error
    for _ in stream:
        pass

    def outcome() -> None:
        if failure is not None:
            raise failure

    agree(outcome, axis, "export: whether all is written")
    return _exported(Path(out), plan)


@dataclass(frozen=True, kw_only=True)
class _ExportFile:
    """One weight file and its layout."""

    name: str
    layout: TensorFileLayout


class _StoredSource:
    def __init__(self, stored: StoredCheckpoint, prefix: str) -> None:
        self._stored = stored
        self._prefix = prefix
        self.kinds: Mapping[str, TensorKind] = {
            name[len(prefix) :]: TensorKind(dtype=record.dtype, shape=record.shape)
            for name, record in stored.manifest.tensors.items()
            if name.startswith(prefix)
        }

    def windows(self, name: str) -> Iterator[torch.Tensor]:
        return self._stored.windows(self._prefix + name)


class _LiveSource:
    """Collective from its construction on: every rank learns who holds which elements of which tensor."""

    def __init__(self, tensors: Mapping[str, FlatSlice], axis: Axis, prefix: str) -> None:
        self._parts = {name[len(prefix) :]: part for name, part in tensors.items() if name.startswith(prefix)}
        self._axis = axis
        kinds: dict[str, TensorKind] = {}
        held: dict[str, list[Extent]] = {}
        for rank, parts in enumerate(agree(self._describe, axis, "export: what every rank holds")):
            for name, (code, shape, offset, numel) in parts.items():
                kind = TensorKind(dtype=DTYPES[code], shape=torch.Size(shape))
                if kinds.setdefault(name, kind) != kind:
                    raise CheckpointError(
                        f"{name} can't be exported: ranks hold it in different shapes or dtypes, rank {rank} as {kind}"
                    )
                if numel > 0:
                    held.setdefault(name, []).append(Extent(start=offset, stop=offset + numel, owner=f"rank {rank}"))
        for name, kind in kinds.items():
            fault = coverage_fault(held.get(name, ()), kind.shape.numel())
            if fault is not None:
                raise CheckpointError(f"{name} can't be exported: {fault}")
        self.kinds: Mapping[str, TensorKind] = kinds
        self._held = {name: sorted(extents, key=lambda extent: extent.start) for name, extents in held.items()}

    def windows(self, name: str) -> Iterator[torch.Tensor]:
        kind = self.kinds[name]
        step = _WINDOW_BYTES // kind.dtype.itemsize
        for extent in self._held.get(name, ()):
            owner = int(extent.owner.removeprefix("rank "))
            for start in range(extent.start, extent.stop, step):
                numel = min(step, extent.stop - start)
                if owner == self._axis.rank:
                    part = self._parts[name]
                    window = part.read(start - part.offset, numel).to(self._axis.device).contiguous()
                else:
                    window = torch.empty(numel, dtype=kind.dtype, device=self._axis.device)
                broadcast(window.view(torch.uint8), self._axis, src=owner, purpose=f"export of '{name}'").wait()
                yield window

    def _describe(self) -> dict[str, tuple[str, list[int], int, int]]:
        check_slices(self._parts)
        return {
            name: (
                dtype_name(part.data.dtype, name),
                list(part.shape),
                part.offset,
                part.data.numel() if part.writes else 0,
            )
            for name, part in self._parts.items()
        }


def _strip_aliases(aliases: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {
        alias[len(prefix) :]: owner[len(prefix) :]
        for alias, owner in aliases.items()
        if alias.startswith(prefix) and owner.startswith(prefix)
    }


def _plan(kinds: Mapping[str, TensorKind], aliases: Mapping[str, str], options: ExportOptions) -> list[_ExportFile]:
    """Which tensors go into which file, in the order of their names. The same on every rank."""
    entries = [
        TensorEntry(name=name, dtype=options.target(kinds[name].dtype), shape=tuple(kinds[name].shape))
        for name in sorted(kinds)
        if name not in aliases
    ]
    if not entries:
        raise CheckpointError(f"there is nothing to export: no tensor's name starts with {options.prefix!r}")
    shards: list[list[TensorEntry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > options.max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    planned = []
    for number, shard in enumerate(shards, start=1):
        inside = {entry.name for entry in shard}
        tied = {alias: owner for alias, owner in aliases.items() if owner in inside}
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        planned.append(_ExportFile(name=name, layout=plan_tensor_file(shard, {"format": "pt", **tied})))
    return planned


def _stream(plan: Sequence[_ExportFile], source: _Source) -> Iterator[tuple[int, torch.Tensor]]:
    """Everything to be written, as (number of the file, flat piece of its content). Each file begins with an empty
    piece.
    """
    for number, file in enumerate(plan):
        yield number, torch.empty(0)
        for entry in file.layout.entries:
            for window in source.windows(entry.name):
                yield number, window.to(entry.dtype)


def _write(
    out: Path, plan: Sequence[_ExportFile], stream: Iterator[tuple[int, torch.Tensor]], options: ExportOptions
) -> Exported:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out) as temporary:
        folder = Path(temporary)
        for number, windows in itertools.groupby(stream, key=lambda step: step[0]):
            layout = plan[number].layout
            with BlockWriter(folder / plan[number].name, layout.size) as file:
                file.write(layout.header)
                for _, window in windows:
                    for piece in as_bytes(window):
                        file.write(piece)
                file.finish()
        names = [file.name for file in plan]
        for name, content in _json_files(plan, options).items():
            write_file(folder / name, json.dumps(content, indent=2).encode() + b"\n")
            names.append(name)
        for path in out.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in names:
                path.unlink()
        for name in names:
            os.replace(folder / name, out / name)
    sync_directory(out)
    return _exported(out, plan)


def _json_files(plan: Sequence[_ExportFile], options: ExportOptions) -> dict[str, Mapping[str, Any]]:
    files: dict[str, Mapping[str, Any]] = {}
    if len(plan) > 1:
        files["model.safetensors.index.json"] = {
            "metadata": {"total_size": sum(entry.nbytes for file in plan for entry in file.layout.entries)},
            "weight_map": {entry.name: file.name for file in plan for entry in file.layout.entries},
        }
    if options.config is not None:
        config = dict(options.config)
        if options.dtype is not None:  # else the reader would cast back to what the model was trained in
            keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
            config.update(dict.fromkeys(keys, str(options.dtype).removeprefix("torch.")))
        files["config.json"] = config
    return files


def _exported(out: Path, plan: Sequence[_ExportFile]) -> Exported:
    entries = [entry for file in plan for entry in file.layout.entries]
    return Exported(
        path=out,
        files=tuple(file.name for file in plan),
        tensors=len(entries),
        nbytes=sum(entry.nbytes for entry in entries),
    )
