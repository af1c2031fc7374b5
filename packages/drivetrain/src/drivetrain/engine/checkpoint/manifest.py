"""The manifest: what a checkpoint holds, written last, as JSON.

Problem: a checkpoint is a folder of files of many ranks. A reader must know whether it is whole, which bytes are
which elements of which tensor, and nothing that it reads may be able to run code.
Idea: one JSON file that is written after all the others names each file with its size and checksums, each tensor
with dtype, shape and chunks (where in which file its elements lie), and carries the small state: step, schedule,
configuration. A folder without a valid manifest is not a checkpoint.
Invariants: the chunks of a tensor are sorted, and every element is in exactly one of them; a chunk lies inside of
its file and is aligned to its element size; a file's name has no folder in it. A manifest that breaks one of these
is refused when it is decoded.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError
from .extents import Extent, coverage_fault
from .files import FileRecord
from .tensorfile import DTYPES, dtype_name

__all__ = [
    "MANIFEST",
    "Chunk",
    "Manifest",
    "TensorRecord",
    "decode_manifest",
    "encode_manifest",
    "file_from_json",
    "file_to_json",
]

MANIFEST = "manifest.json"
_FORMAT = "drivetrain-checkpoint"
_VERSION = 1

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`numel` elements of a flattened tensor, from element `offset` on, stored at byte `position` of `file`."""

    offset: int
    numel: int
    file: str
    position: int

    @property
    def extent(self) -> Extent:
        return Extent(start=self.offset, stop=self.offset + self.numel, owner=self.file)


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """A whole tensor as it is stored."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: tuple[Chunk, ...]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except the elements.

    Attributes:
        tag: its name.
        created: when, ISO 8601 with the time zone.
        world_size: how many ranks wrote it.
        producer: versions of what wrote it, by name.
        metadata: the engine's small state, JSON.
        aliases: further names of tensors, alias -> name in `tensors` (tied weights).
        tensors: by name.
        files: by name.
    """

    tag: str
    created: str
    world_size: int
    producer: Mapping[str, str]
    metadata: Mapping[str, Any]
    aliases: Mapping[str, str]
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())

    def stored_name(self, name: str) -> str | None:
        """Under which name the tensor is stored: the name itself, or what it is an alias of. None if it isn't there."""
        if name in self.tensors:
            return name
        return self.aliases.get(name)


def file_to_json(record: FileRecord) -> Json:
    return {"size": record.size, "block": record.block, "crc32": "".join(f"{crc:08x}" for crc in record.checksums)}


