"""Where a module's parameters get their values from when `shard` lays them into buckets.

A parameter is whole on the first rank; or `Init` has split it; or it is read from a source, by name and by parts, so
that a checkpoint of any size goes straight into shards; or it is initialised, one module at a time. All of them may
occur in one module.

Invariants: whatever the source has wrong is found before anything is read, and told on all ranks in one error; each
rank reads its own elements only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from drivetrain.comm import all_gather_object, broadcast
from drivetrain.zero.grouping import NamedParameter, named_parameters
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.split import SplitParameter, cut, join, placeholder

Initialize = Callable[[nn.Module], object]
_SHOWN = 8


class TensorSource(Protocol):
    """Tensors by name that can be read in parts, such as those of a checkpoint."""

    def names(self) -> Collection[str]:
        """What there is."""

    def shape(self, name: str) -> Sequence[int]:
        """The shape of the tensor ``name``."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The elements ``start <= i < stop`` of the row-major flattened tensor ``name``: 1-D, any dtype and device."""


@dataclass(frozen=True)
class _Buffer:
    """A buffer, where it is."""

    owner: nn.Module
    key: str
    name: str
    persistent: bool

    @property
    def tensor(self) -> torch.Tensor:
        return self.owner.get_buffer(self.key)


@dataclass
class _Match:
    """What of a module is in a source and what is not."""

    parameters: dict[int, str] = field(default_factory=dict)  # by id: the name in the source
    buffers: list[_Buffer] = field(default_factory=list)
    absent: dict[int, str] = field(default_factory=dict)  # by id: on the meta device, and nothing gives a value
    kept: list[str] = field(default_factory=list)  # not in the source, but with values in the module
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)


class ParameterValues:
    """The values of one module's parameters. See `drivetrain.zero.bucket.Values`.

    Args:
        ranks: that train the module.
        source: where values are read from.
        names: by id, the parameters that are read from it, under which name.
    """

    def __init__(self, ranks: Ranks, source: TensorSource | None, names: Mapping[int, str]) -> None:
        self._ranks = ranks
        self._pieces: dict[int, SplitParameter] = {}
        self._source = source
        self._names = names

    def add(self, pieces: Mapping[int, SplitParameter]) -> None:
        """More parameters that are split already, by id."""
        self._pieces.update(pieces)

    def has(self, parameters: Iterable[NamedParameter]) -> bool:
        """Whether one of ``parameters`` is not simply there on the first rank."""
        return any(id(p.parameter) in self._pieces or id(p.parameter) in self._names for p in parameters)

    def dtype(self, named: NamedParameter) -> torch.dtype:
        split = self._pieces.get(id(named.parameter))
        return named.parameter.dtype if split is None or id(named.parameter) in self._names else split.piece.dtype

    def read(self, named: NamedParameter, start: int, stop: int) -> torch.Tensor:
        name = self._names.get(id(named.parameter))
        split = self._pieces.pop(id(named.parameter), None)
        if name is not None:
            return self._read_source(named, name, start, stop)
        if split is not None:
            return join(split.piece, self._ranks.shard)[start:stop]
        flat = named.parameter.detach().reshape(-1).to(self._ranks.shard.device, copy=True)
        broadcast(flat, self._ranks.everyone, purpose=f"first values of '{named.name}'").wait()
        return flat[start:stop]

    def _read_source(self, named: NamedParameter, name: str, start: int, stop: int) -> torch.Tensor:
        if start == stop or self._source is None:
            return torch.empty(0, dtype=named.parameter.dtype, device=self._ranks.shard.device)
        found = self._source.read(name, start, stop)
        if found.shape != (stop - start,):
            raise ValueError(
                f"rank {self._ranks.shard.world.rank}: reading elements {start} to {stop} of '{name}' from "
                f"{type(self._source).__name__} gave a tensor of shape {tuple(found.shape)}, not ({stop - start},)"
            )
        return found.to(self._ranks.shard.device, named.parameter.dtype)


def find_values(
    module: nn.Module, ranks: Ranks, source: TensorSource | None, initialize: Initialize | None
) -> ParameterValues:
    """Match ``module`` with ``source``; afterwards nothing of it is on the meta device. Collective.

    Where the ranks themselves are on the meta device, nothing needs a value.

    Buffers are read here and absent ones initialised; parameters are read when buckets ask for them. The same parameter
    objects are used on, as they become real.

    Raises:
        ValueError: the two do not fit, or ``initialize`` leaves something without a value.
    """
    match = _match(module, source, needs_values=ranks.shard.device.type != "meta")
    _agree_to(_problem(module, match, source, initialize), ranks)
    for named in named_parameters(module):
        if id(named.parameter) in match.parameters and named.parameter.is_meta:
            shape, dtype = named.parameter.shape, named.parameter.dtype
            real = placeholder(shape, dtype, ranks.shard.device) if shape.numel() else torch.empty(shape, dtype=dtype)
            _make_real(named.parameter, real)
    for buffer in match.buffers:
        if source is not None:
            read = source.read(buffer.name, 0, buffer.tensor.numel()).view(buffer.tensor.shape)
            buffer.owner._buffers[buffer.key] = read.to(ranks.shard.device, buffer.tensor.dtype, copy=True)
    values = ParameterValues(ranks, source, match.parameters)
    if initialize is not None and match.absent:
        values.add(_initialize(module, match.absent, initialize, ranks))
    return values


