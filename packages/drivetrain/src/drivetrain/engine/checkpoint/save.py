"""Writing a checkpoint, by all ranks together.

Problem: many ranks write parts of one thing. If one fails, or the machine stops, what was there before must stay
loadable, and nobody may wait forever.

    1. all ranks agree on the tag and that what they were given can be saved
    2. rank 0 clears leftovers and makes the temporary folder; all ranks see it
    3. each rank writes its elements and its random state, rank 0 the client state      (phase "data-written")
    4. all ranks tell whether it worked; if not everywhere, all raise and the temporary folder goes away
    5. rank 0 writes the manifest                                                        (phase "manifest-written")
    6. rank 0 renames (see directory.py)                                 (phases "retired", "renamed", "latest-written")
    7. all ranks hear that it is done

A file is on stable storage before its step ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import state_dict_saver

from drivetrain.comm import Axis
from drivetrain.zero import FlatSlice

from .agreement import agree, gather, planned
from .client_state import CLIENT_STATE, encode_client_state
from .directory import check_tag, clean_leftovers, commit, partial_path
from .errors import CheckpointError
from .files import sync_directory, write_file
from .manifest import MANIFEST, Manifest, TensorRecord, encode_manifest, file_from_json, file_to_json
from .planner import FlatSavePlanner, check_slices
from .random_state import RandomState
from .storage import RankFileWriter

__all__ = ["SaveOptions", "TagValidation", "random_state_file", "save"]

_log = logging.getLogger("drivetrain.engine.checkpoint")

TagValidation = Literal["ignore", "warn", "fail"]


def _no_phase(phase: str) -> None:
    """The default of `SaveOptions.on_phase`."""


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to save.

    Attributes:
        update_latest: let the file `latest` name this checkpoint.
        tag_validation: what to do if ranks pass different tags: "fail" raises, "warn" logs, "ignore" says nothing.
            Where it goes on, the tag of rank 0 is used by all.
        on_phase: called with the name of each phase that this rank has just finished (see the module's docstring).
            For tests of crashes, and for progress displays.
    """

    update_latest: bool = True
    tag_validation: TagValidation = "warn"
    on_phase: Callable[[str], None] = _no_phase


@dataclass(frozen=True, kw_only=True)
class _Content:
    """What one rank wants to save."""

    tensors: Mapping[str, FlatSlice]
    metadata: Mapping[str, Any]
    client_state: object
    random_state: RandomState | None
    aliases: Mapping[str, str]


def save(
    directory: str | Path,
    tag: str,
    *,
    tensors: Mapping[str, FlatSlice],
    axis: Axis | None = None,
    metadata: Mapping[str, Any] | None = None,
    client_state: object = None,
    random_state: RandomState | None = None,
    aliases: Mapping[str, str] | None = None,
    options: SaveOptions | None = None,
) -> Path:
    """Saves a checkpoint that can be loaded by any number of ranks in any cut. Collective over `axis`.

    Args:
        directory: the run's folder of checkpoints, on a file system that all ranks share. It is made if it isn't there.
        tag: the name of this checkpoint. A complete checkpoint of that name is replaced.
        tensors: this rank's parts, by name ("model/<name>", "optimizer/<name>/exp_avg", ...). Ranks may hold
            different names. Over all ranks each element must be in exactly one slice with `writes=True`.
        axis: the ranks that save together; None for a process alone.
        metadata: JSON; rank 0's is stored.
        client_state: rank 0's is stored; see client_state.py for what it may hold.
        random_state: this rank's.
        aliases: further names of tensors (tied weights), alias -> name in `tensors`; rank 0's are stored.
        options: see SaveOptions.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, with the rank, tensor, key or file that was at fault. What was there before
        is untouched.
    """
    options = SaveOptions() if options is None else options
    content = _Content(
        tensors=tensors,
        metadata={} if metadata is None else metadata,
        client_state=client_state,
        random_state=random_state,
        aliases={} if aliases is None else aliases,
    )
    folder = Path(directory)
    agree(lambda: _check(tag, content), axis, "save: whether all ranks can save")
    agreed = _agreed_tag(tag, axis, options.tag_validation)
    nonce = gather(secrets.token_hex(4), axis, "save: the name of the temporary folder")[0]
    partial = partial_path(folder, agreed, nonce)
    try:
        prepare = "save: the temporary folder"
        head = agree(lambda: _prepare(folder, agreed, partial, content) if _leads(axis) else {}, axis, prepare)
        agree(lambda: _must_see(partial), axis, "save: whether all see the temporary folder")
        writer = RankFileWriter(partial, _rank(axis))
        planned(lambda: _write_tensors(content.tensors, writer, axis), axis)
        written = "save: whether all ranks have written"
        files = agree(lambda: _finish_data(content, partial, writer, axis, options), axis, written)
        manifest = _manifest(agreed, content, writer.tensors, [*head, *files], len(files))
        agree(lambda: _publish(folder, nonce, manifest, options) if _leads(axis) else None, axis, "save: the end")
    except BaseException:
        if _leads(axis):
            with contextlib.suppress(OSError):
                shutil.rmtree(partial)
        raise
    return folder / agreed


