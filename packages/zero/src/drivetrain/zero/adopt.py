"""Parameters that join a module after it was sharded, and those that leave it.

    model = get_peft_model(model, lora)                 # adapters in what is sharded already
    adopt(sharded)

    with gathered(sharded, model.get_input_embeddings()):
        model.resize_token_embeddings(50_304)           # reads the old rows, and puts new parameters in their place
    adopt(sharded)

The problem: whoever changes a module knows nothing of buckets. The idea: let it, and then look at what the tree has
that no bucket has. New parameters get buckets of their own, in the units of the blocks that they are in, as if they had
been there from the start; all others stay where they are. Names are those of the tree as it is now, in checkpoints too.

What has left the tree is forgotten; where it shared a bucket with others, its room stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from drivetrain.zero.api import ShardedModule
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.build import Init
from drivetrain.zero.grouping import named_parameters
from drivetrain.zero.laying import (
    Plan,
    check_memory,
    check_plain,
    check_same,
    find_groups,
    make_buckets,
    prepare_buffers,
)
from drivetrain.zero.unit import Unit
from drivetrain.zero.values import find_values


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What `adopt` has found.

    Attributes:
        joined: the parameters that are new, in the order of the module tree, by name.
        left: those that are not in the module any more, by the names that they had.
    """

    joined: Mapping[str, nn.Parameter]
    left: Mapping[str, nn.Parameter]


def adopt(sharded: ShardedModule) -> Adopted:
    """Take over what was added to the module, or put in the place of something, since it was sharded. Collective.

    Between steps, when all ranks have made the same changes. New parameters start from rank 0's values. An optimizer
    gets them by `ShardedOptimizer.adopt`, which calls this. Values of those that have left can't be read any more.

    Raises:
        ValueError: ranks have different modules, or a new parameter has no values (it is on the meta device, or was
            built under `Init`) or is no plain dense tensor.
        RuntimeError: there are gradients that no step has used, states are away, the module is compiled, or this is
            inside of `gathered`, `resident` or a backward pass.
    """
    _check(sharded)
    module, policy, ranks = sharded.module, sharded.policy, sharded.ranks
    slots = {id(slot.parameter): slot for bucket in sharded.buckets for slot in bucket.named}
    named = named_parameters(module)
    fresh = [one for one in named if id(one.parameter) not in slots]
    check_plain(fresh)
    check_same(module, policy, ranks.everyone)
    origins = find_values(module, ranks, None, None)
    check_memory(fresh, origins)
    prepare_buffers((owner for owner in module.modules() if not sharded.guard.knows(owner)), ranks.everyone)
    sharded.residency.release_all()
    plan = Plan.of(module, policy, ranks, origins, sharded.shelves)
    wanted = {id(one.parameter) for one in fresh}
    made = [
        (group, make_buckets(replace(group, parameters=members), plan))
        for group in find_groups(module, policy, ranks, sharded.stores)
        if (members := tuple(one for one in group.parameters if id(one.parameter) in wanted))
    ]
    names = {id(one.parameter): one.names for one in named}
    left = [slot for bucket in sharded.buckets for slot in bucket.follow(names)]
    units = list(sharded.units)
    joined: dict[Bucket, Unit] = {}
    presence = sharded.residency.presence
    for group, buckets in made:
        known = (unit for unit in units if not (unit.resident or group.resident) and unit.modules == group.modules)
        unit = next(known, None)
        if unit is None:
            unit = Unit(len(units), group.name, group.modules, buckets, sharded.parameters, presence)
            units.append(unit)
        else:
            unit.set_buckets((*unit.buckets, *buckets))
        joined.update(dict.fromkeys(buckets, unit))
    sharded.adopt(_without_empty(units), joined)
    return Adopted(joined={one.name: one.parameter for one in fresh}, left={slot.name: slot.parameter for slot in left})


def _without_empty(units: list[Unit]) -> tuple[Unit, ...]:
    """Without buckets whose parameters have all left, and units that have no others."""
    for unit in units:
        for bucket in unit.buckets:
            if not bucket.named:
                bucket.dismiss()
        unit.set_buckets([bucket for bucket in unit.buckets if bucket.named])
    kept = tuple(unit for unit in units if unit.buckets)
    for index, unit in enumerate(kept):
        unit.index = index
    return kept


def _check(sharded: ShardedModule) -> None:
    rank = sharded.axis.world.rank
    sharded.moved.require("adopt()")
    if any(unit.pins for unit in sharded.units):
        raise RuntimeError(f"rank {rank}: adopt() inside a `gathered` or `resident` context; leave the context first")
    if sharded.holds_gradients or sharded.hooks.backward.active:
        raise RuntimeError(
            f"rank {rank}: adopt() between a backward pass and the step that uses its gradients; call it after the "
            "step, or drop them with zero_grad()"
        )
    if sharded.hooks.suspended:
        raise RuntimeError(
            f"rank {rank}: adopt() of a module that is compiled with its communication in the graphs "
            "(compile.deepcompile), which were made for the parameters there were; add parameters before, or do not "
            "compile"
        )
    if Init.of(sharded.module):
        raise ValueError(
            f"rank {rank}: adopt() of modules that were built under Init, of which each rank has a part; build what is "
            "added to a sharded module without it"
        )
