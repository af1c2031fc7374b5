"""Every collective against the same computation in one process, to the bit, at 1 to 4 ranks, on each transport."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import lru_cache

import pytest
import torch

from drivetrain.comm import (
    Axis,
    Mesh,
    World,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    init,
    reduce_scatter,
    shutdown,
)
from drivetrain.comm.reduction import fold
from drivetrain_testkit import run_ranks
from drivetrain_testkit.transports import shared_memory

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.bool, torch.complex64)

# Elements of a shard: none, one, odd, just around what fits in a frame, large enough to be streamed in several parts.
LENGTHS = (0, 1, 5, 123, 8192, 8193, 300_001)


@lru_cache(maxsize=64)
def made(length: int, dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """What ``rank`` contributes. Any rank can compute it; nobody may write into it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(length, generator=generator, dtype=torch.float64) * 50
    return values > 0 if dtype is torch.bool else values.to(dtype)


def folded(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The definition of a reduction; ``test_reduction`` compares it with plain torch."""
    out = torch.empty_like(inputs[0])
    if len(inputs) == 1:
        return out.copy_(inputs[0])
    fold(out, inputs, op)  # type: ignore[arg-type]
    return out


def same(actual: torch.Tensor, expected: torch.Tensor, *what: object) -> None:
    assert actual.dtype == expected.dtype, what
    assert torch.equal(actual, expected), (what, actual, expected)


def allowed(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype is torch.bool:
        return ("max", "min")
    if dtype is torch.complex64:
        return ("sum", "mean")
    return ("sum", "mean", "max", "min") if dtype in FLOATS else ("sum", "max", "min")


def check_all(rank: int, world_size: int, transport: str) -> None:
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    assert axis.carrier == transport
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        if length > 10_000 and dtype in (torch.float64, torch.int8, torch.float16, torch.complex64):
            continue  # the paths are those of the other dtypes
        check_gather(axis, dtype, length)
        check_all_to_all(axis, dtype, length)
        check_broadcast(axis, dtype, length)
        for op in allowed(dtype):
            check_all_reduce(axis, dtype, length * world_size + 1, op)
            if op in ("sum", "mean"):
                check_reduce_scatter(axis, dtype, length, op)
    barrier(axis)
    shutdown()


def check_gather(axis: Axis, dtype: torch.dtype, length: int) -> None:
    expected = torch.cat([made(length, dtype, r) for r in range(axis.size)])
    shard, output = made(length, dtype, axis.rank).clone(), torch.empty(axis.size * length, dtype=dtype)
    all_gather(output, shard, axis).wait()
    same(output, expected, "all_gather", dtype, length)
    same(shard, made(length, dtype, axis.rank), "all_gather changed its input")
    in_place = torch.zeros(axis.size * length, dtype=dtype)
    own = in_place[axis.rank * length : (axis.rank + 1) * length]
    own.copy_(shard)
    all_gather(in_place, own, axis).wait()
    same(in_place, expected, "all_gather in place", dtype, length)


def check_reduce_scatter(axis: Axis, dtype: torch.dtype, length: int, op: str) -> None:
    inputs = [made(axis.size * length, dtype, r) for r in range(axis.size)]
    mine = slice(axis.rank * length, (axis.rank + 1) * length)
    expected = folded(inputs, op)[mine]
    input, output = inputs[axis.rank].clone(), torch.empty(length, dtype=dtype)
    reduce_scatter(output, input, axis, op=op).wait()  # type: ignore[arg-type]
    same(output, expected, "reduce_scatter", dtype, length, op)
    same(input, inputs[axis.rank], "reduce_scatter changed its input")
    reduce_scatter(input[mine], input, axis, op=op).wait()  # type: ignore[arg-type]
    same(input[mine], expected, "reduce_scatter in place", dtype, length, op)


def check_all_reduce(axis: Axis, dtype: torch.dtype, length: int, op: str) -> None:
    inputs = [made(length, dtype, r) for r in range(axis.size)]
    tensor = inputs[axis.rank].clone()
    all_reduce(tensor, axis, op=op).wait()  # type: ignore[arg-type]
    same(tensor, folded(inputs, op), "all_reduce", dtype, length, op)


def check_all_to_all(axis: Axis, dtype: torch.dtype, length: int) -> None:
    inputs = [made(axis.size * length, dtype, r) for r in range(axis.size)]
    mine = slice(axis.rank * length, (axis.rank + 1) * length)
    output = torch.empty(axis.size * length, dtype=dtype)
    all_to_all(output, inputs[axis.rank], axis).wait()
    same(output, torch.cat([x[mine] for x in inputs]), "all_to_all", dtype, length)


def check_broadcast(axis: Axis, dtype: torch.dtype, length: int) -> None:
    for src in {0, axis.size - 1}:
        tensor = made(length, dtype, axis.rank).clone()
        broadcast(tensor, axis, src=src).wait()
        same(tensor, made(length, dtype, src), "broadcast", dtype, length, src)


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_collective_equals_one_process(transport: str, world_size: int) -> None:
    run_ranks(check_all, world_size, transport, timeout=110)


def test_every_collective_on_one_rank() -> None:
    run_ranks(check_all, 1, "gloo")


def large(rank: int, world_size: int) -> None:
    """Streamed all-reduces: same bits on all ranks, and as a reduce-scatter and an all-gather."""
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    for dtype, length in ((torch.float32, 1_500_000 * world_size), (torch.bfloat16, 2_000_000 * world_size)):
        inputs = [made(length, dtype, r) for r in range(world_size)]
        reduced = inputs[rank].clone()
        all_reduce(reduced, axis, op="mean").wait()
        same(reduced, folded(inputs, "mean"), "large all_reduce", dtype)
        part, whole = torch.empty(length // world_size, dtype=dtype), torch.empty(length, dtype=dtype)
        reduce_scatter(part, inputs[rank], axis, op="mean").wait()
        all_gather(whole, part, axis).wait()
        same(whole, reduced, "reduce_scatter then all_gather", dtype)
        uneven = inputs[rank][:-1].clone()
        all_reduce(uneven, axis, op="max").wait()
        same(uneven, folded([x[:-1] for x in inputs], "max"), "large uneven all_reduce", dtype)
    shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_reductions(transport: str, world_size: int) -> None:
    run_ranks(large, world_size)


def many_in_flight(rank: int, world_size: int) -> None:
    """Many calls of all kinds and sizes on two channels, waited for in another order on every rank."""
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    axes = [mesh.axis("shard", channel=name) for name in ("main", "second")]
    checks: list[tuple[Callable[[], None], Callable[[], None]]] = []
    for i in range(48):
        axis, length = axes[i % 3 % 2], (7, 10_000, 1_000_000)[i % 3 if i < 12 else i % 2] + i
        kind = i // 3 % 3
        inputs = [made(length * world_size, torch.float32, r, seed=i) for r in range(world_size)]
        mine = slice(rank * length, (rank + 1) * length)
        if kind == 0:
            tensor = inputs[rank].clone()
            handle, result, expected = all_reduce(tensor, axis), tensor, folded(inputs, "sum")
        elif kind == 1:
            output = torch.empty(length)
            handle, result, expected = reduce_scatter(output, inputs[rank], axis), output, folded(inputs, "sum")[mine]
        else:
            output = torch.empty(length * world_size)
            handle = all_gather(output, inputs[rank][:length], axis)
            result, expected = output, torch.cat([x[:length] for x in inputs])
        checks.append((handle.wait, lambda r=result, e=expected, i=i: same(r, e, "in flight", i)))  # type: ignore[misc]
    random.Random(rank).shuffle(checks)
    for wait, check in checks:
        wait()
        check()
        wait()  # idempotent
    shutdown()


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_in_flight_waited_for_in_any_order(transport: str, world_size: int) -> None:
    run_ranks(many_in_flight, world_size)


def natively(rank: int, world_size: int) -> None:
    """The calls that carry other backends than gloo, here made on gloo, which has all but the mean."""
    axis = Mesh.create(init()).axis("shard")
    axis.backend = "another"
    ranks = torch.arange(float(world_size))
    total, whole, part, swapped = torch.full((3,), float(rank)), torch.empty(world_size), torch.empty(1), torch.empty(2)
    all_reduce(total, axis).wait()
    assert total.tolist() == [ranks.sum().item()] * 3
    all_gather(whole, ranks[rank : rank + 1], axis).wait()
    assert torch.equal(whole, ranks)
    reduce_scatter(part, whole, axis).wait()
    assert part.item() == world_size * rank
    all_to_all(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1]), axis).wait()
    assert swapped.tolist() == [rank, 10.0 + rank]
    broadcast(total.fill_(rank), axis, src=1).wait()
    assert total.tolist() == [1.0] * 3
    barrier(axis)
    assert all_gather_object({"rank": rank}, axis) == [{"rank": r} for r in range(world_size)]
    assert {e.op: e.calls for e in axis.ledger.entries()}["all_gather"] == 3
    shutdown()


def test_native_calls() -> None:
    run_ranks(natively, 2)


def objects(rank: int, world_size: int) -> list[list[object]]:
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    gathered = [all_gather_object(value, axis) for value in ({"rank": rank, "é": [None, 1.5]}, "x" * rank, None, rank)]
    with pytest.raises(
        TypeError, match=rf"all_gather_object on axis 'shard', rank {rank}: Tensor is not plain JSON data"
    ):
        all_gather_object(torch.ones(1), axis)
    shutdown()
    return gathered


def test_objects_travel_as_json(transport: str) -> None:
    expected = [[{"rank": r, "é": [None, 1.5]} for r in range(3)], ["", "x", "xx"], [None] * 3, [0, 1, 2]]
    assert run_ranks(objects, 3) == [expected] * 3


def ledger_of_calls(rank: int, world_size: int) -> list[tuple[str, int, int, int]]:
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    axis = mesh.axis("shard")
    all_reduce(torch.ones(10), axis).wait()
    handle = all_gather(torch.empty(6), torch.ones(3), axis)
    assert not handle.done()
    handle.wait()
    handle.wait()
    assert handle.done()
    reduce_scatter(torch.empty(3, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16), axis).wait()
    broadcast(torch.ones(5), axis).wait()
    all_to_all(torch.empty(8), torch.ones(8), axis).wait()
    entries = mesh.ledger.entries()
    assert all(e.axis == "shard" and min(e.seconds, e.waited_seconds) >= 0 and e.bus_bandwidth >= 0 for e in entries)
    shutdown()
    return [(e.op, e.calls, e.bytes, e.moved_bytes) for e in entries]


def test_the_ledger_counts_whole_buffers(transport: str) -> None:
    expected = [
        ("all_reduce", 1, 40, 80),
        ("all_gather", 1, 24, 24),
        ("reduce_scatter", 1, 12, 12),
        ("broadcast", 1, 20, 20),
        ("all_to_all", 1, 32, 32),
    ]
    assert run_ranks(ledger_of_calls, 2) == [expected] * 2


def lonely() -> Axis:
    """An axis of one rank, without any process group: had it to communicate, it would raise."""
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), backend="gloo")
    return Mesh.create(world).axis("shard")


def test_one_rank_communicates_nothing() -> None:
    axis = lonely()
    tensor, output, back = torch.arange(4.0), torch.empty(4), torch.empty(4)
    for handle in (
        all_reduce(tensor, axis, op="mean"),
        all_gather(output, tensor, axis),
        reduce_scatter(back, output, axis),
        broadcast(tensor, axis),
        all_to_all(back, tensor, axis),
    ):
        assert handle.done()
        handle.wait()
    assert tensor.tolist() == output.tolist() == back.tolist() == [0.0, 1.0, 2.0, 3.0]
    barrier(axis)
    assert all_gather_object([1], axis) == [[1]]
    assert axis.ledger.entries() == []


def test_a_parameter_is_written_without_autograd() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    all_reduce(parameter, lonely()).wait()
    assert parameter.grad_fn is None


SHARED = torch.ones(2)

BAD_CALLS = {
    "not contiguous": (
        lambda a: all_reduce(torch.ones(4, 3).t(), a),
        ValueError,
        r"all_reduce on axis 'shard': tensor of shape \(3, 4\) and strides \(1, 3\) is not contiguous",
    ),
    "mean of integers": (
        lambda a: all_reduce(torch.ones(2, dtype=torch.int32), a, op="mean"),
        TypeError,
        "op 'mean' needs",
    ),
    "unknown op": (lambda a: all_reduce(torch.ones(2), a, op="prod"), ValueError, "op 'prod' is not known here"),
    "max in reduce_scatter": (
        lambda a: reduce_scatter(torch.ones(2), torch.ones(2), a, op="max"),
        ValueError,
        "op 'max' is not known here; it must be one of sum, mean",
    ),
    "output too small": (
        lambda a: all_gather(torch.ones(3), torch.ones(2), a),
        ValueError,
        "all_gather on axis 'shard': output has 3 elements and shard 2; output must have 1 times as many",
    ),
    "input too large": (
        lambda a: reduce_scatter(torch.ones(3), torch.ones(4), a),
        ValueError,
        "reduce_scatter on axis 'shard': input has 4 elements and output 3",
    ),
    "two dtypes": (
        lambda a: all_gather(torch.ones(2), torch.ones(2).double(), a),
        TypeError,
        "all_gather on axis 'shard': output is torch.float32, shard is torch.float64; they must be the same",
    ),
    "another device": (
        lambda a: all_reduce(torch.ones(2, device="meta"), a),
        ValueError,
        "all_reduce on axis 'shard': tensor is on meta, the axis works on cpu",
    ),
    "no such source": (
        lambda a: broadcast(torch.ones(2), a, src=1),
        ValueError,
        r"broadcast on axis 'shard': src=1 is not a rank of the axis \(0\.\.0\)",
    ),
    "shared memory": (
        lambda a: all_to_all(SHARED, SHARED, a),
        ValueError,
        "all_to_all on axis 'shard': output and input share memory",
    ),
    "unequal": (
        lambda a: all_to_all(torch.ones(2), torch.ones(3), a),
        ValueError,
        "all_to_all on axis 'shard': output has 2 and input 3 elements",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name: str) -> None:
    call, error, text = BAD_CALLS[name]
    with pytest.raises(error, match=text):
        call(lonely())


def misplaced(rank: int, world_size: int) -> None:
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    whole = torch.ones(6)
    with pytest.raises(ValueError, match=rf"shard lies inside output, but not at rank {rank}'s own slice. It may be"):
        all_gather(whole, whole[(1 - rank) * 3 :][:3], axis)
    with pytest.raises(ValueError, match="output lies inside input, but not at rank"):
        reduce_scatter(whole[1:4], whole, axis)
    with pytest.raises(ValueError, match=r"output has 3 and input 3 elements; they must be equal and a multiple of 2"):
        all_to_all(torch.ones(3), torch.ones(3), axis)
    shutdown()


def test_a_shard_at_the_wrong_place(transport: str) -> None:
    run_ranks(misplaced, 2)


def test_lengths_meet_all_paths() -> None:
    """The lengths above are inline, one message, and streamed in more parts than the window holds."""
    from drivetrain.comm import gloo

    sizes = [4 * n for n in LENGTHS]
    assert any(0 < s <= gloo.INLINE_BYTES for s in sizes)
    assert any(gloo.INLINE_BYTES < s < gloo.PART_BYTES for s in sizes)
    assert math.ceil(4 * 1_500_000 / gloo.PART_BYTES) > gloo.WINDOW
