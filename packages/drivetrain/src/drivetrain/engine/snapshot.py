"""What a checkpoint of an engine consists of, and how it gets back in.

Tensors go as named flat slices: ``model/<parameter or buffer>`` in the highest precision there is (the fp32 master
weights, where there are any), ``optimizer/<parameter>/<key>``. Everything else is JSON in the metadata.

Loading changes no number format: what is loaded takes the formats of this run, rounded to nearest where the file has
more bits, so that a checkpoint goes from fp32 master weights and moments to 16-bit ones and back. A dynamic loss scale
goes on where it was if this run has one too; a constant one is the configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from drivetrain.comm import Axis, all_gather_object
from drivetrain.engine.checkpoint import CheckpointError, StoredCheckpoint
from drivetrain.kernels import FusedAdagrad, FusedAdam, FusedSgd, Lamb, Lion
from drivetrain.zero import FlatSlice, ShardedModule, ShardedOptimizer

MODEL = "model/"
OPTIMIZER = "optimizer/"


@dataclass(frozen=True, kw_only=True)
class LoadParts:
    """Which parts of a checkpoint to load besides the module.

    Attributes:
        optimizer: the optimizer's state, its settings and the loss scale.
        schedule: the position of the learning-rate schedule, and the step counters.
        data: the position in the training data.
        random: the state of the random number generators.
    """

    optimizer: bool = True
    schedule: bool = True
    data: bool = True
    random: bool = True


MODULE_ONLY = LoadParts(optimizer=False, schedule=False, data=False, random=False)


def model_tensors(sharded: ShardedModule) -> dict[str, FlatSlice]:
    """Parameters and persistent buffers."""
    slices = {**sharded.model_slices(), **sharded.buffer_slices()}
    return {MODEL + name: part for name, part in slices.items()}


def optimizer_tensors(optimizer: ShardedOptimizer, purpose: Literal["save", "load"]) -> dict[str, FlatSlice]:
    """The state of the optimizer."""
    return {OPTIMIZER + name: part for name, part in optimizer.state_slices(purpose).items()}


def optimizer_metadata(optimizer: ShardedOptimizer, axis: Axis) -> dict[str, Any]:
    """What is not tensors: class, kinds of state, settings of the groups, loss scale. Collective."""
    schema: dict[str, dict[str, str]] = {}
    for part in all_gather_object(optimizer.state_schema(), axis, purpose="optimizer state for a checkpoint"):
        schema.update(part)
    return {
        "class": _kind_of(optimizer),
        "schema": schema,
        "groups": _json_groups(optimizer.hyperparameters()),
        "loss_scale": optimizer.scaler.state_dict(),
    }


def _kind_of(optimizer: ShardedOptimizer) -> str:
    """The class of the optimizer; torch's where one of ours has the state of torch's."""
    inner = optimizer.optimizer
    if isinstance(inner, FusedAdam):
        return "AdamW" if inner.param_groups[0]["decoupled_weight_decay"] else "Adam"
    names = {FusedAdagrad: "Adagrad", FusedSgd: "SGD", Lamb: "Lamb", Lion: "Lion"}
    return next((name for kind, name in names.items() if isinstance(inner, kind)), type(inner).__name__)


def _json_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings that JSON can hold; a learning rate or such that is a tensor goes as its number."""

    def plain(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or isinstance(value, (str, int, float))

    def number(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    numbers = [{key: number(value) for key, value in group.items()} for group in groups]
    return [{key: value for key, value in group.items() if plain(value)} for group in numbers]


def check_optimizer(optimizer: ShardedOptimizer, stored: StoredCheckpoint) -> None:
    """Refuse a checkpoint whose optimizer state does not fit, before anything is changed.

    Raises:
        CheckpointError: it holds none, or that of another optimizer, or of other parameter groups.
    """
    metadata: Mapping[str, Any] | None = stored.manifest.metadata.get("optimizer")
    ours = _kind_of(optimizer)
    if metadata is None:
        raise CheckpointError(
            f"{stored.path} holds no optimizer state; load it with LoadParts(optimizer=False) or MODULE_ONLY"
        )
    if metadata["class"] != ours:
        raise CheckpointError(
            f"{stored.path} holds the state of {metadata['class']}, and this engine runs {ours}; use the same "
            "optimizer, or load with LoadParts(optimizer=False)"
        )
    way_out = "build the optimizer with the same groups in the same order, or load with LoadParts(optimizer=False)"
    saved, own = (_members(groups) for groups in (metadata["groups"], optimizer.hyperparameters()))
    if len(saved) != len(own):
        raise CheckpointError(
            f"{stored.path} was saved with {len(saved)} parameter groups, and this optimizer has {len(own)}; {way_out}"
        )
    at = {name: index for index, names in enumerate(saved) for name in names}
    for index, names in enumerate(own):
        moved = next((name for name in names if at.get(name, index) != index), None)
        if moved is not None:
            raise CheckpointError(
                f"in {stored.path} parameter '{moved}' is in group {at[moved]} of the optimizer, here it is in group "
                f"{index}, and settings such as weight decay go by group; {way_out}"
            )


def _members(groups: list[dict[str, Any]]) -> list[list[str]]:
    return [group["params"] for group in groups]


def prepare_optimizer(optimizer: ShardedOptimizer, stored: StoredCheckpoint) -> None:
    """Allocate the state that ``stored`` holds, but of parameters that have another shape now: theirs starts anew."""
    shapes = {name: part.shape for name, part in optimizer.sharded.model_slices().items()}
    keys: dict[str, dict[str, torch.Size]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in stored.manifest.tensors.items():
        if name.startswith(MODEL):
            dtypes[name.removeprefix(MODEL)] = tensor.dtype
        elif name.startswith(OPTIMIZER):
            entry = name.removeprefix(OPTIMIZER)
            parameter, _, key = entry.rpartition("/")
            weight = stored.manifest.tensors.get(MODEL + parameter)
            if weight is None or weight.shape == shapes.get(parameter):
                keys.setdefault(parameter, {})[key] = torch.Size(tensor.shape)
                dtypes[entry] = tensor.dtype
    optimizer.prepare_state(keys, stored.manifest.metadata["optimizer"]["schema"], dtypes)


def finish_optimizer(optimizer: ShardedOptimizer, metadata: Mapping[str, Any]) -> None:
    """Settings and numbers, once the tensors are filled."""
    optimizer.finish_load()
    optimizer.load_hyperparameters(metadata["groups"])
    optimizer.scaler.load_state_dict(metadata["loss_scale"])
