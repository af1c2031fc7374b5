"""Whole parameters for a while: to look at them, or to change them.

    with gathered(sharded, [model.embed.weight]):
        print(model.embed.weight.norm())

    with gathered(sharded, model.head.parameters(), modifier_rank=0), torch.no_grad():
        if rank == 0:
            model.head.weight.zero_()               # what this rank writes becomes everybody's

Edits are kept. With ``modifier_rank`` that rank's values win; without, every rank must have made the same edit, and one
that differs is an error on all of them: silently keeping each rank's own slice would leave a model that nobody wrote.

    with resident(sharded), torch.no_grad():        # the whole module, to read only
        tokens = generate(model, prompt)            # as many forward passes as this rank likes

Passes through modules that are whole need nothing from other ranks, so each rank may make its own in either context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from drivetrain.comm import broadcast
from drivetrain.zero.agreement import require_same
from drivetrain.zero.api import ShardedModule
from drivetrain.zero.bucket import Bucket, Slot
from drivetrain.zero.parking import WEIGHTS
from drivetrain.zero.unit import Unit


@contextmanager
def gathered(
    sharded: ShardedModule,
    parameters: torch.nn.Parameter | torch.nn.Module | Iterable[torch.nn.Parameter],
    *,
    modifier_rank: int | None = None,
) -> Iterator[None]:
    """Keep ``parameters`` whole within the context, and keep what is written to them in place. Collective.

    Works at every stage; forward passes inside are fine, optimizer steps are not. Parameters come and go by unit: those
    of the same block are whole as well, but edits to them are lost, so name all that you edit. (The next forward pass
    or step refuses to go on from a lost edit that it can see, which is one that was not made through ``.data``.)

    Args:
        sharded: the module.
        parameters: one, several, or all those of a module.
        modifier_rank: the rank, among all that train the module, whose values become everybody's. None: edits must be
            the same on all ranks.

    Raises:
        KeyError: a parameter does not belong to the module.
        ValueError: ranks made different edits (at stage 3 all are dropped; below it each rank keeps its own, and
            training cannot go on from them). Or there is no such rank.
    """
    everyone = sharded.ranks.everyone
    if modifier_rank is not None and not 0 <= modifier_rank < everyone.size:
        raise ValueError(f"modifier_rank must be one of the {everyone.size} ranks, got {modifier_rank}")
    chosen = _find(sharded, parameters)
    units = tuple({id(unit): unit for unit, _, _ in chosen}.values())
    buckets = {id(bucket): bucket for _, bucket, _ in chosen}.values()
    with _pinned(sharded, units):
        yield
        _agree([slot for _, _, slot in chosen], sharded, modifier_rank)
        for bucket in buckets:
            bucket.adopt_whole()
        sharded.guard.accept(slot for _, _, slot in chosen)


@contextmanager
def resident(sharded: ShardedModule) -> Iterator[None]:
    """Keep the whole module on every rank within the context, to read only. Collective at its beginning.

    For generation and other work that ranks do at their own pace: forward passes inside need nothing from other ranks,
    so their number may differ. Works at every stage, also between forward and backward; optimizer steps inside are
    refused. While it lasts each rank holds all parameters in the dtype that they compute in.

    Raises:
        RuntimeError: at the end, a parameter was changed in place; see `gathered` for that.
    """
    with _pinned(sharded, sharded.units):
        yield
        changed = next(sharded.guard.edited(), None)
        if changed is not None:
            raise RuntimeError(
                f"rank {sharded.axis.world.rank}: parameter '{changed.name}' was changed where the module is whole to "
                "be read only, and the change would not be kept; make it inside of `gathered(...)`"
            )


@contextmanager
def _pinned(sharded: ShardedModule, units: tuple[Unit, ...]) -> Iterator[None]:
    sharded.moved.require("`gathered`", WEIGHTS)
    sharded.hooks.backward.settle()
    sharded.guard.take_edits()
    fresh = sharded.residency.pin(units)
    try:
        yield
    except BaseException:  # what was written goes with the whole parameters
        released = (bucket for unit in units if not unit.resident for bucket in unit.buckets)
        sharded.guard.accept(slot for bucket in released for slot in bucket.slots)
        raise
    finally:
        sharded.residency.unpin(units, fresh)


def _find(
    sharded: ShardedModule, parameters: torch.nn.Parameter | torch.nn.Module | Iterable[torch.nn.Parameter]
) -> list[tuple[Unit, Bucket, Slot]]:
    if isinstance(parameters, torch.nn.Parameter):
        parameters = [parameters]
    elif isinstance(parameters, torch.nn.Module):
        parameters = parameters.parameters()
    wanted = {id(parameter): parameter for parameter in parameters}
    found = [
        (unit, bucket, slot)
        for unit in sharded.units
        for bucket in unit.buckets
        for slot in bucket.slots
        if wanted.pop(id(slot.parameter), None) is not None
    ]
    if wanted:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in wanted.values())
        raise KeyError(
            f"rank {sharded.axis.world.rank}: {len(wanted)} of the parameters do not belong to the sharded "
            f"{type(sharded.module).__name__}; their shapes: {shapes}"
        )
    return found


def _agree(slots: list[Slot], sharded: ShardedModule, modifier_rank: int | None) -> None:
    if modifier_rank is None:
        require_same({slot.name: slot.whole for slot in slots}, sharded.ranks.everyone)
        return
    for slot in slots:
        purpose = f"new values of '{slot.name}'"
        broadcast(slot.whole.view(-1), sharded.ranks.everyone, src=modifier_rank, purpose=purpose).wait()
