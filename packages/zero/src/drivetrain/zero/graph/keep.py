"""Which buckets stay whole for the rest of the step, instead of being gathered again: selective unsharding.

A bucket that is kept from forward to backward (and, where gradients accumulate, to the next micro-batch) saves its
further gathers and takes its memory all the while. The idea: what saves the most time per byte comes first, as long as
every node of forward and backward still has the memory that it needs.

Invariant: what is kept makes no node exceed its budget; one that exceeds it anyway gets no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drivetrain.zero.graph.schedule import Fetch, Schedule, live_bytes


@dataclass(frozen=True, kw_only=True)
class Run:
    """One graph, and what memory there is.

    Attributes:
        schedule: when buckets come and go, but for those that are kept.
        budget: for each node, the most bytes of buckets while it runs.
        backward: it is a backward graph.
        accumulates: the step has more micro-batches, so that what is kept stays from one to the next.
    """

    schedule: Schedule
    budget: Sequence[int]
    backward: bool
    accumulates: bool


def keep(schedule: Schedule, kept: Collection[int]) -> Schedule:
    """``schedule`` with buckets that are not let go."""
    return tuple(replace(fetch, stays=True) if fetch.group in kept else fetch for fetch in schedule)


def occupancy(run: Run, sizes: Mapping[int, int], kept: Collection[int]) -> list[int]:
    """Bytes of buckets at each node of ``run``, at the most that a step comes to, with ``kept`` buckets."""
    nodes = len(run.budget)

    def held(fetch: Fetch) -> Fetch:
        start = 0 if run.backward or run.accumulates else fetch.start
        last = nodes - 1 if run.accumulates or not run.backward else fetch.last
        return replace(fetch, start=start, last=last)

    schedule = tuple(held(fetch) if fetch.group in kept else fetch for fetch in run.schedule)
    elsewhere = sum(sizes[group] for group in set(kept).difference(fetch.group for fetch in run.schedule))
    return [live + elsewhere for live in live_bytes(schedule, sizes, nodes)]


def choose_kept(
    runs: Sequence[Run], sizes: Mapping[int, int], gather_seconds: Mapping[int, float], order: Sequence[int]
) -> list[int]:
    """The buckets to keep, best first.

    Args:
        runs: the graphs of a step.
        sizes: bytes of each bucket, whole.
        gather_seconds: how long bringing each bucket in takes: what keeping it saves.
        order: the buckets that may be kept.
    """
    worth = {group: gather_seconds.get(group, 0.0) / max(1, sizes[group]) for group in order}
    kept: list[int] = []
    for group in sorted(order, key=lambda g: -worth[g]):
        if all(_fits(run, sizes, kept, group) for run in runs):
            kept.append(group)
    return kept


def _fits(run: Run, sizes: Mapping[int, int], kept: Collection[int], group: int) -> bool:
    before, after = occupancy(run, sizes, kept), occupancy(run, sizes, {*kept, group})
    return all(now <= max(allowed, was) for was, now, allowed in zip(before, after, run.budget, strict=True))
