"""Collectives on gloo, built from direct messages between ranks.

Problem: gloo's own reduce-scatter is an all-reduce of which most is thrown away, its all-gather copies every byte
twice more, its sums depend on the algorithm that the size selects, and a mismatch between ranks (another operation,
another size) pairs whatever bytes meet, or ends the process.

Idea: every rank sends each peer that peer's piece straight from the input, and receives each peer's piece straight to
where it belongs. For one exchange each peer gets

    a frame    the header (number on the axis, bytes, label) and, if it is small, the piece itself
    a payload  the piece, if it doesn't fit in the frame, as one message or as several parts

Frames are tagged by a sequence number alone, so the frames of one call always meet, and are compared. The tag of a
payload also hashes the label and the size, so payloads that don't belong together never meet.

Large pieces that must be summed arrive part by part in a small ring of scratch; a thread folds each part while it is
in the cache and the next ones are on the wire. An all-reduce sends every folded part on at once, so its two rounds
overlap.

Invariants:

- receives are posted when the call is issued: data moves while the caller computes;
- scratch is bounded: ``WINDOW * PART_BYTES`` for each peer, less for small pieces, and gone when the call is complete;
- no progress depends on the order in which handles are waited for, so that order is free, on every rank for itself.

A message from or to a peer that has died ends with gloo's connection error, and becomes a ``CollectiveError`` that
names the peer.
"""

from __future__ import annotations

import math
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from drivetrain.comm.call import Call, timed_out
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.mesh import Axis
from drivetrain.comm.reduction import Op, fold
from drivetrain.comm.trail import LABEL_BYTES

INLINE_BYTES: Final = 1 << 15  # pieces up to this size travel in the frame: one message instead of two
DIRECT_BYTES: Final = 3 << 20  # an all-reduce in which each rank gets at most this sends all to all: one hop, not two
PART_BYTES: Final = 1 << 20  # of a payload that is folded: fits a second-level cache, large beside a message's cost
WINDOW: Final = 4  # parts on the wire from each peer

_Message: TypeAlias = Callable[[list[torch.Tensor], int, int], dist.Work]  # (tensors, peer, tag)

_HEADER: Final = struct.Struct(f"<qq{LABEL_BYTES}s")  # number on the axis, bytes, label
_SEQUENCE_BITS: Final = 15  # calls in flight on one axis at once; the other 16 bits of a tag tell payloads apart


