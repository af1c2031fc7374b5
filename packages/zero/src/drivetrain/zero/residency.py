"""Brings a unit's parameters in before they are read and lets them go after: ZeRO's stage 3.

Prefetch and reuse are performance only. The one promise is `need`: when it returns, the unit's parameters can be read.

Invariant: ranks gather in the same order. What is fetched ahead follows from the uses so far, so these must be the same
on all ranks too. A unit that is pinned may be used by one rank alone (to generate, to log), so its uses leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from drivetrain.zero.order import Phase, UseOrder
from drivetrain.zero.policy import Policy
from drivetrain.zero.store import Home, expect
from drivetrain.zero.unit import Presence, Unit

NEAR = 8
"""Shards in a store that it is told of ahead of their gathers: more than it has room for, usually."""


class Residency:
    """Decides what is whole on this rank, and when.

    Args:
        units: every unit, at its own index.
        policy: budgets for prefetch and reuse.
        presence: what ``units`` count in.

    Attributes:
        presence: the same.
        held: the end of a use releases nothing, until `release_all`. For graphs that no hook sees: backward's own.
        others: let go what else is whole, outside of units: called by `release_all`.
    """

    def __init__(self, units: Sequence[Unit], policy: Policy, presence: Presence) -> None:
        self._policy = policy
        self.presence = presence
        self.adopt(units)
        self.held = False
        self.others: list[Callable[[], None]] = []

    def adopt(self, units: Sequence[Unit]) -> None:
        """Go on with ``units``, the known ones at the same places; nothing that can be released is whole."""
        self._units = units
        self._total = sum(unit.numel for unit in units if not unit.resident)
        self._stored = any(bucket.homes.shard is not None for unit in units for bucket in unit.buckets)
        self.order = UseOrder()

    @property
    def all_pinned(self) -> bool:
        """A context keeps the whole module whole, so that its passes need nothing, and may be this rank's own."""
        return all(unit.resident or unit.pins for unit in self._units)

    def restart(self) -> None:
        """A pass through the whole module begins."""
        if not self.all_pinned:
            self.order.restart()

    def need(self, unit: Unit, phase: Phase) -> None:
        """Return once ``unit`` is readable; send for what is expected next."""
        if unit.pins:
            return
        _refuse_transforms(unit)
        self.order.record(unit.index, phase)
        unit.start_gather(during=phase.value)
        if self._stored:
            self._expect()
        self._prefetch(unit, phase)
        unit.finish_gather()

    def _expect(self) -> None:
        """Let stores bring shards near that will be gathered soon."""
        homes: list[Home] = []
        for index in self.order.upcoming():
            unit = self._units[index]
            if not (unit.live or unit.in_flight):
                homes += (bucket.homes.shard for bucket in unit.buckets if bucket.homes.shard is not None)
            if len(homes) >= NEAR:
                break
        expect(homes)

    def restore(self, unit: Unit) -> None:
        """Return once ``unit``, which was let go too early, is readable again. Nothing to go by the next time."""
        unit.start_gather(during=Phase.BACKWARD.value)
        unit.finish_gather()

    def _prefetch(self, current: Unit, phase: Phase) -> None:
        if self.presence.live + self.presence.coming >= self._total:
            return
        budget = self._policy.prefetch_numel
        ahead = 0
        for index in self.order.upcoming():
            unit = self._units[index]
            if unit.live or unit is current:
                continue
            ahead += unit.numel
            if budget is not None and ahead > budget:
                return
            unit.start_gather(during=f"{phase.value}, ahead of use")
            if budget is None:
                return

    def done(self, unit: Unit) -> None:
        """``unit`` has been used: release it, unless it is needed again soon enough to be worth keeping."""
        if unit.live and not (unit.resident or self.held or self._worth_keeping(unit)):
            unit.release()

    def _worth_keeping(self, unit: Unit) -> bool:
        limit = self._policy.max_reuse_numel
        if limit < 0:
            return False
        most = self._policy.max_live_numel
        if most is not None and self.presence.live > most:
            return False
        if limit >= self._total:
            return self.order.expects_again(unit.index)
        between = 0
        for index in self.order.upcoming():
            if index == unit.index:
                return True
            other = self._units[index]
            between += 0 if other.live else other.numel
            if between > limit:
                return False
        return False

    def pin(self, units: Collection[Unit]) -> set[Unit]:
        """Make ``units`` whole, exactly as they are stored, until `unpin`. Collective, as that is not.

        Returns:
            Those that were not whole before.
        """
        self.release_others()
        fresh = {unit for unit in units if not unit.live}
        for unit in units:
            unit.start_gather(exact=True, during="gathered")
            unit.pins += 1  # not before: what is whole but not exact must be let go first
        for unit in units:
            unit.finish_gather()
        return fresh

    def unpin(self, units: Collection[Unit], fresh: set[Unit]) -> None:
        """The caller of `pin` is through with ``units``; ``fresh`` is what it was given."""
        for unit in units:
            unit.pins -= 1
            if not unit.unseen and (unit in fresh or not self.held):
                unit.release()

    def hold(self) -> None:
        """There will be graphs that read what is whole now, or within this backward pass, with no hook before."""
        self.held = True
        for unit in self._units:
            unit.unseen |= unit.pins > 0

    def _let_go(self, unit: Unit) -> None:
        """Release ``unit``, unless there may be a graph that reads it with no hook before."""
        if not (self.held or unit.unseen):
            unit.release()

    def release_idle(self) -> None:
        """A pass has ended: release all that no graph may still read unseen."""
        for unit in self._units:
            self._let_go(unit)

    def release_all(self) -> None:
        """Nothing that can be released stays whole: no graph from before will be run backward."""
        self.held = False
        for unit in self._units:
            unit.unseen = False
            unit.release()
        self.release_others()

    def release_others(self) -> None:
        """Only units have whole parameters."""
        for release in self.others:
            release()


def _refuse_transforms(unit: Unit) -> None:
    """Under some transforms of torch.func every result is a wrapper without memory, and no buffer to gather into."""
    if not unit.live and torch._C._functorch.is_functorch_wrapped_tensor(unit.buckets[0].full[:0]):
        raise RuntimeError(
            f"a transform of torch.func (grad, vjp, jvp, jacrev, jacfwd ...) runs through '{unit.name}', whose "
            "parameters are not whole on this rank, and they cannot be gathered within a transform. Apply it inside of "
            "`with gathered(...)`, or use torch.autograd.grad, which works as it is."
        )
