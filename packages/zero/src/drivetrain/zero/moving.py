"""Moving states off the device between phases, and back: which memory each kind of state is.

    move_states(sharded, optimizer, device="cpu")       # the device is empty but for buffers and activations
    ...                                                 # another phase has the room
    return_states(sharded)                              # every bit as it was; training goes on

See `parking` for how, and for what happens to those who look meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from drivetrain.zero.api import ShardedModule
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.optimizer import ShardedOptimizer
from drivetrain.zero.parking import StateKind
from drivetrain.zero.rows import Rows


def state_kinds(include: Collection[StateKind | str] | None) -> tuple[StateKind, ...]:
    """The kinds that ``include`` names, all for None.

    Raises:
        ValueError: there is no such kind.
    """
    if include is None:
        return tuple(StateKind)
    known = {kind.value: kind for kind in StateKind}
    names = [str(getattr(one, "value", one)) for one in ([include] if isinstance(include, str) else include)]
    for name in names:
        if name not in known:
            raise ValueError(f"there are no states of kind '{name}' to move; the kinds are {', '.join(known)}")
    return tuple(kind for name, kind in known.items() if name in names)


@torch.no_grad()
def move_states(
    sharded: ShardedModule,
    optimizer: ShardedOptimizer | None = None,
    kinds: Collection[StateKind | str] | None = None,
    *,
    device: torch.device | str = "cpu",
    pin_memory: bool = False,
    non_blocking: bool = False,
) -> int:
    """Move states of ``sharded`` and ``optimizer`` to ``device`` until `return_states`. No communication.

    Reductions under way are waited for, and whole parameters of stage 3 released. Meanwhile forward and backward
    passes, optimizer steps, saving, loading, and access to what is away are refused in words. Parameters, and what the
    optimizer has, can be read where they are. Buffers of the module stay.

    Args:
        kinds: of states; None for all. Of those that are away already nothing is moved.
        device: where to. Copies are made also if the states are on such a device.
        pin_memory: into pinned memory, which is faster from and to a GPU; without one it is ignored.
        non_blocking: do not wait for copies to be made; their order on the device's stream keeps them right.

    Returns:
        The bytes that have been moved.

    Raises:
        ValueError: there is no such kind.
        RuntimeError: a `gathered` context is open, a backward pass is running, or there is no room.
    """
    chosen = state_kinds(kinds)
    if any(unit.pins for unit in sharded.units):
        raise RuntimeError(
            f"rank {sharded.axis.world.rank}: states cannot be moved inside a `gathered` context; leave it first"
        )
    sharded.hooks.backward.settle()
    if sharded.hooks.backward.active:
        raise RuntimeError(f"rank {sharded.axis.world.rank}: states cannot be moved while a backward pass is running")
    sharded.reducer.drain()
    sharded.residency.release_all()
    visible = [slot.parameter for bucket in sharded.buckets if bucket.resident for slot in bucket.slots]
    if optimizer is not None:
        visible += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = sharded.moved.bytes
    for kind in chosen:
        tensors = list(_tensors(kind, sharded, optimizer))
        shown = tensors if kind is StateKind.OPTIM_STATES else visible
        sharded.moved.move(
            kind,
            tensors,
            shown,
            torch.device(device),
            pin_memory=pin_memory and torch.cuda.is_available(),
            non_blocking=non_blocking,
        )
    return sharded.moved.bytes - before


def return_states(sharded: ShardedModule, *, non_blocking: bool = False) -> int:
    """Bring back whatever `move_states` has moved, to the last bit. Returns how many bytes."""
    count = sharded.moved.bytes
    with torch.no_grad():
        sharded.moved.come_back(non_blocking=non_blocking)
    return count


def _tensors(kind: StateKind, sharded: ShardedModule, optimizer: ShardedOptimizer | None) -> Iterator[torch.Tensor]:
    """The tensors whose memory is of ``kind`` on this rank."""
    if kind is StateKind.OPTIM_STATES:
        yield from _remembered(sharded, optimizer)
        return
    for bucket in sharded.buckets:
        if kind is StateKind.LP_PARAMS:
            yield from _published(bucket)
        elif kind is StateKind.HP_PARAMS and bucket.own_master and bucket.homes.states is None:
            yield bucket.master
        elif kind is StateKind.LP_GRADS and bucket.reduced is not None and bucket.homes.gradients is None:
            yield bucket.reduced
        elif kind is StateKind.CONTIGUOUS_GRAD_BUFFER:
            local = bucket.local
            yield from (local.indices, local.values) if isinstance(local, Rows) else () if local is None else (local,)


def _published(bucket: Bucket) -> Iterator[torch.Tensor]:
    yield bucket.full
    if bucket.homes.shard is None:
        yield bucket.shard
    if bucket.secondary is not None:
        yield bucket.secondary
    if bucket.packed is not None:
        yield bucket.packed.encoded


def _remembered(sharded: ShardedModule, optimizer: ShardedOptimizer | None) -> Iterator[torch.Tensor]:
    """State of single numbers stays: it is nothing, and may be on the host anyway. What is in a store is away."""
    yield from sharded.reducer.kept_errors()
    if sharded.stores.states is not None:
        return
    for state in () if optimizer is None else optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() and value.device.type == sharded.axis.device.type:
                yield value