class Exchange:
    """One round of messages of one call. Pieces are contiguous bytes, and stay untouched until ``wait``."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._label = call.issued.label.encode()
        self._sequence = call.axis.next_sequence()
        self._group = call.axis.group
        self._headers: dict[int, torch.Tensor] = {}
        # Work stands last, as CPython releases a tuple from its end: gloo lets go of memory before it is freed.
        self._frames: list[tuple[int, int, torch.Tensor | None, torch.Tensor, dist.Work]] = []
        self._received: list[tuple[int, torch.Tensor, dist.Work]] = []
        self._sent: list[tuple[int, torch.Tensor, dist.Work]] = []

    def receive(self, pieces: Mapping[int, torch.Tensor], *, part: int | None = None) -> None:
        """Post the receives of pieces, by rank in the axis of who sends them; in parts of ``part`` bytes if given."""
        for peer, piece in pieces.items():
            raw = _bytes(piece)
            nbytes = raw.numel()
            if part is None and nbytes <= INLINE_BYTES:
                self._frame(peer, nbytes, raw)
                continue
            self._frame(peer, nbytes)
            for view in torch.split(raw, part or nbytes):
                self._received.append((peer, view, self.receive_part(view, peer, nbytes)))

    def send(self, pieces: Mapping[int, torch.Tensor], *, part: int | None = None) -> None:
        """Send pieces, by rank in the axis of who gets them; in parts of ``part`` bytes if given."""
        for peer, piece in pieces.items():
            raw = _bytes(piece)
            nbytes = raw.numel()
            if part is None and nbytes <= INLINE_BYTES:
                self._announce(peer, nbytes, raw)
                continue
            self._announce(peer, nbytes)
            for view in torch.split(raw, part or nbytes):
                self.send_part(view, peer, nbytes)

    def expect(self, peer: int, nbytes: int) -> None:
        """Post the receive of a piece's frame; its ``nbytes`` will be received part by part."""
        self._frame(peer, nbytes)

    def announce(self, peer: int, nbytes: int) -> None:
        """Send a piece's frame; its ``nbytes`` will be sent part by part."""
        self._announce(peer, nbytes)

    def receive_part(self, part: torch.Tensor, peer: int, nbytes: int) -> dist.Work:
        """Post the receive of the next part of a piece of ``nbytes``. Parts arrive in the order of their sending."""
        return self._post(self._group.recv, _bytes(part), peer, self._tag(nbytes))

    def send_part(self, part: torch.Tensor, peer: int, nbytes: int) -> None:
        """Send the next part of a piece of ``nbytes``."""
        raw = _bytes(part)
        self._sent.append((peer, raw, self._post(self._group.send, raw, peer, self._tag(nbytes))))

    def check(self) -> None:
        """Block until every frame has come, and refuse the call if a peer issued another one."""
        for peer, nbytes, inline, frame, work in self._frames:
            self.finish(work, peer)
            if not torch.equal(frame[: _HEADER.size], self._header(nbytes)):
                raise self._mismatch(peer, frame)
            if inline is not None:
                inline.copy_(frame[_HEADER.size : _HEADER.size + nbytes])
        self._frames = []

    def wait(self) -> None:
        """Block until every piece received is there, and every piece sent may be written again."""
        self.check()
        for peer, _, work in self._received:
            self.finish(work, peer)
        for peer, _, work in self._sent:
            self.finish(work, peer)
        self._received, self._sent = [], []

    def finish(self, work: dist.Work, peer: int) -> None:
        """Block until one message is through."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _frame(self, peer: int, nbytes: int, inline: torch.Tensor | None = None) -> None:
        frame = torch.empty(_HEADER.size + INLINE_BYTES, dtype=torch.uint8)
        self._frames.append((peer, nbytes, inline, frame, self._post(self._group.recv, frame, peer, self._tag())))

    def _announce(self, peer: int, nbytes: int, inline: torch.Tensor | None = None) -> None:
        header = self._header(nbytes)
        frame = header if inline is None else torch.cat([header, inline])
        self._sent.append((peer, frame, self._post(self._group.send, frame, peer, self._tag())))

    def _post(self, method: _Message, raw: torch.Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return method([raw], peer, tag)
        except RuntimeError as error:
            raise self._lost(peer, error) from error

    def _header(self, nbytes: int) -> torch.Tensor:
        if nbytes not in self._headers:
            packed = bytearray(_HEADER.pack(self._call.issued.number, nbytes, self._label))
            self._headers[nbytes] = torch.frombuffer(packed, dtype=torch.uint8)
        return self._headers[nbytes]

    def _tag(self, nbytes: int | None = None) -> int:
        number = (self._sequence % (1 << _SEQUENCE_BITS)) << 16
        if nbytes is None:
            return number
        return number | 1 + zlib.crc32(b"%d %s" % (nbytes, self._label)) % 0xFFFF

    def _lost(self, peer: int, error: RuntimeError) -> CollectiveError:
        axis = self._call.axis
        who, text = axis.ranks[peer], str(error)
        if timed_out(error) and "closure" not in text:
            return self._call.lost(f"nothing came from rank {who} for {axis.watch.timeout:g} s", peer, late=True)
        told = text.partition("] ")[2].partition(". ")[0] or text  # without the place in gloo's source, and its advice
        return self._call.lost(f"the connection to rank {who} is gone ({told})", peer, late=False)

    def _mismatch(self, peer: int, frame: torch.Tensor) -> CollectiveError:
        """The error of a frame that says something else than ours."""
        _, _, theirs = _HEADER.unpack(bytes(frame[: _HEADER.size].tolist()))
        axis, issued = self._call.axis, self._call.issued
        label = theirs.rstrip(b"\0").decode(errors="replace")
        return self._call.mismatch(issued.number, {axis.world.rank: issued.label, axis.ranks[peer]: label})


class Gather:
    """All-gather: every piece goes from its owner straight to its place in everybody's output."""

    def __init__(self, call: Call, output: torch.Tensor, shard: torch.Tensor) -> None:
        places, axis = _cut(output, call.axis.size), call.axis
        self._exchange = Exchange(call)
        self._exchange.receive({peer: places[peer] for peer in _peers(axis)})
        self._exchange.send(dict.fromkeys(_peers(axis), shard))
        if places[axis.rank].data_ptr() != shard.data_ptr():
            places[axis.rank].copy_(shard)

    def wait(self) -> None:
        self._exchange.wait()


class Fold:
    """Every rank sends each peer a small piece, and folds what it gets, in rank order, when it is waited for.

    Pieces of different ranks may differ: one slice per rank for a reduce-scatter, or the whole tensor for an all-reduce
    in one hop.
    """

    def __init__(self, call: Call, output: torch.Tensor, pieces: list[torch.Tensor], op: Op) -> None:
        axis = call.axis
        scratch = iter(output.new_empty(axis.size - 1, output.numel()).unbind())
        self._parts = [pieces[rank] if rank == axis.rank else next(scratch) for rank in range(axis.size)]
        self._output, self._op = output, op
        self._exchange = Exchange(call)
        self._exchange.receive({peer: self._parts[peer] for peer in _peers(axis)})
        self._exchange.send({peer: pieces[peer] for peer in _peers(axis)})

    def wait(self) -> None:
        self._exchange.wait()
        fold(self._output, self._parts, self._op)
        self._parts = []


