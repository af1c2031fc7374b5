"""What each node of a graph takes: seconds, and bytes of values that are alive while it runs.

Measured in a few real runs, node by node. Time is that of the device, which is waited for around every node. Memory is
counted, not asked for, since not every allocator can be asked: the storages of all values between their node and their
last use, inputs of backward (the activations that it was handed) included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured of each operation.

    Attributes:
        seconds: the shortest time of all runs.
        live_bytes: values alive while it runs, at the most of all runs.
    """

    seconds: tuple[float, ...]
    live_bytes: tuple[int, ...]

    def merged(self, other: Profile | None) -> Profile:
        """Both in one."""
        if other is None:
            return self
        return Profile(
            seconds=tuple(map(min, self.seconds, other.seconds)),
            live_bytes=tuple(map(max, self.live_bytes, other.live_bytes)),
        )


def tensors_of(value: object) -> list[torch.Tensor]:
    """The tensors that a node's result consists of."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, (tuple, list)) else []


class ProfilingRun(fx.Interpreter):
    """Runs a graph once, and measures.

    Args:
        module: the graph, as `ReadGraph.write` made it.
        positions: the index of each operation, by its name in ``module``.
        uncounted: storages (by address) that are accounted for elsewhere: those of buckets.
        device: what the graph runs on.
    """

    def __init__(
        self, module: fx.GraphModule, positions: Mapping[str, int], uncounted: frozenset[int], device: torch.device
    ) -> None:
        super().__init__(module)
        self._positions = positions
        self._uncounted = uncounted
        self._device = device
        self._seconds = [0.0] * len(positions)
        self._bytes = [0] * len(positions)
        self._holders: Counter[int] = Counter()  # storage -> values that hold it
        self._live = 0

    def run_list(self, args: list[Any]) -> Any:
        """As a compiled graph is called: the list is emptied."""
        given = tuple(args)
        args.clear()
        return self.run(*given)

    def run_node(self, n: fx.Node) -> Any:
        self._wait_for_device()
        began = perf_counter()
        result = super().run_node(n)
        self._wait_for_device()
        seconds = perf_counter() - began
        self._hold(result)
        position = self._positions.get(n.name)
        if position is not None:
            self._seconds[position] = seconds
            self._bytes[position] = self._live
        for gone in self.user_to_last_uses.get(n, ()):
            self._let_go(self.env.get(gone))
        return result

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _hold(self, value: object) -> None:
        for storage in map(torch.Tensor.untyped_storage, tensors_of(value)):
            key = storage._cdata
            if key not in self._uncounted:
                self._live += storage.nbytes() if not self._holders[key] else 0
                self._holders[key] += 1

    def _let_go(self, value: object) -> None:
        for storage in map(torch.Tensor.untyped_storage, tensors_of(value)):
            key = storage._cdata
            if self._holders[key]:
                self._holders[key] -= 1
                self._live -= storage.nbytes() if not self._holders[key] else 0

    @property
    def profile(self) -> Profile:
        return Profile(seconds=tuple(self._seconds), live_bytes=tuple(self._bytes))
