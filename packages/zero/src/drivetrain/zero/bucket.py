"""Parameters of one dtype laid end to end: the unit of storage, of every collective and of the optimizer step.

The problem: gathering and reducing parameters one by one costs a copy in, a copy out and a message each. The idea:
parameters are views into one flat buffer which the collectives read and write directly, so nothing is copied to be
sent, and releasing a bucket is freeing one storage.

Invariants:
- A parameter object never changes. Only its ``.data`` does: a view of the full buffer while the bucket is whole, and
  between uses a placeholder of the true shape and dtype whose elements read as NaN and cannot be written.
- Autograd may have saved views of the full buffer. So the storage object is kept for good: released by resizing it
  to nothing, filled again before the views are read.
- ``master`` covers the optimizer's region of the bucket (the rank's shard, or all of it at stage 0). Where its dtype is
  that of the parameters (they are fp32 already, or 16-bit ones that are updated themselves), or they were never
  trained, it IS that part of them, not a copy.
- Where the shard is kept quantised (``packed``), there is nothing else: ``shard`` and ``master`` are empty.
- What of the shard, the master weights and the reduced gradients lives in a store is read and written `at_hand` only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import torch
from torch import nn

from drivetrain.comm import Axis, all_gather, broadcast
from drivetrain.kernels import QuantizationRule, prefer_large_pages
from drivetrain.zero.clip import square_sum
from drivetrain.zero.grouping import NamedParameter
from drivetrain.zero.layout import ALIGNMENT, BucketLayout, Piece
from drivetrain.zero.packed import PACKABLE, PackedShard, PackedSlice
from drivetrain.zero.policy import Formats
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.rows import Rows
from drivetrain.zero.split import placeholder
from drivetrain.zero.state import FlatSlice
from drivetrain.zero.store import Home, flat_slice


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in its bucket."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    shape: torch.Size
    start: int
    numel: int
    whole: torch.Tensor  # [*shape], view of the full buffer
    placeholder: torch.Tensor  # [*shape], no memory behind it
    plain: bool = True  # the parameter's class is nn.Parameter

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def gone(self) -> bool:
        """The parameter that was here is not in the module any more."""
        return not self.names


class Values(Protocol):
    """Where the values of parameters come from that are not simply there, whole, on the first rank."""

    def dtype(self, named: NamedParameter) -> torch.dtype:
        """What they come in."""

    def read(self, named: NamedParameter, start: int, stop: int) -> torch.Tensor:
        """Elements of the flattened parameter, 1-D. Collective: each rank reads its own part of the same parameter.

        Once per parameter.
        """


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where the states of one bucket live that are not on its device; see `drivetrain.zero.store`."""

    shard: Home | None = None
    states: Home | None = None
    gradients: Home | None = None

    def for_step(self) -> Iterator[Home]:
        """What an optimizer step needs, in the order in which it does."""
        for home in (self.gradients, self.states, self.shard):
            if home is not None:
                yield home


NOWHERE_ELSE = Homes()


