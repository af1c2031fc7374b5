"""The collectives: issued asynchronously, completed by ``Handle.wait``.

All take an ``Axis`` and contiguous tensors on its device. A collective must be issued by all ranks of the axis, in
the same order; handles may be waited for in any order. Where a peer is known to be lost, the issue itself raises the
``CollectiveError`` that ``wait`` would. Until ``wait`` returned, no tensor that was passed may be
written, and outputs are undefined. ``purpose`` says what a collective is for, in errors and to the other ranks: they
must give the same (but see `Purpose`).

On gloo the algorithms are in ``gloo.py``: deterministic, summed in rank order, an all-reduce giving the same bits as
a reduce-scatter followed by an all-gather. Where the ranks share memory (``shared_calls.py``) the results are the same
to the bit. On other backends (NCCL) torch's own collectives run, and their order of summation is the library's.

An axis of one rank communicates nothing: the copy is done, and the handle is complete. In a dry world (``setup.py``)
nothing is moved at all. This is the only place where these are cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from drivetrain.comm import gloo, shared_calls
from drivetrain.comm.call import Call, timed_out
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.mesh import Axis
from drivetrain.comm.reduction import Op, check_op
from drivetrain.comm.shared_memory import SharedGroup
from drivetrain.comm.trail import Purpose


class _Pending(Protocol):
    """What a backend started: ``wait`` finishes it, and raises a RuntimeError where it can't."""

    def wait(self) -> None: ...


class Handle:
    """A collective in flight. It keeps the tensors concerned alive until it is complete."""

    def __init__(self, pending: _Pending | None = None, call: Call | None = None, nbytes: int = 0) -> None:
        self._pending = pending
        self._call = call
        self._nbytes = nbytes
        self._clock = None if call is None else _clock(call.axis.device)
        self._error: CollectiveError | None = None

    def wait(self) -> None:
        """Complete the collective: on return the outputs are ready. Idempotent.

        On CUDA they are ready in the order of the current stream; the host doesn't wait.

        Raises:
            CollectiveError: naming operation, axis, rank and, where known, the peer. It is raised again by every
                further call.
        """
        if self._error is not None:
            raise self._error
        if self._pending is None or self._call is None or self._clock is None:
            return
        call, clock = self._call, self._clock
        axis = call.axis
        start = axis.trail.enter(call.issued)
        try:
            if axis.comparison is not None:
                call.compare()
            self._pending.wait()
        except CollectiveError as error:
            self._error = error
            raise
        except RuntimeError as error:
            self._error = call.lost(str(error), None, late=timed_out(error))
            raise self._error from error
        finally:
            axis.trail.leave()
            self._pending = None
        clock.stop()
        waited = perf_counter() - start
        axis.ledger.record(
            op=call.issued.op, axis=axis.name, size=axis.size, nbytes=self._nbytes, span=clock, waited=waited
        )
        if isinstance(clock, _CudaClock):
            axis.watch.reporter.enqueued(axis.trail, call.issued, clock.over)

    def done(self) -> bool:
        """Whether the collective is complete as far as this rank has seen: always after ``wait``.

        Messages in flight aren't polled (gloo has no query for them), so this may be False until ``wait`` is called.
        """
        return self._pending is None


def all_reduce(tensor: torch.Tensor, axis: Axis, *, op: Op = "sum", purpose: Purpose | str = "") -> Handle:
    """Reduce ``tensor`` (any shape) over the axis' ranks, in place. All ranks end with the same bits.

    Args:
        tensor: same shape and dtype on all ranks.
        op: ``sum``, ``mean`` (floating point only), ``max`` or ``min``. 16-bit floats are summed in fp32 on gloo.
    """
    check_op(op, tensor.dtype, ("sum", "mean", "max", "min"))
    flat = _flat("all_reduce", "tensor", tensor, axis)
    return _issue(
        axis,
        "all_reduce",
        flat,
        purpose,
        argument=op,
        on_shared=lambda call, group: shared_calls.all_reduce(call, group, flat, op),
        on_gloo=lambda call: gloo.all_reduce(call, flat, op),
        on_others=lambda: dist.all_reduce(flat, _REDUCE[op], group=axis.group, async_op=True),
    )


