"""The collectives: issued asynchronously, completed by ``Handle.wait``.

All take an ``Axis`` and contiguous tensors on its device. A collective must be issued by all ranks of the axis, in the same order; handles may be
waited for in any order. Until ``wait`` returned, no tensor that was passed may be written, and outputs are undefined.

On gloo the algorithms are in ``gloo.py``: deterministic, summed in rank order, an all-reduce giving the same bits as a reduce-scatter followed by an
all-gather. On other backends (NCCL) torch's own collectives run, and their order of summation is the library's.

An axis of one rank communicates nothing: the copy is done, and the handle is complete. This is the only place where that is a case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from drivetrain.comm import gloo
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.mesh import Axis
from drivetrain.comm.reduction import Op, check_op


class _Pending(Protocol):
    """What a backend started: ``wait`` finishes it, and raises a RuntimeError where it can't."""

    def wait(self) -> None: ...


class Handle:
    """A collective in flight. It keeps the tensors concerned alive until it is complete."""

    def __init__(self, pending: _Pending | None, axis: Axis, op: str, nbytes: int) -> None:
        self._pending = pending
        self._axis = axis
        self._op = op
        self._nbytes = nbytes
        self._issued = perf_counter()
        self._error: CollectiveError | None = None

    def wait(self) -> None:
        """Complete the collective: on return the outputs are ready (on CUDA: in the order of the current stream). Idempotent.

        Raises:
            CollectiveError: naming operation, axis, rank and, where known, the peer. It is raised again by every further call.
        """
        if self._error is not None:
            raise self._error
        if self._pending is None:
            return
        start = perf_counter()
        try:
            self._pending.wait()
        except CollectiveError as error:
            self._error = error
            raise
        except RuntimeError as error:
            rank = self._axis.world.rank
            self._error = CollectiveError(str(error), op=self._op, axis=self._axis.name, rank=rank)
            raise self._error from error
        finally:
            self._pending = None
        end = perf_counter()
        self._axis.ledger.record(
            op=self._op,
            axis=self._axis.name,
            size=self._axis.size,
            nbytes=self._nbytes,
            seconds=end - self._issued,
            waited=end - start,
        )

    def done(self) -> bool:
        """Whether ``wait`` would return at once because it did before. Completion in flight isn't polled: gloo has no such query."""
        return self._pending is None


def all_reduce(tensor: torch.Tensor, axis: Axis, *, op: Op = "sum") -> Handle:
    """Reduce ``tensor`` (any shape) over the axis' ranks, in place. All ranks end with the same bits.

    Args:
        tensor: same shape and dtype on all ranks.
        op: ``sum``, ``mean`` (floating point only), ``max`` or ``min``. 16-bit floats are summed in fp32 on gloo.
    """
    check_op(op, tensor.dtype, ("sum", "mean", "max", "min"))
    flat = _flat("all_reduce", "tensor", tensor, axis)
    if axis.size == 1:
        return _complete(axis, "all_reduce", flat)
    if axis.backend == "gloo":
        pending: _Pending = gloo.all_reduce(_call(axis, "all_reduce", op, flat), flat, op)
    else:
        pending = _native("all_reduce", axis, lambda: dist.all_reduce(flat, _REDUCE[op], group=axis.group, async_op=True))
    return Handle(pending, axis, "all_reduce", _nbytes(flat))


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Handle:
    """Concatenate every rank's ``shard``, in rank order, in ``output``.

    Args:
        output: 1-D, ``axis.size * shard.numel()`` elements.
        shard: 1-D, as long on all ranks. It may be this rank's own slice of ``output``: then nothing is copied.
    """
    whole, part = _flat("all_gather", "output", output, axis), _flat("all_gather", "shard", shard, axis)
    _check_sizes("all_gather", "output", whole, "shard", part, axis)
    _check_overlap("all_gather", whole, part, axis, "output", "shard")
    if axis.size == 1:
        return _complete(axis, "all_gather", part, copy_to=whole)
    if axis.backend == "gloo":
        pending: _Pending = gloo.Gather(_call(axis, "all_gather", "", part), whole, part)
    else:
        pending = _native("all_gather", axis, lambda: _gather(whole, part, axis.group, async_op=True))
    return Handle(pending, axis, "all_gather", _nbytes(whole))


