"""States that live elsewhere: the joint for host memory and NVMe, and what is at hand of them.

The problem: master weights, moments, gradients and shards of parameters may be more than a device, or a host, has room
for, and each is needed for a moment only. The idea: a `ShardStore` keeps them as records and gives a record's memory
for a while. Tensor objects stay what they are to everyone who holds them (buckets, the optimizer, its state): a `Home`
points them at that memory within a context, and between contexts at a placeholder of their shape that reads as NaN.

Invariant: what is in a store is read and written only at hand. A program that holds on to a tensor sees NaN, never
values from before.

A store is whatever has these methods; ``drivetrain.offload`` has one for host memory and one for files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from drivetrain.zero.split import placeholder
from drivetrain.zero.state import FlatSlice


class ShardStore(Protocol):
    """Keeps records, lists of 1-D tensors, under string keys. One thread calls it.

    A failure of writing is raised by the next call, names the record, and the record counts as lost from then on.
    """

    @property
    def device(self) -> torch.device:
        """Where the tensors of a record are while they are in use."""

    @property
    def bytes(self) -> int:
        """How much is kept."""

    @property
    def in_memory(self) -> bool:
        """A record is its memory: nothing reads or writes it between `release` and `fetch`."""

    def create(self, key: str, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A new record in place of any old one, in use: tensors of these lengths and dtypes, not initialised."""

    def expect(self, keys: Sequence[str]) -> None:
        """These will be fetched next, in this order, instead of what was expected before: begin to bring them in."""

    def fetch(self, key: str) -> list[torch.Tensor]:
        """The record's tensors, which are the caller's until `release`. Blocks until they are there."""

    def release(self, key: str, *, changed: bool) -> None:
        """The caller is through with a record; ``changed``: what its tensors hold now is what is to be kept."""

    def branch(self, key: str, new_key: str) -> list[torch.Tensor]:
        """A new record in place of any old one, in use, with the values of ``key``, which is released as it was.

        ``key`` is in use and has not been written to. Its tensors may be those of the new record.
        """

    def rename(self, key: str, new_key: str) -> None:
        """A record that is not in use has another key from now on, in place of any old one. No values are moved."""

    def drop(self, key: str) -> None:
        """Forget a record."""

    def flush(self) -> None:
        """Block until everything is where it will be kept."""

    def close(self) -> None:
        """Forget all records and give back what they took."""


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Where the states of a sharded module live; None: on its device.

    Attributes:
        parameters: shards of parameters at stage 3, but for those that stay whole and those that are kept quantised.
        states: master weights and what the optimizer remembers. The optimizer runs where the store's tensors are.
        gradients: reduced gradients, from their reduction to the step, of the parameters whose states are elsewhere.
            Those of stage 0, and of embeddings that travel as rows, stay on the device.
        share: how much of the states (and gradients) is elsewhere, by elements, as near as whole buckets come to it:
            the last of the model, whose gradients are there first (Twin-Flow of ZeRO-Offload++).
    """

    parameters: ShardStore | None = None
    states: ShardStore | None = None
    gradients: ShardStore | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"the share of states that live elsewhere must lie in [0, 1], got {self.share}")

    def all(self) -> Iterator[ShardStore]:
        """Each store once."""
        stores = (self.parameters, self.states, self.gradients)
        yield from {id(store): store for store in stores if store is not None}.values()


class Shelf:
    """A store with the homes in it.

    A home may linger: it stays at hand after its context for the next one, until another home of the shelf is entered.
    That makes it one fetch, not many, where a checkpoint reads a record parameter by parameter.
    """

    def __init__(self, store: ShardStore) -> None:
        self.store = store
        self._lingering: Home | None = None

    def make_way(self, home: Home | None = None) -> None:
        """Put away whatever lingers, but ``home``."""
        if self._lingering is not None and self._lingering is not home:
            other, self._lingering = self._lingering, None
            other.put_away()

    def linger(self, home: Home) -> None:
        self.make_way(home)
        self._lingering = home


@dataclass(frozen=True)
class _View:
    """A tensor that looks at a part of a tensor at home."""

    tensor: torch.Tensor
    field: int
    start: int


@dataclass
class Aside:
    """What the tensors of a home would be, kept beside them in a record of its own: see `Home.aside`."""

    home: Home
    key: str
    since: int  # writes to the home when this was made
    fields: Sequence[torch.Tensor] = ()
    views: Sequence[_View] = ()
    kept: Sequence[tuple[int, torch.dtype]] | None = None

    @property
    def current(self) -> bool:
        """Nothing was written to the home since."""
        return self.since == self.home.writes

    def adopt(self) -> None:
        """Let this be what the tensors of the home are. Nothing is read or written."""
        self.home.adopt(self)

    def drop(self) -> None:
        """Forget it."""
        self.home.shelf.store.drop(self.key)


class Home:
    """Tensors that live in one record of a store. They keep their identity, shape and dtype.

    Args:
        shelf: the store.
        key: of the record.

    Attributes:
        writes: how often the tensors may have been written to.
    """

    def __init__(self, shelf: Shelf, key: str) -> None:
        self.key = key
        self.shelf = shelf
        self.writes = 0
        self._fields: list[torch.Tensor] = []
        self._views: list[_View] = []
        self._kept: list[tuple[int, torch.dtype]] | None = None  # the record's lengths and dtypes
        self._memory: list[torch.Tensor] | None = None  # the record, while it is at hand
        self._uses = 0
        self._changed = False
        self._arrival: torch.cuda.Event | None = None

    @property
    def device(self) -> torch.device:
        """Where the tensors are while they are at hand."""
        return self.shelf.store.device

    @property
    def bytes(self) -> int:
        """How much is kept."""
        return sum(numel * dtype.itemsize for numel, dtype in self._kept or ())

    def move_in(self, fields: Sequence[torch.Tensor]) -> None:
        """These tensors live here from now on, with the values that they have. Others that did are forgotten."""
        with self.at_hand(changes=True):
            self.hold(fields)

    def remake(self, fields: Sequence[torch.Tensor]) -> None:
        """As `move_in`, for tensors whose values are still to come: nothing is read, so that what is lost may be."""
        self._drop_record()
        self.hold(fields)
        self._changed = True
        self.writes += 1
        self.put_away()

    def holds(self, fields: Sequence[torch.Tensor]) -> bool:
        """Whether these, and no others, live here."""
        return len(fields) == len(self._fields) and all(a is b for a, b in zip(fields, self._fields, strict=True))

    def hold(self, fields: Sequence[torch.Tensor]) -> None:
        """As `move_in`, inside of a context, at whose end it happens."""
        if not self.holds(fields):
            self._fields = list(fields)
            self._views = [view for view in self._views if view.field < len(fields)]

    def admit(self, value: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that lives here, alone, on the store's device, and has this value, in ``dtype`` if that is given."""
        self.writes += 1
        memory = self.shelf.store.create(
            self.key, [torch.empty(value.numel(), dtype=dtype or value.dtype, device="meta")]
        )
        self._bring(value, memory[0])
        tensor = memory[0].detach()
        self._fields, self._views = [tensor], []
        self._kept, self._memory, self._changed = [(tensor.numel(), tensor.dtype)], memory, True
        self.put_away()
        return tensor

    def watch(self, view: torch.Tensor, of: torch.Tensor, start: int) -> None:
        """``view`` looks at elements of ``of``, which lives here, from ``start`` on, whenever that is at hand."""
        index = next(index for index, field in enumerate(self._fields) if field is of)
        self._views.append(_View(view, index, start))
        if self._memory is None:
            _hide(view)

    @contextmanager
    def at_hand(self, *, changes: bool, anew: bool = False, linger: bool = False) -> Iterator[None]:
        """The tensors can be read in this context, and with ``changes`` written; ``anew``: all of them will be."""
        self.shelf.make_way(self)
        if self._memory is None and self._kept is not None:
            store = self.shelf.store
            self._point_at(store.create(self.key, self._fields) if anew else store.fetch(self.key))
        self._changed |= changes
        self.writes += changes
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses and not linger:
                self.put_away()
            elif not self._uses:
                self.shelf.linger(self)

    @contextmanager
    def aside(self, key: str, *, anew: bool = False) -> Iterator[Aside]:
        """The tensors can be written in this context, and others can come to live here; that is kept aside.

        At its end the tensors are what they were before it, and what they were within it is a record of its own, which
        can come in the place of this one. ``anew``: nothing is read, for all of the tensors will be written.

        Args:
            key: of the other record.
        """
        self.shelf.make_way()
        if self._uses or self._kept is None:
            raise RuntimeError(f"'{self.key}' is at hand, or empty: nothing can be kept beside it")
        self._await_arrival()
        made, before = Aside(self, key, self.writes), (self.key, self._fields, self._views, self._kept)
        memory = self._open_aside(key, anew=anew)
        self.key = key
        self._point_at(memory)
        self._changed, self._uses = True, 1
        try:
            yield made
            self._uses = 0
            self.put_away()
            made.fields, made.views, made.kept = self._fields, self._views, self._kept
        except BaseException:
            with suppress(KeyError):
                self.shelf.store.drop(key)
            raise
        finally:
            for tensor in (*before[1], *self._fields, *(view.tensor for view in (*before[2], *self._views))):
                _hide(tensor)
            self.key, self._fields, self._views, self._kept = before
            self._memory, self._changed, self._uses = None, False, 0

    def _open_aside(self, key: str, *, anew: bool) -> list[torch.Tensor]:
        store = self.shelf.store
        if anew:
            return store.create(key, self._fields)
        store.fetch(self.key)
        try:
            return store.branch(self.key, key)
        except BaseException:
            store.release(self.key, changed=False)
            raise

    def adopt(self, made: Aside) -> None:
        """Let ``made`` be what the tensors are; see `aside`."""
        self.shelf.make_way()
        self._await_arrival()
        self.shelf.store.rename(made.key, self.key)
        self._fields, self._views = list(made.fields), list(made.views)
        self._kept = None if made.kept is None else list(made.kept)
        self.writes += 1

    def put_away(self) -> None:
        """Nobody looks at the tensors any more."""
        if self._uses:
            return
        layout = [(field.numel(), field.dtype) for field in self._fields]
        if layout and layout != self._kept:
            if self._memory is not None:
                self._leave(self._memory)
            self._memory = self.shelf.store.create(self.key, self._fields)
            self._kept = layout
        if self._memory is None:
            return
        for index, (field, memory) in enumerate(zip(self._fields, self._memory, strict=True)):
            if field.numel() and field.data_ptr() != memory.data_ptr():
                self._bring(field, memory)
            for tensor in (field, *(view.tensor for view in self._views if view.field == index)):
                _hide(tensor)  # before the next is copied: what it had is free now
        changed, self._changed, self._memory = self._changed, False, None
        if not self.shelf.store.in_memory:
            self._await_arrival()
        self.shelf.store.release(self.key, changed=changed)

    def _leave(self, memory: Sequence[torch.Tensor]) -> None:
        """Drop a record that another comes in place of, and keep what is in it."""
        places = {flat.data_ptr() for flat in memory if flat.numel()}
        for field in self._fields:
            if field.data_ptr() in places:
                field.data = field.clone()
        self.shelf.store.drop(self.key)

    def _bring(self, field: torch.Tensor, memory: torch.Tensor) -> None:
        """Copy to ``memory``; from a GPU to pinned memory without waiting for it."""
        behind = field.is_cuda and memory.is_pinned()
        memory.copy_(field.reshape(-1), non_blocking=behind)
        if behind:
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def _await_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    def _point_at(self, memory: list[torch.Tensor]) -> None:
        self._await_arrival()
        self._memory = memory
        for field, flat in zip(self._fields, memory, strict=True):
            field.data = flat.view(field.shape)
        for view in self._views:
            flat = memory[view.field].narrow(0, view.start, view.tensor.numel())
            view.tensor.data = flat.view(view.tensor.shape)

    def forget(self) -> None:
        """Nothing lives here any more."""
        self._drop_record()
        self._fields, self._views, self._changed = [], [], False
        self.writes += 1

    def _drop_record(self) -> None:
        """Have none, if there was one, at hand or not."""
        if self._kept is not None:
            self.shelf.store.drop(self.key)
        self._kept = self._memory = None


