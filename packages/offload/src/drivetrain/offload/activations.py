"""Activations in host memory and on NVMe between forward and backward.

Problem: what autograd saves for backward fills the device, and each of it lies there unused for most of a step.
Idea: hooks of autograd are asked about every tensor that is saved. Large ones that nobody else keeps go out while
forward computes on, and come back, in the order in which backward will ask, while it computes. What is saved is bytes
of a storage: tensors that share them are moved once, and get their strides and places back, so that backward calls the
same kernels on the same layout.
Invariants: gradients are the same to the last bit; a tensor that is changed in place after it was saved is refused as
autograd refuses it; nothing of a graph outlives it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .activation_order import SavePass
from .activation_records import ActivationStatistics, Handle, Source
from .activation_store import Budgets, RecordStore
from .activation_tiers import CopyLink, CudaLink, Link, SameMemory

__all__ = ["ActivationOptions", "ActivationStatistics", "OffloadActivations"]

_log = logging.getLogger("drivetrain.offload")

# A storage goes as a whole if what was saved is at least this part of it: autograd alone would keep all of it, too.
_WORTH: Final = 4

_PLAIN: Final = (Tensor, nn.Parameter)


@dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """What goes, where to, and how much at once. Sizes are bytes.

    `min_bytes`: smaller tensors stay. `keep_bytes`: so much of what was saved last stays on the device, as backward
    needs it first. `host_capacity`: so much may lie in host memory, the latest of it; the rest goes to files in `nvme`,
    a folder per drive, or stays on the device where there are none. None: no limit. `in_flight`: bytes on their way out
    at once. `prefetch`: bytes on their way back, or back, ahead of their use; 0 fetches what is asked for and nothing
    else. Host memory holds up to `host_capacity + in_flight + prefetch` at a time, or one tensor more where those are
    smaller than a tensor. `pin_memory`: lock it for transfers to the GPU, without which copies don't run beside the
    computation. `force`: on a CPU, copy to other host memory, which is of no use except in tests.
    """

    min_bytes: int = 1 << 20
    keep_bytes: int = 0
    host_capacity: int | None = None
    nvme: tuple[str | os.PathLike[str], ...] = ()
    in_flight: int = 256 << 20
    prefetch: int = 256 << 20
    pin_memory: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        least = {"min_bytes": 1, "keep_bytes": 0, "in_flight": 1, "prefetch": 0, "host_capacity": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"{name}: expected at least {bound} bytes; found {value}")
        if isinstance(self.nvme, str | os.PathLike):
            raise TypeError(f"nvme: expected a tuple of folders; found {self.nvme!r}. Write ({self.nvme!r},)")
        for folder in self.nvme:
            if not Path(folder).is_dir():
                raise NotADirectoryError(f"nvme: {os.fspath(folder)!r} is not a folder; make it, or name another")


class _Version:
    """Finds out whether a tensor was changed in place after it was saved, without keeping its memory."""

    __slots__ = ("_saved", "_shape", "_witness")

    def __init__(self, tensor: Tensor) -> None:
        self._saved = tensor._version
        self._shape = tuple(tensor.shape)
        # A detached tensor counts versions together with the tensor, and goes on doing so when its data are replaced.
        self._witness = tensor.detach()
        self._witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def check(self) -> None:
        _check_version(self._witness, self._saved, self._shape)


def _check_version(tensor: Tensor, saved: int, shape: tuple[int, ...]) -> None:
    if tensor._version != saved:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"{kind} tensor of shape {shape} on {tensor.device} is at version {tensor._version}; expected version "
            f"{saved} instead. torch.autograd.set_detect_anomaly(True) shows the operation that saved it"
        )


class _Kept:
    """A tensor that was left alone."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # A result must not be held as it is: it holds the node that is about to hold this.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version

    def unpack(self) -> Tensor:
        if self._version is not None:
            _check_version(self._tensor, self._version, tuple(self._tensor.shape))
        return self._tensor


class _Offloaded:
    """A tensor whose bytes are a record's."""

    __slots__ = ("_dtype", "_handle", "_index", "_offset", "_saves", "_shape", "_store", "_stride", "_version")

    def __init__(self, tensor: Tensor, start: int, store: RecordStore, source: Source, saves: SavePass) -> None:
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset() * tensor.element_size() - start
        self._version = _Version(tensor)
        self._store = store
        self._saves = saves
        self._handle: Handle
        self._handle, self._index = store.save(source, saves)

    def unpack(self) -> Tensor:
        self._version.check()
        flat = self._store.bring(self._handle, self._saves, self._index)
        start = (flat.storage_offset() + self._offset) // self._dtype.itemsize
        whole = torch.empty(0, dtype=self._dtype, device=flat.device)
        return whole.set_(flat.untyped_storage(), start, self._shape, self._stride)


class _Saver(threading.local):
    """The contexts that this thread is in."""

    def __init__(self) -> None:
        self.hooks: list[saved_tensors_hooks] = []


