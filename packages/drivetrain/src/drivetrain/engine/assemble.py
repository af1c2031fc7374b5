"""`assemble`: the one place where the order of things is visible.

configuration -> mesh -> sharded module -> optimizer on shards -> schedule -> data -> observer
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from drivetrain.comm import Mesh, Safeguards, init
from drivetrain.engine.config import BatchSizes, Config, ZeroOptimization, load
from drivetrain.engine.data import Collate, LoaderConfig, TrainLoader
from drivetrain.engine.lr import Schedule, build_schedule
from drivetrain.engine.monitor import EventCsvSink, PhaseTimers, SinkGroup
from drivetrain.engine.observe import Observer
from drivetrain.engine.optimizers import Parameters, build_optimizer, check_moments
from drivetrain.engine.precision import DTYPES, Precision
from drivetrain.engine.tiers import make_stores, sub_group_numel
from drivetrain.kernels import SharedMemoryGroup
from drivetrain.zero import (
    INT4_GRADIENTS,
    INT8_WEIGHTS,
    ErrorFeedback,
    LeafRule,
    Policy,
    ShardedModule,
    ShardedOptimizer,
    TensorSource,
    shard,
)

log = logging.getLogger("drivetrain.engine")

MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller brings along instead of, or besides, what the configuration asks for. See `initialize`."""

    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None
    lr_scheduler: LRScheduler | MakeScheduler | None = None
    parameters: Parameters | None = None
    training_data: Dataset[Any] | None = None
    collate_fn: Collate | None = None
    weights: TensorSource | None = None


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an engine consists of."""

    config: Config
    mesh: Mesh
    batch: BatchSizes
    precision: Precision
    sharded: ShardedModule
    optimizer: ShardedOptimizer | None
    schedule: Schedule | None
    loader: TrainLoader | None
    observer: Observer


def assemble(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    given: Given,
    mesh: Mesh | None,
) -> Parts:
    """Put the parts of an engine together. Collective."""
    config = config if isinstance(config, Config) else load(config)
    mesh = _mesh(config) if mesh is None else _check_safeguards(config, mesh)
    _start_logging(config, mesh)
    batch = config.resolve_batch(mesh.sizes["data"] * mesh.sizes["shard"])
    _seed(config, mesh)
    _cast_buffers(model, config)
    precision = Precision.of(config, mesh.device)
    stores = make_stores(config, mesh, precision)
    sharded = shard(model, mesh, zero_policy(config, mesh, precision), values=given.weights, stores=stores)
    optimizer, schedule = _optimization(config, sharded, given, precision)
    loader = _loader(config, sharded, batch.micro, given)
    observer = _observer(config, mesh)
    if config.dump_state and mesh.world.rank == 0:
        log.info("configuration: %s", config.to_dict())
        log.info("batch: %s; mesh: %s; units: %s", batch, mesh.sizes, [unit.name for unit in sharded.units])
    return Parts(
        config=config,
        mesh=mesh,
        batch=batch,
        precision=precision,
        sharded=sharded,
        optimizer=optimizer,
        schedule=schedule,
        loader=loader,
        observer=observer,
    )


def _mesh(config: Config) -> Mesh:
    """All ranks along the shard axis, or groups of `mics_shard_size` of them with replicas of each other."""
    world, size = init(), config.zero_optimization.mics_shard_size
    safeguards = _safeguards(config)
    if size <= 0:
        return Mesh.create(world, shared_memory=SharedMemoryGroup, safeguards=safeguards)
    if world.size % size:
        raise ValueError(
            f"zero_optimization.mics_shard_size is {size}, which does not divide the {world.size} ranks; choose a "
            "divisor, or start another number of ranks"
        )
    data = world.size // size
    return Mesh.create(world, data=data, shard=size, shared_memory=SharedMemoryGroup, safeguards=safeguards)


def _safeguards(config: Config) -> Safeguards:
    section = config.drivetrain
    return Safeguards(timeout=section.collective_timeout, check=section.check_collectives).overridden(os.environ)


def _check_safeguards(config: Config, mesh: Mesh) -> Mesh:
    """The mesh of the caller, which was made with safeguards of its own; refuse a configuration that has others."""
    asked = _safeguards(config)
    wrong = {
        "collective_timeout": asked.timeout not in (None, mesh.timeout),
        "check_collectives": asked.check and not mesh.safeguards.check,
    }
    for name in (name for name, differs in wrong.items() if differs):
        raise ValueError(
            f"the configuration has drivetrain.{name}={getattr(config.drivetrain, name)}, and initialize was given a "
            "mesh that was made without it: pass safeguards=Safeguards(...) to Mesh.create, or leave the key out"
        )
    return mesh


def zero_policy(config: Config, mesh: Mesh, precision: Precision) -> Policy:
    """The part of a configuration that decides how a module is sharded."""
    zero = config.zero_optimization
    predivide = float(mesh.sizes["shard"]) if config.prescale_gradients else config.gradient_predivide_factor
    accumulate = config.data_types.grad_accum_dtype
    reduce = config.communication_data_type
    return Policy(
        stage=zero.stage,
        param_dtype=precision.compute,
        master_dtype=precision.master,
        accumulate_dtype=DTYPES[accumulate] if accumulate else None,
        reduce_dtype=DTYPES[reduce] if reduce else precision.compute,
        wire_rule=precision.wire_rule(config),
        reduce_op=config.gradient_allreduce_op,
        predivide_factor=predivide,
        persistence_numel=zero.param_persistence_threshold,
        persistence_total_numel=zero.model_persistence_threshold,
        bucket_numel=min(zero.reduce_bucket_size, zero.allgather_bucket_size, *sub_group_numel(config, mesh)),
        prefetch_numel=zero.prefetch_bucket_size,
        max_reuse_numel=zero.max_reuse_distance,
        max_live_numel=zero.max_live_parameters,
        leaf=_leaf_rule(zero),
        gather_rule=INT8_WEIGHTS if zero.zero_quantized_weights else None,
        frozen_rule=INT8_WEIGHTS if zero.zero_quantized_nontrainable_weights else None,
        reduce_rule=INT4_GRADIENTS if zero.zero_quantized_gradients else None,
        sparse_gradients=config.sparse_gradients,
        error_feedback=_error_feedback(zero),
        node_ranks=_node_ranks(zero, mesh),
        secondary_ranks=zero.zero_hpz_partition_size,
        gather_in_two=zero.mics_hierarchical_params_gather,
        root_apart=config.compile.deepcompile,
        overlap=zero.overlap_comm is not False,
    )


def _error_feedback(zero: ZeroOptimization) -> ErrorFeedback | None:
    section = zero.zeropp_loco_param
    return None if section is None else ErrorFeedback(beta=section.err_beta, reset_every=section.reset_T)


def _node_ranks(zero: ZeroOptimization, mesh: Mesh) -> int | None:
    """Ranks of the shard axis that are close to each other: as the file says, else those of a host."""
    if zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size
    host, shard = mesh.world.local_size, mesh.sizes["shard"]
    return host if host < shard and shard % host == 0 else None


def _leaf_rule(zero: ZeroOptimization) -> LeafRule:
    """Classes only where the file names some: those of the default are found by what they hold."""
    section = zero.leaf_module
    return LeafRule(
        classes=section.classes if "classes" in section.model_fields_set else (),
        names=section.names,
        suffixes=section.name_suffixes,
        granularity_numel=zero.module_granularity_threshold,
    )


def _optimization(
    config: Config, sharded: ShardedModule, given: Given, precision: Precision
) -> tuple[ShardedOptimizer | None, Schedule | None]:
    trained: Parameters = [p for p in sharded.module.parameters() if p.requires_grad]
    if given.parameters is not None:
        trained = given.parameters
    elif not trained and (given.optimizer or config.optimizer) is not None:
        raise ValueError(
            f"no parameter of {type(sharded.module).__name__} requires gradients, so there is nothing to optimize; "
            "unfreeze some before initialize, or leave the optimizer out"
        )
    if isinstance(given.optimizer, torch.optim.Optimizer):
        optimizer = given.optimizer
    elif given.optimizer is not None:
        optimizer = given.optimizer(trained)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"the function given as optimizer= returned something of type {type(optimizer).__name__}, not a "
                "torch.optim.Optimizer"
            )
    elif config.optimizer is not None:
        parameters = trained if given.parameters is not None else _optimizable(sharded)
        optimizer = build_optimizer(config.optimizer, parameters, sharded.module, precision.moments)
    else:
        if given.lr_scheduler is not None or config.scheduler is not None:
            raise ValueError(
                'there is a learning-rate schedule but no optimizer for it: add an "optimizer" section to the '
                "configuration, or pass optimizer= to initialize"
            )
        return None, None
    if precision.moments is not None:
        check_moments(optimizer, precision.master or torch.float32, precision.moments)
    schedule = build_schedule(config.scheduler, optimizer, given.lr_scheduler)
    section = config.zero_optimization.offload_optimizer
    sharded_optimizer = ShardedOptimizer(
        sharded,
        optimizer,
        max_norm=config.gradient_clipping,
        scaler=precision.loss_scaler(config),
        require_all=not config.zero_optimization.ignore_unused_parameters,
        skip_non_finite=config.bf16.check_grad_overflow if config.bf16.enabled else True,
        early=section is not None and section.super_offload and sharded.stores.states is not None,
    )
    return sharded_optimizer, schedule


def _optimizable(sharded: ShardedModule) -> list[nn.Parameter]:
    """What is trained, or may be unfrozen later."""
    trainable = {id(s.parameter) for bucket in sharded.buckets if bucket.trainable for s in bucket.slots}
    return [p for p in sharded.module.parameters() if id(p) in trainable]


def _loader(config: Config, sharded: ShardedModule, micro: int, given: Given) -> TrainLoader | None:
    if given.training_data is None:
        return None
    axis = sharded.ranks.everyone
    settings = LoaderConfig(
        micro_batch_size=micro,
        rank=axis.rank,
        ranks=axis.size,
        seed=config.drivetrain.seed,
        drop_last=config.dataloader_drop_last,
        pin_memory=axis.device.type == "cuda",
    )
    return TrainLoader(given.training_data, settings, collate_fn=given.collate_fn)


def _observer(config: Config, mesh: Mesh) -> Observer:
    csv = config.csv_monitor
    sinks = [EventCsvSink(csv.output_path, csv.job_name)] if csv.enabled and mesh.world.rank == 0 else []
    return Observer(
        config,
        rank=mesh.world.rank,
        sinks=SinkGroup(sinks),
        timers=PhaseTimers(enabled=config.wall_clock_breakdown, device=mesh.device),
        ledger=mesh.ledger,
        device=mesh.device,
    )


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
    asked |= config.compile.debug_log
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
