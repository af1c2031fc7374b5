"""FX graphs: read as the plain lists that passes work on, and written with a schedule in them.

What is written into a graph are calls of `Actions`: nodes like all others, in the order that the schedule says. A
reader of a parameter gets it from the wait before it. The placeholder that stood for it stays, and is what backward is
handed.
A gradient is taken where it is made, and its place among the results is left empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from drivetrain.zero.graph.internals import UnsupportedGraphError, is_view
from drivetrain.zero.graph.reads import Groups, Line, reads, shared_memory
from drivetrain.zero.graph.schedule import Fetch, Schedule


@dataclass(frozen=True)
class Place:
    """Where a parameter is: the number of its bucket, and its slot in there."""

    group: int
    slot: int


class Actions(Protocol):
    """What the nodes do that a schedule puts into a graph."""

    def begin(self) -> None:
        """A backward graph begins."""

    def start(self, group: int) -> None:
        """Send for a bucket."""

    def wait(self, group: int) -> tuple[torch.Tensor, ...]:
        """Its parameters, whole, by slot."""

    def release(self, group: int) -> None:
        """Let it go."""

    def keep(self, group: int) -> None:
        """Its last reader has run, and it stays."""

    def take(self, group: int, slot: int, gradient: torch.Tensor) -> None:
        """A parameter's gradient, whole."""


