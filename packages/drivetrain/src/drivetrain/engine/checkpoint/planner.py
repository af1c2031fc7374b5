"""Plans for torch.distributed.checkpoint made from flat slices instead of from tensors.

Problem: ranks hold parts of tensors that are cut at any element, and the cut at load is another one than at save.
Idea: to torch.distributed.checkpoint each tensor is one-dimensional, with its elements in row-major order; a rank's
part is a chunk at an offset. The planner of a save turns slices into write items, the one of a load turns requests
into read items on whatever chunks are stored. The real shape travels beside.
Invariants: at save, each element of each tensor is written exactly once over all ranks, and all ranks agree on shape
and dtype, or the save fails and names the tensor. At load, each local element is read exactly once.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from drivetrain.zero import FlatSlice

from .errors import CheckpointError
from .extents import Extent, coverage_fault, overlaps
from .tensorfile import dtype_name

__all__ = ["FlatLoadPlanner", "FlatSavePlanner", "TensorKind", "check_slices"]


@dataclass(frozen=True, kw_only=True)
class TensorKind:
    """What all ranks must agree on about a tensor."""

    dtype: torch.dtype
    shape: torch.Size


def check_slices(tensors: Mapping[str, FlatSlice]) -> None:
    """Raises CheckpointError naming the first slice that can't be a part of its tensor."""
    for name, part in tensors.items():
        total = part.shape.numel()
        if part.data.dim() != 1:
            raise CheckpointError(f"{name}: its local part has {part.data.dim()} dimensions, expected a flat (1-D) one")
        if part.data.numel() > 0 and not 0 <= part.offset <= total - part.data.numel():
            stop = part.offset + part.data.numel()
            raise CheckpointError(
                f"{name}: elements [{part.offset}, {stop}) are no part of shape {tuple(part.shape)} ({total} elements)"
            )
        try:
            dtype_name(part.data.dtype, name)
        except ValueError as error:
            raise CheckpointError(str(error)) from error


class FlatSavePlanner(SavePlanner):
    """One rank's side of a save. The state dict that it is given maps names to FlatSlice."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, FlatSlice] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._tensors = dict(state_dict)
        check_slices(self._tensors)

    def create_local_plan(self) -> SavePlan:
        items = [
            _write_item(name, part) for name, part in self._tensors.items() if part.writes and part.data.numel() > 0
        ]
        kinds = {name: TensorKind(dtype=part.data.dtype, shape=part.shape) for name, part in self._tensors.items()}
        return SavePlan(items=items, planner_data=kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kinds = _agreed_kinds(all_plans)
        extents: dict[str, list[Extent]] = {name: [] for name in kinds}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                chunk = _chunk(item)
                start = chunk.offsets[0]
                extents[item.index.fqn].append(Extent(start=start, stop=start + chunk.sizes[0], owner=f"rank {rank}"))
        for name, claimed in extents.items():
            fault = coverage_fault(claimed, kinds[name].shape.numel())
            if fault is not None:
                raise CheckpointError(
                    f"{name} can't be saved: each element must be written by exactly one rank, but {fault}"
                )
        tensors = {name: _storage_metadata(kinds[name], extents[name]) for name in kinds}
        return all_plans, Metadata(state_dict_metadata=dict(tensors), planner_data=kinds)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        part = self._tensors[write_item.index.fqn]
        return part.read(0, part.data.numel())


class FlatLoadPlanner(LoadPlanner):
    """One rank's side of a load. `stored_names`: requested name -> name in the checkpoint (they differ for aliases)."""

    def __init__(self, stored_names: Mapping[str, str]) -> None:
        self._stored_names = stored_names
        self._tensors: Mapping[str, FlatSlice] = {}
        self._metadata = Metadata(state_dict_metadata={})

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._tensors = dict(state_dict)
        self._metadata = self._metadata if metadata is None else metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(items=[item for name, part in self._tensors.items() for item in self._read_items(name, part)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._tensors[read_item.dest_index.fqn].target(read_item.dest_offsets[0], read_item.lengths[0])

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._tensors[read_item.dest_index.fqn].commit(read_item.dest_offsets[0], tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn}: a tensor was expected, found bytes")

    def _read_items(self, name: str, part: FlatSlice) -> list[ReadItem]:
        stored_name = self._stored_names[name]
        stored = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[stored_name]).chunks
        extents = [Extent(start=chunk.offsets[0], stop=chunk.offsets[0] + chunk.sizes[0]) for chunk in stored]
        return [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name),
                dest_offsets=torch.Size([found.target]),
                storage_index=MetadataIndex(stored_name, stored[found.stored].offsets, found.stored),
                storage_offsets=torch.Size([found.source]),
                lengths=torch.Size([found.numel]),
            )
            for found in overlaps(extents, part.offset, part.offset + part.data.numel())
        ]


def _write_item(name: str, part: FlatSlice) -> WriteItem:
    offset, numel = torch.Size([part.offset]), torch.Size([part.data.numel()])
    return WriteItem(
        index=MetadataIndex(name, offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offset, sizes=numel),
            properties=TensorProperties(dtype=part.data.dtype),
            size=torch.Size([part.shape.numel()]),
        ),
    )


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    if item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn}: a tensor was planned, found none")
    return item.tensor_data.chunk


def _agreed_kinds(plans: list[SavePlan]) -> dict[str, TensorKind]:
    agreed: dict[str, tuple[int, TensorKind]] = {}
    for rank, plan in enumerate(plans):
        kinds: dict[str, TensorKind] = plan.planner_data
        for name, kind in kinds.items():
            first_rank, first = agreed.setdefault(name, (rank, kind))
            if kind != first:
                raise CheckpointError(
                    f"{name} can't be saved: it has shape {tuple(first.shape)} and {first.dtype} on rank {first_rank},"
                    f" but shape {tuple(kind.shape)} and {kind.dtype} on rank {rank}"
                )
    return {name: kind for name, (_, kind) in agreed.items()}


def _storage_metadata(kind: TensorKind, extents: list[Extent]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=kind.dtype),
        size=torch.Size([kind.shape.numel()]),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size([extent.start]), sizes=torch.Size([extent.numel]))
            for extent in sorted(extents, key=lambda extent: extent.start)
        ],
    )