def all_gather(output: torch.Tensor, shard: torch.Tensor, axis: Axis, *, purpose: Purpose | str = "") -> Handle:
    """Concatenate every rank's ``shard``, in rank order, in ``output``.

    Args:
        output: 1-D, ``axis.size * shard.numel()`` elements.
        shard: 1-D, as long on all ranks. It may be this rank's own slice of ``output``: then nothing is copied.
    """
    whole, part = _flat("all_gather", "output", output, axis), _flat("all_gather", "shard", shard, axis)
    _check_sizes("all_gather", "output", whole, "shard", part, axis)
    _check_overlap("all_gather", whole, part, axis, "output", "shard")
    return _issue(
        axis,
        "all_gather",
        whole,
        purpose,
        copy=(part, whole),
        on_shared=lambda call, group: shared_calls.all_gather(call, group, whole, part),
        on_gloo=lambda call: gloo.Gather(call, whole, part),
        on_others=lambda: _gather(whole, part, axis.group, async_op=True),
    )


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    axis: Axis,
    *,
    op: Literal["sum", "mean"] = "sum",
    purpose: Purpose | str = "",
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
    return _issue(
        axis,
        "reduce_scatter",
        whole,
        purpose,
        argument=op,
        copy=(whole, part),
        on_shared=lambda call, group: shared_calls.reduce_scatter(call, group, part, whole, op),
        on_gloo=lambda call: gloo.reduce_scatter(call, part, whole, op),
        on_others=lambda: _reduce_scatter(part, whole, _REDUCE[op], axis.group, async_op=True),
    )


def broadcast(tensor: torch.Tensor, axis: Axis, *, src: int = 0, purpose: Purpose | str = "") -> Handle:
    """Copy ``tensor`` (any shape) of the rank ``src`` of the axis to all its ranks, in place."""
    if not 0 <= src < axis.size:
        raise ValueError(f"broadcast on axis '{axis.name}': src={src} is not a rank of the axis (0..{axis.size - 1})")
    flat = _flat("broadcast", "tensor", tensor, axis)
    return _issue(
        axis,
        "broadcast",
        flat,
        purpose,
        argument=f"from {src}",
        on_shared=lambda call, group: shared_calls.broadcast(call, group, flat, src),
        on_gloo=lambda call: gloo.Broadcast(call, flat, src),
        on_others=lambda: dist.broadcast(flat, group=axis.group, group_src=src, async_op=True),
    )


def all_to_all(output: torch.Tensor, input: torch.Tensor, axis: Axis, *, purpose: Purpose | str = "") -> Handle:
    """Send chunk j of ``input`` to rank j; what rank j sends lands in chunk j of ``output``. All chunks are equal.

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
    return _issue(
        axis,
        "all_to_all",
        outgoing,
        purpose,
        copy=(outgoing, incoming),
        on_shared=lambda call, group: shared_calls.all_to_all(call, group, incoming, outgoing),
        on_gloo=lambda call: gloo.AllToAll(call, incoming, outgoing),
        on_others=lambda: dist.all_to_all_single(incoming, outgoing, group=axis.group, async_op=True),
    )


def barrier(axis: Axis, *, purpose: Purpose | str = "") -> None:
    """Return once every rank of the axis has called it. On CUDA the host waits too."""
    token = torch.zeros(1, dtype=torch.uint8, device=axis.control_device)
    _issue(
        axis,
        "barrier",
        token,
        purpose,
        on_shared=lambda call, group: shared_calls.all_reduce(call, group, token, "max"),
        on_gloo=lambda call: gloo.all_reduce(call, token, "max"),
        on_others=lambda: dist.all_reduce(token, group=axis.group, async_op=True),
    ).wait()
    token.item()  # the host waits for the stream


def all_gather_object(value: object, axis: Axis, *, purpose: Purpose | str = "") -> list[Any]:
    """Every rank's ``value``, by rank in the axis, on all ranks.

    For small control data. Values travel as JSON, never as pickles.

    Raises:
        TypeError: ``value`` isn't made of dicts with string keys, lists, strings, numbers, booleans and None.
    """
    text = _to_json(value, axis)
    if axis.size == 1 or axis.world.dry:
        return [json.loads(text)] * axis.size
    lengths = torch.zeros(axis.size, dtype=torch.int64, device=axis.device)
    all_gather(lengths, torch.tensor([len(text)], device=axis.device), axis, purpose=purpose).wait()
    counts: list[int] = lengths.tolist()
    room = max(counts)
    padded = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8).to(axis.device)
    texts = torch.empty(axis.size * room, dtype=torch.uint8, device=axis.device)
    all_gather(texts, padded, axis, purpose=purpose).wait()
    return [
        json.loads(bytes(chunk.tolist()[:count])) for chunk, count in zip(torch.split(texts, room), counts, strict=True)
    ]


def _to_json(value: object, axis: Axis) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"all_gather_object on axis '{axis.name}', rank {axis.world.rank}: {type(value).__name__} is not plain "
            f"JSON data ({error}). Pass dicts with string keys, lists, strings, numbers, booleans or None; "
            "use all_gather for tensors."
        ) from error


_REDUCE = MappingProxyType(
    {
        "sum": dist.ReduceOp.SUM,
        "mean": dist.ReduceOp.AVG,
        "max": dist.ReduceOp.MAX,
        "min": dist.ReduceOp.MIN,
    }
)


# torch 2.13 renames these two and warns of the old names.
_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _issue(
    axis: Axis,
    op: str,
    whole: torch.Tensor,
    purpose: Purpose | str,
    *,
    argument: str = "",
    copy: tuple[torch.Tensor, torch.Tensor] | None = None,
    on_shared: Callable[[Call, SharedGroup], _Pending],
    on_gloo: Callable[[Call], _Pending],
    on_others: Callable[[], dist.Work | None],
) -> Handle:
    """Start a collective on whatever carries the axis.

    Args:
        whole: the buffer whose size counts in the ledger.
        purpose: what it is for.
        argument: what all ranks must agree on besides the sizes.
        copy: from where to where one rank alone copies.
    """
    if axis.size == 1:
        if copy is not None and copy[0].data_ptr() != copy[1].data_ptr():
            copy[1].copy_(copy[0])
        return Handle()
    call = Call(axis, axis.trail.add(op, argument, whole, purpose))
    if axis.world.dry:
        return Handle(_Dry(), call, _nbytes(whole))
    if axis.comparison is not None:
        axis.comparison.post(call.issued)
    if axis.backend == "gloo":
        pending = on_gloo(call) if axis.shared is None else on_shared(call, axis.shared)
        return Handle(pending, call, _nbytes(whole))
    if axis.trail.failed is not None:
        raise call.error(axis.trail.failed)
    try:
        work = on_others()
    except RuntimeError as error:
        raise call.lost(str(error), None, late=False) from error
    if work is None:
        raise call.error("this process is not in the axis' group")
    return Handle(_Native(work), call, _nbytes(whole))


class _Dry:
    """A collective among ranks that nobody runs."""

    def wait(self) -> None:
        """Nothing comes."""


class _Native:
    """A collective of torch.distributed: waiting blocks the host on the CPU, and only the current stream on CUDA."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


