"""A graph cut where communication goes, and what lies in between handed to a compiler, piece by piece.

The problem: a compiler that is given the whole graph moves nodes, and reuses memory that it believes to be its own: a
gather would start late, and a parameter that is still needed would be written over. The idea: it is given only what
lies between two events. Where these are does not depend on the plan: a bucket's first reader, the end of its last, and
where its last gradient is made. So another plan needs no other pieces, and a start is moved from one cut to another.

What it costs is fusion across cuts: parameters of a block are gathered together, so cuts are between blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from drivetrain.zero.graph.reads import Groups
from drivetrain.zero.graph.rewrite import ReadGraph
from drivetrain.zero.graph.schedule import spans

CompilePiece = Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Sequence[Any]]]
"""Compiles a piece, given examples of its inputs; the result takes them in a list."""


def cuts(reads: Sequence[Groups], gradients: Iterable[Sequence[int]]) -> list[int]:
    """Positions before which a graph is cut, its end included.

    Args:
        reads: for each operation, the buckets that it reads.
        gradients: for each bucket, the positions at which gradients of it are made.
    """
    found = {len(reads)}
    for first, last in spans(reads).values():
        found |= {first, last + 1}
    found |= {max(positions) + 1 for positions in gradients if positions}
    return sorted(found - {0})


def in_pieces(graph: ReadGraph, compile_piece: CompilePiece) -> ReadGraph:
    """The same graph, its operations being compiled pieces."""
    return _Cutter(graph, compile_piece).result


class _Cutter:
    def __init__(self, source: ReadGraph, compile_piece: CompilePiece) -> None:
        self._source = source
        self._compile = compile_piece
        self._graph = fx.Graph()
        self._outer: dict[fx.Node, fx.Node] = {}  # values of the source, as the pieces exchange them
        self._shares: dict[str, Groups] = {}
        position = {node: i for i, node in enumerate(source.operations)}
        self._last_use = {
            node: max((position.get(user, len(position)) for user in node.users), default=-1)
            for node in source.module.graph.nodes
        }
        for node in source.module.graph.nodes:
            if node.op == "placeholder":
                self._outer[node] = self._graph.node_copy(node)
        begin = 0
        for end in cuts(source.reads, source.made_at().values()):
            self._piece(source.operations[begin:end], end)
            begin = end
        results = [self._outer[r] if isinstance(r, fx.Node) else r for r in source.all_results]
        self._graph.output(tuple(results))
        module = fx.GraphModule(source.module, self._graph)
        self.result = source.like(module, self._shares)

    def _piece(self, operations: Sequence[fx.Node], end: int) -> None:
        nodes = [node for node in operations if node.op != "get_attr"]
        if not nodes:
            return
        inside = set(nodes)
        inputs = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
        inputs = [node for node in inputs if node.op != "get_attr"]
        outputs = [n for n in nodes if self._last_use[n] >= end or self._source.takes(n)]
        piece = self._module(nodes, inputs, outputs)
        compiled = self._compile(piece, [node.meta.get("val") for node in inputs])
        call = self._graph.call_function(_runner(compiled), tuple(self._outer[node] for node in inputs))
        for index, node in enumerate(outputs):
            value = self._graph.call_function(operator.getitem, (call, index))
            self._outer[node] = value
            self._shares[value.name] = self._source.shares(node)

    def _module(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> fx.GraphModule:
        graph = fx.Graph()
        inner: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            inner[node] = graph.placeholder(node.name)
            inner[node].meta = dict(node.meta)

        def copied(node: fx.Node) -> fx.Node:
            if node not in inner:  # constants are copied into each piece that reads them
                inner[node] = graph.node_copy(node)
            return inner[node]

        for node in nodes:
            inner[node] = graph.node_copy(node, copied)
        graph.output(tuple(inner[node] for node in outputs))
        return fx.GraphModule(self._source.module, graph)


def _runner(compiled: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    def piece(*inputs: Any) -> Sequence[Any]:
        return compiled(list(inputs))

    return piece
