"""Any torch optimizer, each rank updating only its shards.

The problem: a torch optimizer wants parameters with gradients; a rank has slices of them, in several dtypes. The
idea: give the optimizer the slices. Its parameter groups keep their objects and hyperparameters (so schedules
attached to them go on working), and each holds 1-D views of master weights instead of parameters; at stage 0 the
views are whole and in shape. Of parameters that were never trained a group remembers only that they belong to it.

The step goes bucket by bucket: bring the gradients into the master weights' dtype, update, write the low-precision
copy, send it to the others, and let the gradients go, so that fp32 gradients of one bucket exist at a time and the
sends overlap with the next update. States that live in a store (see `store`) come and go bucket by bucket with it.

What takes the loss scale off and clips is one factor. An optimizer that says ``takes_factor = True`` is called as
``step(factor=...)`` and multiplies on the fly, in fp32; for any other one the gradients are multiplied before.

Only an optimizer whose update of an element depends on nothing but that element's history may be fed slices. Which
ones those are is a table here; an optimizer of one's own says it with a class attribute ``elementwise = True``. One
that needs norms of whole parameters says ``needs_whole_norms = True`` and offers ``reduce_norms`` (see
``drivetrain.kernels.Lamb``). One that needs whole matrices offers ``matrix_exchange`` (see
``drivetrain.kernels.Muon``), and is given the means to bring the slices of a matrix together on one rank.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from drivetrain.comm import Waitable, all_gather_object, all_reduce
from drivetrain.kernels import FusedAdagrad, FusedAdam, FusedSgd, Lion
from drivetrain.zero.adopt import Adopted, adopt
from drivetrain.zero.api import ShardedModule
from drivetrain.zero.bucket import Bucket, Slot
from drivetrain.zero.clip import clip_coefficient, own_square_sum
from drivetrain.zero.early import AtStep, EarlyUpdates, StepPolicy, SubGroup
from drivetrain.zero.layout import Piece
from drivetrain.zero.matrices import Matrix, SlicedMatrices
from drivetrain.zero.parking import OPTIMIZER_STATE
from drivetrain.zero.precision import LossScaler
from drivetrain.zero.state import FlatSlice
from drivetrain.zero.store import expect, flat_slice

log = logging.getLogger("drivetrain.zero")

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
    FusedAdam,
    FusedAdagrad,
    FusedSgd,
    Lion,
)

StateKind = Literal["elementwise", "tensor", "int", "float", "bool"]


class NonFiniteGradientError(RuntimeError):
    """Gradients were Inf or NaN so many steps in a row that training cannot be going anywhere."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        stepped: parameters were updated.
        reason: why not, if not.
        grad_norm: global norm of the unscaled gradients, before clipping.
        clip_coefficient: what the gradients were multiplied by; 1 where clipping did not bite.
        loss_scale: the scale that the gradients carried.
    """

    stepped: bool
    reason: str | None
    grad_norm: float
    clip_coefficient: float
    loss_scale: float


@dataclass(frozen=True)
class _Part:
    """The slice of one parameter that this rank's optimizer updates."""

    slot: Slot
    slot_index: int
    piece: Piece
    tensor: torch.Tensor  # view of the bucket's master weights


@dataclass(frozen=True)
class _SubGroup:
    """What one bucket contributes to each parameter group of the optimizer."""

    bucket: Bucket
    parts: tuple[tuple[_Part, ...], ...]  # by parameter group

    def __iter__(self) -> Iterator[_Part]:
        return (part for group in self.parts for part in group)