class _HostClock:
    """The time from the issue to the observed completion, on the host."""

    def __init__(self) -> None:
        self._time = -perf_counter()

    def stop(self) -> None:
        self._time += perf_counter()

    def over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._time


class _CudaClock:
    """The same on the current stream, which observes the completion. To be read later: reading waits for it."""

    def __init__(self) -> None:
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        self._end.record()

    def over(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


def _clock(device: torch.device) -> _HostClock | _CudaClock:
    return _CudaClock() if device.type == "cuda" else _HostClock()


def _flat(op: str, name: str, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A 1-D view without autograd. Everything below sees only such."""
    if tensor.device.type not in (axis.device.type, axis.control_device.type):
        raise ValueError(f"{op} on axis '{axis.name}': {name} is on {tensor.device}, the axis works on {axis.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{op} on axis '{axis.name}': {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous. Pass tensor.contiguous(), or the flat buffer that it is a view of."
        )
    return tensor.detach().view(-1)


def _check_dtypes(op: str, a_name: str, a: torch.Tensor, b_name: str, b: torch.Tensor, axis: Axis) -> None:
    if a.dtype != b.dtype:
        raise TypeError(
            f"{op} on axis '{axis.name}': {a_name} is {a.dtype}, {b_name} is {b.dtype}; they must be the same"
        )


def _check_sizes(op: str, whole_name: str, whole: torch.Tensor, part_name: str, part: torch.Tensor, axis: Axis) -> None:
    _check_dtypes(op, whole_name, whole, part_name, part, axis)
    if whole.numel() != axis.size * part.numel():
        raise ValueError(
            f"{op} on axis '{axis.name}': {whole_name} has {whole.numel()} elements and {part_name} {part.numel()}; "
            f"{whole_name} must have {axis.size} times as many, once for each rank"
        )


def _check_overlap(
    op: str, whole: torch.Tensor, part: torch.Tensor, axis: Axis, whole_name: str, part_name: str
) -> None:
    start, stop = axis.rank * part.numel(), (axis.rank + 1) * part.numel()
    if _overlap(whole, part) and part.data_ptr() != whole.data_ptr() + start * part.element_size():
        raise ValueError(
            f"{op} on axis '{axis.name}': {part_name} lies inside {whole_name}, but not at rank {axis.rank}'s own "
            f"slice. It may be {whole_name}[{start}:{stop}], or separate memory."
        )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_meta or b.is_meta:
        return False  # what has no memory has no place either
    a_start, b_start = a.data_ptr(), b.data_ptr()
    return a_start < b_start + _nbytes(b) and b_start < a_start + _nbytes(a)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