def expect(homes: Iterable[Home]) -> None:
    """These will be needed next, in this order: let their stores begin to bring them in."""
    keys: dict[int, tuple[Shelf, list[str]]] = {}
    for home in homes:
        if home.bytes:
            keys.setdefault(id(home.shelf), (home.shelf, []))[1].append(home.key)
    for shelf, expected in keys.values():
        shelf.make_way()
        shelf.store.expect(expected)


def _hide(tensor: torch.Tensor) -> None:
    """Have ``tensor`` look at no memory to speak of."""
    tensor.data = placeholder(tensor.shape, tensor.dtype, tensor.device)


@dataclass(frozen=True, kw_only=True)
class StoredSlice(FlatSlice):
    """A part of a tensor that lives in a store: ``data`` tells size and dtype only, and lies on the meta device."""

    home: Home
    whole: torch.Tensor  # the tensor that lives there
    start: int  # in ``whole``, flat

    def read(self, start: int, numel: int) -> torch.Tensor:
        with self.home.at_hand(changes=False, linger=True):
            return self.whole.view(-1).narrow(0, self.start + start, numel).clone()

    def target(self, start: int, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.data.dtype, device=self.home.device)

    def commit(self, start: int, values: torch.Tensor) -> None:
        with self.home.at_hand(changes=True, linger=True):
            self.whole.view(-1).narrow(0, self.start + start, values.numel()).copy_(values)


def flat_slice(
    whole: torch.Tensor, part: slice, home: Home | None, *, offset: int, shape: torch.Size, writes: bool
) -> FlatSlice:
    """``part`` of the flat ``whole``, which lives in ``home`` if there is one; the rest as `FlatSlice` says."""
    if home is None:
        return FlatSlice(data=whole.view(-1)[part], offset=offset, shape=shape, writes=writes)
    nothing = torch.empty(part.stop - part.start, dtype=whole.dtype, device="meta")
    return StoredSlice(
        data=nothing, offset=offset, shape=shape, writes=writes, home=home, whole=whole, start=part.start
    )
