"""Collectives on gloo, built from direct messages between ranks.

Problem: gloo's own reduce-scatter is an all-reduce of which most is thrown away, its all-gather copies every byte twice more, and a
mismatch between ranks (other operation, other size) pairs whatever bytes meet, or ends the process.

Idea: every rank sends each peer that peer's piece straight from the input, and receives each peer's piece straight to where it belongs. For
one exchange, two messages go to each peer:

    frame     header (who, sequence number, operation, bytes) and, for small pieces, the piece itself
    payload   the piece, where it doesn't fit in the frame

The frame's tag is the sequence number alone, so frames of one call always meet and are compared; the payload's tag also hashes the
operation and the size, so payloads that don't belong together never meet.

Invariants:

- all receives are posted when the call is issued, so data moves while the caller computes;
- nothing but the frames is buffered: a rank's scratch is one piece per peer, and only where pieces must be summed;
- no message depends on the order in which handles are waited for.

A message that waits for a peer which has died ends with gloo's connection error, and becomes a ``CollectiveError`` naming the peer.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.mesh import Axis
from drivetrain.comm.reduction import Op, fold

INLINE_BYTES: Final = 4096  # pieces up to this size travel in the frame: one message instead of two
DIRECT_BYTES: Final = 1 << 16  # all-reduce: up to this size every rank sends all to all; one latency instead of two

_HEADER: Final = struct.Struct("<qq32s16s")  # sequence number, bytes, operation, dtype
_SEQUENCE_BITS: Final = 15  # calls in flight on one axis at once; the other 16 bits of a tag tell payloads apart


@dataclass(frozen=True, kw_only=True)
class Call:
    """What all ranks of the axis must agree on for one exchange."""

    axis: Axis
    op: str
    detail: str  # operation with its arguments ("all_reduce sum"), compared between ranks
    dtype: torch.dtype

    def error(self, reason: str, peer: int | None = None) -> CollectiveError:
        world_peer = None if peer is None else self.axis.ranks[peer]
        rank = self.axis.world.rank
        return CollectiveError(reason, op=self.op, axis=self.axis.name, rank=rank, peer=world_peer)


class Exchange:
    """One round of messages: pieces to some peers, pieces from some peers. Pieces are contiguous and stay untouched until ``wait``."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._sequence = call.axis.next_sequence()
        self._sends: list[tuple[int, dist.Work, torch.Tensor]] = []
        self._frames: list[tuple[int, dist.Work, torch.Tensor, torch.Tensor]] = []
        self._payloads: list[tuple[int, dist.Work, torch.Tensor]] = []

    def receive(self, pieces: Mapping[int, torch.Tensor]) -> None:
        """Post the receives of ``pieces``, by rank in the axis of who sends them."""
        for peer, piece in pieces.items():
            self._post_receive(peer, _bytes(piece))

    def send(self, pieces: Mapping[int, torch.Tensor]) -> None:
        """Send ``pieces``, by rank in the axis of who gets them."""
        for peer, piece in pieces.items():
            self._post_send(peer, _bytes(piece))

    def received(self) -> None:
        """Block until every piece has arrived."""
        for peer, work, frame, piece in self._frames:
            self._finish(work, peer)
            self._check(peer, frame, piece.numel())
            if 0 < piece.numel() <= INLINE_BYTES:
                piece.copy_(frame[_HEADER.size : _HEADER.size + piece.numel()])
        for peer, work, _ in self._payloads:
            self._finish(work, peer)
        self._frames, self._payloads = [], []

    def wait(self) -> None:
        """Block until every piece has arrived and every piece sent may be overwritten."""
        self.received()
        for peer, work, _ in self._sends:
            self._finish(work, peer)
        self._sends = []

    def _post_receive(self, peer: int, piece: torch.Tensor) -> None:
        frame = torch.empty(_HEADER.size + INLINE_BYTES, dtype=torch.uint8)
        self._frames.append((peer, self._irecv(frame, peer, self._tag()), frame, piece))
        if piece.numel() > INLINE_BYTES:
            self._payloads.append((peer, self._irecv(piece, peer, self._tag(piece.numel())), piece))

    def _post_send(self, peer: int, piece: torch.Tensor) -> None:
        header = self._header(piece.numel())
        inline = 0 < piece.numel() <= INLINE_BYTES
        frame = torch.cat([header, piece]) if inline else header
        self._sends.append((peer, self._isend(frame, peer, self._tag()), frame))
        if piece.numel() > INLINE_BYTES:
            self._sends.append((peer, self._isend(piece, peer, self._tag(piece.numel())), piece))

    def _irecv(self, piece: torch.Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return _made(dist.irecv(piece, group=self._call.axis.group, group_src=peer, tag=tag))
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _isend(self, piece: torch.Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return _made(dist.isend(piece, group=self._call.axis.group, group_dst=peer, tag=tag))
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _finish(self, work: dist.Work, peer: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _lost(self, peer: int, error: RuntimeError) -> CollectiveError:
        world_peer = self._call.axis.ranks[peer]
        return self._call.error(
            f"the connection to rank {world_peer} failed, or nothing came from it in time. Look at the output of rank {world_peer} first: "
            f"it died, is stuck, or issued fewer collectives. gloo says: {error}",
            peer,
        )

    def _header(self, nbytes: int) -> torch.Tensor:
        packed = _HEADER.pack(self._sequence, nbytes, self._call.detail.encode(), _dtype_name(self._call.dtype).encode())
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _check(self, peer: int, frame: torch.Tensor, nbytes: int) -> None:
        expected = self._header(nbytes)
        if torch.equal(frame[: _HEADER.size], expected):
            return
        sequence, their_bytes, detail, dtype = _HEADER.unpack(bytes(frame[: _HEADER.size].tolist()))
        theirs, their_dtype = detail.rstrip(b"\0").decode(errors="replace"), dtype.rstrip(b"\0").decode(errors="replace")
        world_peer = self._call.axis.ranks[peer]
        raise self._call.error(
            f"the ranks issued different collectives. Number {self._sequence} on this axis is '{self._call.detail}' here, which takes {nbytes} bytes of "
            f"{_dtype_name(self._call.dtype)} from rank {world_peer}; rank {world_peer} issued number {sequence}, '{theirs}', and sent {their_bytes} "
            f"bytes of {their_dtype}. All ranks of an axis must issue the same collectives in the same order.",
            peer,
        )

    def _tag(self, nbytes: int | None = None) -> int:
        number = (self._sequence % (1 << _SEQUENCE_BITS)) << 16
        if nbytes is None:
            return number
        signature = f"{self._call.detail} {self._call.dtype} {nbytes}".encode()
        return number | 1 + zlib.crc32(signature) % 0xFFFF


_PEER: Final = {dist.isend: "group_dst", dist.irecv: "group_src"}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")[:16]


def _peers(axis: Axis) -> list[int]:
    """The other ranks, nearest above first, so that not all ranks send to the same one at the same time."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


class Gather:
    """All-gather: every piece goes from its owner straight to its place in everybody's output."""

    def __init__(self, call: Call, output: torch.Tensor, shard: torch.Tensor) -> None:
        places = _cut(output, call.axis.size)
        self._exchange = Exchange(call)
        self._exchange.receive({peer: places[peer] for peer in _peers(call.axis)})
        self._exchange.send(dict.fromkeys(_peers(call.axis), shard))
        if places[call.axis.rank].data_ptr() != shard.data_ptr():
            places[call.axis.rank].copy_(shard)

    def wait(self) -> None:
        self._exchange.wait()


class ReduceScatter:
    """Reduce-scatter: every rank gets all ranks' pieces for it, and folds them in rank order."""

    def __init__(self, call: Call, output: torch.Tensor, input: torch.Tensor, op: Op) -> None:
        pieces, peers = _cut(input, call.axis.size), _peers(call.axis)
        self._output, self._op = output, op
        self._parts = _landing(output, pieces[call.axis.rank], call.axis)
        self._exchange = Exchange(call)
        self._exchange.receive({peer: self._parts[peer] for peer in peers})
        self._exchange.send({peer: pieces[peer] for peer in peers})

    def wait(self) -> None:
        self._exchange.received()
        fold(self._output, self._parts, self._op)
        self._parts = []
        self._exchange.wait()


class DirectAllReduce:
    """All-reduce in one round: everybody sends all of it to everybody. Best for small tensors, and for two ranks at any size."""

    def __init__(self, call: Call, tensor: torch.Tensor, op: Op) -> None:
        peers = _peers(call.axis)
        self._tensor, self._op = tensor, op
        self._parts = _landing(tensor, tensor, call.axis)
        self._exchange = Exchange(call)
        self._exchange.receive({peer: self._parts[peer] for peer in peers})
        self._exchange.send(dict.fromkeys(peers, tensor))

    def wait(self) -> None:
        self._exchange.wait()
        fold(self._tensor, self._parts, self._op)
        self._parts = []


class ShardedAllReduce:
    """All-reduce in two rounds: a reduce-scatter of one slice per rank, then an all-gather of the slices, in place.

    The second round's receives are posted at once: a slice's owner can only send it after it has our piece of it, so it cannot arrive
    while that piece is still being read. Its sends follow the sum, on a thread of this call, so that the rounds of several calls proceed
    whatever the order in which their handles are waited for.
    """

    def __init__(self, call: Call, tensor: torch.Tensor, op: Op) -> None:
        slices, peers = list(tensor.tensor_split(call.axis.size)), _peers(call.axis)
        self._own, self._op, self._peers = slices[call.axis.rank], op, peers
        self._parts = _landing(self._own, self._own, call.axis)
        self._reduce, self._gather = Exchange(call), Exchange(call)
        self._reduce.receive({peer: self._parts[peer] for peer in peers})
        self._gather.receive({peer: slices[peer] for peer in peers})
        self._reduce.send({peer: slices[peer] for peer in peers})
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._advance, name=f"all_reduce on {call.axis.name}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._reduce.wait()
        self._gather.wait()

    def _advance(self) -> None:
        try:
            self._reduce.received()
            fold(self._own, self._parts, self._op)
            self._parts = []
            self._gather.send(dict.fromkeys(self._peers, self._own))
        except BaseException as error:
            self._error = error


class Broadcast:
    """Broadcast: the source sends all of it to everybody. Its link carries n - 1 copies, which is fine for what gloo is used for."""

    def __init__(self, call: Call, tensor: torch.Tensor, src: int) -> None:
        self._exchange = Exchange(call)
        if call.axis.rank == src:
            self._exchange.send(dict.fromkeys(_peers(call.axis), tensor))
        else:
            self._exchange.receive({src: tensor})

    def wait(self) -> None:
        self._exchange.wait()


class AllToAll:
    """All-to-all: chunk j of the input goes to rank j, whose chunk for us lands in chunk j of the output."""

    def __init__(self, call: Call, output: torch.Tensor, input: torch.Tensor) -> None:
        outgoing, incoming, axis = _cut(input, call.axis.size), _cut(output, call.axis.size), call.axis
        self._exchange = Exchange(call)
        self._exchange.receive({peer: incoming[peer] for peer in _peers(axis)})
        self._exchange.send({peer: outgoing[peer] for peer in _peers(axis)})
        incoming[axis.rank].copy_(outgoing[axis.rank])

    def wait(self) -> None:
        self._exchange.wait()


def all_reduce(call: Call, tensor: torch.Tensor, op: Op) -> DirectAllReduce | ShardedAllReduce:
    """The faster of the two all-reduces. Their results are the same to the bit."""
    nbytes = tensor.numel() * tensor.element_size()
    direct = call.axis.size == 2 or nbytes <= DIRECT_BYTES
    return DirectAllReduce(call, tensor, op) if direct else ShardedAllReduce(call, tensor, op)


def _landing(output: torch.Tensor, own: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """Where the pieces of all ranks are when they are folded into ``output``, by rank.

    The own piece stays where it is. One peer's piece lands in ``output`` itself, unless the own piece is there; the others in scratch.
    """
    peers, length = _peers(axis), output.numel()
    free = output.data_ptr() != own.data_ptr()
    places = len(peers) - free
    rooms = [output] * free + _cut(output.new_empty(places * length), places)
    parts = dict(zip(peers, rooms, strict=True))
    return [own if rank == axis.rank else parts[rank] for rank in range(axis.size)]


def _made(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this process is not in the axis' process group")
    return work


def _cut(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    length = tensor.numel() // max(count, 1)
    return [tensor[i * length : (i + 1) * length] for i in range(count)]


def _peers(axis: Axis) -> list[int]:
    """The other ranks, nearest above first, so that not all ranks send to the same one at the same time."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")[:16]
