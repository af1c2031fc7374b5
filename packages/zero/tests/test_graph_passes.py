"""Passes over compiled graphs, as arithmetic: whatever the graph, nothing is let go too early or sent for twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.zero.graph.keep import Run, choose_kept, keep, occupancy
from drivetrain.zero.graph.pieces import cuts
from drivetrain.zero.graph.planner import UNBOUNDED, Memory, Task, plan
from drivetrain.zero.graph.prefetch import Costs, prefetch
from drivetrain.zero.graph.reads import Line, reads, shared_memory
from drivetrain.zero.graph.schedule import Fetch, ahead_bytes, check, live_bytes, on_demand, spans

A, B, C = 0, 1, 2


def reading(*groups: int) -> frozenset[int]:
    return frozenset(groups)


# reads ----------------------------------------------------------------------------------------------------------------


def test_views_are_followed_to_their_readers() -> None:
    lines = [
        Line(shares=reading(A)),  # 0 parameter of A
        Line(shares=reading(B)),  # 1 parameter of B
        Line(),  # 2 an input
        Line(inputs=(0,), is_view=True),  # 3 transpose of 0
        Line(inputs=(2, 3)),  # 4 product: new memory
        Line(inputs=(3,), is_view=True),  # 5 transposed back
        Line(inputs=(4,), is_view=True),  # 6 a view of new memory
        Line(inputs=(6, 5, 1)),  # 7
    ]
    assert reads(lines) == [
        reading(),
        reading(),
        reading(),
        reading(A),
        reading(A),
        reading(A),
        reading(),
        reading(A, B),
    ]
    assert shared_memory(lines)[3:7] == [reading(A), reading(), reading(A), reading()]


# schedules ------------------------------------------------------------------------------------------------------------


def test_on_demand_starts_where_the_order_and_the_readers_say() -> None:
    graph = [reading(), reading(B), reading(A), reading(B), reading()]
    assert on_demand(graph, [B, A]) == (
        Fetch(group=B, start=1, first=1, last=3),
        Fetch(group=A, start=2, first=2, last=2),
    )
    # The order of another rank: A must not wait for B's start.
    assert on_demand(graph, [A, B])[0] == Fetch(group=A, start=1, first=2, last=2)
    # C is read by other ranks only: it comes and goes.
    assert on_demand(graph, [B, C, A])[1] == Fetch(group=C, start=2, first=2, last=2)
    assert on_demand(graph, [B, A, C])[2] == Fetch(group=C, start=4, first=4, last=4)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ((Fetch(group=A, start=0, first=0, last=0),), "bucket 0 is read from node 0 to node 2"),
        ((Fetch(group=A, start=1, first=1, last=2),), "bucket 0 is read from node 0 to node 2"),
        ((Fetch(group=A, start=1, first=0, last=2),), "does not follow a start at 0"),
        ((Fetch(group=A, start=0, first=0, last=3),), "in a graph of 3 nodes"),
        ((Fetch(group=A, start=0, first=0, last=2),) * 2, "fetched twice"),
        ((), "fetched by None"),
        ((Fetch(group=A, start=0, first=0, last=2), Fetch(group=B, start=0, first=1, last=1)), ""),
        ((Fetch(group=B, start=1, first=1, last=1), Fetch(group=A, start=0, first=0, last=2)), "a start at 1"),
    ],
)
def test_check_finds_what_is_wrong(schedule: tuple[Fetch, ...], told: str) -> None:
    graph = [reading(A), reading(), reading(A)]
    if told:
        with pytest.raises(ValueError, match=told):
            check(schedule, graph)
    else:
        check(schedule, graph)


def test_bytes_of_a_schedule() -> None:
    schedule = (Fetch(group=A, start=0, first=2, last=2), Fetch(group=B, start=2, first=3, last=4))
    sizes = {A: 10, B: 1}
    assert live_bytes(schedule, sizes, 6) == [10, 10, 11, 1, 1, 0]
    assert ahead_bytes(schedule, sizes, 6) == [10, 10, 1, 0, 0, 0]


# prefetch -------------------------------------------------------------------------------------------------------------


def costs(nodes: int, *, budget: int = 100, ahead: int = 100, seconds: float = 2.0) -> Costs:
    return Costs(
        sizes={A: 10, B: 10, C: 10},
        gather_seconds=dict.fromkeys((A, B, C), seconds),
        node_seconds=[1.0] * nodes,
        budget=[budget] * nodes,
        ahead=ahead,
    )


def starts(schedule: tuple[Fetch, ...]) -> list[int]:
    return [fetch.start for fetch in schedule]


def test_prefetch_leaves_each_gather_its_time() -> None:
    graph = [reading()] * 6 + [reading(A), reading(), reading(B), reading(C)]
    plain = on_demand(graph, [A, B, C])
    assert starts(plain) == [6, 8, 9]
    # C must start at 7 and B, on the same channel, at 5; A at 3. B joins A, which is no further than one gather takes.
    assert starts(prefetch(plain, costs(10))) == [3, 3, 7]
    assert starts(prefetch(plain, costs(10, ahead=10))) == [3, 6, 8]  # one at a time
    assert starts(prefetch(plain, costs(10, budget=10))) == [3, 7, 9]  # each comes when the one before is gone
    assert starts(prefetch(plain, costs(10, budget=9))) == [6, 8, 9]
    assert starts(prefetch(plain, costs(10, seconds=0.0))) == [6, 8, 9]


def test_prefetch_stops_where_memory_is_short() -> None:
    graph = [reading()] * 5 + [reading(A)]
    tight = costs(6, seconds=9.0)
    budget = [100, 100, 0, 100, 100, 100]
    limited = Costs(**{**vars(tight), "budget": budget})
    assert starts(prefetch(on_demand(graph, [A]), limited)) == [3]


# keeping --------------------------------------------------------------------------------------------------------------


def test_what_saves_most_per_byte_is_kept() -> None:
    forward = [reading(A), reading(B), reading(C)]
    backward = [reading(C), reading(B), reading(A)]
    sizes, seconds = {A: 10, B: 20, C: 5}, {A: 1.0, B: 1.0, C: 1.0}

    def chosen(most: int, *, accumulates: bool = False) -> list[int]:
        runs = [
            Run(schedule=on_demand(g, o), budget=[most] * 3, backward=is_backward, accumulates=accumulates)
            for g, o, is_backward in ((forward, [A, B, C], False), (backward, [C, B, A], True))
        ]
        return choose_kept(runs, sizes, seconds, [A, B, C])

    assert chosen(1000) == [C, A, B]
    assert chosen(30) == [C, A]
    assert chosen(29) == [C, B]  # A would take 30 at B's forward node
    assert chosen(24) == [C]
    assert chosen(4) == [C]  # it stays between its last reader of forward and its first of backward, which is free
    assert chosen(24, accumulates=True) == []
    assert chosen(25, accumulates=True) == [C]


def test_occupancy_of_what_is_kept() -> None:
    graph = [reading(), reading(A), reading(B), reading()]
    run = Run(schedule=on_demand(graph, [A, B]), budget=[0] * 4, backward=False, accumulates=False)
    sizes = {A: 1, B: 10, C: 100}
    assert occupancy(run, sizes, ()) == [0, 1, 10, 0]
    assert occupancy(run, sizes, (A,)) == [0, 1, 11, 1]
    assert occupancy(Run(**{**vars(run), "accumulates": True}), sizes, (A,)) == [1, 1, 11, 1]
    assert occupancy(Run(**{**vars(run), "backward": True}), sizes, (B,)) == [10, 11, 10, 0]
    assert occupancy(run, sizes, (C,)) == [100, 101, 110, 100]  # kept by another graph
    assert [fetch.stays for fetch in keep(run.schedule, (B,))] == [False, True]


# pieces ---------------------------------------------------------------------------------------------------------------


def test_cuts_are_where_events_may_be() -> None:
    graph = [reading(), reading(A), reading(A, B), reading(), reading(B), reading()]
    assert cuts(graph, []) == [1, 2, 3, 5, 6]
    assert cuts([reading()] * 4, [[0, 2], [3], []]) == [3, 4]


# everything together --------------------------------------------------------------------------------------------------

groups = st.frozensets(st.integers(0, 5), max_size=3)


@st.composite
def tasks(draw: st.DrawFn) -> tuple[Task, Memory, dict[int, float], list[int], list[int]]:
    graph = draw(st.lists(groups, min_size=1, max_size=25))
    order = draw(st.permutations(sorted({*spans(graph), *draw(groups)})))
    nodes = len(graph)
    task = Task(
        reads=graph,
        order=order,
        backward=draw(st.booleans()),
        accumulates=draw(st.booleans()),
        node_seconds=draw(st.lists(st.floats(0, 3), min_size=nodes, max_size=nodes)),
        live_bytes=draw(st.lists(st.integers(0, 50), min_size=nodes, max_size=nodes)),
    )
    memory = Memory(
        sizes={group: draw(st.integers(1, 30)) for group in range(6)},
        most=draw(st.sampled_from((0, 20, 60, 100, UNBOUNDED))),
        free=draw(st.sampled_from((30, 80, 150, UNBOUNDED))),
        ahead=draw(st.sampled_from((0, 20, 60, UNBOUNDED))),
    )
    seconds = {group: draw(st.floats(0, 5)) for group in range(6)}
    keeps = draw(st.lists(st.sampled_from(order), unique=True)) if order else []
    return task, memory, seconds, keeps, sorted({*keeps, *draw(groups)})


@settings(deadline=None, max_examples=150)
@given(tasks())
def test_any_plan_serves_its_readers_within_the_budget(
    case: tuple[Task, Memory, dict[int, float], list[int], list[int]],
) -> None:
    task, memory, seconds, keeps, held = case
    planned = plan(task, memory, seconds, keeps, held)
    assert [fetch.group for fetch in planned.schedule] == list(task.order)  # each once, as agreed
    events = list(events_of(planned.schedule, len(task.reads)))
    assert_sound(events, task)
    # Beyond the budget only where even sending on demand is: there nothing more was added.
    before = task.run(memory)
    run = Run(**{**vars(before), "schedule": planned.schedule})
    least = occupancy(before, memory.sizes, held)
    for used, needed, allowed in zip(occupancy(run, memory.sizes, held), least, before.budget, strict=True):
        assert used <= max(needed, allowed)
    assert planned.peak_bytes == max(occupancy(run, memory.sizes, held))


@settings(deadline=None, max_examples=100)
@given(tasks(), tasks())
def test_what_is_kept_fits(
    one: tuple[Task, Memory, dict[int, float], list[int], list[int]],
    other: tuple[Task, Memory, dict[int, float], list[int], list[int]],
) -> None:
    memory, seconds = one[1], one[2]
    runs = [one[0].run(memory), other[0].run(memory)]
    kept = choose_kept(runs, memory.sizes, seconds, range(6))
    for run in runs:
        for used, needed, allowed in zip(
            occupancy(run, memory.sizes, kept), occupancy(run, memory.sizes, ()), run.budget, strict=True
        ):
            assert used <= max(needed, allowed)


Event = tuple[str, int]


def events_of(schedule: tuple[Fetch, ...], nodes: int) -> list[Event]:
    """What a graph with this schedule does, in order, as `ReadGraph.write` puts it."""
    events: list[Event] = []
    for node in range(nodes):
        events += [("start", f.group) for f in schedule if f.start == node]
        events += [("wait", f.group) for f in schedule if f.first == node]
        events.append(("run", node))
        events += [("keep" if f.stays else "release", f.group) for f in schedule if f.last == node]
    return events


def assert_sound(events: list[Event], task: Task) -> None:
    started: list[int] = []
    waited: list[int] = []
    gone: list[int] = []
    for what, which in events:
        if what == "start":
            assert which not in started
            started.append(which)
        elif what == "wait":
            assert which in started
            assert which not in waited
            waited.append(which)
        elif what == "run":
            assert task.reads[which] <= set(waited) - set(gone)
        else:
            assert which in waited
            assert which not in gone
            gone.append(which)
    assert sorted(started) == sorted(waited) == sorted(gone) == sorted(task.order)