def reduce_scatter(
    output: torch.Tensor, input: torch.Tensor, axis: Axis, *, op: Literal["sum", "mean"] = "sum"
) -> Handle:
    """Reduce all ranks' ``input``, and leave the slice of this rank in ``output``.

    Args:
        output: 1-D. It may be this rank's own slice of ``input``.
        input: 1-D, ``axis.size * output.numel()`` elements, as long on all ranks.
        op: ``sum`` or ``mean`` (floating point only). 16-bit floats are summed in fp32 on gloo.
    """
    check_op(op, input.dtype, ("sum", "mean"))
    whole, part = _flat("reduce_scatter", "input", input, axis), _flat("reduce_scatter", "output", output, axis)
    _check_sizes("reduce_scatter", "input", whole, "output", part, axis)
    _check_overlap("reduce_scatter", whole, part, axis, "input", "output")
    if axis.size == 1:
        return _complete(axis, "reduce_scatter", whole, copy_to=part)
    if axis.backend == "gloo":
        pending: _Pending = gloo.reduce_scatter(_call(axis, "reduce_scatter", op, part), part, whole, op)
    else:
        pending = _native(
            "reduce_scatter",
            axis,
            lambda: _reduce_scatter(part, whole, _REDUCE[op], axis.group, async_op=True),
        )
    return Handle(pending, axis, "reduce_scatter", _nbytes(whole))


def broadcast(tensor: torch.Tensor, axis: Axis, *, src: int = 0) -> Handle:
    """Copy ``tensor`` (any shape) of the rank ``src`` of the axis to all its ranks, in place."""
    if not 0 <= src < axis.size:
        raise ValueError(f"broadcast on axis '{axis.name}': src={src} is not a rank of the axis (0..{axis.size - 1})")
    flat = _flat("broadcast", "tensor", tensor, axis)
    if axis.size == 1:
        return _complete(axis, "broadcast", flat)
    if axis.backend == "gloo":
        pending: _Pending = gloo.Broadcast(_call(axis, "broadcast", f"from {src}", flat), flat, src)
    else:
        pending = _native("broadcast", axis, lambda: dist.broadcast(flat, group=axis.group, group_src=src, async_op=True))
    return Handle(pending, axis, "broadcast", _nbytes(flat))


def all_to_all(output: torch.Tensor, input: torch.Tensor, axis: Axis) -> Handle:
    """Send the j-th of ``axis.size`` equal chunks of ``input`` to rank j; chunk j of ``output`` is what rank j sent here.

    Args:
        output, input: 1-D, equally long, a multiple of ``axis.size``, not overlapping.
    """
    incoming, outgoing = _flat("all_to_all", "output", output, axis), _flat("all_to_all", "input", input, axis)
    _check_dtypes("all_to_all", "output", incoming, "input", outgoing, axis)
    if incoming.numel() != outgoing.numel() or outgoing.numel() % axis.size:
        raise ValueError(
            f"all_to_all on axis '{axis.name}': output has {incoming.numel()} and input {outgoing.numel()} elements; "
            f"they must be equal and a multiple of {axis.size}, the axis' size"
        )
    if _overlap(incoming, outgoing):
        raise ValueError(f"all_to_all on axis '{axis.name}': output and input share memory; they must be separate")
    if axis.size == 1:
        return _complete(axis, "all_to_all", outgoing, copy_to=incoming)
    if axis.backend == "gloo":
        pending: _Pending = gloo.AllToAll(_call(axis, "all_to_all", "", outgoing), incoming, outgoing)
    else:
        pending = _native(
            "all_to_all", axis, lambda: dist.all_to_all_single(incoming, outgoing, group=axis.group, async_op=True)
        )
    return Handle(pending, axis, "all_to_all", _nbytes(outgoing))


def barrier(axis: Axis) -> None:
    """Return once every rank of the axis has called it. On CUDA the host waits too."""
    if axis.size == 1:
        return
    token = torch.zeros(1, dtype=torch.uint8, device=axis.device)
    if axis.backend == "gloo":
        Handle(gloo.all_reduce(_call(axis, "barrier", "", token), token, "max"), axis, "barrier", 0).wait()
        return
    Handle(_native("barrier", axis, lambda: dist.all_reduce(token, group=axis.group, async_op=True)), axis, "barrier", 0).wait()
    token.item()


