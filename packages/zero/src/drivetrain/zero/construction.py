"""Modules while they are being built: whole where code looks, split where it does not.

The problem: a module is split to save memory, but building is not over when its ``__init__`` returns. Parents
initialise their children again, tie and resize their weights, convert their dtype, copy them, load into them. Whatever
reads or writes a parameter must find it whole, or training starts from other values than it would in one process.

The idea: every access to a tensor from Python passes through torch's function mode. So a parameter is split when
something else is built or looked at, and comes back when a call has it, or a view of it, among its arguments. What is
split is the memory, not the parameter: storage objects stay for good, emptied and filled again, so ``.data``, views and
parameters that share memory keep seeing each other.

Invariants:
- Ranks run the same code, so they split and gather in the same order. Nothing that decides about a collective depends
  on what is garbage already, or on values.
- What counts are the first rank's values: they are broadcast whenever memory is split.
- At most one module's own parameters are whole besides those that the current call needs, and pinned ones.
"""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.comm import Axis, all_gather, all_reduce, broadcast
from drivetrain.zero.hooks import tensors_in
from drivetrain.zero.looks import LOOKS
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.split import SplitParameter, cut, is_placeholder, join, placeholder

Claims = list[tuple[nn.Parameter, SplitParameter]]

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ALLOCATIONS = frozenset([torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor])
_BACKWARD = frozenset([torch.Tensor.backward, torch.autograd.grad])


@contextmanager
def _unseen() -> Iterator[None]:
    """Our own work on tensors: no mode sees it (such as ``with torch.device("meta")``), and no graph records it."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        yield


class ModuleLog:
    """Modules in the order in which they appeared, which is the same on all ranks. Keeps none of them alive."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._next = itertools.count()

    def number(self, module: nn.Module) -> int:
        """Its place in the order; a new module comes last."""
        number: int | None = self._numbers.get(module)
        if number is None:
            number = next(self._next)
            self._numbers[module] = number
            self._modules[number] = weakref.ref(module)
        return number

    def __iter__(self) -> Iterator[nn.Module]:
        return (module for ref in list(self._modules.values()) if (module := ref()) is not None)

    def forget(self, module: nn.Module) -> None:
        number = self._numbers.pop(module, None)
        if number is not None:
            del self._modules[number]


