"""Brings a unit's parameters in before they are read and lets them go after: ZeRO's stage 3.

Prefetch and reuse are performance only. The one promise is `need`: when it returns, the unit's parameters can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from drivetrain.zero.order import Phase, UseOrder
from drivetrain.zero.policy import Policy
from drivetrain.zero.unit import Presence, Unit


class Residency:
    """Decides what is whole on this rank, and when.

    Args:
        units: every unit, at its own index.
        policy: budgets for prefetch and reuse.
        presence: what ``units`` count in.

    Attributes:
        held: the end of a use releases nothing, until `release_all`. For graphs that no hook sees: backward's own.
        others: let go what else is whole, outside of units: called by `release_all`.
    """

    def __init__(self, units: Sequence[Unit], policy: Policy, presence: Presence) -> None:
        self._units = units
        self._policy = policy
        self._presence = presence
        self._total = sum(unit.numel for unit in units if not unit.resident)
        self.order = UseOrder()
        self.held = False
        self.others: list[Callable[[], None]] = []

    def need(self, unit: Unit, phase: Phase) -> None:
        """Return once ``unit`` is readable; send for what is expected next."""
        self.order.record(unit.index, phase)
        unit.start_gather(during=phase.value)
        self._prefetch(unit, phase)
        unit.finish_gather()

    def restore(self, unit: Unit) -> None:
        """Return once ``unit``, which was let go too early, is readable again. Nothing to go by the next time."""
        unit.start_gather(during=Phase.BACKWARD.value)
        unit.finish_gather()

    def _prefetch(self, current: Unit, phase: Phase) -> None:
        if self._presence.live + self._presence.coming >= self._total:
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
        if most is not None and self._presence.live > most:
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

    def release_all(self) -> None:
        """Nothing that can be released stays whole."""
        self.held = False
        for unit in self._units:
            unit.release()
        self.release_others()

    def release_others(self) -> None:
        """Only units have whole parameters."""
        for release in self.others:
            release()
