"""Read this first: `shard` splits a module over ranks, `ShardedModule` is what it gives back.

    module = build_model()                                     # any nn.Module, same code as without sharding
    sharded = shard(module, mesh, Policy(stage=3))             # module's parameters now live in buckets
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(module.parameters(), lr=1e-3))
    loss = module(batch).mean()                                # hooks bring parameters in and let them go
    loss.backward()                                            # gradients leave for their owners as they are made
    optimizer.step()                                           # each rank updates its shard

The rooms, from small to large: `layout` (who owns what, pure), `bucket` (storage), `unit` (buckets of one block),
`grouping` (which parameters form a unit), `exchange` and `reducer` (gradients), `order` and `residency` (parameters),
`hooks` (where all of it meets autograd), `guard` (what else programs do to a module), `optimizer`, `wire` (what travels
in fewer bits). For models that fit on no rank: `build` (`Init`, over `construction` and `split`) and `values` (what
buckets are filled from). Without hooks: `compiled` (over `plans`, `gathers` and the passes in `graph`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from drivetrain.comm import Axis, Mesh, all_gather
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.build import Init
from drivetrain.zero.exchange import GradientExchange
from drivetrain.zero.fetch import ParameterExchange
from drivetrain.zero.grouping import named_parameters
from drivetrain.zero.guard import Guard
from drivetrain.zero.hooks import Hooks
from drivetrain.zero.laying import (
    Plan,
    Shelves,
    check_memory,
    check_plain,
    check_same,
    find_groups,
    make_buckets,
    prepare_buffers,
)
from drivetrain.zero.parking import GRADIENTS, PARAMETERS, WEIGHTS, MovedStates
from drivetrain.zero.policy import Policy
from drivetrain.zero.provenance import announce, others_behind, scaled
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.reducer import GradientReducer
from drivetrain.zero.residency import Residency
from drivetrain.zero.state import FlatSlice
from drivetrain.zero.store import Stores
from drivetrain.zero.trained import Trained
from drivetrain.zero.unit import Presence, Unit
from drivetrain.zero.values import Initialize, TensorSource, find_values
from drivetrain.zero.wire import WireRule


@dataclass(frozen=True, kw_only=True)
class ModelStateBytes:
    """Bytes of model states that one rank holds at this moment."""

    parameters: int
    gradients: int
    master: int
    gathered: int  # part of `parameters`: what stage 3 has whole now and will release


class ShardedModule:
    """A module whose parameters are stored, gathered and reduced according to a policy. Made by `shard`.

    Attributes:
        module: the module that was given, its hooks installed.
        policy: the policy.
        ranks: the ranks that it is trained on.
        units: what is gathered and released together, root first.
        buckets: all buckets, in the order of the units.
        trained: which parameters are trained now.
        closes_step: whether the next backward pass is the last one before the optimizer step. Only stages that
            reduce once per step ask; with False they keep accumulating on their own.
        moved: which states are away (see `move_states`).
        stores: where states live that are not on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        policy: Policy,
        ranks: Ranks,
        units: tuple[Unit, ...],
        residency: Residency,
        parameters: ParameterExchange,
        reducer: GradientReducer,
        moved: MovedStates,
        shelves: Shelves,
    ) -> None:
        self.module = module
        self.policy = policy
        self.ranks = ranks
        self.units = units
        self.residency = residency
        self.parameters = parameters
        self.reducer = reducer
        self.moved = moved
        self.shelves = shelves
        self.stores = shelves.stores
        self.buckets = tuple(bucket for unit in units for bucket in unit.buckets)
        self.closes_step = True
        gathers = any(not unit.resident for unit in units)
        self.trained = Trained(self.buckets, ranks, gathers=gathers, holds_gradients=lambda: self.holds_gradients)
        self.trained.tell(reducer.set_trained)
        self.hooks = Hooks(module, units, residency, reducer, self.trained, self.reduces, lambda: self.closes_step)
        self.hooks.backward.admit = self.check_backward
        self.guard = Guard(module, units, ranks.shard.world.rank, moved)

    @property
    def axis(self) -> Axis:
        """The ranks that it is sharded over."""
        return self.ranks.shard

    @property
    def trained_buckets(self) -> tuple[Bucket, ...]:
        """The buckets with parameters that are trained now."""
        return tuple(bucket for bucket in self.buckets if bucket.trained)

    def adopt(self, units: tuple[Unit, ...], fresh: Mapping[Bucket, Unit]) -> None:
        """Go on with ``units``, in which there are ``fresh`` buckets. For `drivetrain.zero.adopt`."""
        self.units = units
        self.buckets = tuple(bucket for unit in units for bucket in unit.buckets)
        self.residency.adopt(units)
        self.reducer.extend([bucket for bucket in fresh if bucket.trainable])
        self.hooks.adopt(units, fresh)
        self.guard.adopt(units)
        self.trained.adopt(self.buckets)

    def reduces(self) -> bool:
        """Whether the next backward pass reduces gradients, or only adds them up."""
        return self.policy.reduces_every_micro_batch or self.closes_step

    def check_backward(self) -> None:
        """Called when a backward pass begins; refuses it while it would miss something.

        Raises:
            RuntimeError: parameters or gradients are away.
        """
        self.moved.require("a backward pass", (*PARAMETERS, *GRADIENTS))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context accumulate without reducing, where the stage keeps whole gradients.

        Stages 2 and 3 keep no whole gradients: they go on reducing, which gives the same sum.
        """
        before, self.closes_step = self.closes_step, False
        try:
            yield
        finally:
            self.closes_step = before

    def scaled(self, loss: torch.Tensor, scale: float) -> torch.Tensor:
        """``loss * scale``, for a backward pass whose gradients carry a loss scale.

        The pass tells this module, and every sharded module that the loss comes from, which scale it brings: each
        converts its gradients to its own optimizer's scale.

        Raises:
            RuntimeError: the loss carries a loss scale already; or, in the backward pass, it meets another one.
        """
        return scaled(loss, scale, self.hooks.backward)

    @contextmanager
    def announced(self, outputs: Sequence[torch.Tensor], scale: float) -> Iterator[None]:
        """As `scaled`, for a backward pass in this context from ``outputs`` with gradients that carry ``scale``."""
        handles = announce(outputs, scale, self.hooks.backward)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def others_behind(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether other sharded modules that are trained would get gradients of ``outputs``."""
        return others_behind(outputs, self.hooks.backward)

    def release(self) -> None:
        """Let go of what was kept whole for graphs that may yet run backward; an optimizer step does that too.

        Stage 3 keeps parameters whole from a backward pass with ``create_graph``, or a call whose outputs hide their
        tensors, to the next step. Graphs from before cannot run backward after this.
        """
        self.hooks.backward.settle()
        self.hooks.forget_calls()
        self.residency.release_all()

    def zero_grad(self) -> None:
        """Forget the gradients accumulated so far."""
        self.moved.require("zero_grad()", GRADIENTS)
        self.hooks.backward.settle()
        self.reducer.drain()
        self.reducer.clear()

    @property
    def holds_gradients(self) -> bool:
        """Whether this rank has gradients that no step has used. Those of a backward pass that failed do not count."""
        self.hooks.backward.settle()
        return self.reducer.holds_gradients

    def refresh_parameters(self) -> None:
        """Make every rank's parameters follow from the shards, after these were written to (by a load). Collective."""
        self.moved.require("refresh_parameters()", WEIGHTS)
        self.residency.release_all()
        for bucket in self.buckets:
            if not bucket.split:
                purpose = f"master weights of {bucket.title}"
                with bucket.at_hand(changes=True):
                    all_gather(bucket.master, bucket.master[bucket.own], self.axis, purpose=purpose).wait()
            bucket.publish_master()
            if bucket.split and bucket.resident:
                self.parameters.start(bucket, during="refresh_parameters").wait()
        torch.clear_autocast_cache()

    def model_slices(self) -> dict[str, FlatSlice]:
        """This rank's part of every parameter, by canonical name, in the highest precision there is."""
        self.moved.require("saving or loading the model", WEIGHTS)
        slices: dict[str, FlatSlice] = {}
        for bucket in self.buckets:
            slices.update(bucket.model_slices(writes=self.ranks.writes))
        return slices

    def buffer_slices(self) -> dict[str, FlatSlice]:
        """Persistent buffers, by name; rank 0 writes them."""
        slices = {}
        for name, buffer in persistent_buffers(self.module):
            flat = buffer.detach().view(-1)
            slices[name] = FlatSlice(data=flat, offset=0, shape=buffer.shape, writes=self.ranks.everyone.rank == 0)
        return slices

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Other names of tied parameters, by canonical name."""
        slots = (slot for bucket in self.buckets for slot in bucket.slots)
        return {slot.name: slot.names[1:] for slot in slots if len(slot.names) > 1}

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A copy of every parameter, whole, in the dtype it computes in; one unit is gathered at a time. Collective."""
        self.moved.require("full_parameters()", PARAMETERS)
        self.residency.release_others()
        for unit in self.units:
            was_live = unit.live
            unit.start_gather(exact=True, during="full_parameters")
            unit.finish_gather()
            copies = [(s.name, s.parameter.detach().clone()) for bucket in unit.buckets for s in bucket.named]
            if not was_live:
                unit.release()
            yield from copies

    def bytes(self) -> ModelStateBytes:
        """What this rank holds now."""
        gathered = sum(b.full.untyped_storage().size() for b in self.buckets if not b.resident)
        return ModelStateBytes(
            parameters=sum(b.parameter_bytes for b in self.buckets),
            gradients=sum(b.gradient_bytes for b in self.buckets),
            master=sum(b.master_bytes for b in self.buckets),
            gathered=gathered,
        )


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that ``state_dict`` holds, with their names, each once."""
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def shard(
    module: nn.Module,
    mesh: Mesh,
    policy: Policy,
    *,
    values: TensorSource | None = None,
    initialize: Initialize | None = None,
    stores: Stores | None = None,
) -> ShardedModule:
    """Split ``module`` over the mesh's shard axis as ``policy`` says. Collective: every rank calls it.

    Along the mesh's data axis the shards are held several times: gathers stay within the shard axis, and gradients are
    reduced there first and then, once per step, over the replicas.

    All ranks start from rank 0's values. Parameter objects stay the same, so optimizers and references made before
    remain valid; parameters and buffers move to the mesh's device. Master weights start from the values as given,
    before they are cast to ``policy.param_dtype``.

    A model that no rank has room for is built under `Init`, or on the meta device (``with torch.device("meta")``) and
    given its values here: from then on each rank has its shards and, for a moment, one parameter or one module whole.

    Args:
        module: the module. It may have been built under `Init`, on the meta device, or plainly; also in parts.
        mesh: the ranks.
        policy: how to shard and train.
        values: a source (a checkpoint, say) from which parameters and persistent buffers are read by name, each rank
            its own slices. It has all of them and no others, under one of the names where they are tied.
        initialize: if given, ``values`` may lack some. It is called, children first, with each module that owns
            parameters or buffers which are on the meta device and not in ``values``, when these have got memory, and
            fills them, as the ``reset_parameters`` of torch's layers do, or the ``_init_weights`` of a model of
            transformers. The first rank's numbers are what counts.
        stores: where states live; None keeps all of them on the mesh's device.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: something is on the meta device and gets no value, ``values`` has other names or shapes, no
            parameter is there at all, the module is sharded, or wrapped for another way of parallel training, already,
            was built under `Init` for another mesh or policy, or is not the same on all ranks.
        RuntimeError: called inside of `Init`.
    """
    _check(module, mesh)
    builders = _builders(module, mesh, policy)
    if policy.releases_parameters:
        _check_leaves(module, policy)
    if policy.wire_rule is not None:
        _check_wire(module, policy.wire_rule)
    ranks = Ranks.of(mesh, policy)
    check_same(module, policy, ranks.everyone)
    origins = find_values(module, ranks, values, initialize)
    for builder in builders:
        origins.add(builder.take(module))
    check_memory(named_parameters(module), origins)
    prepare_buffers(module.modules(), ranks.everyone)
    stores = stores or Stores()
    groups = find_groups(module, policy, ranks, stores)
    moved = MovedStates(ranks.shard.world.rank)
    parameters = ParameterExchange(policy, ranks, moved)
    shelves = Shelves(stores, sum(p.numel() for p in module.parameters() if p.requires_grad))
    plan = Plan.of(module, policy, ranks, origins, shelves)
    presence = Presence()
    units = tuple(
        Unit(index, group.name, group.modules, make_buckets(group, plan), parameters, presence)
        for index, group in enumerate(groups)
    )
    buckets = [bucket for unit in units for bucket in unit.buckets if bucket.trainable]
    residency = Residency(units, policy, presence)
    exchange = GradientExchange(policy, ranks)
    gathers = sum(not unit.resident for unit in units) > 1  # the gather of a single one precedes all of backward
    reducer = GradientReducer(buckets, exchange, ranks, overlap=policy.overlap, gathers=gathers)
    return ShardedModule(module, policy, ranks, units, residency, parameters, reducer, moved, shelves)


def _check(module: nn.Module, mesh: Mesh) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to shard, found something of type {type(module).__name__}")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"the model is wrapped in {type(module).__name__}, which would reduce gradients a second time; hand over "
            "the module inside it (its attribute .module)"
        )
    if Guard.of(module) is not None:
        raise ValueError(
            f"{type(module).__name__}, or a part of it, has been sharded before; build a new model for each engine"
        )
    parameters = named_parameters(module)
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters to shard")
    check_plain(parameters)
    others = {name: size for name, size in mesh.sizes.items() if name not in ("data", "shard") and size > 1}
    if others:
        raise ValueError(f"this version trains over the axes 'data' and 'shard'; the mesh also has {others}")


def _builders(module: nn.Module, mesh: Mesh, policy: Policy) -> list[Init]:
    """The contexts that ``module`` was built in, if they fit."""
    if Init.active() is not None:
        raise RuntimeError(f"rank {mesh.world.rank}: shard() inside of Init; leave the context first")
    builders = Init.of(module)
    for builder in builders:
        builder.require(mesh, policy)
    return builders


def _check_leaves(module: nn.Module, policy: Policy) -> None:
    unmatched = policy.leaf.unmatched(module)
    if unmatched:
        raise ValueError(
            f"{type(module).__name__} has no module that these rules for leaves match: {', '.join(unmatched)}. Correct "
            "them (names are those of named_modules()), or remove them: a rule that matches nothing protects nothing"
        )


def _check_wire(module: nn.Module, rule: WireRule) -> None:
    unknown = rule.unknown(module)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no class of this name is loaded, and {type(module).__name__} has no module of it, "
            "so no parameter can be found that is safe to send in fewer bits (wire_rule; in a configuration "
            "torch_autocast.lower_precision_safe_modules). Write package.module.Class, or remove it"
        )