class Memory:
    """The storage of a parameter, and of all tensors that look at it.

    Attributes:
        owner: number of the module whose parameter it was first.
        touched: a call has had it among its arguments.
        piece: this rank's part, while it is split and the storage is empty.
    """

    def __init__(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        numel: int,
        owner: int | None,
        piece: torch.Tensor | None,
    ) -> None:
        self.storage = storage
        self.dtype = dtype
        self.numel = numel
        self.owner = owner
        self.touched = False
        self.piece = piece

    def _flat(self, numel: int) -> torch.Tensor:
        view = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        view.set_(self.storage, 0, (numel,), (1,))
        return view

    def part(self, ranks: Ranks) -> torch.Tensor:
        """This rank's part of the first rank's values. Collective."""
        flat = self._flat(self.numel).to(ranks.shard.device)
        broadcast(flat, ranks.everyone, purpose="a parameter built under Init").wait()
        return cut(flat, ranks.shard)

    def split(self, ranks: Ranks) -> None:
        """Keep this rank's part only. Collective. Memory that was handed to others, as a numpy array, has to stay."""
        if self.storage.resizable():
            self.piece = self.part(ranks)
            self.storage.resize_(0)

    def restore(self, axis: Axis) -> None:
        """Fill the storage again. Collective."""
        assert self.piece is not None
        padded = self.piece.numel() * axis.size
        if self.storage.device == axis.device:
            self.storage.resize_(padded * self.dtype.itemsize)
            all_gather(self._flat(padded), self.piece, axis, purpose="a parameter built under Init").wait()
        else:
            self.storage.resize_(self.numel * self.dtype.itemsize)
            self._flat(self.numel).copy_(join(self.piece, axis)[: self.numel])
        self.piece = None

    def poison(self) -> None:
        """Give tensors that still look at it something that is safe to read: NaN."""
        self.storage.resize_(self.numel * self.dtype.itemsize)
        self._flat(self.numel).fill_(float("nan") if self.dtype.is_floating_point else 0)

    def is_all_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is the whole of it, in order."""
        same = tensor.dtype == self.dtype and tensor.numel() == self.numel
        return same and tensor.storage_offset() == 0 and tensor.is_contiguous()

    @property
    def seen_by_others(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) > 1


class Construction(TorchFunctionMode):
    """Splits and restores what is built while it is entered. Use once, in one thread.

    Args:
        ranks: over which to split.
        log: modules that are known, to which new ones are added.
        is_foreign: tells modules whose parameters are somebody else's to keep.
    """

    def __init__(self, ranks: Ranks, log: ModuleLog, is_foreign: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._ranks = ranks
        self._log = log
        self._is_foreign = is_foreign
        self._memories: dict[int, Memory] = {}
        self._whole: dict[int, Memory] = {}
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Construction:
        self._handles = [
            module_hooks.register_module_parameter_registration_hook(self._on_parameter),
            module_hooks.register_module_module_registration_hook(self._on_module),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def resume(self, parameter: nn.Parameter, kept: SplitParameter) -> None:
        """Take in a parameter that was split by another construction."""
        empty = torch.empty(kept.shape, dtype=kept.piece.dtype, device=parameter.device)
        parameter.data = empty
        storage = empty.untyped_storage()
        storage.resize_(0)
        self._memories[storage._cdata] = Memory(storage, empty.dtype, empty.numel(), None, kept.piece)

    @contextmanager
    def pinned(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Keep ``parameters`` whole within the context, whatever else is looked at. Collective."""
        with _unseen():
            found = [memory for parameter in parameters if (memory := self._memory_of(parameter)) is not None]
            pinned = {}
            for memory in found:
                self._restore(memory)
                key = memory.storage._cdata
                if self._whole.pop(key, None) is not None:  # else somebody around us has pinned it
                    pinned[key] = memory
        try:
            yield
        finally:
            self._whole.update(pinned)

    # what is seen -----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Collection[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOOKS:
            return func(*args, **kwargs)
        if func in _BACKWARD:
            raise RuntimeError(
                f"rank {self._ranks.shard.world.rank}: a backward pass while modules are built under Init; leave the "
                "context and call shard(module, mesh, policy) first"
            )
        sets_data = func == _SET_DATA and isinstance(args[0], nn.Parameter)
        copies = func is torch.Tensor.clone and _copies_a_parameter(sys._getframe(1))
        with _unseen():
            if func in _ALLOCATIONS:
                self._make_room()
            # What is assigned to `.data` replaces what is there: nobody reads it.
            touched = self._touch(tensors_in((args[1:] if sets_data else args, kwargs)))
            if copies:
                self._split(memory for memory in self._whole.values() if memory not in touched)
        result = func(*args, **kwargs)
        if sets_data or copies:
            with _unseen():
                self._follow(args[0] if sets_data else result, None)
        return result

    def _on_parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() == self._thread and not self._is_foreign(module):
            with _unseen():
                number = self._log.number(module)
                self._split(memory for memory in self._whole.values() if memory.owner != number)
                self._follow(parameter, number)

    def _on_module(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if threading.get_ident() == self._thread and child is not None:
            with _unseen():
                if not self._is_foreign(parent):
                    self._log.number(parent)
                for module in child.modules():
                    if not self._is_foreign(module):
                        number = self._log.number(module)
                        for parameter in module._parameters.values():
                            self._follow(parameter, number)
                self._split(self._whole.values())

    # what is done -----------------------------------------------------------------------------------------------------

    def _follow(self, tensor: torch.Tensor | None, owner: int | None) -> None:
        """From now on split and restore the memory of ``tensor``, unless that is known."""
        if tensor is None or not _can_be_split(tensor) or tensor.untyped_storage()._cdata in self._memories:
            return
        storage = tensor.untyped_storage()
        if not storage.resizable() or storage.nbytes() % tensor.element_size():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)  # memory that is not torch's own
            storage = tensor.untyped_storage()
        memory = Memory(storage, tensor.dtype, storage.nbytes() // tensor.element_size(), owner, None)
        self._memories[storage._cdata] = self._whole[storage._cdata] = memory

    def _memory_of(self, tensor: torch.Tensor) -> Memory | None:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        try:
            return self._memories.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # tensors of other libraries, which have no storage
            return None

    def _touch(self, tensors: Iterable[torch.Tensor]) -> list[Memory]:
        """Make whole what a call is about to use."""
        found = [memory for tensor in tensors if (memory := self._memory_of(tensor)) is not None]
        for memory in found:
            memory.touched = True
        if any(memory.piece is not None for memory in found):
            owners = {memory.owner for memory in found if memory.owner is not None}
            self._split(m for m in self._whole.values() if m not in found and m.owner not in owners)
            for memory in found:
                self._restore(memory)
        return found

    def _restore(self, memory: Memory) -> None:
        if memory.piece is not None:
            memory.restore(self._ranks.shard)
            self._whole[memory.storage._cdata] = memory

    def _split(self, memories: Iterable[Memory]) -> None:
        for memory in list(memories):
            memory.split(self._ranks)
            del self._whole[memory.storage._cdata]

    def _make_room(self) -> None:
        """Before something is allocated: it may be large, and what was initialised need not be there beside it."""
        if all(memory.touched for memory in self._whole.values()):
            self._split(self._whole.values())

    # the end ----------------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Those of all known modules that can be split, each once."""
        seen: set[int] = set()
        for module in self._log:
            for parameter in list(module._parameters.values()):
                if parameter is not None and id(parameter) not in seen and _can_be_split(parameter):
                    seen.add(id(parameter))
                    yield parameter

    def finish(self, dtype: torch.dtype | None) -> Claims:
        """Split all that is whole, and leave placeholders, of ``dtype`` where they are floats. Collective.

        Returns what this rank keeps of every parameter of the modules. Memory that other tensors look at is whole
        again for these; the parameters have nothing to do with it any more.
        """
        gc.collect()  # what is alive is the same on all ranks
        with _unseen():
            self._split(self._whole.values())
            claims: Claims = []
            claimed: set[int] = set()
            for parameter in self._parameters():
                claims.append((parameter, self._claim(parameter, claimed)))
            self._leave_placeholders(claims, dtype)
            self._cast_others(dtype)
            self._restore_for_others()
        return claims

    def _claim(self, parameter: nn.Parameter, claimed: set[int]) -> SplitParameter:
        """This rank's part of ``parameter``. One that has its memory not to itself gets a copy."""
        memory = self._memory_of(parameter)
        if memory is not None and (id(memory) in claimed or not memory.is_all_of(parameter)):
            self._restore(memory)
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            memory = None
        if memory is None:
            self._follow(parameter, None)
            memory = self._memory_of(parameter)
            self._split(self._whole.values())
        assert memory is not None
        claimed.add(id(memory))
        piece = memory.part(self._ranks) if memory.piece is None else memory.piece
        return SplitParameter(piece, parameter.shape)

    def _leave_placeholders(self, claims: Claims, dtype: torch.dtype | None) -> None:
        for parameter, _ in claims:
            shown = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
            parameter.data = placeholder(parameter.shape, shown, parameter.device)
            torch.autograd.graph.increment_version(parameter)  # a graph that has read it cannot be run backward

    def _cast_others(self, dtype: torch.dtype | None) -> None:
        """Parameters that were not split, since they have no elements or no memory, get ``dtype`` all the same."""
        for parameter in (p for module in self._log for p in module._parameters.values()):
            if dtype is not None and parameter is not None and not is_lazy(parameter) and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def _restore_for_others(self) -> None:
        memories = list(self._memories.values())
        if not memories:
            return
        axis = self._ranks.shard
        seen = torch.tensor([int(m.seen_by_others) for m in memories], dtype=torch.int32, device=axis.device)
        all_reduce(seen, axis, op="max", purpose="which parameters built under Init are whole").wait()
        for memory, wanted in zip(memories, seen.tolist(), strict=True):
            if wanted:
                self._restore(memory)

    def abandon(self, dtype: torch.dtype | None) -> Claims:
        """What `finish` does, as far as it goes without the other ranks: what is whole stays so."""
        with _unseen():
            claims: Claims = []
            claimed: set[int] = set()
            for parameter in self._parameters():
                memory = self._memory_of(parameter)
                if memory is None or memory.piece is None or id(memory) in claimed or not memory.is_all_of(parameter):
                    continue
                claimed.add(id(memory))
                claims.append((parameter, SplitParameter(memory.piece, parameter.shape)))
            self._leave_placeholders(claims, dtype)
            for memory in self._memories.values():
                if memory.piece is not None and memory.seen_by_others:
                    memory.poison()
        return claims


def _can_be_split(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
        return False
    return type(tensor.data) is torch.Tensor and not is_placeholder(tensor)


def _copies_a_parameter(frame: Any) -> bool:
    """Whether the code of ``frame`` is the copying of a parameter: what it clones will be one."""
    return frame.f_code is nn.Parameter.__deepcopy__.__code__
