"""Which cells are run: every pair of values at least once, or all of them. Pure.

The values of a cell are its stage, its precision and its features. Errors mostly need two of them to meet, so a set of
cells in which every pair meets finds nearly what the full product finds, at a hundredth of its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TypeAlias

from parity_recipe import STAGES, Cell, Feature, Precision, Refusal

Value: TypeAlias = "int | str"
"""A stage, or the name of a precision or a feature. Names are unique."""
Pair: TypeAlias = "frozenset[Value]"


class Matrix:
    """The space of cells over tables of precisions and features."""

    def __init__(self, precisions: Mapping[str, Precision], features: Mapping[str, Feature]) -> None:
        assert not precisions.keys() & features.keys()
        self.precisions = precisions
        self.features = features
        self._apart = {frozenset(pair) for pair in combinations(features, 2) if self._conflict(*pair)}

    def _conflict(self, first: str, second: str) -> bool:
        one, other = self.features[first], self.features[second]
        ranks = {one.ranks, other.ranks} - {None}
        return len(ranks) > 1 or not set(one.kinds).isdisjoint(other.kinds)

    def fits(self, features: Sequence[str]) -> bool:
        """Whether these are not different values of one setting."""
        return not any(frozenset(pair) in self._apart for pair in combinations(features, 2))

    def refusals(self, cell: Cell) -> list[Refusal]:
        """Those that apply; the error must be one of theirs."""
        return [r for name in cell.features for r in self.features[name].refused if r.applies(cell)]

    def product(self) -> Iterator[Cell]:
        """Every stage and precision with no feature, each feature and (for most precisions) each pair of features."""
        chosen = [(), *((name,) for name in self.features), *combinations(self.features, 2)]
        for features in chosen:
            for name, precision in self.precisions.items():
                if self.fits(features) and (precision.in_product or len(features) < 2):
                    for stage in STAGES:
                        yield Cell(stage, name, features)

    def pairs(self) -> list[Pair]:
        """All pairs of values that some cell has, in a fixed order."""
        found: list[Pair] = [frozenset((stage, precision)) for stage in STAGES for precision in self.precisions]
        for name in self.features:
            found += [frozenset((value, name)) for value in (*STAGES, *self.precisions)]
        found += [frozenset(pair) for pair in combinations(self.features, 2) if self.fits(pair)]
        return found

    def covering(self, most: Callable[[Sequence[Feature]], int]) -> list[Cell]:
        """Cells that hold every pair which some cell can be trained with, and one cell for every pair that is refused
        whatever is beside it, and for every refusal. A cell grows to at most ``most(its features)`` features."""
        cells: list[Cell] = []
        missing = dict.fromkeys(self.pairs())
        while missing:
            pair = next(iter(missing))
            cell = self._grow(pair, missing, most)
            if cell is None:  # refused with all that could be beside it
                cell = self._smallest(pair, lambda c: bool(self.refusals(c)))
                missing.pop(pair)
            else:
                for covered in pairs_of(cell):
                    missing.pop(covered, None)
            cells.append(cell)
        told = {id(refusal) for cell in cells for refusal in self.refusals(cell)}
        for name, feature in self.features.items():
            for refusal in feature.refused:
                if id(refusal) not in told:
                    cells.append(self._asked(name, refusal))
        return cells

    def _asked(self, name: str, refusal: Refusal) -> Cell:
        precision = refusal.precisions[0] if refusal.precisions else next(iter(self.precisions))
        cell = Cell(refusal.stages[0], precision, (*refusal.beside, name))
        assert refusal.applies(cell), f"{name}: {refusal.reason}"
        return cell

    def _smallest(self, pair: Pair, wanted: Callable[[Cell], bool]) -> Cell | None:
        features = tuple(name for name in self.features if name in pair)
        for precision in [p for p in self.precisions if p in pair] or list(self.precisions):
            for stage in [s for s in STAGES if s in pair] or STAGES:
                cell = Cell(stage, precision, features)
                if wanted(cell):
                    return cell
        return None

    def _grow(self, pair: Pair, missing: Mapping[Pair, None], most: Callable[..., int]) -> Cell | None:
        """The cell around ``pair`` that covers most of what is missing, built greedily."""
        best: Cell | None = None
        fewest = -1
        features = tuple(name for name in self.features if name in pair)
        for precision in [p for p in self.precisions if p in pair] or list(self.precisions):
            for stage in [s for s in STAGES if s in pair] or STAGES:
                cell = Cell(stage, precision, features)
                gain = sum(p in missing for p in pairs_of(cell))
                if gain > fewest and not self.refusals(cell):
                    best, fewest = cell, gain
        while best is not None and len(best.features) < most([self.features[name] for name in best.features]):
            wider = self._widened(best, missing)
            if wider is None:
                break
            best = wider
        return best

    def _widened(self, cell: Cell, missing: Mapping[Pair, None]) -> Cell | None:
        """``cell`` with the feature that adds most of what is missing; None where none adds anything."""
        values = (cell.stage, cell.precision, *cell.features)
        gains = {
            name: sum(frozenset((name, value)) in missing for value in values)
            for name in self.features
            if name not in cell.features
        }
        for name in sorted(gains, key=lambda name: -gains[name]):
            if not gains[name]:
                return None
            wider = Cell(cell.stage, cell.precision, (*cell.features, name))
            if self.fits(wider.features) and not self.refusals(wider):
                return wider
        return None


def pairs_of(cell: Cell) -> list[Pair]:
    values = (cell.stage, cell.precision, *cell.features)
    return [frozenset(pair) for pair in combinations(values, 2)]