class ReadGraph:
    """An FX graph of aten operations, with what passes need to know of it.

    Args:
        module: the graph.
        fetched: the parameters that are not simply there, by the name of their placeholder.
        gradients: for a backward graph, the parameter whose gradient each result is, or None.
        shares: the buckets that values share memory with, by name, where the graph alone does not tell.

    Attributes:
        operations: its nodes but for inputs and results.
        reads: for each of them, the buckets that it reads.

    Raises:
        UnsupportedGraphError: a result shares memory with a parameter, or there is nothing to run.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        fetched: Mapping[str, Place],
        gradients: Sequence[Place | None] | None = None,
        shares: Mapping[str, Groups] | None = None,
    ) -> None:
        self.module = module
        self.backward = gradients is not None
        self._places = fetched
        nodes = list(module.graph.nodes)
        index = {node: i for i, node in enumerate(nodes)}
        lines = [_line(node, index, fetched, shares or {}) for node in nodes]
        self.operations = [node for node in nodes if node.op not in ("placeholder", "output")]
        self._fetched = {
            node: fetched[node.name] for node in nodes if node.op == "placeholder" and node.name in fetched
        }
        everything = reads(lines)
        self.reads: list[Groups] = [everything[index[node]] for node in self.operations]
        self._shares: dict[fx.Node, Groups] = dict(zip(nodes, shared_memory(lines), strict=True))
        self.all_results: list[Any] = _results(nodes[-1])
        self._targets = gradients or [None] * len(self.all_results)
        self._takes: dict[fx.Node, list[Place]] = {}
        self._check()
        for result, target in zip(self.all_results, self._targets, strict=True):
            if isinstance(result, fx.Node) and target is not None:
                self._takes.setdefault(result, []).append(target)

    def _check(self) -> None:
        if not self.operations:
            raise UnsupportedGraphError("there is nothing to compute in the forward pass")
        if len(self._targets) != len(self.all_results):
            raise UnsupportedGraphError(f"backward has {len(self.all_results)} results for {len(self._targets)} inputs")
        for result, target in zip(self.all_results, self._targets, strict=True):
            if isinstance(result, fx.Node) and target is None and result not in self._fetched and self._shares[result]:
                raise UnsupportedGraphError(
                    f"a result ({result.name}) is a view of a parameter that is split over ranks"
                )

    def like(self, module: fx.GraphModule, shares: Mapping[str, Groups]) -> ReadGraph:
        """``module``, of the same inputs and results, read in the same way."""
        return ReadGraph(module, self._places, self._targets if self.backward else None, shares)

    def write(self, schedule: Schedule, actions: Actions) -> tuple[fx.GraphModule, dict[str, int]]:
        """A copy of the graph with ``schedule`` in it, and the index of each operation by its name in the copy."""
        return _Writer(self, schedule, actions).written

    @property
    def fetched(self) -> Mapping[fx.Node, Place]:
        return self._fetched

    @property
    def results(self) -> list[Any]:
        """What it returns, with None in place of the gradients that are taken."""
        pairs = zip(self.all_results, self._targets, strict=True)
        return [result if target is None else None for result, target in pairs]

    def takes(self, node: fx.Node) -> Sequence[Place]:
        """The parameters whose gradient ``node`` is."""
        return self._takes.get(node, ())

    def shares(self, node: fx.Node) -> Groups:
        """The buckets whose memory ``node`` may be a part of."""
        return self._shares[node]

    def made_at(self) -> dict[int, list[int]]:
        """For each bucket, the positions at which gradients of it are made."""
        found: dict[int, list[int]] = {}
        for position, node in enumerate(self.operations):
            for place in self.takes(node):
                found.setdefault(place.group, []).append(position)
        return found


def _line(
    node: fx.Node, index: Mapping[fx.Node, int], fetched: Mapping[str, Place], shares: Mapping[str, Groups]
) -> Line:
    if node.op == "placeholder":
        return Line(shares=frozenset((fetched[node.name].group,)) if node.name in fetched else None)
    if node.name in shares:
        return Line(inputs=tuple(index[source] for source in node.all_input_nodes), shares=shares[node.name])
    return Line(inputs=tuple(index[source] for source in node.all_input_nodes), is_view=is_view(node))


def _results(output: fx.Node) -> list[Any]:
    results: Any = output.args[0]
    return list(results) if isinstance(results, (tuple, list)) else [results]


class _Writer:
    def __init__(self, source: ReadGraph, schedule: Schedule, actions: Actions) -> None:
        self._source = source
        self._actions = actions
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._whole: dict[fx.Node, fx.Node] = {}  # placeholders of parameters -> what readers read
        self._positions: dict[str, int] = {}
        self._by_start = _grouped(schedule, lambda fetch: fetch.start)
        self._by_first = _grouped(schedule, lambda fetch: fetch.first)
        self._by_last = _grouped(schedule, lambda fetch: fetch.last)
        self._inputs()
        for position, node in enumerate(source.operations):
            self._operation(position, node)
        self._graph.output(tuple(self._copies[r] if isinstance(r, fx.Node) else r for r in source.results))
        self.written = (fx.GraphModule(source.module, self._graph), self._positions)

    def _inputs(self) -> None:
        inputs = [node for node in self._source.module.graph.nodes if node.op == "placeholder"]
        for node in inputs:
            self._copies[node] = self._graph.node_copy(node)
        if self._source.backward:
            self._graph.call_function(self._actions.begin)
        for node in inputs:
            self._take(node)

    def _operation(self, position: int, node: fx.Node) -> None:
        for fetch in self._by_start.get(position, ()):
            self._graph.call_function(self._actions.start, (fetch.group,))
        for fetch in self._by_first.get(position, ()):
            self._wait(fetch)
        copy = self._graph.node_copy(node, lambda source: self._whole.get(source) or self._copies[source])
        self._copies[node] = copy
        self._positions[copy.name] = position
        self._take(node)
        for fetch in self._by_last.get(position, ()):
            self._graph.call_function(self._actions.keep if fetch.stays else self._actions.release, (fetch.group,))

    def _wait(self, fetch: Fetch) -> None:
        arrived = self._graph.call_function(self._actions.wait, (fetch.group,))
        for placeholder, place in self._source.fetched.items():
            if place.group == fetch.group:
                self._whole[placeholder] = self._graph.call_function(_slot, (arrived, place.slot))

    def _take(self, node: fx.Node) -> None:
        for place in self._source.takes(node):
            self._graph.call_function(self._actions.take, (place.group, place.slot, self._copies[node]))


def _slot(parameters: tuple[torch.Tensor, ...], slot: int) -> torch.Tensor:
    return parameters[slot]


def _grouped(schedule: Schedule, position: Callable[[Fetch], int]) -> dict[int, list[Fetch]]:
    found: dict[int, list[Fetch]] = {}
    for fetch in schedule:
        found.setdefault(position(fetch), []).append(fetch)
    return found
