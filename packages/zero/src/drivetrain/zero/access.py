"""Read and write single parameters, their gradients and their optimizer state while they are split over ranks.

The problem: programs look into training (clip one layer, reset a moment, log a weight, merge an adapter), and what
they look for lies in slices over all ranks, in another precision than the module shows. The idea: three quantities
with the same four verbs:

    access = ParameterAccess(sharded, optimizer)
    access.master.full(p)                  # the whole tensor, collective
    access.master.set_full(p, value)       # collective
    access.gradient.local(p)               # this rank's slice, 1-D; nobody else is asked
    access.state("exp_avg").set_local(p, values)

`full_many` and `set_full_many` do a list of parameters with one collective; a training loop that visits every parameter
of a large model wants these. All of it works at every stage: what isn't split is simply there.

Invariants: what is read is a copy, so writing to it changes nothing; what is written is what the next step, the next
forward pass and the next checkpoint see, on every rank. Gradients are those of the loss as it was, without loss scale
(in fp32 where there is a scale: the fp16 ones that are stored may be too small for fp16 without it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch

from drivetrain.comm import all_reduce
from drivetrain.zero.agreement import require_same
from drivetrain.zero.api import ShardedModule
from drivetrain.zero.bucket import Bucket, Slot
from drivetrain.zero.layout import Piece
from drivetrain.zero.optimizer import ShardedOptimizer
from drivetrain.zero.parking import GRADIENTS, OPTIMIZER_STATE, WEIGHTS
from drivetrain.zero.ranks import Ranks


@dataclass(frozen=True)
class _Place:
    """Where one parameter lies."""

    bucket: Bucket
    slot: Slot
    index: int  # of the slot

    @property
    def own(self) -> Piece:
        """What of it is in this rank's shard; the offset counts from the optimizer's region."""
        return self.bucket.own_piece(self.index)


class _Places:
    """Finds parameters, also those that were adopted since it was made."""

    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded
        self._buckets: tuple[Bucket, ...] = ()
        self._found: dict[int, _Place] = {}

    def get(self, parameter: torch.nn.Parameter) -> _Place | None:
        """Where ``parameter`` lies; None if it is not in the module."""
        if self._buckets is not self._sharded.buckets:
            self._buckets = self._sharded.buckets
            self._found = {
                id(slot.parameter): _Place(bucket, slot, index)
                for bucket in self._buckets
                for index, slot in enumerate(bucket.slots)
            }
        return self._found.get(id(parameter))


_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


def _unscaled(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a loss scale is taken off or put on."""
    return torch.promote_types(dtype, torch.float32)


