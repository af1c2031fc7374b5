"""Loading a checkpoint into the slices that this rank holds now, whatever the cut was when it was saved.

Problem: a load that quietly fills only a part, or nothing, looks like one that worked.
Idea: everything that can go wrong is looked for before the first element is written: the manifest, the sizes of all
files, names, shapes and dtypes over all ranks. Then each rank reads its own elements and no others. The report tells
what was filled and what not, and by default anything that was asked for and can't be filled is an error.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader

from drivetrain.comm import Axis
from drivetrain.zero import FlatSlice

from .agreement import agree, gather, planned
from .client_state import CLIENT_STATE, decode_client_state
from .errors import CheckpointError, some
from .planner import FlatLoadPlanner, check_slices
from .random_state import RandomState
from .report import LoadReport, Reshaped
from .save import random_state_file
from .storage import ManifestReader
from .stored import StoredCheckpoint, open_checkpoint

__all__ = ["LoadOptions", "LoadedCheckpoint", "check_fit", "load"]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load.

    Attributes:
        strict: raise if a tensor that was asked for is missing or has another shape. If False they keep their
            values, and the report names them.
        prefixes: only tensors whose names start with one of these take part, of those asked for and of those in the
            checkpoint; `("model/",)` loads the module only. Empty: all.
        exhaustive: with `strict`, raise also if the checkpoint holds tensors that nobody asked for and whose names
            start with one of these: a model with fewer layers is another model.
    """

    strict: bool = True
    prefixes: tuple[str, ...] = ()
    exhaustive: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        return not self.prefixes or name.startswith(self.prefixes)


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What was loaded beside the tensors.

    Attributes:
        report: what happened to which tensor.
        metadata: the JSON that was saved.
        client_state: the client state that was saved.
        random_state: for this rank: its own if as many ranks load as saved, else one derived from rank 0's; None if
            none was saved.
        world_size: how many ranks saved.
    """

    report: LoadReport
    metadata: Mapping[str, Any]
    client_state: object
    random_state: RandomState | None
    world_size: int


def load(
    directory: str | Path,
    tag: str | None = None,
    *,
    tensors: Mapping[str, FlatSlice],
    axis: Axis | None = None,
    options: LoadOptions | None = None,
) -> LoadedCheckpoint:
    """Fills `tensors` from a checkpoint, casting to their dtypes. Collective over `axis`.

    Args:
        directory: as given to `save`.
        tag: which checkpoint; None takes the one that the file `latest` names.
        tensors: this rank's parts, by name. Ranks may ask for different names and cuts.
        axis: the ranks that load together; None for a process alone.
        options: see LoadOptions.

    Raises:
        CheckpointNotFoundError: no such directory or tag; the text lists the tags that are there.
        CheckpointError: a damaged or missing file; with `strict`, a missing or reshaped tensor; a dtype that can't
            be cast. Every rank raises. If it names a corrupted file, some tensors may already have been overwritten;
            in all other cases none is.
    """
    options = LoadOptions() if options is None else options
    wanted = {name: part for name, part in tensors.items() if options.takes(name)}
    opened: list[StoredCheckpoint] = []

    def look() -> str:
        check_slices(wanted)
        stored = open_checkpoint(directory, tag)
        faults = stored.size_faults(*((axis.rank, axis.size) if axis is not None else (0, 1)))
        if faults:
            raise CheckpointError("; ".join(faults))
        _check_dtypes(wanted, stored)
        opened.append(stored)
        return stored.manifest.tag + stored.manifest.created

    if len(set(agree(look, axis, "load: which checkpoint"))) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints under {directory}; all must load the same one from a shared file system"
        )
    stored = opened[0]
    report = _report(stored, _all_wanted(wanted, axis), options)
    _require_fit(report, options)
    loaded: list[LoadedCheckpoint] = []
    agree(lambda: loaded.append(_side_files(stored, report, axis)), axis, "load: the other files")
    filled = set(report.filled)
    names = {name: stored.manifest.stored_name(name) or name for name in wanted if name in filled}
    planned(lambda: _read_tensors(stored, {name: wanted[name] for name in names}, names, axis), axis)
    return loaded[0]


def check_fit(stored: StoredCheckpoint, tensors: Mapping[str, FlatSlice], options: LoadOptions) -> None:
    """Refuse what a strict load of these tensors would refuse, before anything is prepared for it. Not collective.

    Raises CheckpointError.
    """
    _require_fit(_report(stored, {name: tuple(part.shape) for name, part in tensors.items()}, options), options)
    _check_dtypes(tensors, stored)


def _require_fit(report: LoadReport, options: LoadOptions) -> None:
    surplus = any(name.startswith(options.exhaustive) for name in report.unexpected)
    if options.strict and (surplus or not report.complete):
        raise CheckpointError(_strict_text(report))


def _check_dtypes(wanted: Mapping[str, FlatSlice], stored: StoredCheckpoint) -> None:
    for name, part in wanted.items():
        stored_name = stored.manifest.stored_name(name)
        if stored_name is None:
            continue
        saved = stored.manifest.tensors[stored_name].dtype
        if not torch.can_cast(saved, part.data.dtype):
            raise CheckpointError(f"{name} was saved as {saved} and can't be loaded into {part.data.dtype}")


def _all_wanted(wanted: Mapping[str, FlatSlice], axis: Axis | None) -> dict[str, tuple[int, ...]]:
    """Names and shapes that any rank asks for. Costs one small message if all ranks ask for the same, as they mostly
    do.
    """
    mine = {name: list(part.shape) for name, part in sorted(wanted.items())}
    purpose = "load: what every rank wants"
    digests = gather(hashlib.sha256(json.dumps(mine).encode()).hexdigest(), axis, purpose)
    everybody = [mine] if len(set(digests)) == 1 else gather(mine, axis, purpose)
    shapes: dict[str, tuple[int, ...]] = {}
    for part in everybody:
        for name, shape in part.items():
            if shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise CheckpointError(f"ranks ask for {name} in different shapes: {list(shapes[name])} and {shape}")
    return shapes


def _report(stored: StoredCheckpoint, wanted: Mapping[str, tuple[int, ...]], options: LoadOptions) -> LoadReport:
    manifest = stored.manifest
    filled, missing, reshaped, used = [], [], [], set()
    for name in sorted(wanted):
        stored_name = manifest.stored_name(name)
        if stored_name is None:
            missing.append(name)
            continue
        used.add(stored_name)
        saved = tuple(manifest.tensors[stored_name].shape)
        if saved == wanted[name]:
            filled.append(name)
        else:
            reshaped.append(Reshaped(name=name, saved=saved, wanted=wanted[name]))
    unexpected = sorted(name for name in manifest.tensors if options.takes(name) and name not in used)
    return LoadReport(
        path=stored.path,
        tag=manifest.tag,
        filled=tuple(filled),
        missing=tuple(missing),
        unexpected=tuple(unexpected),
        reshaped=tuple(reshaped),
    )


def _strict_text(report: LoadReport) -> str:
    parts = []
    if report.missing:
        parts.append(f"{len(report.missing)} tensors are not in it: {some(report.missing)}")
    if report.reshaped:
        parts.append(
            f"{len(report.reshaped)} tensors have another shape: {some([str(entry) for entry in report.reshaped])}"
        )
    if report.unexpected:
        parts.append(f"{len(report.unexpected)} of its tensors were not asked for: {some(report.unexpected)}")
    faults = "; ".join(parts)
    return f"checkpoint {report.path} doesn't fit, nothing was loaded: {faults}. With strict=False the rest is loaded"


def _side_files(stored: StoredCheckpoint, report: LoadReport, axis: Axis | None) -> LoadedCheckpoint:
    manifest = stored.manifest
    rank, size = (0, 1) if axis is None else (axis.rank, axis.size)
    raw = stored.read_file(CLIENT_STATE)
    client_state = None if raw is None else decode_client_state(raw, f"checkpoint {stored.path}: file {CLIENT_STATE}")
    random_state, notices = _random_state(stored, rank, size)
    return LoadedCheckpoint(
        report=replace(report, notices=notices),
        metadata=manifest.metadata,
        client_state=client_state,
        random_state=random_state,
        world_size=manifest.world_size,
    )


def _random_state(stored: StoredCheckpoint, rank: int, size: int) -> tuple[RandomState | None, tuple[str, ...]]:
    saved_by = stored.manifest.world_size
    source = rank if size == saved_by else 0
    name = random_state_file(source)
    raw = stored.read_file(name)
    if raw is None:
        return None, ()
    state = RandomState.from_json(raw, f"checkpoint {stored.path}: file {name}")
    if size == saved_by:
        return state, ()
    notice = f"saved by {saved_by} ranks, loaded by {size}: random numbers go on from states derived from rank 0's"
    return state.derived(rank), (notice,)


def _read_tensors(
    stored: StoredCheckpoint, tensors: Mapping[str, FlatSlice], stored_names: Mapping[str, str], axis: Axis | None
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_loader.load(
            dict(tensors),
            storage_reader=ManifestReader(stored.path, stored.manifest),
            planner=FlatLoadPlanner(stored_names),
            process_group=None if axis is None else axis.group,
            no_dist=axis is None or axis.size == 1,
        )
