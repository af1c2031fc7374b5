"""Between phases: states leave the device and come back. `Engine.offload_states` documents it."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from drivetrain.zero import ShardedModule, ShardedOptimizer, StateKind, move_states, return_states, state_kinds

log = logging.getLogger("drivetrain.engine")


class Phases:
    """Moves the states of one engine.

    Args:
        sharded, optimizer: whose states.
        device: where they belong.
        rank: this process, for messages.
    """

    def __init__(
        self, sharded: ShardedModule, optimizer: ShardedOptimizer | None, device: torch.device, rank: int
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._device = device
        self._rank = rank
        self._told = False

    def offload(
        self,
        include: Collection[StateKind | str] | None,
        device: torch.device | str,
        *,
        pin_memory: bool,
        non_blocking: bool,
    ) -> None:
        name = str(getattr(device, "value", device))
        if name != "cpu":
            raise ValueError(f"offload_states moves states to host memory: device must be 'cpu', got '{name}'")
        kinds = state_kinds(include)
        if self._device.type != "cpu":
            move_states(
                self._sharded,
                self._optimizer,
                kinds,
                device="cpu",
                pin_memory=pin_memory,
                non_blocking=non_blocking,
            )
        elif not self._told:
            self._told = True
            log.warning(
                "rank %d: offload_states does nothing here: states are in host memory already, and stay usable",
                self._rank,
            )

    def reload(self, *, non_blocking: bool) -> None:
        return_states(self._sharded, non_blocking=non_blocking)
