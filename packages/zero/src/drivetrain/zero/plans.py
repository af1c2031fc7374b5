"""What ranks that compile on their own agree on before each forward pass: a plan, or to give up.

The problem: each rank's graph depends on its inputs. One may meet a new shape, compile again and come out with other
needs, or fail to; if the others don't know, they wait in a collective that it never joins. The idea: a handshake of 16
bytes per forward pass. Each rank says the number of the plan that covers its graph, that none does, or that it has no
graph. Only if those differ, or nobody knows, is more said.

Invariant: the table from needs to plans is the same on all ranks, since it changes only in exchanges of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch

from drivetrain.comm import Axis, all_gather_object, all_reduce
from drivetrain.zero.graph.reads import Groups

_NO_PLAN, _NO_GRAPH = 1 << 30, 1 << 31


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a rank's graphs of one forward pass, and of its backward pass, read.

    Attributes:
        forward, backward: buckets, in the order of first readers.
        sequence: stands for the order in which backward comes by buckets that it reads and buckets whose gradients it
            has made. Equal for equal sequences.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sequence: str

    @property
    def needs(self) -> Needs:
        return frozenset(self.forward), frozenset(self.backward), self.sequence


Needs = tuple[Groups, Groups, str]


class GiveUpError(Exception):
    """All ranks go on without compiled graphs, and none uses what came of this forward pass. The text says why."""


@dataclass(kw_only=True)
class Plan:
    """What all ranks do alike in passes with the same needs.

    Attributes:
        forward, backward: the buckets that are sent for, in order.
        alike: backward passes go through the same sequence on all ranks.
        kept: those that stay whole until the step.
        calls: passes so far.
        final: what is kept has been decided.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    alike: bool
    kept: frozenset[int] = frozenset()
    calls: int = 0
    final: bool = False


class Plans:
    """The plans of one compiled module. Every method is collective, and may raise `GiveUpError` on all ranks."""

    def __init__(self, everyone: Axis) -> None:
        self._everyone = everyone
        self._plans: list[Plan] = []
        self._number_of: dict[Needs, int] = {}

    def common(self, reading: Reading) -> Plan:
        """The plan of this pass, in which this rank's graphs read ``reading``."""
        largest, smallest = self._handshake(self._number_of.get(reading.needs, _NO_PLAN))
        if largest == _NO_GRAPH:
            self._exchange_reasons(None)
        if largest == _NO_PLAN or largest != smallest:
            self._exchange_readings(reading)
        return self._plans[self._number_of[reading.needs]]

    def give_up(self, reason: str) -> NoReturn:
        """In place of `common`, on a rank that has no graph."""
        self._handshake(_NO_GRAPH)
        self._exchange_reasons(reason)

    def confirm(self, complaint: str | None) -> None:
        """After a first pass: whether all ranks are content with what came out of it."""
        largest, _ = self._handshake(0 if complaint is None else _NO_GRAPH)
        if largest == _NO_GRAPH:
            self._exchange_reasons(complaint)

    def known(self) -> Sequence[Plan]:
        """All plans so far. Not collective."""
        return self._plans

    def _handshake(self, mine: int) -> tuple[int, int]:
        """The largest and the smallest of what the ranks say."""
        said = torch.tensor([mine, -mine], dtype=torch.int64, device=self._everyone.device)
        all_reduce(said, self._everyone, op="max", purpose="handshake of compiled passes").wait()
        largest, negated = said.tolist()
        return largest, -negated

    def _exchange_reasons(self, mine: str | None) -> NoReturn:
        reasons = all_gather_object(mine, self._everyone, purpose="reasons to stop compiling")
        given = [(rank, reason) for rank, reason in zip(self._everyone.ranks, reasons, strict=True) if reason]
        rank, reason = given[0]
        raise GiveUpError(reason if len(given) == len(reasons) else f"on rank {rank}, {reason}")

    def _exchange_readings(self, mine: Reading) -> None:
        """One plan for the graphs of all ranks: the first rank's order, then what others need besides."""
        purpose = "buckets that compiled passes read"
        everybody = [Reading(**told) for told in all_gather_object(asdict(mine), self._everyone, purpose=purpose)]
        forward = tuple(dict.fromkeys(group for reading in everybody for group in reading.forward))
        backward = tuple(dict.fromkeys(group for reading in everybody for group in reading.backward))
        alike = len({reading.sequence for reading in everybody}) == 1
        together = Reading(forward=forward, backward=backward, sequence=mine.sequence if alike else "").needs
        number = self._number_of.get(together)
        if number is None:
            number = len(self._plans)
            self._plans.append(Plan(forward=forward, backward=backward, alike=alike))
        for needs in (together, *(reading.needs for reading in everybody)):
            self._number_of[needs] = number
