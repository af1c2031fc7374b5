"""Collectives among processes of one host, through memory that they share.

Problem: between ranks of one host a socket copies every byte several times; that costs the time of cores that could
compute.
Idea: `SharedMemoryGroup` gives each rank a ring of slots that the others read. Bytes are written once, and folded
straight out of the ring; a thread of the native core does it while the caller computes (csrc/core/shared_memory_*.h).
Invariants: reductions are left folds in the order of the ranks, in float32 for 16-bit floats and rounded once, so all
ranks get the same bits, whatever the sizes; no memory has a name, so nothing is left behind however a process ends; a
peer that ended, or issued another call, ends a call in an error that names it, never in a hang.
"""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from .core import CORE

__all__ = [
    "SharedMemoryCall",
    "SharedMemoryError",
    "SharedMemoryFailure",
    "SharedMemoryGroup",
    "SharedMemoryWork",
    "shared_memory_refusal",
]

SLOT_BYTES: Final = 1 << 17
SLOTS: Final = 8
_VERSION: Final = 2  # of what ranks tell each other and of the layout of their memory
_LINE: Final = 64  # SharedMemoryGroup deals slots out in lines of the cache
_LOOK_SECONDS: Final = 0.2  # how often a waiting thread returns to Python, which handles signals

Trouble: TypeAlias = Literal["ended", "gave up", "closed", "differs", "late", "shut down"]

# In the order of CallKind, FoldOp, FoldType and Trouble in the core.
_KINDS: Final = ("all_gather", "broadcast", "all_to_all", "reduce_scatter", "all_reduce")
_OPS: Final = ("sum", "mean", "max", "min")
_FOLDED: Final[Mapping[torch.dtype, int]] = MappingProxyType(
    {
        torch.float32: 0,
        torch.bfloat16: 1,
        torch.float16: 2,
        torch.float64: 3,
        torch.int8: 4,
        torch.uint8: 5,
        torch.int16: 6,
        torch.int32: 7,
        torch.int64: 8,
        torch.bool: 5,
    }
)
_TROUBLES: Final[tuple[tuple[Trouble, str], ...]] = (
    ("ended", "its process has ended"),
    ("gave up", "it gave up on a call of this group"),
    ("closed", "it closed the group before its part of the call was done"),
    ("differs", "it issued another call"),
    ("late", "nothing came from it for {timeout:g} s: it is stuck, or issued fewer calls"),
    ("shut down", "the group was closed"),
)


def shared_memory_refusal() -> str:
    """Why ranks cannot share memory on this machine; empty where they can."""
    if CORE.module is None:
        return CORE.reason
    if sys.platform != "linux":
        return f"shared-memory groups need Linux, this is {sys.platform}"
    try:
        CORE.module.SharedMemoryEndpoint(slot_bytes=_LINE, slots=2).close()
        _host()
    except OSError as error:
        return _text(error)
    return ""


@dataclass(frozen=True, kw_only=True)
class SharedMemoryCall:
    """A call as one rank issued it: its number in the group, its label, and the bytes of one rank's piece."""

    number: int
    label: str
    nbytes: int
    dtype: str

    def __str__(self) -> str:
        return f"'{self.label}' of {self.nbytes} bytes of {self.dtype} as number {self.number}"


@dataclass(frozen=True, kw_only=True)
class SharedMemoryFailure:
    """Why a call did not complete: `reason` speaks of the rank `peer`, or of the group where that is None.

    `trouble` says the same to programs. `mine` and `theirs`: the first calls that differed, where ranks issued
    different ones.
    """

    trouble: Trouble
    reason: str
    peer: int | None
    mine: SharedMemoryCall | None = None
    theirs: SharedMemoryCall | None = None

    def __str__(self) -> str:
        about = self.reason if self.peer is None else f"of rank {self.peer}: {self.reason}"
        return about if self.mine is None else f"{about}, {self.theirs}; this rank issued {self.mine}"