class StreamedFold:
    """As ``Fold``, for large pieces: folded part by part, on a thread, as the parts arrive.

    With ``spread`` this is an all-reduce: ``pieces`` are slices of one tensor, ``output`` is this rank's own, and every
    part of it is sent to all peers as soon as it is folded. Their parts are received straight into the slices that are
    sent to them: a peer can only send a folded part after ours has arrived there, so none is overwritten too early.
    """

    def __init__(self, call: Call, output: torch.Tensor, pieces: list[torch.Tensor], op: Op, *, spread: bool) -> None:
        self._axis, self._op, self._output, self._own = call.axis, op, output, pieces[call.axis.rank]
        self._peers, self._length = _peers(call.axis), PART_BYTES // output.element_size()
        theirs = {peer: pieces[peer] for peer in self._peers}
        self._collect, self._spread = Exchange(call), Exchange(call) if spread else None
        self._ring = self._make_ring()
        self._posted = deque(self._post(number) for number in range(len(self._ring)))
        for peer in self._peers:
            self._collect.expect(peer, _nbytes(output))
        if self._spread is not None:
            self._spread.receive(theirs, part=PART_BYTES)
            for peer in self._peers:
                self._spread.announce(peer, _nbytes(output))
        self._collect.send(theirs, part=PART_BYTES)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"{call.issued.op} on {call.axis.name}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._collect.wait()
        if self._spread is not None:
            self._spread.wait()

    def _make_ring(self) -> list[dict[int, torch.Tensor]]:
        slots = min(WINDOW, math.ceil(self._output.numel() / self._length))
        size = min(self._length, self._output.numel())
        scratch = self._output.new_empty(slots, len(self._peers), size)
        return [dict(zip(self._peers, slot.unbind(), strict=True)) for slot in scratch]

    def _post(self, number: int) -> list[tuple[int, dist.Work]]:
        """Receive all peers' parts of this number in the slot of the ring that is theirs."""
        size = min(self._length, self._output.numel() - number * self._length)
        slot, nbytes = self._ring[number % len(self._ring)], _nbytes(self._output)
        return [(peer, self._collect.receive_part(room[:size], peer, nbytes)) for peer, room in slot.items()]

    def _run(self) -> None:
        try:
            self._collect.check()
            outputs, owns = (torch.split(t, self._length) for t in (self._output, self._own))
            for number, (output, own) in enumerate(zip(outputs, owns, strict=True)):
                self._fold_part(number, output, own)
                if number + len(self._ring) < len(outputs):
                    self._posted.append(self._post(number + len(self._ring)))
                if self._spread is not None:
                    for peer in self._peers:
                        self._spread.send_part(output, peer, _nbytes(self._output))
        except BaseException as error:
            self._error = error
        finally:
            self._posted.clear()  # before the memory that gloo may still write to after a failure
            self._ring = []

    def _fold_part(self, number: int, output: torch.Tensor, own: torch.Tensor) -> None:
        for peer, work in self._posted.popleft():
            self._collect.finish(work, peer)
        slot, size = self._ring[number % len(self._ring)], own.numel()
        parts = [own if rank == self._axis.rank else slot[rank][:size] for rank in range(self._axis.size)]
        fold(output, parts, self._op)


class Broadcast:
    """Broadcast: the source sends all of it to everybody. Its link carries n - 1 copies: right for gloo's few ranks."""

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


def all_reduce(call: Call, tensor: torch.Tensor, op: Op) -> Fold | StreamedFold:
    """The faster all-reduce for the size. The results are the same to the bit."""
    size = call.axis.size
    if _nbytes(tensor) * (size - 1) <= DIRECT_BYTES or tensor.numel() < size:
        return Fold(call, tensor, [tensor] * size, op)
    slices = list(tensor.tensor_split(size))
    return StreamedFold(call, slices[call.axis.rank], slices, op, spread=True)


def reduce_scatter(call: Call, output: torch.Tensor, input: torch.Tensor, op: Op) -> Fold | StreamedFold:
    """The faster reduce-scatter for the size. The results are the same to the bit."""
    pieces = _cut(input, call.axis.size)
    if _nbytes(output) <= PART_BYTES:
        return Fold(call, output, pieces, op)
    return StreamedFold(call, output, pieces, op, spread=False)


def _cut(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    length = tensor.numel() // count
    return [tensor[i * length : (i + 1) * length] for i in range(count)]


def _peers(axis: Axis) -> list[int]:
    """The other ranks, nearest above first, so that not all ranks send to the same one at the same time."""
    return [(axis.rank + step) % axis.size for step in range(1, axis.size)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
