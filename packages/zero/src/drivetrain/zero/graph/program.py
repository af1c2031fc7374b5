"""A forward or backward graph that runs under a schedule, and is measured for a while."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from drivetrain.zero.graph import internals
from drivetrain.zero.graph.profile import Profile, ProfilingRun
from drivetrain.zero.graph.rewrite import Actions, ReadGraph
from drivetrain.zero.graph.schedule import Schedule


class Program:
    """Runs a graph.

    Args:
        graph: the graph.
        actions: what the nodes of a schedule do.

    Attributes:
        profile: what was measured; None before the first measured run has ended.
        schedule: the one that it runs under.
        peak_bytes: the most bytes of buckets that the schedule comes to.
    """

    def __init__(self, graph: ReadGraph, actions: Actions) -> None:
        self.graph = graph
        self._actions = actions
        self.profile: Profile | None = None
        self.schedule: Schedule = ()
        self.peak_bytes = 0
        self._written: tuple[fx.GraphModule, Mapping[str, int]] | None = None
        self._function: internals.Function | None = None

    def follow(self, schedule: Schedule, peak_bytes: int) -> None:
        """Run under ``schedule`` from now on."""
        self.peak_bytes = peak_bytes
        if self._function is None or schedule != self.schedule:
            self.schedule = schedule
            self._written = self.graph.write(schedule, self._actions)
            self._function = internals.boxed(self._written[0])

    @property
    def module(self) -> fx.GraphModule:
        """The graph with the schedule in it."""
        assert self._written is not None
        return self._written[0]

    def run(self, args: list[Any]) -> Any:
        """Its results; ``args`` is emptied."""
        assert self._function is not None
        return self._function(args)

    def measure(self, args: list[Any], uncounted: frozenset[int], device: torch.device) -> Any:
        """The same, operation by operation, with a profile made of it. See `ProfilingRun`."""
        assert self._written is not None
        run = ProfilingRun(*self._written, uncounted, device)
        result = run.run_list(args)
        self.profile = run.profile.merged(self.profile)
        return result

    @property
    def node_seconds(self) -> tuple[float, ...]:
        """Measured of each operation, or zeros."""
        return self.profile.seconds if self.profile else (0.0,) * len(self.graph.operations)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Measured of each operation, or zeros."""
        return self.profile.live_bytes if self.profile else (0,) * len(self.graph.operations)
