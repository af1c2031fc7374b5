"""What carries host tensors between ranks of one host faster than gloo: shared memory, handed in from above.

This package has no native code. Somebody who has (``drivetrain.kernels.SharedMemoryGroup`` fits) hands it to
``Mesh.create``; every axis whose ranks can share memory then uses it, and the others use gloo. Which one it is, is
agreed on by all ranks of the axis when it is made, so no rank waits on one while a peer is on the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist

SHARED_MEMORY_VARIABLE: Final = "DRIVETRAIN_SHARED_MEMORY"
"""The environment variable that switches shared memory off: 0 on any rank does it for the axes that it is on."""

_RECORD_BYTES: Final = 1024
_LENGTH_BYTES: Final = 2


class IssuedCall(Protocol):
    """A call as a rank issued it: its number on the axis, and the label that it was given."""

    @property
    def number(self) -> int: ...
    @property
    def label(self) -> str: ...


class SharedFailure(Protocol):
    """Why a call did not complete: ``reason`` speaks of the rank ``peer`` of the group, or of the group if it is None.

    ``trouble`` is "late" where nothing came for too long. ``mine`` and ``theirs`` are the first calls that differed,
    where ranks issued different ones.
    """

    @property
    def trouble(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def peer(self) -> int | None: ...
    @property
    def mine(self) -> IssuedCall | None: ...
    @property
    def theirs(self) -> IssuedCall | None: ...


class SharedWork(Protocol):
    """A call under way."""

    @property
    def failure(self) -> SharedFailure | None: ...

    def wait(self) -> None:
        """Return when the result is there; raise a RuntimeError, and fill ``failure``, where it won't come."""


class SharedGroup(Protocol):
    """Collectives as in ``collectives.py``, on checked tensors, with the results that ``reduction.py`` defines.

    Labels have up to ``trail.LABEL_BYTES`` ASCII characters. Ranks whose labels differ have issued different calls.
    Calls run in the order of their issue, also those that end with one another's peers at different times.
    """

    def folds(self, dtype: torch.dtype) -> bool:
        """Whether ``all_reduce`` and ``reduce_scatter`` take this dtype. The others take any."""

    def all_reduce(self, tensor: torch.Tensor, op: str, *, label: str) -> SharedWork: ...
    def all_gather(self, output: torch.Tensor, shard: torch.Tensor, *, label: str) -> SharedWork: ...
    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str, *, label: str) -> SharedWork: ...
    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str) -> SharedWork: ...
    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, *, label: str) -> SharedWork: ...


class SharedMemory(Protocol):
    """Makes the group of ``size`` processes in which this one is ``rank``.

    ``exchange`` gives the bytes (up to 1 KiB) of every rank, and must be called equally often on all. A RuntimeError,
    on all ranks alike, says why they cannot share memory. ``timeout`` is in seconds without any progress.
    """

    def __call__(
        self, rank: int, size: int, exchange: Callable[[bytes], Sequence[bytes]], *, timeout: float
    ) -> SharedGroup: ...


def connect(
    shared_memory: SharedMemory | None, group: dist.ProcessGroup, timeout: float
) -> tuple[SharedGroup | None, str]:
    """The shared-memory group of the ranks of a gloo group, or None and the reason. COLLECTIVE over the group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(record: bytes) -> list[bytes]:
        return _exchange(record, group, size)

    refusals = [text.decode() for text in exchange(_refusal(shared_memory).encode())]
    refusal = next((f"on rank {index}, {text}" for index, text in enumerate(refusals) if text), "")
    if refusal or shared_memory is None:
        return None, refusal
    try:
        return shared_memory(rank, size, exchange, timeout=timeout), ""
    except RuntimeError as error:
        return None, str(error)


def _refusal(shared_memory: SharedMemory | None) -> str:
    if shared_memory is None:
        return "Mesh.create was given no shared_memory"
    setting = os.environ.get(SHARED_MEMORY_VARIABLE, "1")
    if setting not in ("0", "1"):
        raise ValueError(
            f"{SHARED_MEMORY_VARIABLE}={setting!r} is neither 1 (the default) nor 0, which switches shared memory off"
        )
    return f"{SHARED_MEMORY_VARIABLE}=0 switches it off" if setting == "0" else ""


def _exchange(record: bytes, group: dist.ProcessGroup, size: int) -> list[bytes]:
    if len(record) > _RECORD_BYTES - _LENGTH_BYTES:
        raise ValueError(f"a record of {len(record)} bytes; at most {_RECORD_BYTES - _LENGTH_BYTES} can be exchanged")
    padded = (len(record).to_bytes(_LENGTH_BYTES, "little") + record).ljust(_RECORD_BYTES, b"\0")
    records = [torch.empty(_RECORD_BYTES, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(records, torch.frombuffer(bytearray(padded), dtype=torch.uint8), group=group)
    received = [bytes(one.tolist()) for one in records]
    return [one[_LENGTH_BYTES:][: int.from_bytes(one[:_LENGTH_BYTES], "little")] for one in received]
