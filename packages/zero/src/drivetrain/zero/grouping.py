"""Which parameters communicate together: units found from the module tree.

The problem: one collective per parameter drowns in latency, one for the whole model cannot overlap with anything and
needs the whole model in memory. The idea: models are towers of repeated blocks, so a block is the natural unit. It is
found as an element of a ModuleList, ModuleDict or Sequential of which at least one sibling has the same class, or by a
rule for leaves (see `leaf`). Inside it nothing is split but linear layers that are made of tiles (see `tiled`), and not
even these in a leaf. What lies in no block belongs to the root unit, which is alive for the whole forward pass. A
parameter that several units use (tied weights) belongs to the root for the same reason.

Pure: reads the module tree and moves no data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from drivetrain.zero.leaf import FOUND, LeafRule
from drivetrain.zero.tiled import Tile

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
MERGE_NUMEL = 4 << 20
"""Units that need no gathering are merged up to this many elements: 16 MB of fp32 amortise a collective's latency."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter with every name that it has in the module tree, the first one being canonical."""

    parameter: nn.Parameter
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Group:
    """The plan of one unit: its parameters, and the modules whose forward needs them.

    ``resident`` parameters stay whole on every rank for good; others may be released between uses.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[NamedParameter, ...]
    resident: bool

    @property
    def numel(self) -> int:
        return sum(p.parameter.numel() for p in self.parameters)


def named_parameters(module: nn.Module) -> list[NamedParameter]:
    """Every distinct parameter once, in the order of the module tree, with all its names."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Parameter] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return [NamedParameter(found[key], tuple(names[key])) for key in found]


def find_blocks(module: nn.Module, leaf: LeafRule = FOUND) -> list[tuple[str, nn.Module]]:
    """The outermost repeated blocks and leaves of ``module``, and the tiles in them, with their names, each once.

    In the order of the tree. None where ``module`` is a leaf itself.
    """
    seen: set[int] = set()
    blocks = []
    for name, block in _walk_blocks(module, "", leaf):
        if id(block) not in seen:
            seen.add(id(block))
            blocks.append((name, block))
    return blocks


def _walk_blocks(module: nn.Module, prefix: str, leaf: LeafRule) -> Iterator[tuple[str, nn.Module]]:
    if leaf.matches(prefix, module):
        return
    classes = Counter(type(child) for child in module.children()) if isinstance(module, CONTAINERS) else Counter()
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        repeated = classes[type(child)] >= 2 and not isinstance(child, CONTAINERS)
        if (repeated or leaf.matches(path, child)) and next(child.parameters(), None) is not None:
            yield path, child
            yield from _walk_tiles(child, path, leaf)
        else:
            yield from _walk_blocks(child, path, leaf)


def _walk_tiles(module: nn.Module, prefix: str, leaf: LeafRule) -> Iterator[tuple[str, nn.Module]]:
    """The tiles inside of a block, but not those of leaves."""
    if leaf.matches(prefix, module):
        return
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if isinstance(child, Tile):
            yield path, child
        else:
            yield from _walk_tiles(child, path, leaf)


def group_parameters(
    module: nn.Module,
    *,
    releases: bool,
    persistence_numel: int,
    persistence_total_numel: int | None,
    leaf: LeafRule = FOUND,
) -> list[Group]:
    """Cut the parameters of ``module`` into the groups that communicate together, root first, then in tree order.

    With ``releases`` (stage 3) parameters of fewer than ``persistence_numel`` elements, taken from the smallest up to
    ``persistence_total_numel`` in all, form one resident group. Without it every group is resident, and
    consecutive small groups are merged, since nothing needs to be gathered block by block.
    """
    parameters = named_parameters(module)
    small = _small_parameters(parameters, persistence_numel, persistence_total_numel) if releases else set()
    blocks = find_blocks(module, leaf)
    home: dict[int, set[str]] = {}
    tiles = {inner for _, inner in blocks if isinstance(inner, Tile)}
    for path, block in blocks:
        for parameter in _own_parameters(block, tiles):
            home.setdefault(id(parameter), set()).add(path)
    outside = _used_outside(module, blocks)

    members: dict[str, list[NamedParameter]] = {"": [], **{path: [] for path, _ in blocks}}
    whole: list[NamedParameter] = []
    for named in parameters:
        key = id(named.parameter)
        if key in small:
            whole.append(named)
        elif key in outside or len(home.get(key, ())) != 1:
            members[""].append(named)
        else:
            members[next(iter(home[key]))].append(named)

    modules = {"": module, **dict(blocks)}
    groups = [
        Group(path or "root", (modules[path],), tuple(named), resident=not releases)
        for path, named in members.items()
        if named
    ]
    if not releases:
        groups = _merge(groups)
    if whole:
        groups.append(Group("small", (), tuple(whole), resident=True))
    return groups


def _small_parameters(parameters: Sequence[NamedParameter], below: int, total: int | None) -> set[int]:
    chosen: set[int] = set()
    room = total if total is not None else sum(p.parameter.numel() for p in parameters)
    for named in sorted(parameters, key=lambda p: p.parameter.numel()):
        numel = named.parameter.numel()
        if numel >= below or numel > room:
            break
        chosen.add(id(named.parameter))
        room -= numel
    return chosen


def _own_parameters(block: nn.Module, tiles: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """Those of ``block`` but for tiles in it, which are units of their own."""
    for module in block.modules():
        if module is block or module not in tiles:
            yield from module.parameters(recurse=False)


def _used_outside(module: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> set[int]:
    """Parameters that some module outside every block owns as well."""
    inside = {id(m) for _, block in blocks for m in block.modules()}
    return {id(p) for m in module.modules() if id(m) not in inside for p in m.parameters(recurse=False)}


def _merge(groups: Sequence[Group]) -> list[Group]:
    merged: list[Group] = []
    for group in groups:
        last = merged[-1] if merged else None
        if last is None or last.numel + group.numel > MERGE_NUMEL:
            merged.append(group)
        else:
            merged[-1] = Group(
                last.name, (*last.modules, *group.modules), (*last.parameters, *group.parameters), resident=True
            )
    return merged


class Kind(NamedTuple):
    """What one flat buffer cannot mix."""

    dtype: torch.dtype  # stored
    trained: bool
    lowered: bool  # travels in fewer bits, see `wire`


def split_by_kind(
    parameters: Sequence[NamedParameter], lowered: Collection[int] = ()
) -> dict[Kind, list[NamedParameter]]:
    """Separate parameters by kind. ``lowered`` are ids."""
    kinds: dict[Kind, list[NamedParameter]] = {}
    for named in parameters:
        parameter = named.parameter
        kind = Kind(parameter.dtype, parameter.requires_grad, id(parameter) in lowered)
        kinds.setdefault(kind, []).append(named)
    return kinds


def row_parameters(module: nn.Module) -> frozenset[int]:
    """The ids of parameters whose gradients touch few rows: weights of embeddings that nothing else in the tree has.

    A table that is also the weight of a linear layer is left out, since its gradient touches every row.
    """
    tables: set[int] = set()
    others: set[int] = set()
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            is_table = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and name == "weight" and parameter.dim() == 2
            (tables if is_table and parameter.requires_grad and parameter.numel() else others).add(id(parameter))
    return frozenset(tables - others)


def set_apart(parameters: Sequence[NamedParameter], alone: Collection[int]) -> list[list[NamedParameter]]:
    """``parameters`` with each of those ``alone`` (by id) in a list of its own, after the others."""
    together = [named for named in parameters if id(named.parameter) not in alone]
    lists = [together, *([named] for named in parameters if id(named.parameter) in alone)]
    return [members for members in lists if members]