def _match(module: nn.Module, source: TensorSource | None, *, needs_values: bool) -> _Match:
    match = _Match()
    unused = dict.fromkeys(() if source is None else source.names())
    for named in named_parameters(module):
        name = next((name for name in named.names if name in unused), None)
        if source is not None and name is not None:
            match.parameters[id(named.parameter)] = name
            match.misshapen += _misshapen(name, source, named.parameter)
        elif named.parameter.is_meta and needs_values:
            match.absent[id(named.parameter)] = named.name
        elif source is not None:
            match.kept.append(named.name)
        for alias in named.names:
            unused.pop(alias, None)
    for buffer in _buffers(module):
        if source is not None and buffer.persistent and buffer.name in unused:
            match.buffers.append(buffer)
            match.misshapen += _misshapen(buffer.name, source, buffer.tensor)
        elif buffer.tensor.is_meta and needs_values:
            match.absent[id(buffer.tensor)] = buffer.name
        elif source is not None and buffer.persistent:
            match.kept.append(buffer.name)
    taken = {buffer.name for buffer in match.buffers}
    match.unexpected = [name for name in unused if name not in taken]
    return match


def _misshapen(name: str, source: TensorSource, wanted: torch.Tensor) -> list[str]:
    found = tuple(source.shape(name))
    return [] if found == tuple(wanted.shape) else [f"'{name}' ({list(found)}, not {list(wanted.shape)})"]


def _buffers(module: nn.Module) -> Iterator[_Buffer]:
    for prefix, owner in module.named_modules():
        for key, _ in owner.named_buffers(recurse=False):
            persistent = key not in owner._non_persistent_buffers_set
            yield _Buffer(owner, key, f"{prefix}.{key}" if prefix else key, persistent)


def _problem(
    module: nn.Module, match: _Match, source: TensorSource | None, initialize: Initialize | None
) -> str | None:
    """What does not fit, in one sentence."""
    missing = [] if initialize is not None else [f"'{name}'" for name in (*match.absent.values(), *match.kept)]
    if source is None:
        if not missing:
            return None
        return (
            f"{len(missing)} parameters and buffers are on the meta device and have no data: {_listed(missing)}. Pass "
            "values= (a source to read them from) or initialize= (a function that is called with each module that has "
            "some), or give them values before sharding"
        )
    faults = [
        f"{len(items)} {what}: {_listed(items)}"
        for what, items in (
            ("missing", missing),
            ("unexpected", [f"'{name}'" for name in match.unexpected]),
            ("of another shape", match.misshapen),
        )
        if items
    ]
    if not faults:
        return None
    return (
        f"the tensors of {type(source).__name__} are not those of {type(module).__name__}. {'; '.join(faults)}. Rename "
        "or leave out what the source has too much. If it may lack some, pass initialize=, which is called for those "
        "on the meta device; others keep the values that they have"
    )


def _listed(items: Sequence[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(items[:_SHOWN]) + more


def _agree_to(problem: str | None, ranks: Ranks) -> None:
    """Raise on every rank what any rank has found."""
    axis = ranks.everyone
    problems = all_gather_object(problem, axis, purpose="whether the values fit the model")
    for rank, text in zip(axis.ranks, problems, strict=True):
        if text is not None:
            raise ValueError(text if text == problem else f"rank {rank} found: {text}")


def _initialize(
    module: nn.Module, absent: dict[int, str], initialize: Initialize, ranks: Ranks
) -> dict[int, SplitParameter]:
    """Give values to what is absent, and split it; one module's are whole at a time. Children come before parents."""
    device = ranks.shard.device
    pieces: dict[int, SplitParameter] = {}
    forgotten: list[str] = []
    for owner in _children_first(module, set()):
        parameters = [(key, p) for key, p in owner._parameters.items() if p is not None and id(p) in absent]
        buffers = [(key, b) for key, b in owner._buffers.items() if b is not None and id(b) in absent]
        if not parameters and not buffers:
            continue
        names = {key: absent.pop(id(tensor)) for key, tensor in (*parameters, *buffers)}
        for _, parameter in parameters:
            _make_real(parameter, _nothing_yet(parameter, device))
        for key, buffer in buffers:
            owner._buffers[key] = _nothing_yet(buffer, device)
        with torch.no_grad():
            initialize(owner)
        for key, name in names.items():
            tensor: torch.Tensor | None = owner._buffers.get(key, owner._parameters.get(key))
            if tensor is None or (tensor.is_floating_point() and bool(tensor.isnan().any())):
                forgotten.append(f"'{name}'")
        for key, _ in parameters:
            made = owner._parameters.get(key)
            if made is not None and made.numel():
                pieces[id(made)] = _split(made, ranks)
    problem = f"initialize= gave no values, or NaN, to {_listed(forgotten)}" if forgotten else None
    _agree_to(problem, ranks)
    return pieces


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    """In the order of ``nn.Module.apply``, each module once."""
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _nothing_yet(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.full(
        tensor.shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype, device=device
    )


def _make_real(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Give a parameter on the meta device memory; the object stays the same."""
    real = nn.Parameter(data, requires_grad=parameter.requires_grad)
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def _split(parameter: nn.Parameter, ranks: Ranks) -> SplitParameter:
    flat = parameter.detach().reshape(-1).to(ranks.shard.device)
    broadcast(flat, ranks.everyone, purpose="first values of a parameter").wait()
    kept = SplitParameter(cut(flat, ranks.shard), parameter.shape)
    parameter.data = placeholder(parameter.shape, parameter.dtype, ranks.shard.device)
    return kept
