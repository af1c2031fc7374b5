"""Which unit is used next, predicted from the last time.

The problem: at stage 3 a unit's parameters should be on their way before they are needed, and should not be let go if
they are needed again at once. The idea: remember, for every use of a unit, which unit's use followed it. A use is
told apart by its phase (training forward, backward, inference) and its count within the phase, so a module that is
called several times has several successors. A prediction is only ever a hint: if it is wrong, the memory of it is
corrected and the parameters are gathered on demand.

Pure: knows unit numbers, no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


Use = tuple[Phase, int, int]


class UseOrder:
    """Successors of uses, learned one pass at a time."""

    def __init__(self) -> None:
        self._successor: dict[Use, Use] = {}
        self._seen: Counter[int] = Counter()
        self._phase: Phase | None = None
        self._last: Use | None = None
        self._latest: dict[int, Use] = {}  # of every unit, in the current pass
        self._returned: set[Use] = set()  # those that another use of the same unit followed
        self.wrong = 0  # uses that differed from their prediction

    def restart(self) -> None:
        """A new pass begins: what came before has no successor in it."""
        self._returned.difference_update(self._latest.values())
        self._latest.clear()
        self._seen.clear()
        self._phase = None
        self._last = None

    def record(self, unit: int, phase: Phase) -> None:
        """``unit`` is used now."""
        if phase is not self._phase:
            self._seen.clear()
            self._phase = phase
        use = (phase, unit, self._seen[unit])
        self._seen[unit] += 1
        if self._last is not None:
            expected = self._successor.get(self._last)
            self.wrong += expected is not None and expected != use
            self._successor[self._last] = use
        if unit in self._latest:
            self._returned.add(self._latest[unit])
        self._last = self._latest[unit] = use

    def expects_again(self, unit: int) -> bool:
        """Whether ``unit``'s latest use is expected not to be its last in this pass."""
        latest = self._latest.get(unit)
        return latest is not None and latest in self._returned

    def upcoming(self) -> Iterator[int]:
        """Units whose use is expected after the current one, in order."""
        use, visited = self._last, set[Use]()
        while use is not None and use not in visited:
            visited.add(use)
            use = self._successor.get(use)
            if use is not None:
                yield use[1]