class SharedMemoryError(RuntimeError):
    """A call did not complete, or a group could not be made. The group is then of no more use, on any rank."""


_UnderWay: TypeAlias = tuple[Any, tuple[Tensor, ...]]  # a call of the core, and the tensors that it works on


class SharedMemoryWork:
    """A call under way."""

    def __init__(self, group: SharedMemoryGroup, native: Any, label: str) -> None:
        self._group = group
        self._native = native
        self._label = label
        self._settled = False
        self.failure: SharedMemoryFailure | None = None  # once `wait` has raised

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._native.wait(milliseconds=0))

    def wait(self) -> None:
        """Return once the result is there. Further calls give the same.

        Raises SharedMemoryError, and tells more in `failure`, if a peer ended, issued another call, or did nothing for
        as long as the group's timeout.
        """
        if not self._settled:
            self._group._wait_for(self._native)
            self.failure = self._group._failure(self._native)
            self._settled = True
            self._group._forget_ended()
        if self.failure is not None:
            raise SharedMemoryError(f"{self._label} failed on rank {self._group.rank}: {self.failure}")


def _close(native: Any, under_way: list[_UnderWay]) -> None:
    """Runs when the group is dropped and at exit: tensors stay alive until nothing touches them any more."""
    native.close()
    under_way.clear()


