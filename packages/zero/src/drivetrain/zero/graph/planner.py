"""One graph's schedule from everything that is known: what ranks agreed on, what was measured, what memory there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from drivetrain.zero.graph.keep import Run, keep, occupancy
from drivetrain.zero.graph.prefetch import Costs, prefetch
from drivetrain.zero.graph.reads import Groups
from drivetrain.zero.graph.schedule import Schedule, check, live_bytes, on_demand

UNBOUNDED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What whole parameters may take, in bytes.

    Attributes:
        sizes: of each bucket that is fetched, whole.
        most: of all of them together, at any moment; `UNBOUNDED` for no such limit.
        free: what the device has to spare while there are neither activations nor fetched buckets.
        ahead: what may be sent for ahead of need.
    """

    sizes: Mapping[int, int]
    most: int
    free: int
    ahead: int

    def budget(self, live: Sequence[int]) -> list[int]:
        """For each operation, what buckets may take, if values take ``live`` bytes meanwhile."""
        return [min(self.most, self.free - taken) for taken in live]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A graph to make a schedule for.

    Attributes:
        reads: for each operation, the buckets that it reads.
        order: the order in which ranks send for buckets in it.
        backward: it is a backward graph.
        accumulates: what is kept may be there from its first operation on, and stays after its last.
        node_seconds, live_bytes: measured of each operation; zeros where nothing is known.
    """

    reads: Sequence[Groups]
    order: Sequence[int]
    backward: bool
    accumulates: bool
    node_seconds: Sequence[float]
    live_bytes: Sequence[int]

    def run(self, memory: Memory) -> Run:
        """The graph with nothing sent for ahead of need, and nothing kept."""
        return Run(
            schedule=on_demand(self.reads, self.order),
            budget=memory.budget(self.live_bytes),
            backward=self.backward,
            accumulates=self.accumulates,
        )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A schedule, and the most bytes of buckets that it comes to."""

    schedule: Schedule
    peak_bytes: int


def plan(
    task: Task, memory: Memory, gather_seconds: Mapping[int, float], keeps: Collection[int], held: Collection[int]
) -> Planned:
    """The schedule of a graph.

    Args:
        task, memory: the graph, and what there is.
        gather_seconds: how long bringing each bucket in takes; empty where nothing was measured.
        keeps: buckets that this graph keeps until the step.
        held: these, and what other graphs may have kept.
    """
    run = task.run(memory)
    schedule = keep(run.schedule, keeps)
    # What is kept may be there when the schedule does not say so: the others have so much less.
    counted = live_bytes(schedule, memory.sizes, len(task.reads))
    surplus = [there - seen for there, seen in zip(occupancy(run, memory.sizes, held), counted, strict=True)]
    here_already = keeps if task.backward else ()
    costs = Costs(
        sizes=memory.sizes,
        gather_seconds={group: s for group, s in gather_seconds.items() if group not in here_already},
        node_seconds=task.node_seconds,
        budget=[most - more for most, more in zip(run.budget, surplus, strict=True)],
        ahead=memory.ahead,
    )
    schedule = prefetch(schedule, costs)
    check(schedule, task.reads)
    peak = max(occupancy(replace(run, schedule=schedule), memory.sizes, held))
    return Planned(schedule=schedule, peak_bytes=peak)
