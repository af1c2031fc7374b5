"""Lays the parameters of a module into buckets: when it is sharded, and again for those that come later."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from drivetrain.comm import Axis, all_gather_object, broadcast
from drivetrain.zero.bucket import NOWHERE_ELSE, Bucket, Homes
from drivetrain.zero.grouping import (
    Group,
    Kind,
    NamedParameter,
    group_parameters,
    named_parameters,
    row_parameters,
    set_apart,
    split_by_kind,
)
from drivetrain.zero.layout import fill_buckets
from drivetrain.zero.packed import PACKABLE
from drivetrain.zero.policy import Policy
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.split import is_placeholder
from drivetrain.zero.store import Home, ShardStore, Shelf, Stores
from drivetrain.zero.values import ParameterValues


def check_plain(parameters: Sequence[NamedParameter]) -> None:
    """Refuse parameters that are no plain dense tensors.

    Raises:
        ValueError: one is not.
    """
    odd = [p for p in parameters if type(p.parameter.data) is not Tensor or p.parameter.is_sparse]
    if odd:
        kind = type(odd[0].parameter.data).__name__
        raise ValueError(
            f"parameter '{odd[0].name}' is a {kind} of layout {odd[0].parameter.layout}, and only plain dense tensors "
            "can be laid into buckets; hand over the module before another library shards or packs it"
        )


def check_memory(parameters: Iterable[NamedParameter], origins: ParameterValues) -> None:
    """Refuse parameters that were built under `Init` and are nobody's now."""
    for named in parameters:
        if not origins.has([named]) and is_placeholder(named.parameter):
            raise ValueError(
                f"parameter '{named.name}' was split under Init, and no module is left that it was built in; build the "
                "modules that use it in the same context"
            )


def check_same(module: nn.Module, policy: Policy, axis: Axis) -> None:
    """All ranks must have the same model but for its values, or every collective from here on would go wrong."""
    rows = _rows(module, policy)
    mine = [
        (
            p.name,
            f"{p.parameter.dtype} of shape {list(p.parameter.shape)}, requires_grad={p.parameter.requires_grad}"
            + (", an embedding's weight alone" if id(p.parameter) in rows else ""),
        )
        for p in named_parameters(module)
    ]
    mine += [(name, f"a buffer, {b.dtype} of shape {list(b.shape)}") for name, b in module.named_buffers()]
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = all_gather_object(digest, axis, purpose="comparison of the ranks' models")
    if len(set(digests)) == 1:
        return
    everybody = [dict(entries) for entries in all_gather_object(mine, axis, purpose="comparison of the ranks' models")]
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    first, other = everybody[0], everybody[rank]
    name = next((name for name in {**first, **other} if first.get(name) != other.get(name)), None)
    if name is None:
        difference = "parameters and buffers come in another order"
    else:
        found = other.get(name, "not there")
        difference = f"'{name}' is {first.get(name, 'not there')} on rank {axis.ranks[0]} and {found} on the other"
    raise ValueError(
        f"rank {axis.ranks[rank]} has another model than rank {axis.ranks[0]}: {difference}. All ranks must build the "
        "same one"
    )


def prepare_buffers(owners: Iterable[nn.Module], axis: Axis) -> None:
    """Bring their buffers to the device, with the first rank's values."""
    for owner in owners:
        for name, buffer in owner.named_buffers(recurse=False):
            moved = buffer.to(axis.device).contiguous()
            broadcast(moved, axis, purpose=f"first values of buffer '{name}'").wait()
            owner._buffers[name] = moved


def _rows(module: nn.Module, policy: Policy) -> frozenset[int]:
    return row_parameters(module) if policy.sparse_gradients else frozenset()


def find_groups(module: nn.Module, policy: Policy, ranks: Ranks, stores: Stores) -> list[Group]:
    """What is gathered and released together."""
    # With one rank there is nothing to gather from: stage 3 would only copy. But quantised parameters are decoded, and
    # those in a store brought in.
    frozen = any(not p.requires_grad for p in module.parameters())
    elsewhere = (policy.frozen_rule is not None and frozen) or stores.parameters is not None
    releases = policy.releases_parameters and (ranks.shard.size > 1 or elsewhere)
    return group_parameters(
        module,
        releases=releases,
        persistence_numel=policy.persistence_numel,
        persistence_total_numel=policy.persistence_total_numel,
        leaf=policy.leaf,
    )