class SharedMemoryGroup:
    """Some processes of one host, and collectives on contiguous tensors in host memory among them.

    All ranks issue the same calls in the same order, from any thread; they run in that order, and may be waited for in
    any. A call completes only when all ranks have issued it. Until its work is waited for, its tensors must stay
    untouched. Only the process that made the group can use it, not one forked from it.

    A call's label is compared too, and told where ranks issued different calls: at most 191 bytes of it.

    Args:
        rank, size: of this process among those of the group; at least two.
        exchange: gives every rank's bytes (up to 1 KiB) in the order of ranks; called twice.
        timeout: seconds without any progress after which a wait gives up.
        slot_bytes, slots: each rank shares ``slots * slot_bytes`` bytes, which bounds what is under way; a slot has at
            least 64 bytes per rank. The same on all ranks.

    Raises:
        SharedMemoryError: the processes cannot share memory; raised on all ranks alike, so that all can do without.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Callable[[bytes], Sequence[bytes]],
        *,
        timeout: float = 1800.0,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
    ) -> None:
        if not 0 <= rank < size or size < 2:
            raise ValueError(
                f"SharedMemoryGroup: expected a rank below size, which is at least 2; found {rank}, {size}"
            )
        if slots < 2 or slot_bytes % _LINE or slot_bytes < _LINE * size:
            raise ValueError(
                f"SharedMemoryGroup: expected at least 2 slots, of a multiple of {_LINE} bytes and at least {_LINE} "
                f"per rank; found {slots} of {slot_bytes} bytes for {size} ranks"
            )
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._owner = os.getpid()
        self._under_way: list[_UnderWay] = []
        self._native = _connected(rank, exchange, slot_bytes, slots)
        self._finalizer = weakref.finalize(self, _close, self._native, self._under_way)

    @staticmethod
    def folds(dtype: torch.dtype) -> bool:
        """Whether `all_reduce` and `reduce_scatter` take tensors of this dtype; the other calls take any."""
        return dtype in _FOLDED

    def all_reduce(self, tensor: Tensor, op: str = "sum", *, label: str = "") -> SharedMemoryWork:
        """Reduce `tensor` over the ranks, in place. `op`: sum, mean (of floating-point numbers), max or min."""
        self._check("all_reduce", tensor)
        return self._submit("all_reduce", tensor, tensor, _nbytes(tensor), op=op, label=label or f"all_reduce {op}")

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> SharedMemoryWork:
        """Concatenate the ranks' shards in `output`. `shard` may be this rank's own slice of it."""
        self._check("all_gather", output, shard)
        self._check_times("all_gather", "output", output, "shard", shard)
        return self._submit("all_gather", output, shard, _nbytes(shard), label=label or "all_gather")

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str = "sum", *, label: str = "") -> SharedMemoryWork:
        """Reduce the ranks' `input`, and leave this rank's slice in `output`, which may be that slice of `input`."""
        self._check("reduce_scatter", output, input)
        self._check_times("reduce_scatter", "input", input, "output", output)
        label = label or f"reduce_scatter {op}"
        return self._submit("reduce_scatter", output, input, _nbytes(output), op=op, label=label)

    def broadcast(self, tensor: Tensor, src: int = 0, *, label: str = "") -> SharedMemoryWork:
        """Copy `tensor` of the rank `src` to all."""
        self._check("broadcast", tensor)
        if not 0 <= src < self.size:
            raise ValueError(f"broadcast: expected src to be a rank below {self.size}; found {src}")
        label = label or f"broadcast from {src}"
        return self._submit("broadcast", tensor, tensor, _nbytes(tensor), root=src, label=label)

    def all_to_all(self, output: Tensor, input: Tensor, *, label: str = "") -> SharedMemoryWork:
        """Send chunk j of `input` to rank j, whose chunk for this rank lands in chunk j of `output`."""
        self._check("all_to_all", output, input)
        if output.numel() != input.numel() or input.numel() % self.size:
            raise ValueError(
                f"all_to_all: expected output and input of the same length, a multiple of {self.size}; found "
                f"{output.numel()} and {input.numel()} elements"
            )
        return self._submit("all_to_all", output, input, _nbytes(input) // self.size, label=label or "all_to_all")

    def close(self) -> None:
        """End the calls under way, on all ranks, and give the memory back. Safe to call twice."""
        self._finalizer()

    def _check(self, op: str, *tensors: Tensor) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{op}: the group belongs to process {self._owner}, from which this one was forked; make another here"
            )
        if not self._finalizer.alive:
            raise ValueError(f"{op}: the group is closed")
        for tensor in tensors:
            if not tensor.is_cpu or not tensor.is_contiguous():
                raise ValueError(
                    f"{op}: expected contiguous tensors in host memory; found one on {tensor.device} of shape "
                    f"{tuple(tensor.shape)} and strides {tensor.stride()}"
                )
            if tensor.dtype != tensors[0].dtype:
                raise TypeError(f"{op}: expected tensors of one dtype; found {tensors[0].dtype} and {tensor.dtype}")

    def _check_times(self, op: str, whole_name: str, whole: Tensor, part_name: str, part: Tensor) -> None:
        if whole.numel() != self.size * part.numel():
            raise ValueError(
                f"{op}: expected {whole_name} to have {self.size} times the elements of {part_name}; found "
                f"{whole.numel()} and {part.numel()}"
            )

    def _submit(
        self, kind: str, output: Tensor, input: Tensor, nbytes: int, *, label: str, op: str = "", root: int = 0
    ) -> SharedMemoryWork:
        folded = _fold_type(kind, op, output.dtype) if op else 0
        if not output.is_inference():
            # The core writes behind autograd's back: tell it.
            torch.autograd.graph.increment_version(output)
        native = self._native.submit(
            kind=_KINDS.index(kind),
            input=input.data_ptr(),
            output=output.data_ptr(),
            bytes=nbytes,
            label=label,
            dtype=str(output.dtype).removeprefix("torch."),
            type=folded,
            op=_OPS.index(op) if op else 0,
            root=root,
        )
        self._forget_ended()
        self._under_way.append((native, (output, input)))
        return SharedMemoryWork(self, native, label)

    def _forget_ended(self) -> None:
        self._under_way[:] = [each for each in self._under_way if not each[0].wait(milliseconds=0)]

    def _wait_for(self, native: Any) -> None:
        """Block until it has ended, which a wait without progress for too long brings about."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"the call belongs to process {self._owner}, from which this one was forked; wait there")
        progress, deadline = -1, 0.0
        while not native.wait(milliseconds=int(min(_LOOK_SECONDS, self._timeout) * 1e3) + 1):
            if not self._finalizer.alive:
                continue
            now = self._native.progress()
            if now != progress:
                progress, deadline = now, time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                self._native.expire(native)

    def _failure(self, native: Any) -> SharedMemoryFailure | None:
        trouble, peer, mine, theirs = native.outcome()
        if not trouble:
            return None
        kind, reason = _TROUBLES[trouble - 1]
        return SharedMemoryFailure(
            trouble=kind,
            reason=reason.format(timeout=self._timeout),
            peer=peer if peer >= 0 else None,
            mine=_call(mine) if kind == "differs" else None,
            theirs=_call(theirs) if kind == "differs" else None,
        )