def all_gather_object(value: object, axis: Axis) -> list[Any]:
    """Every rank's ``value``, by rank in the axis, on all ranks. For small control data; values travel as JSON, never as pickles.

    Raises:
        TypeError: ``value`` isn't made of dicts with string keys, lists, strings, numbers, booleans and None.
    """
    text = _to_json(value, axis)
    if axis.size == 1:
        return [json.loads(text)]
    lengths = torch.zeros(axis.size, dtype=torch.int64, device=axis.device)
    all_gather(lengths, torch.tensor([len(text)], device=axis.device), axis).wait()
    counts: list[int] = lengths.tolist()
    room = max(counts)
    padded = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8).to(axis.device)
    texts = torch.empty(axis.size * room, dtype=torch.uint8, device=axis.device)
    all_gather(texts, padded, axis).wait()
    return [json.loads(bytes(chunk.tolist()[:count])) for chunk, count in zip(torch.split(texts, room), counts, strict=True)]


def _to_json(value: object, axis: Axis) -> bytes:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"all_gather_object on axis '{axis.name}', rank {axis.world.rank}: {type(value).__name__} is not plain JSON data ({error}). "
            "Pass dicts with string keys, lists, strings, numbers, booleans or None; use all_gather for tensors."
        ) from error
    return text.encode()


_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


# torch 2.13 renames these two and warns of the old names.
_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class _NativeWork:
    """A collective of torch.distributed. ``Work.wait`` blocks the host on the CPU, and makes the current stream wait on CUDA."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


def _native(op: str, axis: Axis, issue: Callable[[], dist.Work | None]) -> _NativeWork:
    try:
        work = issue()
    except RuntimeError as error:
        raise CollectiveError(str(error), op=op, axis=axis.name, rank=axis.world.rank) from error
    if work is None:
        raise CollectiveError("this process is not in the axis' group", op=op, axis=axis.name, rank=axis.world.rank)
    return _NativeWork(work)


def _complete(axis: Axis, op: str, source: torch.Tensor, copy_to: torch.Tensor | None = None) -> Handle:
    if copy_to is not None and copy_to.data_ptr() != source.data_ptr():
        copy_to.copy_(source)
    return Handle(None, axis, op, 0)


def _call(axis: Axis, op: str, argument: str, tensor: torch.Tensor) -> gloo.Call:
    return gloo.Call(axis=axis, op=op, detail=f"{op} {argument}".rstrip(), dtype=tensor.dtype)


def _flat(op: str, name: str, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A 1-D view without autograd. Everything below sees only such."""
    if tensor.device.type != axis.device.type:
        raise ValueError(f"{op} on axis '{axis.name}': {name} is on {tensor.device}, the axis works on {axis.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op} on axis '{axis.name}': {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous. "
            "Pass tensor.contiguous(), or the flat buffer that it is a view of."
        )
    return tensor.detach().view(-1)


def _check_dtypes(op: str, a_name: str, a: torch.Tensor, b_name: str, b: torch.Tensor, axis: Axis) -> None:
    if a.dtype != b.dtype:
        raise TypeError(f"{op} on axis '{axis.name}': {a_name} is {a.dtype}, {b_name} is {b.dtype}; they must be the same")


def _check_sizes(op: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor, axis: Axis) -> None:
    _check_dtypes(op, whole_name, whole, part_name, part, axis)
    if whole.numel() != axis.size * part.numel():
        raise ValueError(
            f"{op} on axis '{axis.name}': {whole_name} has {whole.numel()} elements and {part_name} {part.numel()}; "
            f"{whole_name} must have {axis.size} times as many, once for each rank"
        )


def _check_overlap(op: str, whole: torch.Tensor, part: torch.Tensor, axis: Axis, whole_name: str, part_name: str) -> None:
    own = whole.data_ptr() + axis.rank * part.numel() * part.element_size()
    if _overlap(whole, part) and part.data_ptr() != own:
        raise ValueError(
            f"{op} on axis '{axis.name}': {part_name} lies inside {whole_name}, but not at rank {axis.rank}'s own slice. "
            f"It may be {whole_name}[{axis.rank * part.numel()}:{(axis.rank + 1) * part.numel()}], or separate memory."
        )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + _nbytes(b) and b_start < a_start + _nbytes(a)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
