"""Collectives that send encoded tensors, in one hop or in two.

Problem: between hosts a byte costs many times what it costs within one, and most values need far fewer bits than they
have (ZeRO++, arXiv:2306.10209).
Idea: encode once, move bytes with the plain collectives, decode where they arrive. A sum is never taken of encoded
values: every rank sends each other rank its piece, encoded, and the receiver decodes and adds in fp32. In two hops the
first runs within a host (``within``), where its results are encoded again, and the second between hosts (``between``),
which then carries ``within.size`` times fewer bytes.
Invariants: the order of additions is that of the ranks; all ranks decode the same bytes, so what is gathered is the
same everywhere, on the rank that sent it too. Ranks of the whole are numbered ``between`` outermost, as ``Mesh.split``
has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from drivetrain.comm.codec import Codec
from drivetrain.comm.collectives import all_gather, all_to_all
from drivetrain.comm.mesh import Axis
from drivetrain.comm.trail import Purpose


class Waitable(Protocol):
    """Something under way. A `Handle` is one."""

    def wait(self) -> None:
        """Return once the outputs are ready."""
        ...


class Staged:
    """A first step under way, and what must follow it. The rest runs in `wait`, which may be called again."""

    def __init__(self, first: Waitable, then: Callable[[], None]) -> None:
        self._first: Waitable | None = first
        self._then = then

    def wait(self) -> None:
        """Finish all steps."""
        if self._first is not None:
            self._first.wait()
            self._first = None
            self._then()


def all_gather_encoded(
    output: torch.Tensor, shard: torch.Tensor, axis: Axis, codec: Codec, *, purpose: Purpose | str = ""
) -> Waitable:
    """`all_gather` of ``shard`` through ``codec``: every rank gets every shard as it comes out of the codec."""
    numel, size = shard.numel(), codec.encoded_bytes(shard.numel())
    wire = torch.empty(axis.size, size, dtype=torch.uint8, device=shard.device)
    codec.encode(shard, wire[axis.rank])

    def decode() -> None:
        for rank, encoded in enumerate(wire):
            codec.decode_sum([encoded], output[rank * numel : (rank + 1) * numel])

    return Staged(all_gather(wire.view(-1), wire[axis.rank], axis, purpose=purpose), decode)


def all_gather_in_two(
    output: torch.Tensor,
    shard: torch.Tensor,
    within: Axis,
    between: Axis,
    codec: Codec | None = None,
    *,
    purpose: Purpose | str = "",
) -> Waitable:
    """All-gather between hosts first and within them after, encoded on both ways if there is a codec.

    Each shard crosses between two hosts once, instead of once for every rank of the other host.
    """
    numel = shard.numel()
    size = shard.element_size() * numel if codec is None else codec.encoded_bytes(numel)
    wire = torch.empty(within.size, between.size, size, dtype=torch.uint8, device=shard.device)
    own = wire[within.rank, between.rank]
    if codec is None:
        own.copy_(shard.view(torch.uint8))
    else:
        codec.encode(shard, own)

    def rest() -> None:
        all_gather(wire.view(-1), wire[within.rank].view(-1), within, purpose=purpose).wait()
        for inner in range(within.size):
            for outer in range(between.size):
                start = (outer * within.size + inner) * numel
                place = output[start : start + numel]
                if codec is None:
                    place.copy_(wire[inner, outer].view(shard.dtype))
                else:
                    codec.decode_sum([wire[inner, outer]], place)

    return Staged(all_gather(wire[within.rank].view(-1), own, between, purpose=purpose), rest)


def reduce_scatter_encoded(
    output: torch.Tensor,
    input: torch.Tensor,
    within: Axis,
    between: Axis,
    codec: Codec,
    *,
    near: Codec | None = None,
    adjust: Callable[[torch.Tensor], None] | None = None,
    op: Literal["sum", "mean"] = "sum",
    purpose: Purpose | str = "",
) -> Waitable:
    """`reduce_scatter` through ``codec``, within hosts first and between them after (qgZ of ZeRO++).

    With one rank on either axis this is one hop.

    Args:
        output: 1-D. It may be this rank's slice of ``input``.
        input: 1-D, as many pieces as there are ranks; undefined afterwards.
        near: encodes what stays within hosts where there are two hops; None: ``codec`` does.
        adjust: called with what ``codec`` is about to encode, [pieces, elements], which it may change in place.
    """
    inner, outer, numel = within.size, between.size, output.numel()
    last = _LastHop(output, codec, adjust, 1.0 / (inner * outer) if op == "mean" else 1.0, purpose)
    if inner == 1:
        return last.start(input.view(outer, numel), between)
    if outer == 1:
        return last.start(input.view(inner, numel), within)
    first, pieces = near or codec, input.view(outer, inner, numel)
    sent = torch.empty(inner, outer, first.encoded_bytes(numel), dtype=torch.uint8, device=input.device)
    for peer in range(inner):
        for target in range(outer):
            first.encode(pieces[target, peer], sent[peer, target])
    came = torch.empty_like(sent)

    def rest() -> None:
        partial = torch.empty(outer, numel, dtype=torch.float32, device=input.device)
        for target in range(outer):
            first.decode_sum(list(came[:, target]), partial[target])
        last.start(partial, between).wait()

    return Staged(all_to_all(came.view(-1), sent.view(-1), within, purpose=purpose), rest)


class _LastHop:
    """Every rank sends each other rank its piece, and adds what it gets."""

    def __init__(
        self,
        output: torch.Tensor,
        codec: Codec,
        adjust: Callable[[torch.Tensor], None] | None,
        factor: float,
        purpose: Purpose | str,
    ) -> None:
        self._output = output
        self._codec = codec
        self._adjust = adjust
        self._factor = factor
        self._purpose = purpose

    def start(self, pieces: torch.Tensor, axis: Axis) -> Waitable:
        if self._adjust is not None:
            self._adjust(pieces)
        size = self._codec.encoded_bytes(self._output.numel())
        sent = torch.empty(axis.size, size, dtype=torch.uint8, device=pieces.device)
        for piece, encoded in zip(pieces, sent, strict=True):
            self._codec.encode(piece, encoded)
        came = torch.empty_like(sent)
        first = all_to_all(came.view(-1), sent.view(-1), axis, purpose=self._purpose)
        return Staged(first, lambda: self._codec.decode_sum(list(came), self._output, factor=self._factor))
