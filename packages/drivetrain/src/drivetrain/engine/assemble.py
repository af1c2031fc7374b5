"""`initialize`: the one place where the order of things is visible.

    configuration -> mesh -> sharded module -> optimizer on shards -> schedule -> data -> sinks -> engine
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from drivetrain.comm import Mesh, init
from drivetrain.engine.config import Config, load
from drivetrain.engine.data import Collate, LoaderConfig, TrainLoader
from drivetrain.engine.engine import Engine, Parts
from drivetrain.engine.lr import Schedule, build_schedule
from drivetrain.engine.monitor import EventCsvSink, PhaseTimers, SinkGroup
from drivetrain.engine.optimizers import build_optimizer
from drivetrain.zero import LossScalePolicy, LossScaler, Policy, ShardedModule, ShardedOptimizer, shard

log = logging.getLogger("drivetrain.engine")

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    lr_scheduler: LRScheduler | MakeScheduler | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Collate | None = None,
    mesh: Mesh | None = None,
) -> Engine:
    """Make an engine that trains ``model`` as ``config`` says. Collective: every rank calls it.

    Args:
        model: any module. Its parameters are sharded in place, and start from rank 0's values on every rank.
        config: a dict, the path of a JSON file, base64 text, or what `drivetrain.engine.config.load` returned.
        optimizer: takes the place of the configured one: an optimizer over the model's parameters, or a function
            that makes one from them.
        lr_scheduler: takes the place of the configured one: a scheduler of the optimizer, or a function that makes one
            from it.
        model_parameters: what the optimizer trains: parameters, or parameter groups. All that require gradients by
            default.
        training_data: a data set; the engine's ``train_loader`` splits it over the ranks.
        collate_fn: makes a micro-batch from a list of samples.
        mesh: the ranks; by default all of them, along the axis ``shard``.

    Raises:
        ConfigError: the configuration, with every problem in it.
        ValueError: model, optimizer or mesh do not go with it.
    """
    config = config if isinstance(config, Config) else load(config)
    mesh = mesh or Mesh.create(init())
    _start_logging(config, mesh)
    batch = config.resolve_batch(mesh.sizes["shard"])
    _seed(config, mesh)
    _cast_buffers(model, config)
    sharded = shard(model, mesh, zero_policy(config, mesh))
    sharded_optimizer, schedule = _optimization(config, sharded, optimizer, lr_scheduler, model_parameters)
    loader = _loader(config, mesh, batch.micro, training_data, collate_fn)
    writes_csv = config.csv_monitor.enabled and mesh.world.rank == 0
    sinks = [EventCsvSink(config.csv_monitor.output_path, config.csv_monitor.job_name)] if writes_csv else []
    timers = PhaseTimers(enabled=config.wall_clock_breakdown, device=mesh.device)
    engine = Engine(
        Parts(
            config=config,
            mesh=mesh,
            batch=batch,
            sharded=sharded,
            optimizer=sharded_optimizer,
            schedule=schedule,
            loader=loader,
            sinks=SinkGroup(sinks),
            timers=timers,
        )
    )
    if config.dump_state and mesh.world.rank == 0:
        log.info("configuration: %s", config.to_dict())
        log.info("batch: %s; mesh: %s; units: %s", batch, mesh.sizes, [unit.name for unit in sharded.units])
    return engine


def zero_policy(config: Config, mesh: Mesh) -> Policy:
    """The part of a configuration that decides how a module is sharded."""
    zero = config.zero_optimization
    given = zero.model_fields_set
    half = config.model_dtype != "fp32"
    predivide = float(mesh.sizes["shard"]) if config.prescale_gradients else config.gradient_predivide_factor
    accumulate = config.data_types.grad_accum_dtype
    reduce = config.communication_data_type
    return Policy(
        stage=zero.stage,
        param_dtype=DTYPES[config.model_dtype] if half else None,
        accumulate_dtype=DTYPES[accumulate] if accumulate else None,
        reduce_dtype=DTYPES[reduce] if reduce else None,
        reduce_op=config.gradient_allreduce_op,
        predivide_factor=predivide,
        persistence_numel=zero.param_persistence_threshold,
        persistence_total_numel=zero.model_persistence_threshold,
        bucket_numel=min(zero.reduce_bucket_size, zero.allgather_bucket_size),
        # Where the file says nothing, the least memory: one unit ahead, and nothing kept that others come between.
        prefetch_numel=zero.prefetch_bucket_size if "prefetch_bucket_size" in given else None,
        max_reuse_numel=zero.max_reuse_distance if "max_reuse_distance" in given else 0,
        max_live_numel=zero.max_live_parameters if "max_live_parameters" in given else None,
        overlap=zero.overlap_comm is not False,
    )


def loss_scaler(config: Config) -> LossScaler:
    """The loss scaler of the ``fp16`` section; one that never scales without it."""
    fp16 = config.fp16
    if not fp16.enabled:
        return LossScaler()
    if fp16.loss_scale:
        return LossScaler(LossScalePolicy(initial=fp16.loss_scale, dynamic=False))
    return LossScaler(
        LossScalePolicy(
            initial=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )
    )


def _optimization(
    config: Config,
    sharded: ShardedModule,
    given: torch.optim.Optimizer | MakeOptimizer | None,
    given_schedule: LRScheduler | MakeScheduler | None,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None,
) -> tuple[ShardedOptimizer | None, Schedule | None]:
    trained = list(parameters) if parameters is not None else [p for p in sharded.module.parameters() if p.requires_grad]
    if isinstance(given, torch.optim.Optimizer):
        optimizer = given
    elif given is not None:
        optimizer = given(trained)
    elif config.optimizer is not None:
        optimizer = build_optimizer(config.optimizer, trained)
    else:
        if given_schedule is not None or config.scheduler is not None:
            raise ValueError("there is a learning-rate schedule but no optimizer for it")
        return None, None
    schedule = build_schedule(config.scheduler, optimizer, given_schedule)
    sharded_optimizer = ShardedOptimizer(
        sharded,
        optimizer,
        max_norm=config.gradient_clipping,
        scaler=loss_scaler(config),
        require_all=not config.zero_optimization.ignore_unused_parameters,
        skip_non_finite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
    )
    return sharded_optimizer, schedule


def _loader(
    config: Config, mesh: Mesh, micro: int, data: Dataset[Any] | None, collate: Collate | None
) -> TrainLoader | None:
    if data is None:
        return None
    axis = mesh.axis("shard")
    settings = LoaderConfig(
        micro_batch_size=micro,
        rank=axis.rank,
        ranks=axis.size,
        seed=config.drivetrain.seed,
        drop_last=config.dataloader_drop_last,
        pin_memory=mesh.device.type == "cuda",
    )
    return TrainLoader(data, settings, collate_fn=collate)


def _seed(config: Config, mesh: Mesh) -> None:
    """Seed the generators only if the file asks for it: a library does not reset what the caller seeded."""
    if "seed" in config.drivetrain.model_fields_set:
        seed = config.drivetrain.seed + mesh.world.rank
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


def _cast_buffers(model: nn.Module, config: Config) -> None:
    wanted = config.data_types.buffer_dtype
    if wanted is None:
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.to(DTYPES[wanted])


def _start_logging(config: Config, mesh: Mesh) -> None:
    """Let rank 0 show what the file asks to be shown, unless the program has set up logging itself."""
    root = logging.getLogger("drivetrain")
    asked = config.steps_per_print is not None or config.wall_clock_breakdown or config.dump_state
    if config.log_level is not None:
        root.setLevel(config.log_level.upper())
    elif asked:
        root.setLevel(logging.INFO)
    else:
        return
    if mesh.world.rank == 0 and not root.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
