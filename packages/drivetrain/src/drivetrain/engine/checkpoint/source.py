"""Safetensors files as a source of weights that are read in slices: a model goes from disk straight into its shards.

Problem: to load whole tensors, a rank needs memory for them and reads, n times over n ranks, what belongs to others.
Idea: the header of a safetensors file says where each tensor lies, and a slice of a flattened tensor is one run of
bytes. `drivetrain.zero.shard` asks for this rank's slices by name (its protocol `TensorSource`), and only these bytes
are read, into the tensor that is handed out.
Invariants: headers are checked when the source is made, so that a damaged or foreign file is refused before anything is
read; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .tensorfile import DTYPES

__all__ = ["SafetensorsSource"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # the format's own limit

Rename = Callable[[str], str | None]


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    position: int  # of its first byte in the file


class SafetensorsSource:
    """The tensors of one or several safetensors files.

    Args:
        path: a file; an index (``*.safetensors.index.json``); or a folder, in which ``model.safetensors.index.json`` or
            ``model.safetensors`` is taken, or else its only safetensors file.
        rename: from the name in a file to the name in the module; None leaves a tensor out. Default: no change.

    Raises:
        CheckpointError: files are missing, damaged, or not what the index says, or two tensors get the same name.
    """

    def __init__(self, path: str | os.PathLike[str], *, rename: Rename | None = None) -> None:
        self._tensors: dict[str, _Stored] = {}
        for file, wanted in _files(Path(path)).items():
            found = _read_header(file)
            missing = sorted(wanted - found.keys())
            if missing:
                raise CheckpointError(f"{file} lacks {missing[0]!r}, which the index says is in it")
            for stored_name, stored in found.items():
                name = stored_name if rename is None else rename(stored_name)
                if name is None:
                    continue
                if name in self._tensors:
                    raise CheckpointError(f"{self._tensors[name].file} and {file} both have a tensor named {name!r}")
                self._tensors[name] = stored

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements ``start <= i < stop`` of the flattened tensor, in the stored dtype, on the CPU."""
        stored = self._tensors[name]
        size = torch.Size(stored.shape).numel()
        if not 0 <= start <= stop <= size:
            raise ValueError(f"{name!r} has {size} elements, asked for {start} to {stop}")
        raw = torch.empty((stop - start) * stored.dtype.itemsize, dtype=torch.uint8)
        target = raw.numpy().data
        filled = 0
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.position + start * stored.dtype.itemsize)
            while filled < len(target):
                count = file.readinto(target[filled:])
                if not count:
                    raise CheckpointError(
                        f"{stored.file} ended while {name!r} was read; it was cut since it was opened"
                    )
                filled += count
        return raw.view(stored.dtype)


def _files(path: Path) -> dict[Path, set[str]]:
    """The files, and the names that each is known to have."""
    if path.is_dir():
        for name in (_INDEX, _SINGLE):
            if (path / name).is_file():
                return _files(path / name)
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise CheckpointError(
                f"folder {path} has neither {_INDEX} nor {_SINGLE}, and {len(found)} other safetensors files; name the "
                "file, or convert the weights to safetensors"
            )
        return {found[0]: set()}
    if not path.is_file():
        raise CheckpointError(f"there is no file or folder {path}")
    if path.suffix != ".json":
        return {path: set()}
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(path.parent / str(file), set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error})") from None
    return files


def _read_header(path: Path) -> dict[str, _Stored]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _LARGEST_HEADER):
                raise CheckpointError(
                    f"{path} is no safetensors file, or is cut: it says its header has {length} bytes"
                )
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        stored = {name: _stored(path, entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a header that cannot be read ({type(error).__name__}: {error})") from None
    for name, tensor in stored.items():
        stop = tensor.position + torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
        if stop > size:
            raise CheckpointError(f"{path} is cut: {name!r} ends at byte {stop}, and the file has {size}")
    return stored


def _stored(path: Path, entry: dict[str, Any], first: int) -> _Stored:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"dtype {entry['dtype']} is not one of {', '.join(DTYPES)}")
    shape = tuple(int(length) for length in entry["shape"])
    begin, end = entry["data_offsets"]
    if min((begin, *shape)) < 0 or end - begin != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError(f"a tensor of {entry['dtype']} and shape {list(shape)} does not take bytes {begin} to {end}")
    return _Stored(file=path, dtype=dtype, shape=shape, position=first + begin)