def _call(described: tuple[int, str, int, str]) -> SharedMemoryCall:
    number, label, nbytes, dtype = described
    return SharedMemoryCall(number=number, label=label, nbytes=nbytes, dtype=dtype)


def _fold_type(kind: str, op: str, dtype: torch.dtype) -> int:
    allowed = _OPS if dtype.is_floating_point else _OPS[2:] if dtype is torch.bool else _OPS[:1] + _OPS[2:]
    if dtype not in _FOLDED or op not in allowed:
        raise TypeError(
            f"{kind}: {dtype} cannot be reduced by {op!r}; `folds` tells which dtypes can be, and of these "
            f"floating-point numbers by {', '.join(_OPS)}, integers by all but mean, truth values by max or min"
        )
    return _FOLDED[dtype]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------------------------------------------- connecting


def _host() -> str:
    """What processes that can see each other's numbers have in common."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def _connected(rank: int, exchange: Callable[[bytes], Sequence[bytes]], slot_bytes: int, slots: int) -> Any:
    """This rank's started endpoint. Raises SharedMemoryError on all ranks, with the same text, where one cannot."""
    native = None
    mine: dict[str, Any] = {"version": _VERSION, "shape": [slot_bytes, slots], "refusal": shared_memory_refusal()}
    if not mine["refusal"]:
        try:
            native = _endpoint(slot_bytes, slots)
            mine.update(host=_host(), address=native.address())
        except OSError as error:
            mine["refusal"] = _text(error)
    everyone = [json.loads(text) for text in exchange(json.dumps(mine).encode())]
    problem = _disagreement(everyone)
    if not problem and native is not None:
        mine["refusal"] = _connect(native, rank, [tuple(one["address"]) for one in everyone])
        problem = _refused([text.decode() for text in exchange(mine["refusal"].encode()[:512])])
    if problem or native is None:
        raise SharedMemoryError(problem)
    native.start()
    return native


def _endpoint(slot_bytes: int, slots: int) -> Any:
    if CORE.module is None:
        raise OSError(CORE.reason)
    return CORE.module.SharedMemoryEndpoint(slot_bytes=slot_bytes, slots=slots)


def _connect(native: Any, rank: int, addresses: list[tuple[int, ...]]) -> str:
    try:
        native.connect(rank, addresses)
    except OSError as error:
        return _text(error)
    return ""


def _text(error: OSError) -> str:
    return error.strerror or str(error)


def _refused(refusals: list[str]) -> str:
    return next((f"rank {rank} cannot share memory: {text}" for rank, text in enumerate(refusals) if text), "")


def _disagreement(everyone: list[dict[str, Any]]) -> str:
    problem = _refused([one["refusal"] for one in everyone])
    for rank, one in enumerate(everyone):
        if problem:
            break
        if one["host"] != everyone[0]["host"]:
            problem = f"rank {rank} is on another host than rank 0, or in another container"
        elif (one["version"], one["shape"]) != (everyone[0]["version"], everyone[0]["shape"]):
            problem = f"rank {rank} has another version of this library, or other slots, than rank 0"
    return problem
