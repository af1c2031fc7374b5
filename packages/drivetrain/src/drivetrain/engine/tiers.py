"""Which memory each kind of state lives in: what `offload_optimizer` and `offload_param` ask for, as stores.

On a CPU the host's memory is the device's, so that ``device: cpu`` changes nothing there, and says so once.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from drivetrain.comm import Mesh
from drivetrain.engine.config import Aio, Config, OffloadOptimizer, OffloadParam
from drivetrain.engine.precision import Precision
from drivetrain.kernels import AsyncFileOptions
from drivetrain.offload import HostStore, NvmeStore
from drivetrain.zero import ShardStore, Stores

log = logging.getLogger("drivetrain.engine")


def make_stores(config: Config, mesh: Mesh, precision: Precision) -> Stores:
    """The stores that ``config`` asks for.

    Raises:
        ValueError: a folder cannot be written to, or another running job uses it.
    """
    zero = config.zero_optimization
    maker = _Maker(config, mesh)
    parameters = maker.parameters(zero.offload_param, precision) if zero.offload_param else None
    states = maker.states(zero.offload_optimizer) if zero.offload_optimizer else None
    share = zero.offload_optimizer.ratio if zero.offload_optimizer else 1.0
    return Stores(parameters=parameters, states=states, gradients=states, share=share)


def sub_group_numel(config: Config, mesh: Mesh) -> tuple[int, ...]:
    """Most elements of a bucket whose states come and go with it; nothing where states stay."""
    zero = config.zero_optimization
    section = zero.offload_optimizer
    away = section is not None and section.device != "none"
    return (zero.sub_group_size * mesh.sizes["shard"],) if away else ()


class _Maker:
    def __init__(self, config: Config, mesh: Mesh) -> None:
        self._config = config
        self._rank = mesh.world.rank
        self._device = mesh.device

    def parameters(self, section: OffloadParam, precision: Precision) -> ShardStore | None:
        if section.device != "nvme":
            return self._host("offload_param", section)
        itemsize = (precision.compute or torch.float32).itemsize
        fixed = "buffer_size" in section.model_fields_set
        return NvmeStore(
            self._folders("offload_param", section.nvme_path or ()),
            name="parameters",
            rank=self._rank,
            buffer_count=section.buffer_count,
            buffer_bytes=section.buffer_size * itemsize if fixed else None,
            max_in_cpu=section.max_in_cpu * itemsize,
            pin_memory=section.pin_memory,
            options=self._options(),
        )

    def states(self, section: OffloadOptimizer) -> ShardStore | None:
        if section.device != "nvme":
            return self._host("offload_optimizer", section)
        return NvmeStore(
            self._folders("offload_optimizer", section.nvme_path or ()),
            name="states",
            rank=self._rank,
            buffer_count=section.buffer_count,
            pin_memory=section.pin_memory,
            pipeline_read=section.pipeline_read,
            pipeline_write=section.pipeline_write,
            options=self._options(),
        )

    def _host(self, name: str, section: OffloadParam | OffloadOptimizer) -> ShardStore | None:
        if section.device == "none":
            return None
        if self._device.type == "cpu":
            if self._rank == 0:
                log.warning(
                    "zero_optimization.%s: device cpu changes nothing here, since this job computes in host memory "
                    "already; device nvme would make room",
                    name,
                )
            return None
        return HostStore(pin_memory=section.pin_memory)

    def _folders(self, name: str, paths: Sequence[str]) -> list[Path]:
        """They are there already, or next to something that is: a disk that is not mounted must be noticed."""
        folders = [Path(path).expanduser() for path in paths]
        for folder in folders:
            try:
                folder.mkdir(exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise ValueError(
                    f"rank {self._rank}: zero_optimization.{name}.nvme_path: {folder} cannot be written to: "
                    f"{os.strerror(error.errno or 0)}; name a folder on a local disk that this user may write to"
                ) from error
        return folders

    def _options(self) -> AsyncFileOptions | None:
        if "aio" not in self._config.model_fields_set:
            return None
        aio: Aio = self._config.aio
        return AsyncFileOptions(
            block_size=aio.block_size,
            queue_depth=aio.queue_depth,
            parallelism=min(aio.intra_op_parallelism, aio.queue_depth),
        )
