"""Where torch.distributed.checkpoint puts and finds elements: one safetensors file per rank, described by the manifest.

Problem: the storage classes that come with torch write their metadata with pickle, and read it with `pickle.load`,
which runs whatever code a file contains; and they read a whole chunk where a few elements are wanted.
Idea: a writer that streams a rank's elements into one safetensors file and hands back where each chunk lies, and a
reader that fetches byte ranges. Neither writes or reads metadata: that goes into the manifest, which is JSON.
Invariants: at most 16 MiB of a tensor are in flight at a time, on either way; nothing here can unpickle.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .errors import CheckpointError
from .files import BlockReader, BlockWriter, FileRecord
from .manifest import Chunk, Manifest, TensorRecord
from .planner import TensorKind
from .tensorfile import TensorEntry, as_bytes, plan_tensor_file

__all__ = ["ManifestReader", "RankFileWriter", "read_elements"]

_STAGING_BYTES = 1 << 24


class RankFileWriter(StorageWriter):
    """Writes this rank's chunks into `<folder>/rank-<rank>.safetensors`; a rank without elements writes no file.

    After the save, `files` holds this rank's records, and on the coordinator `tensors` holds where every chunk of
    every rank lies.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self.files: list[FileRecord] = []
        self.tensors: dict[str, TensorRecord] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        self.files, self.tensors = [], {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the folder is there already."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[list[WriteResult]] = Future()
        written.set_result(self._write(plan.items, planner) if plan.items else [])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        kinds: dict[str, TensorKind] = metadata.planner_data
        chunks: dict[str, list[Chunk]] = {name: [] for name in kinds}
        for result in itertools.chain.from_iterable(results):
            chunks[result.index.fqn].append(result.storage_data)
        self.tensors = {
            name: TensorRecord(
                dtype=kind.dtype, shape=kind.shape, chunks=tuple(sorted(chunks[name], key=attrgetter("offset")))
            )
            for name, kind in kinds.items()
        }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, (str, Path))

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        by_entry: dict[str, WriteItem] = {}
        entries: list[TensorEntry] = []
        for item in items:
            if item.tensor_data is None or item.index.offset is None:
                raise CheckpointError(f"{item.index.fqn}: only flat tensors can be stored")
            entry = TensorEntry(
                name=f"{item.index.fqn}@{item.index.offset[0]}",
                dtype=item.tensor_data.properties.dtype,
                shape=tuple(item.tensor_data.chunk.sizes),
            )
            entries.append(entry)
            by_entry[entry.name] = item
        layout = plan_tensor_file(entries, {"format": "pt"})
        path = self._folder / f"rank-{self._rank:05d}.safetensors"
        results = []
        with BlockWriter(path, layout.size) as out:
            out.write(layout.header)
            for entry, position in zip(layout.entries, layout.positions, strict=True):
                item = by_entry[entry.name]
                data = planner.resolve_data(item)  # only now: it may not be there before it is asked for
                assert isinstance(data, torch.Tensor)
                for piece in as_bytes(data):
                    out.write(piece)
                chunk = Chunk(offset=_only(item.index.offset), numel=data.numel(), file=path.name, position=position)
                results.append(WriteResult(index=item.index, size_in_bytes=entry.nbytes, storage_data=chunk))
            self.files = [out.finish()]
        return results


class ManifestReader(StorageReader):
    """Reads elements of a checkpoint whose manifest is known already."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=record.dtype),
                    size=torch.Size([record.shape.numel()]),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size([chunk.offset]), sizes=torch.Size([chunk.numel]))
                        for chunk in record.chunks
                    ],
                )
                for name, record in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the manifest has it all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads file by file, in ascending order, so that each block of a file is read and checked at most once."""
        reads = [_Read.of(item, self._manifest.tensors) for item in plan.items]
        reads.sort(key=lambda read: (read.file, read.position))
        with torch.no_grad():
            for name, group in itertools.groupby(reads, key=lambda read: read.file):
                with BlockReader(self._folder, self._manifest.files[name]) as file:
                    for read in group:
                        target = planner.resolve_tensor(read.item)
                        read_elements(file, read.position, read.dtype, target)
                        planner.commit_tensor(read.item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return isinstance(checkpoint_id, (str, Path))


def read_elements(file: BlockReader, position: int, dtype: torch.dtype, target: torch.Tensor) -> None:
    """Fills the 1-D `target` (any device and dtype) with elements of `dtype` stored from byte `position` on."""
    nbytes = target.numel() * dtype.itemsize
    staging = torch.empty(min(nbytes, _STAGING_BYTES), dtype=torch.uint8)
    for start in range(0, nbytes, _STAGING_BYTES):
        piece = staging[: min(_STAGING_BYTES, nbytes - start)]
        file.read_into(position + start, piece.numpy().data)
        elements = piece.view(dtype)
        target.narrow(0, start // dtype.itemsize, elements.numel()).copy_(elements)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A read item with where its bytes are."""

    item: ReadItem
    file: str
    position: int
    dtype: torch.dtype

    @classmethod
    def of(cls, item: ReadItem, tensors: Mapping[str, TensorRecord]) -> _Read:
        record = tensors[item.storage_index.fqn]
        chunk = record.chunks[_only_index(item.storage_index)]
        position = chunk.position + item.storage_offsets[0] * record.dtype.itemsize
        return cls(item=item, file=chunk.file, position=position, dtype=record.dtype)


def _only(offset: torch.Size | None) -> int:
    if offset is None:
        raise CheckpointError("a chunk without an offset can't be stored")
    return offset[0]


def _only_index(index: MetadataIndex) -> int:
    if index.index is None:
        raise CheckpointError(f"{index.fqn}: a read item without the number of its chunk")
    return index.index