def file_from_json(name: str, value: Any) -> FileRecord:
    size, block, digits = _field(value, "size", int), _field(value, "block", int), _field(value, "crc32", str)
    if Path(name).name != name or name in {"", ".", "..", MANIFEST}:
        raise ValueError(f"{name!r} is not the plain name of a file")
    if size < 0 or block < 1 or block % 16 != 0 or len(digits) != 8 * (-(-size // block)):
        raise ValueError(f"the record of file {name} is not consistent")
    checksums = tuple(int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    return FileRecord(name=name, size=size, block=block, checksums=checksums)


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON, one tensor and one file to a line, wrapped with the CRC-32 of the inner text."""
    file_numbers = {name: number for number, name in enumerate(sorted(manifest.files))}
    tensors = {
        name: {
            "dtype": dtype_name(record.dtype, name),
            "shape": list(record.shape),
            "chunks": [
                [chunk.offset, chunk.numel, file_numbers[chunk.file], chunk.position] for chunk in record.chunks
            ],
        }
        for name, record in sorted(manifest.tensors.items())
    }
    parts = [
        f'"format":{json.dumps(_FORMAT)}',
        f'"version":{_VERSION}',
        f'"tag":{json.dumps(manifest.tag)}',
        f'"created":{json.dumps(manifest.created)}',
        f'"world_size":{manifest.world_size}',
        f'"producer":{json.dumps(dict(manifest.producer))}',
        f'"metadata":{json.dumps(manifest.metadata)}',
        f'"aliases":{_lines(manifest.aliases)}',
        f'"files":{_lines({name: file_to_json(manifest.files[name]) for name in file_numbers})}',
        f'"tensors":{_lines(tensors)}',
    ]
    body = ("{" + ",\n".join(parts) + "}").encode()
    return _prefix(body) + body + _SUFFIX


def decode_manifest(raw: bytes, folder: Path) -> Manifest:
    """Raises CheckpointError, naming the folder, for anything that is not a whole and consistent manifest."""
    body = raw[len(_prefix(b"")) : -len(_SUFFIX)]
    try:
        if raw != _prefix(body) + body + _SUFFIX:
            raise ValueError(
                "its checksum is wrong, it was cut or changed" if raw.startswith(_START) else "it is no manifest"
            )
        value = json.loads(body)
        found = (_field(value, "format", str), _field(value, "version", int))
        if found != (_FORMAT, _VERSION):
            raise ValueError(
                f"it has format {found[0]} version {found[1]}, and this program reads {_FORMAT} version {_VERSION}"
            )
        return _from_json(value)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"checkpoint {folder}: file {MANIFEST} can't be used: {error}") from error


_START = b'{"crc32":"'
_SUFFIX = b"}\n"


def _prefix(body: bytes) -> bytes:
    return _START + f"{zlib.crc32(body):08x}".encode() + b'","manifest":\n'


def _lines(values: Mapping[str, Any]) -> str:
    rows = (f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'))}" for key, value in values.items())
    return "{\n" + ",\n".join(rows) + "}"


def _field(value: Any, key: str, kind: type[Any]) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f"{key!r} is missing")
    found = value[key]
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise ValueError(f"{key!r} is a {type(found).__name__}, expected a {kind.__name__}")
    return found


def _from_json(value: Json) -> Manifest:
    files = {name: file_from_json(name, entry) for name, entry in _field(value, "files", dict).items()}
    order = sorted(files)
    tensors = {
        name: _tensor_from_json(name, entry, order, files) for name, entry in _field(value, "tensors", dict).items()
    }
    aliases: dict[str, str] = _field(value, "aliases", dict)
    for alias, name in aliases.items():
        if name not in tensors:
            raise ValueError(f"{alias} is an alias of {name}, which is not there")
    return Manifest(
        tag=_field(value, "tag", str),
        created=_field(value, "created", str),
        world_size=_field(value, "world_size", int),
        producer=_field(value, "producer", dict),
        metadata=_field(value, "metadata", dict),
        aliases=aliases,
        tensors=tensors,
        files=files,
    )


def _tensor_from_json(name: str, value: Json, order: Sequence[str], files: Mapping[str, FileRecord]) -> TensorRecord:
    code, shape = _field(value, "dtype", str), _field(value, "shape", list)
    if code not in DTYPES:
        raise ValueError(f"tensor {name} has the unknown dtype {code!r}")
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise ValueError(f"tensor {name} has the shape {shape!r}")
    dtype = DTYPES[code]
    chunks = []
    for row in _field(value, "chunks", list):
        offset, numel, number, position = row
        if not all(isinstance(entry, int) and entry >= 0 for entry in row):
            raise ValueError(f"a chunk of tensor {name} is {row}, expected four whole numbers")
        chunk = Chunk(offset=offset, numel=numel, file=order[number], position=position)
        inside = position + numel * dtype.itemsize <= files[chunk.file].size
        if numel == 0 or not inside or position % dtype.itemsize != 0:
            raise ValueError(f"a chunk of tensor {name} does not lie in file {chunk.file}")
        chunks.append(chunk)
    chunks.sort(key=lambda chunk: chunk.offset)
    fault = coverage_fault((chunk.extent for chunk in chunks), torch.Size(shape).numel())
    if fault is not None:
        raise ValueError(f"tensor {name}: {fault}")
    return TensorRecord(dtype=dtype, shape=torch.Size(shape), chunks=tuple(chunks))