class Bucket:
    """Storage of parameters that are gathered, reduced and updated together.

    Args:
        unit: the name of the unit that it is a part of, for errors.
        parameters: the parameters, all of one dtype. The first rank's values become the values on every rank.
        values: where their values come from instead; then no rank needs to have the whole bucket.
        formats: what they compute, are updated and travel in.
        resident: the full buffer is never released.
        splits_optimizer: the optimizer's region is this rank's shard instead of the whole bucket.
        ranks: the ranks that train it; it is split over their shard axis.
        rows: gradients are kept and sent as rows of the one parameter, a matrix, that there is.
        pack: how the shard is kept quantised; None keeps it as it is. For frozen parameters that are released.
        homes: where its states live.

    Attributes:
        trainable: the parameters can be trained: they take gradients, and are not kept quantised.
        trained: ranks have agreed that some of them are trained now (see `trained`), so gradients are reduced.
        has_master: they are, or were, trained, so there is something for an optimizer to update.
    """

    full: torch.Tensor  # [padded_numel] dtype; without storage while released
    shard: torch.Tensor  # [shard_numel] dtype; a view of full if resident
    packed: PackedShard | None  # the shard, where it is kept quantised
    secondary: torch.Tensor | None  # [part of what is gathered]; a second copy within the node, if it is current
    master: torch.Tensor  # [region] in the master weights' dtype
    local: torch.Tensor | Rows | None  # [padded_numel] gradients of this rank that are not reduced yet
    reduced: torch.Tensor | None  # [region] gradients reduced over the ranks that it is split over
    averaged: bool  # `reduced` is reduced over the replicas too
    gradient_writes: int  # how often `reduced` may have changed
    row_width: int | None  # elements of a row, where gradients are kept and sent as rows

    def __init__(
        self,
        unit: str,
        parameters: Sequence[NamedParameter],
        *,
        formats: Formats,
        resident: bool,
        splits_optimizer: bool,
        ranks: Ranks,
        values: Values | None = None,
        rows: bool = False,
        pack: QuantizationRule | None = None,
        homes: Homes = NOWHERE_ELSE,
    ) -> None:
        axis = ranks.shard
        self.homes = homes
        self.title = f"unit '{unit}' (first parameter '{parameters[0].name}')"
        alignment = ALIGNMENT if pack is None else math.lcm(ALIGNMENT, pack.block_size)
        self.layout = BucketLayout(tuple(p.parameter.numel() for p in parameters), axis.size, alignment)
        self.dtype = formats.compute
        self.wire = formats.wire
        self.resident = resident
        self.trainable = pack is None and formats.compute.is_floating_point
        self.trained = self.trainable and any(p.parameter.requires_grad for p in parameters)
        self.has_master = self.trained
        self.master_dtype = formats.master
        self.split = splits_optimizer
        self.row_width = parameters[0].parameter.shape[1] if rows else None
        self.axis = axis
        self.own = slice(*self.layout.shard_range(axis.rank))
        self.region = self.own if splits_optimizer else slice(0, self.layout.padded_numel)
        self.local = None
        self.reduced = None
        self.averaged = False
        self.gradient_writes = 0
        self._squares: torch.Tensor | None = None  # of reduced gradients that live in a store, as they went there
        self.secondary = None
        self.packed = None
        if pack is None:
            self._place(parameters, ranks.everyone, values)
        else:
            self._pack(parameters, ranks.everyone, values, pack)
        self.slots = self._make_slots(parameters)
        self.used = [False] * len(self.slots)
        self._away: type[nn.Parameter] | None = None
        self.attach()
        if not resident:
            self.release()

    def _place(self, parameters: Sequence[NamedParameter], everyone: Axis, values: Values | None) -> None:
        """Lay out the values, in the precision they came in, and keep what this rank needs of them."""
        if values is not None and not self.resident:
            region = self._read(parameters, values)
            self.full = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.axis.device)
            self.shard = self._shard_of(region)
        else:
            flat = self._broadcast(parameters, everyone) if values is None else self._collect(parameters, values)
            region = flat[self.region]
            self.full = flat.to(self.dtype)
            self.shard = self.full[self.own] if self.resident else self._shard_of(self.full[self.own])
        states, master = self.homes.states, self.master_dtype
        if not (self.trained and self._apart):
            self.master = self.shard if self.split else self.full
        elif states is None:
            self.master = region.to(master, copy=True)
        else:
            self.master = states.admit(region, master)

    def _shard_of(self, values: torch.Tensor) -> torch.Tensor:
        """A shard with these values."""
        home = self.homes.shard
        return values.to(self.dtype, copy=True) if home is None else home.admit(values, self.dtype)

    def _pack(
        self, parameters: Sequence[NamedParameter], everyone: Axis, values: Values | None, rule: QuantizationRule
    ) -> None:
        """Keep this rank's part of the values quantised, from the precision they came in."""
        own = self._broadcast(parameters, everyone)[self.own] if values is None else self._read(parameters, values)
        self.packed = PackedShard(own if own.dtype in PACKABLE else own.float(), rule)
        self.full = torch.empty(self.layout.padded_numel, dtype=self.dtype, device=self.axis.device)
        self.shard = self.master = self.full.new_empty(0)

    def _broadcast(self, parameters: Sequence[NamedParameter], everyone: Axis) -> torch.Tensor:
        """The first rank's values, [padded_numel]."""
        stored = parameters[0].parameter.dtype
        flat = torch.zeros(self.layout.padded_numel, dtype=stored, device=self.axis.device)
        for start, named in zip(self.layout.starts, parameters, strict=True):
            flat[start : start + named.parameter.numel()].copy_(named.parameter.detach().reshape(-1))
        broadcast(flat, everyone, purpose=f"first values of {self.title}").wait()
        return flat

    def _read(self, parameters: Sequence[NamedParameter], values: Values) -> torch.Tensor:
        """This rank's values, [shard_numel]."""
        stored = reduce(torch.promote_types, (values.dtype(named) for named in parameters))
        own = torch.zeros(self.layout.shard_numel, dtype=stored, device=self.axis.device)
        for index, named in enumerate(parameters):
            piece = self.layout.piece(index, self.axis.rank)
            part = values.read(named, piece.start, piece.start + piece.numel)
            own[piece.shard_offset : piece.shard_offset + piece.numel].copy_(part)
        return own

    def _collect(self, parameters: Sequence[NamedParameter], values: Values) -> torch.Tensor:
        """All values, [padded_numel], of which each rank reads its own."""
        own = self._read(parameters, values)
        flat = torch.empty(self.layout.padded_numel, dtype=own.dtype, device=self.axis.device)
        all_gather(flat, own, self.axis, purpose=f"first values of {self.title}").wait()
        return flat

    def _make_slots(self, parameters: Sequence[NamedParameter]) -> list[Slot]:
        nothing = placeholder(torch.Size(), self.dtype, self.axis.device)
        slots = []
        for start, named in zip(self.layout.starts, parameters, strict=True):
            shape, numel = named.parameter.shape, named.parameter.numel()
            whole = self.full[start : start + numel].view(shape)
            away = nothing.expand(shape) if numel else whole
            plain = type(named.parameter) is nn.Parameter
            slots.append(Slot(named.parameter, named.names, shape, start, numel, whole, away, plain))
        return slots

    @property
    def named(self) -> list[Slot]:
        """The slots whose parameters are in the module."""
        return [slot for slot in self.slots if not slot.gone]

    def follow(self, names: Mapping[int, tuple[str, ...]]) -> list[Slot]:
        """The module has changed: its parameters, by id, have these ``names``.

        Returns:
            What has left it. Its room stays, as something that nobody trains.
        """
        left: list[Slot] = []
        for index, slot in enumerate(self.slots):
            if not slot.gone and id(slot.parameter) not in names:
                left.append(slot)
                if slot.plain:
                    slot.parameter.__class__ = nn.Parameter
                slot.parameter.data = slot.placeholder
                nobody = nn.Parameter(slot.whole if self.resident else slot.placeholder, requires_grad=False)
                self.slots[index] = replace(slot, parameter=nobody, names=(), plain=False)
            elif not slot.gone:
                self.slots[index] = replace(slot, names=names[id(slot.parameter)])
        return left

    @property
    def numel(self) -> int:
        """Elements of the bucket, padding included."""
        return self.layout.padded_numel

    def make_master(self) -> None:
        """Have something for an optimizer to update, made of the parameters as they are, if there never was."""
        if not self.has_master and self._apart:
            states = self.homes.states
            with self.shard_at_hand(changes=False):
                if states is None:
                    self.master = self.master.to(self.master_dtype, copy=True)
                else:
                    self.master = states.admit(self.master, self.master_dtype)
        self.has_master = True

    @property
    def _apart(self) -> bool:
        """Master weights, where there are any, are memory of their own."""
        states = self.homes.states
        return self.master_dtype != self.dtype or (states is not None and states.device != self.axis.device)

    @property
    def whole(self) -> bool:
        """The full buffer has its storage."""
        return self.full.untyped_storage().size() > 0 or self.numel == 0

    def attach(self) -> None:
        """Point the parameters at the full buffer."""
        self._show_away(None)
        for slot in self.slots:
            slot.parameter.data = slot.whole

    @property
    def away(self) -> type[nn.Parameter] | None:
        """The class that parameters have while they are away (see `looks`); None: their own."""
        return self._away

    @away.setter
    def away(self, kind: type[nn.Parameter] | None) -> None:
        self._away = kind
        self._show_away(None if self.whole else kind)

    def _show_away(self, kind: type[nn.Parameter] | None) -> None:
        for slot in self.slots:
            if type(slot.parameter) is not (kind or nn.Parameter) and slot.plain:
                slot.parameter.__class__ = kind or nn.Parameter

    def release(self) -> None:
        """Give the full buffer's memory back; the parameters keep shape and dtype only."""
        self.detach()
        self.drop()

    def detach(self) -> None:
        """Point the parameters at nothing."""
        self._show_away(None)
        for slot in self.slots:
            slot.parameter.data = slot.placeholder
        self._show_away(self.away)

    def dismiss(self) -> None:
        """Nobody needs it any more."""
        self.trained = False
        self.slots.clear()
        self.full = self.shard = self.master = self.full.new_empty(0)
        self.packed = self.secondary = self.local = self.reduced = None
        for home in self.homes.for_step():
            home.forget()

    def drop(self) -> None:
        """Give the full buffer's memory back. The parameters must not point at it."""
        self.full.untyped_storage().resize_(0)

    def make_room(self) -> None:
        """Give the full buffer its storage, for a gather to fill."""
        if not self.whole:
            self.full.untyped_storage().resize_(self.numel * self.full.element_size())
            prefer_large_pages(self.full)

    def keep_second_copy(self, whole: torch.Tensor, axis: Axis) -> None:
        """Keep a part of ``whole``, which was gathered, split over ``axis``, to gather from until it changes."""
        self.secondary = whole[slice_of(whole.numel(), axis)].clone()

    def region_piece(self, index: int) -> Piece:
        """What of slot ``index`` lies in the optimizer's region; offsets count from the region's start."""
        if self.split:
            return self.layout.piece(index, self.axis.rank)
        slot = self.slots[index]
        return Piece(0, slot.numel, slot.start)

    def own_piece(self, index: int) -> Piece:
        """What of slot ``index`` lies in this rank's shard; offsets count from the optimizer region's start."""
        piece = self.layout.piece(index, self.axis.rank)
        return Piece(piece.start, piece.numel, piece.shard_offset + self.own.start - self.region.start)

    def region_pieces(self) -> list[Piece]:
        """`region_piece` of each slot."""
        return [self.region_piece(index) for index in range(len(self.slots))]

    def own_pieces(self) -> list[Piece]:
        """`own_piece` of each slot."""
        return [self.own_piece(index) for index in range(len(self.slots))]

    def own_reduced(self) -> torch.Tensor | None:
        """The part of the reduced gradients that is this rank's shard."""
        return self.reduced if self.split or self.reduced is None else self.reduced[self.own]

    @property
    def own_master(self) -> bool:
        """The master weights are memory of their own, not that of the parameters."""
        return self.master is not (self.shard if self.split else self.full)

    @property
    def master_home(self) -> Home | None:
        """Where the master weights live, if not on the device."""
        return self.homes.states if self.own_master else self.homes.shard

    @contextmanager
    def at_hand(self, *, changes: bool, linger: bool = False) -> Iterator[None]:
        """The master weights, and what the optimizer keeps beside them, can be read, and with ``changes`` written."""
        with ExitStack() as stack:
            for home in dict.fromkeys((self.homes.states, self.master_home)):
                if home is not None:
                    stack.enter_context(home.at_hand(changes=changes, linger=linger))
            yield

    @contextmanager
    def shard_at_hand(self, *, changes: bool, anew: bool = False) -> Iterator[None]:
        """The shard can be read, and with ``changes`` written; ``anew``: all of it will be."""
        home = self.homes.shard
        with nullcontext() if home is None else home.at_hand(changes=changes, anew=anew):
            yield

    @contextmanager
    def gradients_at_hand(self, *, changes: bool) -> Iterator[None]:
        """The reduced gradients can be read, and with ``changes`` written."""
        home = self.homes.gradients
        if changes:
            self._squares = None
            self.gradient_writes += 1
        with nullcontext() if home is None or self.reduced is None else home.at_hand(changes=changes):
            yield

    def add_reduced(self, gradients: torch.Tensor) -> None:
        """Add to the reduced gradients. ``gradients`` [region] belong to the bucket from here on."""
        home, self.averaged, self._squares = self.homes.gradients, False, None
        self.gradient_writes += 1
        if self.reduced is not None:
            with self.gradients_at_hand(changes=True):
                self.reduced.add_(gradients.to(self.reduced.device))
                self._squares = None if home is None else square_sum(self.reduced)
        elif home is None:
            self.reduced = gradients
        else:
            self._squares = square_sum(gradients)
            self.reduced = home.admit(gradients)

    def forget_gradients(self) -> None:
        """Drop the reduced gradients."""
        if self.reduced is not None and self.homes.gradients is not None:
            self.homes.gradients.forget()
        self.reduced = None
        self.averaged = False
        self.gradient_writes += 1

    def own_square_sum(self) -> torch.Tensor | None:
        """The sum of squares of the reduced gradients of this rank's shard, a float64 scalar; None without any."""
        own = self.own_reduced()
        if own is None or own.is_meta:
            return None
        if self._squares is None or self.averaged:
            with self.gradients_at_hand(changes=False):
                return square_sum(own)
        return self._squares

    def publish_master(self) -> None:
        """Write the master weights into the parameters' own dtype (nothing to do where they are the same memory)."""
        self.secondary = None
        if self.own_master:
            with self.at_hand(changes=False), self.shard_at_hand(changes=True, anew=True):
                target = self.shard if self.split else self.full
                target.copy_(self.master)

    def adopt_published(self) -> None:
        """Take into the master weights what was written into the whole parameters; all else keeps its precision."""
        if self.own_master:
            published = self.full[self.region].to(self.master.device)
            with self.at_hand(changes=True):
                same = published == self.master.to(self.dtype)
                self.master.copy_(torch.where(same, self.master, published.to(self.master.dtype)))

    def adopt_whole(self) -> None:
        """Take what was written into the whole parameters, the same on every rank, into what this rank keeps."""
        self.secondary = None
        if self.packed is not None:
            self.packed.adopt(self.full[self.own])
            return
        if not self.resident:
            with self.shard_at_hand(changes=True, anew=True):
                self.shard.copy_(self.full[self.own])
        self.adopt_published()

    def model_slices(self, *, writes: bool) -> dict[str, FlatSlice]:
        """This rank's part of every parameter, by canonical name, in the highest precision there is."""
        slices: dict[str, FlatSlice] = {}
        if self.packed is not None:
            self.packed.forget_arrivals()
        for slot, piece in zip(self.slots, self.own_pieces(), strict=True):
            if slot.gone:
                continue
            if self.packed is not None:
                nothing = torch.empty(piece.numel, dtype=torch.float32, device="meta")
                slices[slot.name] = PackedSlice(
                    data=nothing,
                    offset=piece.start,
                    shape=slot.shape,
                    writes=writes,
                    packed=self.packed,
                    start=piece.shard_offset,
                )
            else:
                part = slice(piece.shard_offset, piece.shard_offset + piece.numel)
                slices[slot.name] = flat_slice(
                    self.master, part, self.master_home, offset=piece.start, shape=slot.shape, writes=writes
                )
        return slices

    @property
    def parameter_bytes(self) -> int:
        """Bytes that the parameters take now on this rank, in the dtype that they compute in."""
        full = self.full.untyped_storage().size()
        second = 0 if self.secondary is None else self.secondary.untyped_storage().size()
        own = self.shard if self.packed is None else self.packed.encoded
        return full if self.resident else full + second + own.untyped_storage().size()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients held now on this rank."""
        tensors = [t for t in (self.local, self.reduced) if isinstance(t, torch.Tensor)]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().size() for t in tensors}
        return sum(held.values()) + (self.local.nbytes if isinstance(self.local, Rows) else 0)

    @property
    def master_bytes(self) -> int:
        """Bytes of master weights that are not the parameters themselves."""
        return self.master.untyped_storage().size() if self.own_master else 0


def slice_of(numel: int, axis: Axis) -> slice:
    """This rank's part of ``numel`` elements that are cut evenly over ``axis``."""
    length = numel // axis.size
    return slice(axis.rank * length, (axis.rank + 1) * length)