class Shelves:
    """Hands out homes. There is a shelf for each store, though several kinds of states may share it.

    Args:
        stores: what lives where.
        trained: elements of all parameters that have states.
    """

    def __init__(self, stores: Stores, trained: int) -> None:
        made: dict[int, Shelf] = {}

        def shelf(store: ShardStore | None) -> Shelf | None:
            return None if store is None else made.setdefault(id(store), Shelf(store))

        self.stores = stores
        self._parameters, self._states = shelf(stores.parameters), shelf(stores.states)
        self._gradients = shelf(stores.gradients)
        self._staying = (1.0 - stores.share) * trained  # elements whose states are still to stay on the device
        self._names: Counter[str] = Counter()

    def homes(self, parameters: Sequence[NamedParameter], *, released: bool, reduced: bool) -> Homes:
        """Where the states of the next bucket live.

        ``released``: its shard may live elsewhere; ``reduced``: so may its reduced gradients.
        """
        name = parameters[0].name
        self._names[name] += 1
        key = name if self._names[name] == 1 else f"{name} ({self._names[name]})"  # another one had the name before
        leaving = self._leaves(sum(p.parameter.numel() for p in parameters if p.parameter.requires_grad))

        def home(shelf: Shelf | None, what: str, wanted: bool) -> Home | None:
            return Home(shelf, f"{what} of {key}") if wanted and shelf is not None else None

        return Homes(
            shard=home(self._parameters, "parameters", released),
            states=home(self._states, "states", leaving),
            gradients=home(self._gradients, "gradients", leaving and reduced),
        )

    def _leaves(self, numel: int) -> bool:
        before, self._staying = self._staying, self._staying - numel
        return before < numel / 2 or before <= 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all buckets of a module are made from.

    ``rows``: the ids of parameters whose gradients travel as rows, which have a bucket each. ``lowered``: of those that
    travel in fewer bits.
    """

    root: nn.Module
    policy: Policy
    ranks: Ranks
    origins: ParameterValues
    rows: Collection[int]
    lowered: Collection[int]
    shelves: Shelves

    @classmethod
    def of(cls, module: nn.Module, policy: Policy, ranks: Ranks, origins: ParameterValues, shelves: Shelves) -> Plan:
        return cls(
            root=module,
            policy=policy,
            ranks=ranks,
            origins=origins,
            rows=_rows(module, policy),
            lowered=policy.wire_rule.parameters(module) if policy.wire_rule else frozenset(),
            shelves=shelves,
        )


def make_buckets(group: Group, plan: Plan) -> list[Bucket]:
    """The buckets of one unit. Collective."""
    buckets = []
    apart = plan.policy.root_apart and plan.root in group.modules and not group.resident
    most = 1 if apart else plan.policy.bucket_numel
    for kind, alike in split_by_kind(group.parameters, plan.lowered).items():
        packed = [named for named in alike if _is_packed(named.parameter, group, plan.policy)]
        others = [named for named in alike if not _is_packed(named.parameter, group, plan.policy)]
        for members in (packed, *set_apart(others, plan.rows)):
            for run in fill_buckets([p.parameter.numel() for p in members], most):
                buckets.append(_make_bucket([members[i] for i in run], kind, group, plan))
    return buckets


def _is_packed(parameter: nn.Parameter, group: Group, policy: Policy) -> bool:
    """Whether it is kept quantised. Vectors (biases, scales of norms) are not: they are few bytes and matter most."""
    if policy.frozen_rule is None or group.resident or parameter.requires_grad:
        return False
    dtypes = {parameter.dtype, policy.formats(parameter.dtype).compute}
    return parameter.dim() >= 2 and parameter.numel() > 0 and dtypes.issubset(PACKABLE)


def _make_bucket(parameters: list[NamedParameter], kind: Kind, group: Group, plan: Plan) -> Bucket:
    packed = _is_packed(parameters[0].parameter, group, plan.policy)
    rows, split = id(parameters[0].parameter) in plan.rows, plan.policy.splits_optimizer
    released = not group.resident and not packed
    homes = NOWHERE_ELSE if packed else plan.shelves.homes(parameters, released=released, reduced=split and not rows)
    return Bucket(
        group.name,
        parameters,
        formats=plan.policy.formats(kind.dtype, lowered=kind.lowered),
        resident=group.resident,
        splits_optimizer=split,
        ranks=plan.ranks,
        values=plan.origins if plan.origins.has(parameters) else None,
        rows=rows,
        pack=plan.policy.frozen_rule if packed else None,
        homes=homes,
    )
