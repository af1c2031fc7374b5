"""Starts moved ahead of need: as far as a gather takes, as long as there is memory for it.

The problem: sent for when it is needed, a bucket makes the computation wait for all of its gather; sent for early, it
takes memory that activations may need. The idea: gathers run one after another on their own channel, so working
backwards from each deadline gives the latest moment at which each must start to be in time. Going forwards, each start
is moved towards that moment as far as the budget of every node in between allows. Starts that end up close together
(within the time of one gather) are put at one node, so that the graph is interrupted less often.

Invariants: the order of starts stays as it is; first and last readers stay; where the schedule that came in was within
the budget, the one that goes out is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from drivetrain.zero.graph.schedule import Fetch, Schedule, ahead_bytes, live_bytes


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a schedule is made against.

    Attributes:
        sizes: bytes of each bucket, whole.
        gather_seconds: how long bringing each bucket in takes.
        node_seconds: how long each node takes.
        budget: for each node, the most bytes of fetched buckets while it runs.
        ahead: the most bytes sent for ahead of need, at any node.
    """

    sizes: Mapping[int, int]
    gather_seconds: Mapping[int, float]
    node_seconds: Sequence[float]
    budget: Sequence[int]
    ahead: int


def prefetch(schedule: Schedule, costs: Costs) -> Schedule:
    """``schedule`` with starts moved to earlier nodes."""
    return _gathered_together(_earlier(schedule, _wanted(schedule, costs), costs), costs)


def _wanted(schedule: Schedule, costs: Costs) -> list[int]:
    """For each fetch, the latest node at which it must start to be there in time."""
    begins = [0.0, *accumulate(costs.node_seconds)]  # when each node begins, if nothing makes it wait
    wanted, channel_free = [], float("inf")
    for fetch in reversed(schedule):
        channel_free = min(begins[fetch.first], channel_free) - costs.gather_seconds.get(fetch.group, 0.0)
        wanted.append(max(0, bisect_right(begins, channel_free) - 1))
    return wanted[::-1]


class _Room:
    """Bytes in use at each node, and whether more would fit."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        nodes = len(costs.node_seconds)
        self._costs = costs
        self._live = live_bytes(schedule, costs.sizes, nodes)
        self._ahead = ahead_bytes(schedule, costs.sizes, nodes)

    def earliest(self, fetch: Fetch, wanted: int) -> int:
        """The first node, from ``wanted`` on, from which ``fetch`` could be there."""
        size, node = self._costs.sizes[fetch.group], fetch.start
        while (
            node > wanted
            and self._live[node - 1] + size <= self._costs.budget[node - 1]
            and self._ahead[node - 1] + size <= self._costs.ahead
        ):
            node -= 1
        return node

    def take(self, fetch: Fetch, start: int) -> None:
        """``fetch`` starts at ``start`` instead."""
        for node in range(start, fetch.start):
            self._live[node] += self._costs.sizes[fetch.group]
            self._ahead[node] += self._costs.sizes[fetch.group]


def _earlier(schedule: Schedule, wanted: Sequence[int], costs: Costs) -> Schedule:
    room = _Room(schedule, costs)
    moved: list[Fetch] = []
    for fetch, node in zip(schedule, wanted, strict=True):
        start = room.earliest(fetch, max(node, moved[-1].start if moved else 0))
        room.take(fetch, start)
        moved.append(replace(fetch, start=start))
    return tuple(moved)


def _gathered_together(schedule: Schedule, costs: Costs) -> Schedule:
    """Each start is put at the node of the one before it, if that is no earlier than the gather takes."""
    room = _Room(schedule, costs)
    begins = [0.0, *accumulate(costs.node_seconds)]
    moved: list[Fetch] = []
    for fetch in schedule:
        start = fetch.start
        leader = moved[-1].start if moved else start
        near = begins[start] - begins[leader] <= costs.gather_seconds.get(fetch.group, 0.0)
        if near and room.earliest(fetch, leader) == leader:
            room.take(fetch, leader)
            start = leader
        moved.append(replace(fetch, start=start))
    return tuple(moved)
