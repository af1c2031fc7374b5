"""A schedule written into an FX graph: what runs, in which order, and what comes out."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from drivetrain.zero.graph import internals
from drivetrain.zero.graph.internals import UnsupportedGraphError
from drivetrain.zero.graph.pieces import in_pieces
from drivetrain.zero.graph.rewrite import Place, ReadGraph
from drivetrain.zero.graph.schedule import Fetch, on_demand

aten = torch.ops.aten
A, B = 0, 1


class Recorder:
    """Has one parameter in each of two buckets, and writes down what it is asked for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gradients: dict[Place, torch.Tensor] = {}
        self.parameters = {A: torch.full((2, 3), 2.0), B: torch.full((2,), 3.0)}
        self.here: set[int] = set()

    def begin(self) -> None:
        self.events.append("begin")

    def start(self, group: int) -> None:
        self.events.append(f"start {group}")

    def wait(self, group: int) -> tuple[torch.Tensor, ...]:
        self.events.append(f"wait {group}")
        return (self.parameters[group],)

    def release(self, group: int) -> None:
        self.events.append(f"release {group}")

    def keep(self, group: int) -> None:
        self.events.append(f"keep {group}")

    def take(self, group: int, slot: int, gradient: torch.Tensor) -> None:
        self.events.append(f"take {group}")
        self.gradients[Place(group, slot)] = gradient


def graph_of(build: Callable[[fx.Graph], None]) -> fx.GraphModule:
    graph = fx.Graph()
    build(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def forward(graph: fx.Graph) -> None:
    """x @ a.T + b, and what backward needs: x and a."""
    a, b, x = (graph.placeholder(name) for name in "abx")
    double = graph.call_function(aten.mul.Tensor, (x, 2.0))
    turned = graph.call_function(aten.t.default, (a,))
    product = graph.call_function(aten.mm.default, (double, turned))
    moved = graph.call_function(aten.add.Tensor, (product, b))
    graph.output((graph.call_function(aten.tanh.default, (moved,)), x, a))


def backward(graph: fx.Graph) -> None:
    a, x, tangent = (graph.placeholder(name) for name in ("a", "x", "tangent"))
    turned = graph.call_function(aten.t.default, (tangent,))
    of_a = graph.call_function(aten.mm.default, (turned, x))
    of_x = graph.call_function(aten.mm.default, (tangent, a))
    graph.output((of_a, tangent, of_x))


PLACES = {"a": Place(A, 0), "b": Place(B, 0)}
NAN = torch.full((), float("nan"))


def test_readers_get_what_was_waited_for() -> None:
    graph = ReadGraph(graph_of(forward), PLACES)
    assert [sorted(groups) for groups in graph.reads] == [[], [A], [A], [B], []]
    recorder = Recorder()
    ahead = (Fetch(group=A, start=0, first=1, last=2), Fetch(group=B, start=1, first=3, last=3, stays=True))
    module, positions = graph.write(ahead, recorder)
    stub = NAN.expand(2, 3)
    x = torch.ones(1, 3)
    given = [stub, NAN.expand(2), x]
    result, saved_x, saved_a = internals.boxed(module)(given)
    assert given == []
    assert torch.equal(result, torch.tanh(torch.full((1, 2), 15.0)))
    assert saved_x is x
    assert saved_a is stub  # backward is handed the placeholder, never memory that is let go
    assert recorder.events == ["start 0", "start 1", "wait 0", "release 0", "wait 1", "keep 1"]
    assert sorted(positions.values()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cut", [False, True])
def test_gradients_are_taken_where_they_are_made(cut: bool) -> None:
    graph = ReadGraph(graph_of(backward), {"a": Place(A, 0)}, [Place(A, 0), Place(B, 0), None])
    if cut:
        graph = in_pieces(graph, lambda module, inputs: internals.boxed(module))
        assert sum(node.target is not operator.getitem for node in graph.operations) == 2
    recorder = Recorder()
    module, _ = graph.write(on_demand(graph.reads, [A]), recorder)
    x, tangent = torch.ones(1, 3), torch.ones(1, 2)
    of_a, of_b, of_x = internals.boxed(module)([NAN.expand(2, 3), x, tangent])
    assert of_a is None
    assert of_b is None
    assert torch.equal(of_x, torch.full((1, 3), 4.0))
    assert recorder.events == ["begin", "take 1", "take 0", "start 0", "wait 0", "release 0"]
    assert torch.equal(recorder.gradients[Place(A, 0)], torch.ones(2, 3))
    assert recorder.gradients[Place(B, 0)] is tangent


def test_pieces_pass_views_of_parameters_on() -> None:
    """The transpose of A is made in one piece and read in the next: A stays until then, and no longer."""

    def build(graph: fx.Graph) -> None:
        a, b, x = (graph.placeholder(name) for name in "abx")
        turned = graph.call_function(aten.t.default, (a,))
        moved = graph.call_function(aten.add.Tensor, (x, b))
        product = graph.call_function(aten.mm.default, (moved, turned))
        graph.output((graph.call_function(aten.tanh.default, (product,)),))

    graph = in_pieces(ReadGraph(graph_of(build), PLACES), lambda module, inputs: internals.boxed(module))
    recorder = Recorder()
    recorder.parameters[B] = torch.full((3,), 3.0)
    module, _ = graph.write(on_demand(graph.reads, [A, B]), recorder)
    (result,) = internals.boxed(module)([NAN.expand(2, 3), NAN.expand(3), torch.ones(1, 3)])
    assert torch.equal(result, torch.tanh(torch.full((1, 2), 24.0)))
    assert recorder.events == ["start 0", "wait 0", "start 1", "wait 1", "release 1", "release 0"]


def test_results_that_are_views_of_parameters_are_refused() -> None:
    def build(graph: fx.Graph) -> None:
        a = graph.placeholder("a")
        graph.output((graph.call_function(aten.t.default, (a,)),))

    with pytest.raises(UnsupportedGraphError, match="is a view of a parameter that is split over ranks"):
        ReadGraph(graph_of(build), PLACES)
    with pytest.raises(UnsupportedGraphError, match="nothing to compute"):
        ReadGraph(graph_of(lambda graph: graph.output((graph.placeholder("a"),)) and None), PLACES)
    with pytest.raises(UnsupportedGraphError, match="3 results for 1 inputs"):
        ReadGraph(graph_of(backward), {}, [None])
