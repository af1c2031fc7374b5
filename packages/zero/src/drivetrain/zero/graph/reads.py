"""Which nodes of a graph read which groups of parameters, also through views.

The problem: a bucket may be let go after its last read, and a node rarely reads a parameter itself: it reads a
transpose of it, made earlier, perhaps for several users. The idea: follow what a value may be part of. A placeholder is
part of its own group, a view is part of what it is a view of, anything else is new memory.

Invariant: a node is said to read a group if any of its inputs may share memory with it. Too many reads make a bucket
stay longer; too few would let it go under a reader, so a caller in doubt calls a node a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Groups = frozenset[int]
"""Numbers of buckets."""
NOTHING: Groups = frozenset()


@dataclass(frozen=True, kw_only=True)
class Line:
    """One node, in the order of execution.

    Attributes:
        inputs: indices of earlier lines.
        is_view: the result may share memory with the inputs.
        shares: the groups that the result shares memory with, where that is known: those of a parameter's placeholder.
    """

    inputs: tuple[int, ...] = ()
    is_view: bool = False
    shares: Groups | None = None


def shared_memory(lines: Sequence[Line]) -> list[Groups]:
    """For each line, the groups that its result may share memory with."""
    parts: list[Groups] = []
    for line in lines:
        if line.shares is not None:
            parts.append(line.shares)
        elif line.is_view:
            parts.append(NOTHING.union(*(parts[i] for i in line.inputs)))
        else:
            parts.append(NOTHING)
    return parts


def reads(lines: Sequence[Line]) -> list[Groups]:
    """For each line, the groups whose memory it reads, or passes on."""
    parts = shared_memory(lines)
    return [NOTHING.union(*(parts[i] for i in line.inputs)) for line in lines]
