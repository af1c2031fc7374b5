"""A checkpoint on disk, opened for reading: its manifest, any range of any tensor, its health."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .directory import existing_tags, read_latest, resolve
from .errors import CheckpointError, CheckpointNotFoundError
from .files import BlockReader, file_fault
from .manifest import MANIFEST, Manifest, decode_manifest
from .storage import read_elements

__all__ = ["CheckpointSummary", "StoredCheckpoint", "list_checkpoints", "open_checkpoint", "verify_checkpoint"]

_WINDOW_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint whose manifest was read and found consistent. Its files are looked at only when they are read."""

    path: Path
    manifest: Manifest

    def size_faults(self, start: int = 0, step: int = 1) -> list[str]:
        """Files that are missing or have the wrong size, in words; of every `step`-th file from `start` on."""
        names = sorted(self.manifest.files)[start::step]
        return [fault for name in names if (fault := file_fault(self.path, self.manifest.files[name])) is not None]

    def read_file(self, name: str) -> bytes | None:
        """The checked content of a file; None if the checkpoint has no such file."""
        record = self.manifest.files.get(name)
        if record is None:
            return None
        with BlockReader(self.path, record) as file:
            return file.read_all()

    def windows(self, name: str) -> Iterator[torch.Tensor]:
        """All elements of a tensor in order, flat, on the CPU, in the stored dtype, in pieces of at most 16 MiB."""
        record = self.manifest.tensors[name]
        step = _WINDOW_BYTES // record.dtype.itemsize
        for chunk in record.chunks:
            with BlockReader(self.path, self.manifest.files[chunk.file]) as file:
                for start in range(0, chunk.numel, step):
                    window = torch.empty(min(step, chunk.numel - start), dtype=record.dtype)
                    read_elements(file, chunk.position + start * record.dtype.itemsize, record.dtype, window)
                    yield window

    def read_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU, in its shape. For tools and tests; loading a model goes by slices."""
        record = self.manifest.tensors[name]
        flat = torch.empty(record.shape.numel(), dtype=record.dtype)
        filled = 0
        for window in self.windows(name):
            flat[filled : filled + window.numel()] = window
            filled += window.numel()
        return flat.view(record.shape)


@dataclass(frozen=True, kw_only=True)
class CheckpointSummary:
    """A line of a list of checkpoints. `fault` says why one can't be loaded; None if nothing speaks against it."""

    tag: str
    path: Path
    latest: bool
    created: str = ""
    world_size: int = 0
    nbytes: int = 0
    tensors: int = 0
    fault: str | None = None


def open_checkpoint(directory: str | Path, tag: str | None = None) -> StoredCheckpoint:
    """Finds and opens a checkpoint; `tag=None` takes the one that `latest` names.

    Raises CheckpointNotFoundError if there is none, with a list of those that are there, and CheckpointError for a
    damaged manifest.
    """
    _, path = resolve(Path(directory), tag)
    try:
        raw = (path / MANIFEST).read_bytes()
    except FileNotFoundError as error:  # removed since it was found
        raise CheckpointNotFoundError(f"{path} has no {MANIFEST}") from error
    return StoredCheckpoint(path=path, manifest=decode_manifest(raw, path))


def list_checkpoints(directory: str | Path) -> list[CheckpointSummary]:
    """All checkpoints of a directory, oldest step first. File sizes are checked, contents are not
    (`verify_checkpoint` does that).
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"checkpoint directory {folder} does not exist")
    latest = read_latest(folder)
    return [_summary(folder, tag, latest=tag == latest) for tag in existing_tags(folder)]


def verify_checkpoint(directory: str | Path, tag: str | None = None) -> list[str]:
    """Reads every byte of a checkpoint; returns what is wrong, in words. Empty: all is well.

    Raises CheckpointError if there is no checkpoint, or no usable manifest to compare with.
    """
    stored = open_checkpoint(directory, tag)
    faults = []
    for _, record in sorted(stored.manifest.files.items()):
        fault = file_fault(stored.path, record)
        if fault is not None:
            faults.append(fault)
            continue
        with BlockReader(stored.path, record) as file:
            faults.extend(file.faults())
    return faults


def _summary(folder: Path, tag: str, *, latest: bool) -> CheckpointSummary:
    try:
        stored = open_checkpoint(folder, tag)
    except CheckpointError as error:
        return CheckpointSummary(tag=tag, path=folder / tag, latest=latest, fault=str(error))
    faults = stored.size_faults()
    return CheckpointSummary(
        tag=tag,
        path=stored.path,
        latest=latest,
        created=stored.manifest.created,
        world_size=stored.manifest.world_size,
        nbytes=stored.manifest.nbytes,
        tensors=len(stored.manifest.tensors),
        fault=faults[0] if faults else None,
    )