class OffloadActivations:
    """A context in which what autograd saves goes out of the device until backward needs it.

        offload = OffloadActivations(ActivationOptions(keep_bytes=1 << 28))
        for batch in batches:
            with offload:
                loss = model(batch)
            loss.backward()

    Parameters, frozen ones too, leaves that require gradients and what shares their memory stay. `model`: its buffers
    stay as well. `keeps`: asked about each other tensor that may go; what it says True to stays. Memory that comes and
    goes behind autograd's back must be named there, unless it is that of a parameter when autograd saves it.

    On a CPU, host memory is where activations are already: only files free memory, and without them nothing is done.

    Saved tensors stay as they are if they are no plain strided tensors, a small part of a large storage, or saved while
    backward runs, as by checkpointing's second forward or for second derivatives. A context may be entered again and
    again, and by several threads at once. Backward may run inside or outside of it. CUDA graphs can't be captured with
    it.

    A write that fails is raised by the next tensor that is saved, or by backward: OSError with the path.
    """

    def __init__(
        self,
        options: ActivationOptions | None = None,
        *,
        model: nn.Module | None = None,
        keeps: Callable[[Tensor], bool] | None = None,
    ) -> None:
        self._options = ActivationOptions() if options is None else options
        self._model = model
        self._keeps = keeps
        budgets = Budgets(
            keep=self._options.keep_bytes,
            host=self._options.host_capacity,
            in_flight=self._options.in_flight,
            prefetch=self._options.prefetch,
        )
        folders = [Path(folder) for folder in self._options.nvme]
        self._store = RecordStore(budgets, folders, pin=self._options.pin_memory)
        self._links: dict[torch.device, Link | None] = {}
        self._owned: dict[int, StorageWeakRef] = {}
        self._owned_until_swept = 1024
        self._thread = _Saver()
        self._closed = False

    def __enter__(self) -> OffloadActivations:
        if self._closed:
            raise RuntimeError("OffloadActivations is closed; make another one")
        for buffer in self._model.buffers() if self._model is not None else ():
            if buffer.layout is torch.strided:
                self._note_owned(buffer.untyped_storage())
        hooks = saved_tensors_hooks(_Pass(self).pack, _unpack)
        hooks.__enter__()
        self._thread.hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.hooks.pop().__exit__(kind, error, trace)
        self._store.settle()

    def statistics(self) -> ActivationStatistics:
        """What has been done so far, and how it stands."""
        return self._store.statistics()

    def synchronize(self) -> None:
        """Wait for every copy, read and write under way. Their failures are raised where the bytes are needed."""
        self._store.synchronize()

    def close(self) -> None:
        """Give memory and files back. A graph that was saved here can't be used any more. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._store.close()

    # -------------------------------------------------------------------------------------------------------- what goes

    def save(self, tensor: Tensor, saves: SavePass) -> _Kept | _Offloaded:
        """Decide about one tensor."""
        bounds = self._bounds(tensor)
        link = None if bounds is None else self._link(tensor.device)
        if bounds is None or link is None:
            self._store.keep()
            return _Kept(tensor)
        start, end = bounds
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (end - start,), (1,))
        key = (storage._cdata, start, end, tensor._version)
        return _Offloaded(tensor, start, self._store, Source(key, StorageWeakRef(storage), flat, link), saves)

    def _bounds(self, tensor: Tensor) -> tuple[int, int] | None:
        """The bytes of its storage that are to go; None: it stays."""
        if not _plain(tensor) or torch._C._current_graph_task_id() != -1:
            return None
        if self._is_owned(tensor) or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        bounds = _worth_moving(tensor, self._options.min_bytes)
        if bounds is None or (self._keeps is not None and self._keeps(tensor)):
            return None
        return bounds

    def _is_owned(self, tensor: Tensor) -> bool:
        """Whether the memory is a parameter's, or somebody's who lets gradients add up."""
        storage = tensor.untyped_storage()
        for leaf in (tensor, tensor._base):
            if leaf is not None and leaf.is_leaf and (leaf.requires_grad or isinstance(leaf, nn.Parameter)):
                self._note_owned(storage)
                return True
        return storage._cdata in self._owned

    def _note_owned(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._owned:
            return
        # The reference keeps the address from serving another storage.
        self._owned[storage._cdata] = StorageWeakRef(storage)
        if len(self._owned) > self._owned_until_swept:
            self._owned = {place: owned for place, owned in self._owned.items() if not owned.expired()}
            self._owned_until_swept = 2 * len(self._owned) + 1024

    def _link(self, device: torch.device) -> Link | None:
        if device not in self._links:
            self._links[device] = self._make_link(device)
        return self._links[device]

    def _make_link(self, device: torch.device) -> Link | None:
        if device.type == "cuda":
            return CudaLink(device)
        if device.type != "cpu":
            _log.warning("activations on %s stay there: nothing but CUDA devices and CPUs is supported", device)
            return None
        if self._options.force:
            return CopyLink(device)
        if self._options.nvme:
            return SameMemory()
        _log.warning(
            "activations on the CPU stay where they are: that is host memory already; name folders in `nvme` to free it"
        )
        return None


class _Pass:
    """One time that the context is entered: the saves of one forward pass after the other."""

    def __init__(self, owner: OffloadActivations) -> None:
        self._owner = owner
        self._saves = SavePass(owner._store.orders)

    def pack(self, tensor: Tensor) -> _Kept | _Offloaded:
        if self._saves.asked:
            self._saves = SavePass(self._owner._store.orders)
        return self._owner.save(tensor, self._saves)


def _unpack(saved: _Kept | _Offloaded) -> Tensor:
    return saved.unpack()


def _plain(tensor: Tensor) -> bool:
    """Whether it is nothing but bytes of a storage."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.is_inference())
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _worth_moving(tensor: Tensor, least: int) -> tuple[int, int] | None:
    """The bytes of the storage that hold the tensor, if they are worth a copy.

    The whole storage where the tensor is a good part of it, else those from its first to its last byte.
    """
    if tensor.numel() == 0:
        return None
    steps = [(int(size), int(step)) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    item = tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    size = min(math.prod(size for size, _ in steps) * item, held)
    if size < least:
        return None
    if held <= _WORTH * size:
        return 0, held
    span = (1 + sum((size - 1) * step for size, step in steps)) * item
    if span > _WORTH * size:
        return None
    start = int(tensor.storage_offset()) * item
    return start, start + span