class Quantity(ABC):
    """Something that there is one of for every element of a parameter."""

    def __init__(self, places: _Places, ranks: Ranks) -> None:
        self._places = places
        self._axis = ranks.shard
        self._everyone = ranks.everyone

    @abstractmethod
    def _region(self, place: _Place) -> torch.Tensor | None:
        """All of it that this rank has of one parameter: 1-D, the memory itself; None where there is none.

        A copy where it is kept in another form, see `_write`. Its elements are there while it is `_at_hand`.
        """

    @abstractmethod
    def _at_hand(self, place: _Place, *, changes: bool) -> AbstractContextManager[None]:
        """What lives in a store can be read in this context, and with ``changes`` written."""

    def _present(self, place: _Place) -> bool:
        """Whether this rank knows that there is some of it."""
        region = self._region(place)
        return region is not None and region.numel() > 0

    def _publish(self, places: Sequence[_Place], wholes: Sequence[torch.Tensor] | None) -> bool:
        """Carry what was written to ``places`` on to whoever reads a copy; whether there is one.

        ``wholes`` are the whole values, where all ranks have written theirs.
        """
        return False

    def _scale(self) -> float:
        """What is stored is this many times what is shown."""
        return 1.0

    def local(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """A copy of this rank's slice of ``parameter``: 1-D, of 0 elements where the parameter has none on this rank.

        None where there is nothing yet (no gradient, no such state). No communication.
        """
        place = self._place(parameter)
        if place.own.numel == 0:
            return torch.empty(0, device=self._axis.device)
        with self._at_hand(place, changes=False):
            own = self._own(place)
            return None if own is None else self._shown(own)

    def set_local(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite this rank's slice of ``parameter`` with ``value``: 1-D, as long as `local` returns it.

        Where whole parameters are kept (stages 0 to 2), other ranks' copies of a parameter follow at the next optimizer
        step or `ShardedModule.refresh_parameters`.
        """
        place = self._place(parameter)
        if value.numel() != place.own.numel:
            raise ValueError(
                f"rank {self._axis.world.rank}: this rank's slice of '{place.slot.name}' has {place.own.numel} "
                f"elements, got {value.numel()}"
            )
        if place.own.numel == 0:
            return
        with self._at_hand(place, changes=True):
            own = self._own(place)
            if own is None:
                raise self._absent(place)
            self._write(place, own, value)
            self._publish([place], None)

    def full(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """A copy of the whole, in the shape of ``parameter``. Collective. None where no rank has it."""
        return self.full_many([parameter])[0]

    def full_many(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """`full` of each of ``parameters``, which are the same on every rank. Collective: one call per dtype."""
        places = [self._place(parameter) for parameter in parameters]
        found: list[torch.Tensor | None] = [None] * len(places)
        split: dict[torch.dtype, list[int]] = {}
        for index, dtype in enumerate(self._dtypes(places)):
            if dtype is None:
                continue
            place = places[index]
            if place.bucket.split:
                split.setdefault(dtype, []).append(index)
            else:
                whole = torch.zeros(place.slot.numel, dtype=dtype, device=self._axis.device)
                self._copy_region(place, whole)
                found[index] = self._shown(whole).view(place.slot.shape)
        for dtype, indices in split.items():
            for index, whole in zip(indices, self._gather([places[i] for i in indices], dtype), strict=True):
                found[index] = whole
        return found

    def set_full(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite the whole with ``value``, which has the parameter's shape and the same values on every rank.

        Collective. Raises ValueError for another shape or where ranks disagree, and KeyError where there is nothing.
        """
        self.set_full_many([parameter], [value])

    def set_full_many(self, parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
        """`set_full` of each of ``parameters``. Collective; nothing is written if anything is wrong with one."""
        places = [self._place(parameter) for parameter in parameters]
        for place, value in zip(places, values, strict=True):
            if value.shape != place.slot.shape:
                raise ValueError(
                    f"rank {self._axis.world.rank}: '{place.slot.name}' has shape {tuple(place.slot.shape)}, got "
                    f"{tuple(value.shape)}"
                )
        for place, dtype in zip(places, self._dtypes(places), strict=True):
            if dtype is None:
                raise self._absent(place)
        require_same({place.slot.name: value for place, value in zip(places, values, strict=True)}, self._everyone)
        for place, value in zip(places, values, strict=True):
            with self._at_hand(place, changes=True):
                region = self._region(place)
                if region is not None:
                    piece = place.bucket.region_piece(place.index)
                    self._write(place, region, value.reshape(-1)[piece.start : piece.start + piece.numel])
        self._publish(places, values)

    def _place(self, parameter: torch.nn.Parameter) -> _Place:
        place = self._places.get(parameter)
        if place is None:
            raise KeyError(
                f"rank {self._axis.world.rank}: a parameter of shape {tuple(parameter.shape)} does not belong to this "
                "sharded module"
            )
        return place

    def _absent(self, place: _Place) -> KeyError:
        return KeyError(
            f"rank {self._axis.world.rank}: there is no {self} of '{place.slot.name}' to write to; it is made by the "
            "first step or backward pass"
        )

    def _own(self, place: _Place) -> torch.Tensor | None:
        region = self._region(place)
        if region is None or place.bucket.split:
            return region
        own = place.own
        return region[own.start : own.start + own.numel]

    def _shown(self, stored: torch.Tensor) -> torch.Tensor:
        """A copy without the scale: in fp32 where there is one, since fp16 may not hold what is left."""
        scale = self._scale()
        return stored.clone() if scale == 1.0 else stored.to(_unscaled(stored.dtype)) / scale

    def _write(self, place: _Place, stored: torch.Tensor, value: torch.Tensor) -> None:
        """Overwrite ``stored``, which belongs to ``place``."""
        scale, shaped = self._scale(), value.reshape(stored.shape)
        stored.copy_(shaped if scale == 1.0 else shaped.to(_unscaled(stored.dtype)) * scale)

    def _dtypes(self, places: Sequence[_Place]) -> list[torch.dtype | None]:
        """The dtype that each is stored in on the ranks that have it, agreed on by all; None where none has."""
        codes = [0] * len(places)
        for index, place in enumerate(places):
            region = self._region(place) if self._present(place) else None
            codes[index] = 0 if region is None else 1 + _DTYPES.index(region.dtype)
        agreed = torch.tensor(codes, dtype=torch.int64, device=self._axis.control_device)
        all_reduce(agreed, self._axis, op="max", purpose=f"dtype of {self._told(places)}").wait()
        return [None if code == 0 else _DTYPES[code - 1] for code in agreed.tolist()]

    def _told(self, places: Sequence[_Place]) -> str:
        """What of which parameters, in words."""
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        return f"{self} of '{places[0].slot.name}'{more}" if places else f"{self} of no parameter"

    def _gather(self, places: Sequence[_Place], dtype: torch.dtype) -> list[torch.Tensor]:
        """Whole tensors out of everybody's slices.

        Where a rank has nothing it sends zeros, so the largest of all ranks' bytes is the one that counts, whatever the
        dtype. Neither memory nor work depends on the number of ranks, as they would if every rank's slices were sent.
        """
        ends = list(accumulate(place.slot.numel for place in places))
        flat = torch.zeros(ends[-1], dtype=dtype, device=self._axis.device)
        for place, end in zip(places, ends, strict=True):
            self._copy_region(place, flat[end - place.slot.numel : end])
        all_reduce(flat.view(torch.uint8), self._axis, op="max", purpose=self._told(places)).wait()
        wholes = (flat[end - place.slot.numel : end] for place, end in zip(places, ends, strict=True))
        return [self._shown(whole).view(place.slot.shape) for whole, place in zip(wholes, places, strict=True)]

    def _copy_region(self, place: _Place, whole: torch.Tensor) -> None:
        """Copy what this rank has to its place in the flat ``whole``."""
        with self._at_hand(place, changes=False):
            region = self._region(place)
            if region is not None:
                start = place.bucket.region_piece(place.index).start
                whole[start : start + region.numel()].copy_(region)


class Master(Quantity):
    """Parameters in the precision that the optimizer keeps them in (see `Policy.master_dtype`)."""

    def __init__(self, places: _Places, sharded: ShardedModule) -> None:
        super().__init__(places, sharded.ranks)
        self._moved = sharded.moved

    def __str__(self) -> str:
        return "master weight"

    def _region(self, place: _Place) -> torch.Tensor | None:
        self._moved.require("access to master weights", WEIGHTS)
        piece = place.bucket.region_piece(place.index)
        if place.bucket.packed is not None:
            return place.bucket.packed.read(piece.shard_offset, piece.numel)
        return place.bucket.master[piece.shard_offset : piece.shard_offset + piece.numel]

    def _at_hand(self, place: _Place, *, changes: bool) -> AbstractContextManager[None]:
        return place.bucket.at_hand(changes=changes, linger=True)

    def _present(self, place: _Place) -> bool:
        return True

    def _write(self, place: _Place, stored: torch.Tensor, value: torch.Tensor) -> None:
        packed = place.bucket.packed
        if packed is None:
            super()._write(place, stored, value)
        else:
            packed.write(place.own.shard_offset, stored.copy_(value))

    def _publish(self, places: Sequence[_Place], wholes: Sequence[torch.Tensor] | None) -> bool:
        for bucket in {id(place.bucket): place.bucket for place in places}.values():
            bucket.publish_master()
        for place, whole in zip(places, wholes or (), strict=bool(wholes)):
            if place.bucket.whole:
                packed = place.bucket.packed
                place.slot.whole.copy_(whole if packed is None else packed.shown(whole.float()))
        return True


class Gradient(Quantity):
    """Gradients, reduced over all ranks, between the backward pass that closes a step and the step itself."""

    def __init__(self, places: _Places, sharded: ShardedModule, optimizer: ShardedOptimizer | None) -> None:
        super().__init__(places, sharded.ranks)
        self._sharded = sharded
        self._optimizer = optimizer

    def __str__(self) -> str:
        return "gradient"

    def _scale(self) -> float:
        return 1.0 if self._optimizer is None else self._optimizer.scaler.scale

    def _present(self, place: _Place) -> bool:
        return super()._present(place) and place.bucket.used[place.index]

    def _at_hand(self, place: _Place, *, changes: bool) -> AbstractContextManager[None]:
        self._settle()
        return place.bucket.gradients_at_hand(changes=changes)

    def _settle(self) -> None:
        self._sharded.moved.require("access to gradients", GRADIENTS)
        self._sharded.hooks.backward.settle()
        self._sharded.reducer.drain()

    def _region(self, place: _Place) -> torch.Tensor | None:
        self._settle()
        bucket = place.bucket
        if bucket.local is not None:
            raise RuntimeError(
                f"rank {self._axis.world.rank}: the gradient of '{place.slot.name}' is still being accumulated on each "
                "rank on its own; read or write it after the backward pass that closes the step"
            )
        if bucket.reduced is None:
            return None
        piece = bucket.region_piece(place.index)
        return bucket.reduced[piece.shard_offset : piece.shard_offset + piece.numel]


class OptimizerState(Quantity):
    """One entry of the optimizer's state that has the shape of its parameter."""

    def __init__(self, places: _Places, optimizer: ShardedOptimizer, key: str) -> None:
        super().__init__(places, optimizer.sharded.ranks)
        self._optimizer = optimizer
        self._key = key

    def __str__(self) -> str:
        return f"optimizer state '{self._key}'"

    def _at_hand(self, place: _Place, *, changes: bool) -> AbstractContextManager[None]:
        return place.bucket.at_hand(changes=changes, linger=True)

    def _region(self, place: _Place) -> torch.Tensor | None:
        self._optimizer.sharded.moved.require("access to optimizer state", OPTIMIZER_STATE)
        value = self._optimizer.state_of(place.slot.parameter).get(self._key)
        if value is None:
            return None
        piece = place.bucket.region_piece(place.index)
        if not isinstance(value, torch.Tensor) or value.numel() != piece.numel:
            raise TypeError(
                f"optimizer state '{self._key}' of '{place.slot.name}' is one number for the whole parameter, not one "
                "for each of its elements"
            )
        return value.view(-1)


class ParameterAccess:
    """Reads and writes what belongs to single parameters of ``sharded``.

    Args:
        sharded: the module.
        optimizer: its optimizer; without one there is no state, and gradients carry whatever scale they got.

    Attributes:
        master: the parameters' values, in the highest precision that is kept.
        gradient: reduced gradients of the current step.
    """

    def __init__(self, sharded: ShardedModule, optimizer: ShardedOptimizer | None = None) -> None:
        self._places = _Places(sharded)
        self._optimizer = optimizer
        self.master: Quantity = Master(self._places, sharded)
        self.gradient: Quantity = Gradient(self._places, sharded, optimizer)

    def state(self, key: str) -> Quantity:
        """The entry ``key`` of the optimizer's state, such as ``exp_avg``."""
        if self._optimizer is None:
            raise ValueError(f"there is no optimizer whose state '{key}' could be read")
        return OptimizerState(self._places, self._optimizer, key)
