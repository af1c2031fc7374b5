"""In which order backward asks for what forward saved.

Problem: what is far away must be on its way before it is asked for, so somebody has to know what comes next.
Idea: backward asks in the reverse order of saving, nearly. Where branches of a graph make it differ, it differs in the
same way in the next step: the order that was seen is kept under the sizes that were saved, and predicted next time.
Invariants: a wrong prediction costs time and nothing else; every save is predicted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

__all__ = ["LearnedOrders", "SavePass"]

_KEPT: Final = 16
_NEARBY: Final = 4


class LearnedOrders:
    """The orders that were not the reverse of saving, of the latest few kinds of passes."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, ...], tuple[int, ...]] = {}

    def predict(self, sizes: tuple[int, ...]) -> Sequence[int]:
        """The order in which saves of these sizes will be asked for, as indices."""
        return self._orders.get(sizes) or range(len(sizes) - 1, -1, -1)

    def learn(self, sizes: tuple[int, ...], asked: Sequence[int]) -> None:
        """Backward has asked in this order. What it did not ask for goes to the end, in reverse order."""
        seen = set(asked)
        rest = [index for index in range(len(sizes) - 1, -1, -1) if index not in seen]
        self._orders.pop(sizes, None)
        self._orders[sizes] = (*asked, *rest)
        if len(self._orders) > _KEPT:
            self._orders.pop(next(iter(self._orders)))


class SavePass:
    """The saves of one forward pass, and how far backward has come with them.

    A save has an index, a size in bytes and the number of the record that holds it: several saves may share one.
    """

    def __init__(self, orders: LearnedOrders) -> None:
        self._orders = orders
        self.records: list[int] = []
        self._sizes: list[int] = []
        self._asked: list[int] = []
        self._seen: set[int] = set()
        self._order: Sequence[int] = ()
        self._place: dict[int, int] = {}
        self.surprises = 0
        #: Records that are back, or on their way, because of this pass.
        self.window: set[int] = set()

    def __del__(self) -> None:
        self._finish()

    @property
    def asked(self) -> bool:
        """Whether backward has begun with it."""
        return bool(self._asked)

    def add(self, record: int, size: int) -> int:
        """The index of one more save."""
        self.records.append(record)
        self._sizes.append(size)
        return len(self.records) - 1

    def ask(self, index: int) -> Iterator[int]:
        """Backward asks for save `index`. Gives the saves that are expected after it, soonest first."""
        if len(self._order) != len(self.records):  # at first, or when more was saved in between
            self._order = self._orders.predict(tuple(self._sizes))
            self._place = {save: place for place, save in enumerate(self._order)}
        place = self._place[index]
        if index not in self._seen:
            if any(save not in self._seen for save in self._order[max(0, place - 1) : place]):
                self.surprises += 1
            self._asked.append(index)
            self._seen.add(index)
        # A node may ask for what it saved last before what it saved first: what was passed over a moment ago is next.
        places = chain(range(max(0, place - _NEARBY), place), range(place + 1, len(self._order)))
        return (save for save in map(self._order.__getitem__, places) if save not in self._seen)

    def _finish(self) -> None:
        # Backward is through, or the rest will never be asked for.
        if self.surprises:
            self._orders.learn(tuple(self._sizes), self._asked)
