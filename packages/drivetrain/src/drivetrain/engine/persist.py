"""Saving, loading and exporting what `assemble` put together. All of it is collective.

Loading first examines everything that could not fit, on all ranks, and only then changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from drivetrain.engine.assemble import Parts
from drivetrain.engine.checkpoint import (
    CheckpointError,
    Exported,
    ExportOptions,
    LoadedCheckpoint,
    LoadOptions,
    RandomState,
    SaveOptions,
    StoredCheckpoint,
    TagValidation,
    agree,
    check_fit,
    export_tensors,
    load,
    open_checkpoint,
    save,
)
from drivetrain.engine.record import Counters
from drivetrain.engine.snapshot import (
    MODEL,
    LoadParts,
    check_optimizer,
    finish_optimizer,
    model_tensors,
    optimizer_metadata,
    optimizer_tensors,
    prepare_optimizer,
)

TAG_VALIDATION: Mapping[str, TagValidation] = MappingProxyType({"Ignore": "ignore", "Warn": "warn", "Fail": "fail"})


class Persistence:
    """Brings an engine's parts to disk and back. `Engine` documents what its methods do."""

    def __init__(self, parts: Parts) -> None:
        self.config = parts.config
        self.sharded = parts.sharded
        self.optimizer = parts.optimizer
        self.schedule = parts.schedule
        self.loader = parts.loader
        # A channel of its own: what checkpoints send is neither in training's order nor on its account.
        self._axis = parts.mesh.axis("data", "shard", channel="checkpoint")

    def save(
        self,
        directory: str | Path,
        tag: str | None,
        counters: Counters,
        client_state: object,
        options: SaveOptions | None,
    ) -> Path:
        """Save all parts, with ``counters``."""
        tensors = model_tensors(self.sharded)
        metadata: dict[str, Any] = {
            "counters": vars(counters),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "data": self.loader.state_dict() if self.loader else None,
            "config": self.config.to_dict(only_given=True),
            "model_config": _model_config(self.sharded.module),
        }
        if self.optimizer is not None:
            tensors.update(optimizer_tensors(self.optimizer, "save"))
            metadata["optimizer"] = optimizer_metadata(self.optimizer, self._axis)
        return save(
            directory,
            f"global_step{counters.global_steps}" if tag is None else tag,
            tensors=tensors,
            axis=self._axis,
            metadata=metadata,
            client_state=client_state,
            random_state=RandomState.capture(self._axis.device),
            aliases=self._aliases(),
            options=options or SaveOptions(tag_validation=TAG_VALIDATION[self.config.checkpoint.tag_validation]),
        )

    def load(self, directory: str | Path, tag: str | None, parts: LoadParts, *, strict: bool) -> LoadedCheckpoint:
        """Load into all parts. The counters are in the metadata of what is returned."""
        tensors = model_tensors(self.sharded)
        optimizer = self.optimizer if parts.optimizer else None
        only_model = LoadOptions(strict=strict, prefixes=(MODEL,), exhaustive=(MODEL,))
        opened: list[StoredCheckpoint] = []

        def examine() -> None:
            stored = open_checkpoint(directory, tag)
            check_fit(stored, tensors, only_model)
            if optimizer is not None:
                check_optimizer(optimizer, stored)
            self._take_positions(stored, parts)
            opened.append(stored)

        agree(examine, self._axis, "load: whether the checkpoint fits")
        (stored,) = opened
        self.sharded.zero_grad()
        if optimizer is not None:
            prepare_optimizer(optimizer, stored)
            tensors = {**model_tensors(self.sharded), **optimizer_tensors(optimizer, "load")}
        options = only_model if optimizer is None else replace(only_model, prefixes=())
        loaded = load(directory, stored.manifest.tag, tensors=tensors, axis=self._axis, options=options)
        self.sharded.refresh_parameters()
        metadata = loaded.metadata
        if optimizer is not None:
            finish_optimizer(optimizer, metadata["optimizer"])
        if parts.random and loaded.random_state is not None:
            loaded.random_state.restore(self._axis.device)
        return loaded

    def _take_positions(self, stored: StoredCheckpoint, parts: LoadParts) -> None:
        """Those of the data and of the schedule: they know best whether they fit, and have done nothing if not."""
        metadata = stored.manifest.metadata
        try:
            if parts.data and self.loader is not None and metadata["data"] is not None:
                self.loader.load_state_dict(metadata["data"])
            if parts.schedule and self.schedule is not None and metadata["schedule"] is not None:
                self.schedule.load_state_dict(metadata["schedule"])
        except ValueError as error:
            raise CheckpointError(f"{stored.path} does not fit this run: {error} (see LoadParts)") from error

    def export(self, directory: str | Path, options: ExportOptions | None, *, trainable_only: bool) -> Exported:
        """Write the whole weights, or those that are trained."""
        if options is None:
            options = ExportOptions(dtype=self.sharded.policy.param_dtype, config=_model_config(self.sharded.module))
        tensors = model_tensors(self.sharded)
        if trainable_only:
            slots = (slot for bucket in self.sharded.buckets for slot in bucket.named)
            trained = {MODEL + slot.name for slot in slots if slot.parameter.requires_grad}
            tensors = {name: part for name, part in tensors.items() if name in trained}
        return export_tensors(tensors, directory, axis=self._axis, aliases=self._aliases(), options=options)

    def _aliases(self) -> dict[str, str]:
        return {MODEL + other: MODEL + name for name, others in self.sharded.aliases().items() for other in others}


def _model_config(module: nn.Module) -> dict[str, Any] | None:
    """The configuration that models of transformers carry."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return to_dict() if callable(to_dict) else None
