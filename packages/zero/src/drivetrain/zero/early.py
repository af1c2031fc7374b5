"""Updates that begin in the backward pass, before it is known whether they may happen (SuperOffload).

The problem: where states live elsewhere, an optimizer step brings them in and takes them back, and the device waits for
all of it. Backward needs none of them, so their way could lie beside it. But the update of a sub-group needs a factor
that is known when the last gradient is: the gradients may overflow, or their norm be so large that it is clipped. The
idea (SuperOffload, arXiv:2509.21271): take the factor for granted, update as soon as a sub-group's gradients are
reduced, and take it back if it was another. There, what was updated is computed backwards, up to rounding, and clipping
makes every update wait; here the update goes to records beside the old ones, which are kept until `step()` has chosen.
So going back costs nothing and is exact, and clipping costs only the steps in which it does bite.

What an early update stands for is what the ordinary one would do at the step: with the same gradients, hyperparameters,
states and factor. Each of these is compared then, for each sub-group. What does not stand is dropped, and that
sub-group updated in the ordinary way.

Invariants:
- Until the step nothing has changed for anyone: states, parameters, the optimizer's numbers. Whoever reads, or saves,
  finds the old ones; whoever writes makes the early update fall.
- No rank tells another about it. An update that needs other ranks is never early.
- Gradients stay where they are until the step.

The price is room for states, and parameters, twice, where they live. Updates run on the thread that runs backward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from drivetrain.zero.api import ShardedModule
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.exchange import Pending
from drivetrain.zero.store import Aside, Home, expect

Written = list[dict[str, Any]]
"""Copies of the optimizer's groups after an update, with what it wrote into them."""


class Part(Protocol):
    """What the optimizer has as a parameter."""

    @property
    def tensor(self) -> torch.Tensor: ...


class SubGroup(Protocol):
    """What is updated at a time: the parts of one bucket."""

    @property
    def bucket(self) -> Bucket: ...
    def __iter__(self) -> Iterator[Part]: ...


class Updater(Protocol):
    """Who can update one sub-group."""

    optimizer: Optimizer

    def sub_group_of(self, bucket: Bucket) -> SubGroup | None: ...
    def assumed_factor(self, divisor: float) -> float:
        """The factor of a step that does not clip."""

    def update_at_hand(self, sub: SubGroup, factor: float) -> Written:
        """Update a sub-group whose gradients and states are at hand."""

    def living_with(self, sub: SubGroup) -> list[torch.Tensor]:
        """What of it lives in a store together."""


class StepPolicy(Protocol):
    """Where and when the update of a sub-group runs: told of each finished gradient shard, and of the step."""

    def settle(self, factor: float | None) -> None:
        """The step multiplies gradients by this; None: it does not happen."""

    def needs(self, sub: SubGroup) -> Iterator[Home]:
        """What the step will bring in for ``sub``, in this order."""

    def take(self, sub: SubGroup) -> Written | None:
        """Let the update of ``sub`` that has happened count; None if none has. Its gradients are forgotten then."""

    def stepped(self, coefficient: float, divisor: float) -> None:
        """The step has updated everything, having clipped by ``coefficient``."""


class AtStep:
    """A `StepPolicy`: all updates run in the step."""

    def settle(self, factor: float | None) -> None:
        pass

    def needs(self, sub: SubGroup) -> Iterator[Home]:
        return sub.bucket.homes.for_step()

    def take(self, sub: SubGroup) -> Written | None:
        return None

    def stepped(self, coefficient: float, divisor: float) -> None:
        pass


class _Told:
    """A `Pending` that tells when it has been waited for."""

    def __init__(self, pending: Pending, policy: EarlyUpdates) -> None:
        self.bucket = pending.bucket
        self._pending = pending
        self._policy: EarlyUpdates | None = policy

    def wait(self) -> None:
        self._pending.wait()
        policy, self._policy = self._policy, None
        if policy is not None:
            policy.reduced(self.bucket)

    def drop(self) -> None:
        self._policy = None
        self._pending.drop()


class _Parcel:
    """New values of parameters that stay on the device: in a store until backward has read the old ones."""

    def __init__(self, bucket: Bucket, home: Home) -> None:
        self._target = bucket.shard if bucket.split else bucket.full
        self.home = home
        self._values = home.admit(bucket.master, bucket.dtype)

    @property
    def current(self) -> bool:
        return True  # an edit of the parameters is one of the master weights as well

    def adopt(self) -> None:
        with self.home.at_hand(changes=False):
            self._target.copy_(self._values)
        self.home.forget()

    def drop(self) -> None:
        self.home.forget()


@dataclass(frozen=True, kw_only=True)
class _Early:
    """An update that has happened aside."""

    sub: SubGroup
    factor: float
    settings: list[dict[str, Any]]
    gradient_writes: int
    states: Aside
    parameters: Aside | _Parcel
    remembered: list[tuple[torch.Tensor, dict[str, Any] | None]]  # what the optimizer has of each part
    written: Written

    def stands(self, factor: float | None, settings: list[dict[str, Any]]) -> bool:
        return (
            factor == self.factor
            and self.sub.bucket.gradient_writes == self.gradient_writes
            and self.states.current
            and self.parameters.current
            and _alike(self.settings, settings)
        )

    def drop(self) -> None:
        self.states.drop()
        self.parameters.drop()