class ShardedOptimizer:
    """Runs ``optimizer`` on the shards of ``sharded``.

    Args:
        sharded: the module.
        optimizer: made over the module's parameters, before or after sharding. Its parameter groups are pointed at the
            shards in place, and state that it holds already is cut to them. Frozen parameters in its groups are updated
            once they are unfrozen.
        max_norm: clip the global gradient norm to this; 0 does not clip.
        scaler: owns the loss scale. Its scale must have multiplied the loss.
        require_all: every optimized parameter must have got a gradient on some rank.
        skip_non_finite: skip the step when a gradient is Inf or NaN, instead of applying it.
        patience: steps skipped in a row, with the loss scale at its minimum, before `NonFiniteGradientError`.
        early: update what lives in a store within the backward pass that closes a step; see `early`. To the bit the
            same. What has no master weights of its own is updated at the step, and so is everything where the update
            of a parameter needs other ranks (Muon on several).

    Raises:
        TypeError: ``optimizer`` is no torch optimizer.
        ValueError: the optimizer cannot work on slices, within one step or on fp16 weights, or has parameters the
            module lacks.
    """

    def __init__(
        self,
        sharded: ShardedModule,
        optimizer: Optimizer,
        *,
        max_norm: float = 0.0,
        scaler: LossScaler | None = None,
        require_all: bool = False,
        skip_non_finite: bool = True,
        patience: int = 20,
        early: bool = False,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, found something of type {type(optimizer).__name__}")
        if max_norm < 0:
            raise ValueError(f"max_norm cannot be negative, got {max_norm}")
        self.sharded = sharded
        self.optimizer = optimizer
        self.scaler = scaler or LossScaler()
        sharded.hooks.backward.own_scale = lambda: self.scaler.scale
        self.max_norm = max_norm
        self._require_all = require_all
        self._skip_non_finite = skip_non_finite
        self._patience = patience
        self._skipped_in_a_row = 0
        self._steps = 0  # begun, by this object: for errors
        self._torn: str | None = None  # what ended an update half-way
        self._whole_norms = bool(getattr(optimizer, "needs_whole_norms", False))
        self._whole_matrices = hasattr(optimizer, "matrix_exchange")
        self._takes_factor = bool(getattr(optimizer, "takes_factor", False))
        self._elementwise = isinstance(optimizer, ELEMENTWISE) or bool(getattr(optimizer, "elementwise", False))
        self._by_bucket = self._elementwise or self._whole_matrices  # a parameter never lies in two buckets
        self._scalars: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._group_of: dict[int, int] = {}  # by the id of a parameter
        self._tensors: dict[int, torch.Tensor] = {}  # by the id of a parameter: what the optimizer updates of it
        self._sub_groups: list[_SubGroup] = []
        self._sub_group_of: dict[Bucket, _SubGroup] = {}
        self._told = True  # `_tell_unlisted` has nothing new to say
        self._unlisted: frozenset[int] = frozenset()  # trained parameters in no group that were told of, by id
        self.names: list[list[str]] = []  # by group
        self._check()
        self._take_groups()
        self._held = dict(optimizer.state)  # of whole parameters, to be cut
        optimizer.state.clear()
        sharded.trained.tell(self._take_buckets)
        self._unlisted = frozenset(self._find_unlisted())
        self._told = True
        self.policy: StepPolicy = self._early_updates() if early else AtStep()

    # construction -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        name = type(self.optimizer).__name__
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise ValueError(
                f"{name} evaluates the model several times within a step (it needs a closure), which sharded training "
                "does not do; use an optimizer that takes one gradient per step"
            )
        if isinstance(self.optimizer, torch.optim.SparseAdam):
            raise ValueError(f"{name} takes sparse gradients, and an optimizer is given dense ones here; use AdamW")
        slices = self._elementwise or self._whole_norms or self._whole_matrices
        if self.sharded.policy.splits_optimizer and not slices:
            raise ValueError(
                f"{name} is not known to update each element on its own, and ZeRO stage {self.sharded.policy.stage} "
                "gives an optimizer slices of parameters. Use stage 0, or set `elementwise = True` on its class if an "
                "element's update depends on nothing but that element's own values."
            )
        stores = self.sharded.stores
        if stores.states is not None and not stores.states.in_memory and not self._by_bucket:
            raise ValueError(
                f"{name} needs the norms of all parameters before it updates one, so all of its states at once, and "
                "they are in files of which a part is in memory at a time; use an optimizer that updates each element "
                "on its own, or keep its states in memory (offload_optimizer.device cpu)"
            )
        self._check_half()

    def _check_half(self) -> None:
        half = any(bucket.master.dtype == torch.float16 for bucket in self.sharded.trained_buckets)
        if half and not self._takes_factor:
            raise ValueError(
                f"{type(self.optimizer).__name__} would be given fp16 gradients without their loss scale, since master "
                "weights are fp16, and "
                "small ones would be 0. Use an optimizer of drivetrain.kernels, which takes the scale off in fp32, or "
                "keep fp32 master weights"
            )

    def _take_groups(self) -> None:
        """Learn which parameters are in groups that are new."""
        sharded = self.sharded
        slots = {id(slot.parameter): slot for bucket in sharded.buckets for slot in bucket.slots}
        first = len(self.names)
        new = self.optimizer.param_groups[first:]
        listed = [(index, id(parameter)) for index, group in enumerate(new, first) for parameter in group["params"]]
        strangers = sum(key not in slots for _, key in listed)
        again = [slots[key].name for _, key in listed if key in self._group_of]
        if strangers or again:
            if first:
                del self.optimizer.param_groups[first:]
            name = type(self.optimizer).__name__
            raise ValueError(
                f"{strangers} of the {len(listed)} parameters in {name} do not belong to the sharded "
                f"{type(sharded.module).__name__}"
                if strangers
                else f"parameter '{again[0]}' is in a parameter group of {name} already; a parameter has one group"
            )
        self._group_of.update((key, index) for index, key in listed)
        self.names = [[] for _ in self.optimizer.param_groups]
        for key, slot in slots.items():
            if key in self._group_of:
                self.names[self._group_of[key]].append(slot.name)

    def _take_buckets(self) -> None:
        """Point the optimizer's groups at this rank's slices of all that is, or was, trained."""
        self._check_half()
        if len(self.optimizer.param_groups) != len(self.names):
            self._take_groups()
        sharded = self.sharded
        count = len(self.optimizer.param_groups)
        matrices: dict[int, Matrix] = {}
        sub_groups = []
        for bucket in (bucket for bucket in sharded.buckets if bucket.has_master):
            parts: list[list[_Part]] = [[] for _ in range(count)]
            for slot_index, (slot, piece) in enumerate(zip(bucket.slots, bucket.region_pieces(), strict=True)):
                index = self._group_of.get(id(slot.parameter))
                if index is not None and (piece.numel or self._whole_norms or self._whole_matrices):
                    tensor = self._slice(bucket, slot, piece)
                    parts[index].append(_Part(slot, slot_index, piece, tensor))
                    matrices[id(tensor)] = Matrix(bucket, slot_index)
            sub_groups.append(_SubGroup(bucket, tuple(map(tuple, parts))))
            self._move_in(sub_groups[-1])
        for index, group in enumerate(self.optimizer.param_groups):
            group["params"] = [part.tensor for sub in sub_groups for part in sub.parts[index]]
        if self._whole_norms and sharded.policy.splits_optimizer:
            self.optimizer.reduce_norms = self._sum_over_ranks  # type: ignore[attr-defined]
        if self._whole_matrices and sharded.policy.splits_optimizer:
            self.optimizer.matrix_exchange = SlicedMatrices(matrices, sharded.axis)  # type: ignore[attr-defined]
        self._sub_groups = sub_groups
        self._sub_group_of = {sub.bucket: sub for sub in sub_groups}
        self._told = False

    def _slice(self, bucket: Bucket, slot: Slot, piece: Piece) -> torch.Tensor:
        """What the optimizer updates of a parameter: the same tensor every time, as state goes by it."""
        key = id(slot.parameter)
        if key not in self._tensors:
            flat = bucket.master[piece.shard_offset : piece.shard_offset + piece.numel]
            self._tensors[key] = tensor = flat if bucket.split else flat.view(slot.shape)
            held = self._held.pop(slot.parameter, None)
            if held is not None:
                self.optimizer.state[tensor] = _cut_state(held, slot, piece, tensor)
            if bucket.master_home is not None:
                bucket.master_home.watch(tensor, of=bucket.master, start=piece.shard_offset)
        return self._tensors[key]

    def _tell_unlisted(self) -> None:
        """Say what was unfrozen and will not be updated: plain torch is silent too, and it takes days to find."""
        if self._told:
            return
        self._told = True
        unlisted = self._find_unlisted()
        new = [name for key, name in unlisted.items() if key not in self._unlisted]
        if new and self.sharded.axis.world.rank == 0:
            log.warning(
                "parameter '%s', one of %d that were unfrozen, is in no parameter group of the optimizer: it gets "
                "gradients, and no step updates it. Add it with add_param_group",
                new[0],
                len(new),
            )
        self._unlisted = frozenset(unlisted)

    def _find_unlisted(self) -> dict[int, str]:
        """Names, by id, of trained parameters in no group."""
        trained = [s for bucket in self.sharded.trained_buckets for s in bucket.slots if s.parameter.requires_grad]
        return {id(slot.parameter): slot.name for slot in trained if id(slot.parameter) not in self._group_of}

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Optimize more parameters of the module, with settings of their own. No communication; all ranks do the same.

        The same as ``add_param_group`` of the optimizer itself, which is noticed at the next step.

        Args:
            group: ``params``, of which none is in a group yet, and settings; the optimizer's defaults hold for others.
                Frozen ones are updated once they are unfrozen.

        Raises:
            ValueError: a parameter does not belong to the module, or is in a group already.
        """
        self.sharded.moved.require("add_param_group()")
        self.optimizer.add_param_group(dict(group))
        self._notice_groups()

    def adopt(self, settings: Mapping[str, Any] | None = None) -> Adopted:
        """Take over parameters that were added to the module, and optimize them. Collective.

        One that has taken the place of another, under its name, is in that one's group; its state starts anew.

        Args:
            settings: others form a group with these settings, and the optimizer's defaults for the rest. None: they
                join the first group.

        Raises:
            ValueError, RuntimeError: see `drivetrain.zero.adopt`.
        """
        before = {slot.name: slot.parameter for bucket in self.sharded.buckets for slot in bucket.named}
        groups = {name: self._group_of.get(id(parameter)) for name, parameter in before.items()}
        adopted = adopt(self.sharded)
        for parameter in adopted.left.values():
            self._group_of.pop(id(parameter), None)
            tensor = self._tensors.pop(id(parameter), None)
            if tensor is not None:
                self.optimizer.state.pop(tensor, None)
        trainable = {id(s.parameter) for bucket in self.sharded.buckets if bucket.trainable for s in bucket.slots}
        others = []
        for name, parameter in adopted.joined.items():
            index = groups[name] if name in adopted.left else None if settings is not None else 0
            if id(parameter) in trainable and index is not None:
                self._group_of[id(parameter)] = index
            elif id(parameter) in trainable and name not in adopted.left:
                others.append(parameter)
        if others:
            self.optimizer.add_param_group({**(settings or {}), "params": others})
        self._take_groups()
        self._take_buckets()
        return adopted

    def _notice_groups(self) -> None:
        """Take over groups that were added to the optimizer."""
        if len(self.optimizer.param_groups) != len(self.names):
            self._take_buckets()

    def _early_updates(self) -> StepPolicy:
        name, ranks = type(self.optimizer).__name__, self.sharded.ranks
        if self.sharded.stores.states is None:
            raise ValueError("early updates are those of states that live in a store, and there is none for them")
        if not self._by_bucket:
            raise ValueError(
                f"{name} needs the norms of all parameters before it updates one, so that no update can be early; use "
                "an optimizer that updates each element on its own, or leave early updates out (super_offload false)"
            )
        if ranks.replicas.size > 1:
            raise ValueError(
                f"gradients are complete only when they are averaged over the {ranks.replicas.size} replicas, after "
                "backward, so that no update can be early; shard over all ranks, or leave early updates out "
                "(super_offload false)"
            )
        if self._whole_matrices and ranks.shard.size > 1:
            if ranks.everyone.rank == 0:
                log.warning("%s updates matrices on several ranks together, so that no update is early", name)
            return AtStep()
        apart = [bucket for bucket in self.sharded.trained_buckets if bucket.homes.states and bucket.own_master]
        if not apart and ranks.everyone.rank == 0:
            log.warning("no parameters have master weights of their own in a store, so that no update is early")
        return EarlyUpdates(self.sharded, self, clips=self.max_norm > 0)

    def _sum_over_ranks(self, values: torch.Tensor) -> None:
        all_reduce(values, self.sharded.axis, purpose=f"norms of parameters in optimizer step {self._steps}").wait()

    # the step ---------------------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's own groups: change hyperparameters here."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, *, divisor: float = 1.0) -> StepResult:
        """Reduce what is left, check, clip, update, and publish the new parameters. Collective.

        Accumulated gradients are consumed, also when the step is skipped.

        Args:
            divisor: what the gradients are divided by first, besides the loss scale; the same on all ranks. The norm
                and the clipping are those of the divided gradients.

        Raises:
            RuntimeError: no parameter has a gradient on any rank, or not all have while ``require_all``.
            NonFiniteGradientError: steps were skipped too often in a row.
        """
        sharded = self.sharded
        self._require_whole("an optimizer step")
        sharded.moved.require("an optimizer step")
        self._notice_groups()
        if any(unit.pins for unit in sharded.units):
            raise RuntimeError(
                f"rank {sharded.axis.world.rank}: step() inside a `gathered` or `resident` context, whose whole "
                "parameters would be out of date; leave the context first"
            )
        sharded.hooks.backward.settle()
        sharded.hooks.forget_calls()
        sharded.guard.take_edits()
        sharded.residency.release_all()
        sharded.reducer.drain()
        scale = self.scaler.scale
        self._steps += 1
        norm = self._survey() / (scale * divisor)
        sharded.reducer.agree_on_order()
        self._tell_unlisted()
        finite = math.isfinite(norm)
        if not finite and self._skip_non_finite:
            return self._skip(norm, scale)
        self._skipped_in_a_row = 0
        coefficient = clip_coefficient(norm, self.max_norm)
        try:
            self._update(coefficient / (scale * divisor))
            self.policy.stepped(coefficient, divisor)
        except BaseException as error:
            self._torn = f"the update of step {self._steps} failed ({type(error).__name__}: {error})"
            raise
        self.scaler.update(overflow=False)
        return StepResult(stepped=True, reason=None, grad_norm=norm, clip_coefficient=coefficient, loss_scale=scale)

    def _survey(self, *, again: bool = False) -> float:
        """Agree with all ranks on what was used and what is unreduced; return the norm of the scaled gradients."""
        sharded, device = self.sharded, self.sharded.axis.control_device
        buckets, reducer = sharded.trained_buckets, sharded.reducer
        flags = [float(reducer.stray), *(float(flag) for flag in reducer.unsent())]
        flags += [float(used) for bucket in buckets for used in bucket.used]
        squares = own_square_sum((bucket.own_square_sum() for bucket in buckets), device)
        purpose = f"gradient norm of optimizer step {self._steps}"
        survey = torch.cat((squares.view(1), torch.tensor(flags, dtype=torch.float64, device=device)))
        all_reduce(survey, sharded.axis, purpose=purpose).wait()
        # The norms of replicas are the same, what they used is not.
        all_reduce(survey, sharded.ranks.replicas, op="max", purpose=purpose).wait()
        total, stray, *counts = survey.tolist()
        if stray and not again:  # parameters were unfrozen, and since then only a part of the module was called
            sharded.trained.agree()
            return self._survey(again=True)
        unsent = [count > 0 for count in counts[: len(buckets)]]
        if any(unsent):
            reducer.reduce(unsent)
            squares = own_square_sum((bucket.own_square_sum() for bucket in buckets), device)
            all_reduce(squares, sharded.axis, purpose=purpose).wait()
            total = squares.item()
        used = iter(counts[len(buckets) :])
        for bucket in buckets:
            bucket.used = [next(used) > 0 for _ in bucket.slots]
        if not any(used for bucket in buckets for used in bucket.used):
            raise RuntimeError(
                f"rank {sharded.axis.world.rank}: step() without a gradient: no rank has run backward since the last "
                "step, or an exception stopped it, which drops the gradients of the step"
            )
        if self._require_all:
            self._refuse_unused()
        # Rounded to fp32, so that the order in which shards were added up cannot show: see `clip`.
        return torch.tensor(total, dtype=torch.float64).sqrt().to(torch.float32).item()

    def _refuse_unused(self) -> None:
        slots = ((s, used) for b in self.sharded.trained_buckets for s, used in zip(b.slots, b.used, strict=True))
        unused = [slot.name for slot, used in slots if not used and slot.parameter.requires_grad]
        if unused:
            raise RuntimeError(
                f"{len(unused)} parameters got no gradient on any rank in this step, the first is '{unused[0]}'; use "
                "them in the loss, freeze them, or set zero_optimization.ignore_unused_parameters to true"
            )

    def _skip(self, norm: float, scale: float) -> StepResult:
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.scaler.at_minimum else 0
        if self._skipped_in_a_row >= self._patience:
            raise NonFiniteGradientError(
                f"rank {self.sharded.axis.rank}: gradients were not finite in {self._skipped_in_a_row} steps in a row "
                f"at loss scale {scale:g}; the first parameter concerned is {self._first_non_finite()}. Lower the "
                "learning rate, check the inputs of the last batches for NaN, or clip gradients."
            )
        self.policy.settle(None)
        self.sharded.reducer.clear()
        self.sharded.reducer.step_taken(trusted=False)
        self.scaler.update(overflow=True)
        return StepResult(
            stepped=False,
            reason=f"gradients are not finite (norm {norm}) at loss scale {scale:g}",
            grad_norm=norm,
            clip_coefficient=1.0,
            loss_scale=scale,
        )

    def _first_non_finite(self) -> str:
        found = None
        for sub in self._sub_groups:
            reduced = sub.bucket.reduced
            with sub.bucket.gradients_at_hand(changes=False):
                for part in sub:
                    if found is None and reduced is not None:
                        piece = part.piece
                        values = reduced[piece.shard_offset : piece.shard_offset + piece.numel]
                        found = None if bool(torch.isfinite(values).all()) else part.slot.name
        purpose = "the first parameter whose gradient is not finite"
        everywhere = [name for name in all_gather_object(found, self.sharded.axis, purpose=purpose) if name]
        return f"'{everywhere[0]}'" if everywhere else "none that the optimizer updates"

    def _update(self, factor: float) -> None:
        arriving: list[Waitable] = []
        written: list[dict[str, Any]] = []
        trained = [sub for sub in self._sub_groups if sub.bucket.trained]
        batches = [[sub] for sub in trained] if self._by_bucket else [trained]
        self.policy.settle(factor)
        expect(home for sub in trained for home in self.policy.needs(sub))
        for batch in batches:
            early = self.policy.take(batch[0]) if self._by_bucket else None
            written = self._update_batch(batch, factor) if early is None else early
            for sub in batch:
                self._tell_autograd(sub.bucket)
                if sub.bucket.resident and sub.bucket.split:
                    arriving.append(self.sharded.parameters.start(sub.bucket, during=f"optimizer step {self._steps}"))
        for group, copy in zip(self.optimizer.param_groups, written, strict=True):
            group.update((key, value) for key, value in copy.items() if key != "params")
        for handle in arriving:
            handle.wait()
        torch.clear_autocast_cache()  # rounded copies of what has changed, where autocast reaches beyond a step
        self.sharded.reducer.clear()
        self.sharded.reducer.step_taken(trusted=True)

    def _update_batch(self, batch: Sequence[_SubGroup], factor: float) -> list[dict[str, Any]]:
        with ExitStack() as stack:
            for sub in batch:
                stack.enter_context(sub.bucket.gradients_at_hand(changes=False))
                stack.enter_context(self._at_hand(sub))
            written = self._compute(batch, factor)
            for sub in batch:
                sub.bucket.forget_gradients()
                sub.bucket.publish_master()
        return written

    def _compute(self, batch: Sequence[_SubGroup], factor: float) -> list[dict[str, Any]]:
        """Update sub-groups whose gradients and states are at hand."""
        try:
            for sub in batch:
                self._give_gradients(sub, factor)
            return self._run_optimizer(batch, factor)
        finally:
            for sub in batch:
                for part in sub:
                    part.tensor.grad = None

    def sub_group_of(self, bucket: Bucket) -> SubGroup | None:
        """What the optimizer has of ``bucket``."""
        return self._sub_group_of.get(bucket)

    def assumed_factor(self, divisor: float) -> float:
        """What a step that does not clip multiplies gradients by, at the present loss scale."""
        return 1.0 / (self.scaler.scale * divisor)

    def update_at_hand(self, sub: SubGroup, factor: float) -> list[dict[str, Any]]:
        """Update ``sub``, whose gradients and states are at hand."""
        assert isinstance(sub, _SubGroup)
        return self._compute([sub], factor)

    @contextmanager
    def _at_hand(self, sub: _SubGroup) -> Iterator[None]:
        """The masters and the state of ``sub`` can be read and written; state that is made meanwhile stays with it."""
        with sub.bucket.at_hand(changes=True):
            yield
            self._move_in(sub)

    def _move_in(self, sub: _SubGroup) -> None:
        """Where state lives in a store: let there be all state that there is now."""
        home, living = sub.bucket.homes.states, self.living_with(sub)
        if home is not None and not home.holds(living):
            home.move_in(living)

    def living_with(self, sub: SubGroup) -> list[torch.Tensor]:
        """What of ``sub`` lives in a store together: master weights and what the optimizer has of it."""
        masters = [sub.bucket.master] if sub.bucket.own_master else []
        return [*masters, *self._remembered(sub)]

    def _remembered(self, sub: SubGroup) -> Iterator[torch.Tensor]:
        """What the optimizer has of ``sub``, but for single numbers."""
        for part in sub:
            for value in self.optimizer.state.get(part.tensor, {}).values():
                if isinstance(value, torch.Tensor) and value.dim():
                    yield value

    def _tell_autograd(self, bucket: Bucket) -> None:
        """Parameters changed behind autograd's back: let it refuse a backward pass over a graph from before."""
        changed = [slot for slot, used in zip(bucket.slots, bucket.used, strict=True) if used]
        torch.autograd.graph.increment_version(slot.parameter for slot in changed)
        self.sharded.guard.accept(changed)

    def _give_gradients(self, sub: _SubGroup, factor: float) -> None:
        bucket = sub.bucket
        if bucket.reduced is None:
            return
        wanted, gradients = bucket.master.dtype, bucket.reduced
        if factor != 1.0 and not self._takes_factor:
            gradients = gradients.to(torch.promote_types(gradients.dtype, wanted)).mul_(factor)
        gradients = gradients.to(bucket.master.device, wanted)
        for part in sub:
            if bucket.used[part.slot_index]:
                piece = part.piece
                flat = gradients[piece.shard_offset : piece.shard_offset + piece.numel]
                part.tensor.grad = flat.view(part.tensor.shape)

    def _run_optimizer(self, batch: Sequence[_SubGroup], factor: float) -> list[dict[str, Any]]:
        """Let the optimizer see only the parameters of ``batch``, in copies of its groups, which are returned.

        What an optimizer writes into its groups, such as a step count of its own, stays in the copies, so that every
        batch of one step starts from the same values.
        """
        groups = self.optimizer.param_groups
        copies = [
            {**group, "params": [part.tensor for sub in batch for part in sub.parts[index]]}
            for index, group in enumerate(groups)
        ]
        self.optimizer.param_groups = copies
        try:
            if self._takes_factor:
                self.optimizer.step(factor=factor)  # type: ignore[call-overload]
            else:
                self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        return copies

    def zero_grad(self) -> None:
        """Forget the gradients accumulated so far."""
        self.sharded.zero_grad()

    # state ------------------------------------------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's own state on this rank (without master weights, and what is away or in a store)."""
        if set(OPTIMIZER_STATE) & set(self.sharded.moved.away):
            return 0
        here = (part for sub in self._sub_groups if sub.bucket.homes.states is None for part in sub)
        values = (value for part in here for value in self.optimizer.state.get(part.tensor, {}).values())
        return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))

    def state_of(self, parameter: torch.nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of this rank's slice of ``parameter``, live; empty before the first step."""
        tensor = self._tensors.get(id(parameter))
        state: dict[str, Any] = {} if tensor is None else self.optimizer.state.get(tensor, {})
        return state

    def _parts(self) -> Iterator[tuple[Bucket, _Part, Piece]]:
        """Every part with its bucket and with what of it this rank writes to a checkpoint."""
        for sub in self._sub_groups:
            own = sub.bucket.own_pieces()
            for part in sub:
                yield sub.bucket, part, own[part.slot_index]

    def state_schema(self) -> dict[str, dict[str, str]]:
        """The keys of the optimizer's per-parameter state on this rank: kind and dtype of each. JSON-able."""
        schema: dict[str, dict[str, str]] = {}
        for _, part, _ in self._parts():
            for key, value in self.optimizer.state.get(part.tensor, {}).items():
                dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "float64"
                schema.setdefault(key, {"kind": _kind(key, value, part.tensor), "dtype": dtype})
        return schema

    def prepare_state(
        self,
        stored: Mapping[str, Mapping[str, torch.Size]],
        schema: Mapping[str, Mapping[str, str]],
        saved_as: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        """Allocate state to load into, also for parameters that are frozen now if some is stored.

        State that has a value for each element takes the dtype that this optimizer gives it: those of
        ``drivetrain.kernels`` say which (``state_dtype_of``), and torch's make it like the master weights. Others are
        taken to make it as it was saved if the master weights were saved in the dtype that they have here, and else
        like them.

        Args:
            stored: for each parameter name, the keys that a checkpoint holds of it, with the shapes there.
            schema: what `state_schema` said of the keys.
            saved_as: dtypes in the checkpoint, of parameters by name and of their state by ``<parameter>/<key>``; where
                there is none, the parameter's own and the schema's.
        """
        self.sharded.moved.require("loading optimizer state", OPTIMIZER_STATE)
        self.optimizer.state.clear()
        self._scalars.clear()
        self._make_masters(stored)
        for sub in self._sub_groups:
            self._prepare_state(sub, stored, schema, saved_as)

    def _require_whole(self, doing: str) -> None:
        """Refuse ``doing`` after an update that ended half-way."""
        if self._torn is not None:
            raise RuntimeError(
                f"rank {self.sharded.axis.world.rank}: {doing} after {self._torn}, which left some parameters updated "
                "and others not; load a checkpoint first"
            )

    def _prepare_state(
        self,
        sub: _SubGroup,
        stored: Mapping[str, Mapping[str, torch.Size]],
        schema: Mapping[str, Mapping[str, str]],
        saved_as: Mapping[str, torch.dtype],
    ) -> None:
        for part in sub:
            name = part.slot.name
            for key, shape in stored.get(name, {}).items():
                kind, dtype = schema[key]["kind"], getattr(torch, schema[key]["dtype"])
                state = self.optimizer.state[part.tensor]
                if kind == "elementwise":
                    saved = saved_as.get(f"{name}/{key}", dtype)
                    same_master = saved_as.get(name, part.tensor.dtype) == part.tensor.dtype
                    wanted = self._state_dtype(part.tensor, saved, same_master=same_master)
                    state[key] = torch.zeros_like(part.tensor, dtype=wanted)
                elif kind == "tensor":
                    device = part.tensor.device if shape or self._scalars_on_device(part) else "cpu"
                    state[key] = torch.zeros(shape, dtype=dtype, device=device)
                else:
                    state[key] = {"int": 0, "float": 0.0, "bool": False}[kind]
                    self._scalars[part.tensor, key] = torch.zeros((), dtype=dtype)
        home = sub.bucket.homes.states
        if home is not None:
            home.remake(self.living_with(sub))

    def _make_masters(self, names: Collection[str]) -> None:
        """Have slices of frozen parameters in ``names``, as if they had been trained here."""
        optimized = {name for group in self.names for name in group}
        wanted = optimized.intersection(names)
        for bucket in self.sharded.buckets:
            if bucket.trainable and any(slot.name in wanted for slot in bucket.slots):
                bucket.make_master()
        self._take_buckets()

    def _state_dtype(self, tensor: torch.Tensor, saved: torch.dtype, *, same_master: bool) -> torch.dtype:
        if not saved.is_floating_point:
            return saved
        if hasattr(self.optimizer, "state_dtype_of"):
            own: torch.dtype = self.optimizer.state_dtype_of(tensor)
            return own
        return saved if same_master and not isinstance(self.optimizer, ELEMENTWISE) else tensor.dtype

    def _scalars_on_device(self, part: _Part) -> bool:
        groups = self.optimizer.param_groups
        return any(group.get("fused") or group.get("capturable") for group in groups)

    def state_slices(self, purpose: Literal["save", "load"]) -> dict[str, FlatSlice]:
        """The optimizer state as ``<parameter>/<key>``.

        For saving, ranks give disjoint slices; for loading, each gives all that it wants filled.
        """
        self.sharded.moved.require("saving or loading optimizer state", OPTIMIZER_STATE)
        if purpose == "save":
            self._require_whole("saving")
        slices: dict[str, FlatSlice] = {}
        writes = self.sharded.ranks.writes
        for bucket, part, own in self._parts():
            for key, value in self.optimizer.state.get(part.tensor, {}).items():
                name, kind = f"{part.slot.name}/{key}", _kind(key, value, part.tensor)
                if kind != "elementwise":
                    whole = value if kind == "tensor" else self._scalar(part.tensor, key, value)
                    first = own.start == 0 and (own.numel > 0 or (part.slot.numel == 0 and bucket.axis.rank == 0))
                    window, offset, shape = slice(0, whole.numel()), 0, whole.shape
                elif bucket.split or purpose == "load":
                    whole, first = value, bucket.split
                    window, offset, shape = slice(0, value.numel()), part.piece.start, part.slot.shape
                else:
                    whole, first = value, True
                    window, offset, shape = slice(own.start, own.start + own.numel), own.start, part.slot.shape
                home = bucket.homes.states if whole.dim() else None
                slices[name] = flat_slice(whole, window, home, offset=offset, shape=shape, writes=first and writes)
        return slices

    def _scalar(self, tensor: torch.Tensor, key: str, value: float) -> torch.Tensor:
        kept = self._scalars.get((tensor, key))
        return kept if kept is not None else torch.tensor(value, dtype=torch.float64)

    def finish_load(self) -> None:
        """After a load filled the slices: put numbers that are no tensors back, in their own type."""
        self._torn = None
        for (tensor, key), value in self._scalars.items():
            state = self.optimizer.state[tensor]
            state[key] = type(state[key])(value.item())
        self._scalars.clear()

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Each parameter group's settings and the names of its parameters. JSON-able where the settings are."""
        self._notice_groups()
        groups = zip(self.optimizer.param_groups, self.names, strict=True)
        return [{**{k: v for k, v in group.items() if k != "params"}, "params": names} for group, names in groups]

    def load_hyperparameters(self, saved: list[dict[str, Any]]) -> None:
        """Set each group's settings to what `hyperparameters` returned. Groups are matched by position."""
        if len(saved) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the checkpoint has {len(saved)} parameter groups, the optimizer {len(self.optimizer.param_groups)}; "
                "build the optimizer with the same groups, or load without optimizer state"
            )
        for group, values in zip(self.optimizer.param_groups, saved, strict=True):
            for key, value in values.items():
                if key != "params" and key in group:
                    group[key] = tuple(value) if isinstance(group[key], tuple) else value


def _cut_state(state: dict[str, Any], slot: Slot, piece: Piece, like: torch.Tensor) -> dict[str, Any]:
    """State of a whole parameter, cut to the slice that ``like`` is."""

    def cut(key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if key == "step" or value.shape != slot.shape:
            return value.clone()
        flat = value.reshape(-1)[piece.start : piece.start + piece.numel]
        return torch.empty_like(like, dtype=value.dtype).copy_(flat.reshape(like.shape))

    return {key: cut(key, value) for key, value in state.items()}


def _kind(key: str, value: object, parameter: torch.Tensor) -> StateKind:
    if isinstance(value, torch.Tensor):
        return "elementwise" if key != "step" and value.shape == parameter.shape else "tensor"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    if isinstance(value, float):
        return "float"
    raise TypeError(f"optimizer state '{key}' is a {type(value).__name__}; only tensors and numbers can be saved")
