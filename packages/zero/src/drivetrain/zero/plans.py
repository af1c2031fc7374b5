"""What ranks that compile on their own agree on before each forward pass: a plan, or to give up.

The problem: each rank's graph depends on its inputs. One may meet a new shape, compile again and come out with other
needs, or fail to; if the others don't know, they wait in a collective that it never joins. The idea: a handshake of 16
bytes per forward pass. Each rank says the number of the plan that covers its graph, that none does, or that it has no
graph. Only if those differ, or nobody knows, is more said.

Invariant: the table from needs to plans is the same on all ranks, since it changes only in exchanges of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from drivetrain.comm import Axis, all_gather_object, all_reduce
from drivetrain.zero.graph.reads import Groups

_NO_PLAN, _NO_GRAPH = 1 << 30, 1 << 31

Needs = tuple[Groups, Groups]
"""Buckets that a graph reads in forward and in backward."""
Orders = tuple[Sequence[int], Sequence[int]]
"""The same, in the order of first readers."""


class GiveUpError(Exception):
    """All ranks go on without compiled graphs, and none uses what came of this forward pass. The text says why."""


@dataclass(kw_only=True)
class Plan:
    """What all ranks do alike in passes with the same needs.

    Attributes:
        forward, backward: the buckets that are sent for, in order.
        kept: those that stay whole until the step.
        calls: passes so far.
        final: what is kept has been decided.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    calls: int = 0
    final: bool = False


class Plans:
    """The plans of one compiled module. Every method is collective, and may raise `GiveUpError` on all ranks."""

    def __init__(self, everyone: Axis) -> None:
        self._everyone = everyone
        self._plans: list[Plan] = []
        self._number_of: dict[Needs, int] = {}

    def common(self, orders: Orders) -> Plan:
        """The plan of this pass, whose graph on this rank reads buckets in ``orders``."""
        needs = (frozenset(orders[0]), frozenset(orders[1]))
        largest, smallest = self._handshake(self._number_of.get(needs, _NO_PLAN))
        if largest == _NO_GRAPH:
            self._exchange_reasons(None)
        if largest == _NO_PLAN or largest != smallest:
            self._exchange_orders(orders)
        return self._plans[self._number_of[needs]]

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

    def _exchange_orders(self, mine: Orders) -> None:
        """One plan for the graphs of all ranks: the first rank's order, then what others need besides."""
        own = (list(mine[0]), list(mine[1]))
        everybody = all_gather_object(own, self._everyone, purpose="buckets that compiled passes read")
        forward = tuple(dict.fromkeys(group for order, _ in everybody for group in order))
        backward = tuple(dict.fromkeys(group for _, order in everybody for group in order))
        together = (frozenset(forward), frozenset(backward))
        number = self._number_of.get(together)
        if number is None:
            number = len(self._plans)
            self._plans.append(Plan(forward=forward, backward=backward))
        for own_forward, own_backward in everybody:
            self._number_of[frozenset(own_forward), frozenset(own_backward)] = number
        self._number_of[together] = number