class EarlyUpdates:
    """A `StepPolicy`: updates run in the backward pass that closes a step, if the last step gives reason to hope.

    The update of a sub-group runs when the next one is ready, so that its states have come in meanwhile. A step that
    clips is the reason to have none in the next one, and so is a divisor that is not that of the step before.

    Attributes:
        kept: early updates that counted.
        fallen: those that did not.
    """

    def __init__(self, sharded: ShardedModule, updater: Updater, *, clips: bool) -> None:
        self._sharded = sharded
        self._updater = updater
        self._hopeful = not clips
        self._divisor = 1.0
        self._waiting: tuple[SubGroup, int, int] | None = None  # with the pass, and the writes to its gradients
        self._made: dict[int, _Early] = {}  # by the id of the bucket
        self.kept = 0
        self.fallen = 0
        sharded.reducer.watch = self._watch

    # in the backward pass ---------------------------------------------------------------------------------------------

    def _watch(self, pending: Pending) -> Pending:
        closing = self._sharded.closes_step and self._sharded.hooks.backward.active
        return _Told(pending, self) if closing and self._hopeful else pending

    def reduced(self, bucket: Bucket) -> None:
        """No further gradients of ``bucket`` are expected before the step."""
        backward = self._sharded.hooks.backward
        sub = self._updater.sub_group_of(bucket)
        apart = bucket.homes.states is not None and bucket.own_master and all(bucket.used)
        if sub is None or not apart or not backward.active or torch.is_grad_enabled():
            return
        before, self._waiting = self._waiting, (sub, backward.number, bucket.gradient_writes)
        ready = before is not None and before[1:] == (backward.number, before[0].bucket.gradient_writes)
        coming = [before[0], sub] if before is not None and ready else [sub]
        expect(home for one in coming for home in _read(one.bucket))
        if before is not None and ready:
            self._update(before[0])

    @torch.no_grad()
    def _update(self, sub: SubGroup) -> None:
        """Update ``sub`` aside."""
        bucket, home, state = sub.bucket, sub.bucket.homes.states, self._updater.optimizer.state
        assert home is not None
        self._drop(bucket)
        factor, settings = self._updater.assumed_factor(self._divisor), self._settings()
        tensors = [part.tensor for part in sub]
        before = [(tensor, state.get(tensor)) for tensor in tensors]
        _put(state, [(tensor, None if held is None else _copied(held)) for tensor, held in before])
        try:
            with home.aside(f"{home.key}, early") as states:
                with bucket.gradients_at_hand(changes=False):
                    written = self._updater.update_at_hand(sub, factor)
                home.hold(self._updater.living_with(sub))
                parameters = self._keep(bucket, home)
            remembered = [(tensor, state.get(tensor)) for tensor in tensors]
        finally:
            _put(state, before)
        self._made[id(bucket)] = _Early(
            sub=sub,
            factor=factor,
            settings=settings,
            gradient_writes=bucket.gradient_writes,
            states=states,
            parameters=parameters,
            remembered=remembered,
            written=written,
        )

    def _keep(self, bucket: Bucket, states: Home) -> Aside | _Parcel:
        """The parameters in their own dtype, aside, while the master weights are at hand."""
        home = bucket.homes.shard
        if home is None:
            return _Parcel(bucket, Home(states.shelf, f"{states.key}, early, as parameters"))
        with home.aside(f"{home.key}, early", anew=True) as made:
            bucket.shard.copy_(bucket.master)
        return made

    def _settings(self) -> list[dict[str, Any]]:
        groups = self._updater.optimizer.param_groups
        return [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]

    # in the step ------------------------------------------------------------------------------------------------------

    def settle(self, factor: float | None) -> None:
        self._waiting = None
        settings = self._settings() if self._made else []
        for early in list(self._made.values()):
            if not early.stands(factor, settings) or self._updater.sub_group_of(early.sub.bucket) is not early.sub:
                self._drop(early.sub.bucket)

    def needs(self, sub: SubGroup) -> Iterator[Home]:
        early = self._made.get(id(sub.bucket))
        if early is None:
            yield from sub.bucket.homes.for_step()
        elif isinstance(early.parameters, _Parcel):
            yield early.parameters.home

    def take(self, sub: SubGroup) -> Written | None:
        early = self._made.pop(id(sub.bucket), None)
        if early is None:
            return None
        bucket = sub.bucket
        bucket.forget_gradients()
        early.states.adopt()
        early.parameters.adopt()
        bucket.secondary = None
        _put(self._updater.optimizer.state, early.remembered)
        self.kept += 1
        return early.written

    def stepped(self, coefficient: float, divisor: float) -> None:
        self._hopeful = coefficient == 1.0 and divisor == self._divisor
        self._divisor = divisor

    def _drop(self, bucket: Bucket) -> None:
        early = self._made.pop(id(bucket), None)
        if early is not None:
            early.drop()
            self.fallen += 1


def _read(bucket: Bucket) -> Iterator[Home]:
    """What an early update reads."""
    return (home for home in (bucket.homes.states, bucket.homes.gradients) if home is not None)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state of a part, whose numbers can be counted on without touching these."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value
        for key, value in state.items()
    }


def _put(state: dict[torch.Tensor, Any], held: Sequence[tuple[torch.Tensor, dict[str, Any] | None]]) -> None:
    for tensor, value in held:
        if value is None:
            state.pop(tensor, None)
        else:
            state[tensor] = value


def _alike(one: object, other: object) -> bool:
    """The same values of the same types, also in lists, tuples and mappings."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)
