"""When each bucket is sent for, waited for and let go, in one run of a graph: pure arithmetic on positions.

The problem: all ranks must send for the same buckets in the same order, whatever their graphs look like in detail, and
a bucket must be whole from its first reader to its last. The idea: the order is given (ranks agreed on it), the readers
are given (the graph has them), and a schedule puts each bucket's three events around its readers such that the starts
keep to the order.

Positions count nodes. Before node i come the starts of all fetches with ``start == i``, in order, then the waits of
those with ``first == i``; after node i the releases of those with ``last == i``.

Invariants (`check` raises if one is broken): every bucket of the order is sent for once, in order; start <= first <=
last; no node outside of first..last reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drivetrain.zero.graph.reads import Groups


@dataclass(frozen=True, kw_only=True)
class Fetch:
    """One bucket in one run of a graph.

    Attributes:
        group: the bucket.
        start: it is sent for before this node.
        first: it is waited for before this node.
        last: it is let go after this node.
        stays: it is not let go after all, but kept for the rest of the step.
    """

    group: int
    start: int
    first: int
    last: int
    stays: bool = False


Schedule = tuple[Fetch, ...]


def spans(reads: Sequence[Groups]) -> dict[int, tuple[int, int]]:
    """For each group that is read, its first and its last reader; in the order of first readers."""
    found: dict[int, tuple[int, int]] = {}
    for position, groups in enumerate(reads):
        for group in sorted(groups):
            first, _ = found.get(group, (position, position))
            found[group] = (first, position)
    return found


def on_demand(reads: Sequence[Groups], order: Sequence[int]) -> Schedule:
    """Every bucket is sent for as late as its readers and the order allow.

    A bucket that is in the order and that this graph does not read (another rank's does) is brought in and let go.

    Args:
        reads: for each node, the groups that it reads. At least one node.
        order: the groups, in the order that all ranks keep to. All that are read, each once.
    """
    read = spans(reads)
    fetches: list[Fetch] = []
    latest = len(reads) - 1
    for group in reversed(order):
        first, last = read.get(group, (latest, latest))
        latest = min(latest, first)
        fetches.append(Fetch(group=group, start=latest, first=first, last=last))
    return tuple(reversed(fetches))


def check(schedule: Schedule, reads: Sequence[Groups]) -> None:
    """Refuse a schedule under which a reader would find nothing, or that sends for something twice.

    Raises:
        ValueError: an invariant of this module is broken.
    """
    scheduled = {fetch.group: fetch for fetch in schedule}
    if len(scheduled) != len(schedule):
        raise ValueError(f"a bucket is fetched twice in one run: {[fetch.group for fetch in schedule]}")
    latest = 0
    for fetch in schedule:
        if not latest <= fetch.start <= fetch.first <= fetch.last < len(reads):
            raise ValueError(f"{fetch} does not follow a start at {latest}, in a graph of {len(reads)} nodes")
        latest = fetch.start
    for group, (first, last) in spans(reads).items():
        found = scheduled.get(group)
        if found is None or found.first > first or found.last < last:
            raise ValueError(f"bucket {group} is read from node {first} to node {last}, and fetched by {found}")


def live_bytes(schedule: Schedule, sizes: Mapping[int, int], nodes: int) -> list[int]:
    """Bytes of fetched buckets, arrived or on their way, while each node runs."""
    changes = [0] * (nodes + 1)
    for fetch in schedule:
        changes[fetch.start] += sizes[fetch.group]
        changes[fetch.last + 1] -= sizes[fetch.group]
    total, live = 0, []
    for change in changes[:nodes]:
        total += change
        live.append(total)
    return live


def ahead_bytes(schedule: Schedule, sizes: Mapping[int, int], nodes: int) -> list[int]:
    """The part of `live_bytes` that nobody has read yet: what was sent for ahead of need."""
    waiting = tuple(replace(f, last=f.first - 1) for f in schedule if f.start < f.first)
    return live_bytes(waiting, sizes, nodes)