def random_state_file(rank: int) -> str:
    """The file of a checkpoint that holds the random state of `rank`."""
    return f"random-{rank:05d}.json"


def _rank(axis: Axis | None) -> int:
    return 0 if axis is None else axis.rank


def _leads(axis: Axis | None) -> bool:
    return _rank(axis) == 0


def _check(tag: str, content: _Content) -> None:
    check_tag(tag)
    check_slices(content.tensors)
    _check_json(content.metadata)


def _agreed_tag(tag: str, axis: Axis | None, validation: TagValidation) -> str:
    tags = gather(tag, axis, "save: the tag")
    if len(set(tags)) > 1 and validation != "ignore":
        other = next(rank for rank, found in enumerate(tags) if found != tags[0])
        text = f"ranks pass different tags to save(): rank 0 passes {tags[0]!r}, rank {other} passes {tags[other]!r}"
        if validation == "fail":
            raise CheckpointError(f"{text}; all must pass the same one")
        if _leads(axis):
            _log.warning("%s; the tag of rank 0 is used", text)
    return tags[0]


def _check_json(metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"metadata[{key!r}] can't be written as JSON: {error}") from error


def _prepare(directory: Path, tag: str, partial: Path, content: _Content) -> dict[str, Any]:
    """Makes the temporary folder with the client state in it. Returns the JSON records of its files, by name."""
    client_state = encode_client_state(content.client_state)
    for alias, name in content.aliases.items():
        if alias == name or alias in content.tensors:
            raise CheckpointError(f"{alias} is said to be an alias of {name}, but is saved as a tensor of its own")
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"checkpoint directory {directory} is a file; give the folder of the run's checkpoints")
    directory.mkdir(parents=True, exist_ok=True)
    removed = clean_leftovers(directory)
    if removed:
        _log.info("removed what an interrupted save left in %s: %s", directory, ", ".join(removed))
    final = directory / tag
    if final.exists() and not (final / MANIFEST).is_file():
        raise CheckpointError(
            f"{final} exists and is not a checkpoint of this program; choose another tag, or move it away"
        )
    partial.mkdir()
    sync_directory(directory)
    return {CLIENT_STATE: file_to_json(write_file(partial / CLIENT_STATE, client_state))}


def _must_see(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial}, which rank 0 has just made, can't be seen from here; all ranks must pass the same directory,"
            " on a file system that they share"
        )


def _write_tensors(tensors: Mapping[str, FlatSlice], writer: RankFileWriter, axis: Axis | None) -> None:
    alone = axis is None or axis.size == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        state_dict_saver.save(
            dict(tensors),
            storage_writer=writer,
            planner=FlatSavePlanner(),
            process_group=None if axis is None else axis.group,
            no_dist=alone,
        )


def _finish_data(
    content: _Content, partial: Path, writer: RankFileWriter, axis: Axis | None, options: SaveOptions
) -> dict[str, Any]:
    """Writes what a rank has beside tensors. Returns the JSON records of all its files, by name."""
    records = list(writer.files)
    if content.random_state is not None:
        records.append(write_file(partial / random_state_file(_rank(axis)), content.random_state.to_json()))
    options.on_phase("data-written")
    return {record.name: file_to_json(record) for record in records}


def _manifest(
    tag: str, content: _Content, tensors: Mapping[str, TensorRecord], files: list[dict[str, Any]], world_size: int
) -> Manifest:
    return Manifest(
        tag=tag,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=world_size,
        producer={"torch": str(torch.__version__), "python": platform.python_version()},
        metadata=content.metadata,
        aliases=content.aliases,
        tensors=tensors,
        files={name: file_from_json(name, value) for part in files for name, value in part.items()},
    )


def _publish(directory: Path, nonce: str, manifest: Manifest, options: SaveOptions) -> None:
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors:
            raise CheckpointError(f"{alias} is said to be an alias of {name}, which no rank saves")
    write_file(partial_path(directory, manifest.tag, nonce) / MANIFEST, encode_manifest(manifest))
    options.on_phase("manifest-written")
    commit(directory, manifest.tag, nonce, update_latest=options.update_latest, on_phase=options.on_phase)
