"""Collectives through shared memory: results to the bit, and what happens when a peer or a program ends midway."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.kernels import SharedMemoryError, SharedMemoryGroup, shared_memory_refusal
from drivetrain_testkit import run_ranks

pytestmark = pytest.mark.skipif(shared_memory_refusal() != "", reason=shared_memory_refusal() or "there is none")

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 5, 123, 4099)


def exchange_through_store(rank: int, size: int, name: str = "group") -> Callable[[bytes], list[bytes]]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[attr-defined]
    rounds = itertools.count()

    def exchange(mine: bytes) -> list[bytes]:
        number = next(rounds)
        store.set(f"{name}/{number}/{rank}", mine)
        return [store.get(f"{name}/{number}/{peer}") for peer in range(size)]

    return exchange


def joined(rank: int, size: int, **options: Any) -> SharedMemoryGroup:
    return SharedMemoryGroup(rank, size, exchange_through_store(rank, size), **options)


def made(count: int, dtype: torch.dtype, rank: int) -> Tensor:
    values = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 90
    if dtype.is_floating_point and count > 100:
        values[7 * rank % count] = float("nan")
        values[50:53] = torch.tensor([float("inf"), -float("inf"), 0.0])
    return values > 0 if dtype is torch.bool else values.to(dtype)


def folded(inputs: list[Tensor], op: str) -> Tensor:
    """A left fold in the order of the ranks; in float32 for 16-bit floats, rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = inputs[0].to(wide)
    for each in inputs[1:]:
        combine = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
        total = combine(total, each.to(wide))
    return (total / len(inputs) if op == "mean" else total).to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


def every_call(rank: int, size: int, slot_bytes: int, slots: int) -> None:
    group = joined(rank, size, slot_bytes=slot_bytes, slots=slots)
    for dtype, count in itertools.product((*FLOATS, *INTEGERS, torch.bool), SIZES):
        inputs = [made(size * count, dtype, peer) for peer in range(size)]
        mine = slice(rank * count, (rank + 1) * count)
        if dtype is torch.bool:
            ops = ["max", "min"]
        else:
            ops = ["sum", "max", "min", *(["mean"] if dtype in FLOATS else [])]
        for op in ops:
            tensor, part = inputs[rank].clone(), torch.empty(count, dtype=dtype)
            work = group.all_reduce(tensor, op)
            group.reduce_scatter(part, inputs[rank], op).wait()
            work.wait()
            expected = folded(inputs, op)
            assert same(tensor, expected), ("all_reduce", dtype, count, op)
            assert same(part, expected[mine]), ("reduce_scatter", dtype, count, op)
        whole, swapped = torch.empty_like(inputs[0]), torch.empty_like(inputs[0])
        group.all_gather(whole, inputs[rank][:count]).wait()
        assert same(whole, torch.cat([each[:count] for each in inputs])), ("all_gather", dtype, count)
        group.all_to_all(swapped, inputs[rank]).wait()
        assert same(swapped, torch.cat([each[mine] for each in inputs])), ("all_to_all", dtype, count)
        sent = inputs[rank].clone()
        group.broadcast(sent, size - 1).wait()
        assert same(sent, inputs[size - 1]), ("broadcast", dtype, count)
    group.close()
    group.close()


@pytest.mark.parametrize(("size", "slot_bytes", "slots"), [(2, 1024, 2), (2, 1 << 18, 4), (3, 1024, 3), (4, 4096, 2)])
def test_every_call_equals_the_fold_in_rank_order(size: int, slot_bytes: int, slots: int) -> None:
    run_ranks(every_call, size, slot_bytes, slots)


def bad_calls(rank: int, size: int) -> None:
    group = joined(rank, size)
    ones = torch.ones(4)
    for call, error, text in (
        (lambda: group.all_reduce(torch.ones(4, 2).t()), ValueError, r"shape \(2, 4\) and strides \(1, 2\)"),
        (
            lambda: group.all_reduce(torch.ones(2, device="meta")),
            ValueError,
            "expected contiguous tensors in host memory",
        ),
        (lambda: group.all_reduce(ones.int(), "mean"), TypeError, "int32 cannot be reduced by 'mean'"),
        (lambda: group.all_reduce(ones > 0), TypeError, "bool cannot be reduced by 'sum'"),
        (lambda: group.all_reduce(ones.to(torch.complex64)), TypeError, "complex64 cannot be reduced by 'sum'"),
        (
            lambda: group.all_gather(torch.ones(7), ones),
            ValueError,
            "expected output to have 2 times the elements of shard",
        ),
        (lambda: group.reduce_scatter(ones, ones), ValueError, "expected input to have 2 times the elements of output"),
        (lambda: group.all_to_all(torch.ones(3), torch.ones(3)), ValueError, "a multiple of 2; found 3 and 3 elements"),
        (lambda: group.all_gather(torch.ones(8), ones.int()), TypeError, "found torch.float32 and torch.int32"),
        (lambda: group.broadcast(ones, 2), ValueError, "expected src to be a rank below 2; found 2"),
    ):
        with pytest.raises(error, match=text):
            call()
    group.all_reduce(ones).wait()  # nothing of the above was issued
    group.close()
    with pytest.raises(ValueError, match="all_reduce: the group is closed"):
        group.all_reduce(ones)


def test_bad_calls_are_refused_before_they_are_issued() -> None:
    run_ranks(bad_calls, 2)


def nobody(mine: bytes) -> list[bytes]:
    raise AssertionError("no exchange was needed")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 2, "size": 2}, "expected a rank below size, which is at least 2; found 2, 2"),
        ({"rank": 0, "size": 1}, "expected a rank below size, which is at least 2; found 0, 1"),
        ({"rank": 0, "size": 2, "slots": 1}, "at least 2 slots"),
        ({"rank": 0, "size": 2, "slots": 4, "slot_bytes": 100}, "found 4 of 100 bytes for 2 ranks"),
        ({"rank": 0, "size": 65, "slot_bytes": 4096}, "at least 64 per rank"),
    ],
)
def test_bad_groups(options: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SharedMemoryGroup(exchange=nobody, **options)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"refusal": "it may not"}, "rank 1 cannot share memory: it may not"),
        ({"host": "elsewhere"}, "rank 1 is on another host than rank 0, or in another container"),
        ({"shape": [64, 2]}, "rank 1 has another version of this library, or other slots"),
        ({"address": [os.getpid(), 0, 10_000, 10_000, 0]}, "rank 0 cannot share memory: opening the shared memory"),
    ],
)
def test_ranks_that_cannot_share_memory(change: dict[str, Any], text: str) -> None:
    """Rank 1 answers what this rank said, with a change."""

    def exchange(mine: bytes) -> list[bytes]:
        return [mine, json.dumps(json.loads(mine) | change).encode() if mine.startswith(b"{") else b""]

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryError, match=text):
        SharedMemoryGroup(0, 2, exchange)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_another_process_with_the_same_numbers() -> None:
    def exchange(mine: bytes) -> list[bytes]:
        if not mine.startswith(b"{"):
            return [mine, b""]
        other = json.loads(mine)
        other["address"][4] ^= 1  # its key
        return [mine, json.dumps(other).encode()]

    with pytest.raises(SharedMemoryError, match="is another one"):
        SharedMemoryGroup(0, 2, exchange)


def disagreeing(rank: int, size: int) -> tuple[str, int | None, str, str]:
    group = joined(rank, size)
    tensor = torch.ones(300_000)
    group.all_reduce(tensor).wait()
    work = group.all_reduce(tensor) if rank == 0 else group.broadcast(tensor[:5], label="my label")
    with pytest.raises(SharedMemoryError) as info:
        work.wait()
    with pytest.raises(SharedMemoryError):
        work.wait()
    with pytest.raises(SharedMemoryError):
        group.all_reduce(tensor).wait()
    failure = work.failure
    assert failure is not None
    assert failure.mine is not None
    assert failure.theirs is not None
    return str(info.value), failure.peer, failure.mine.label, failure.theirs.label


def test_ranks_that_disagree() -> None:
    zero, one = run_ranks(disagreeing, 2)
    assert zero[0] == (
        "all_reduce sum failed on rank 0: of rank 1: it issued another call, 'my label' of 20 bytes of float32 as "
        "number 1; this rank issued 'all_reduce sum' of 1200000 bytes of float32 as number 1"
    )
    assert zero[1:] == (1, "all_reduce sum", "my label")
    assert one[1:] == (0, "my label", "all_reduce sum")


def killed(rank: int, size: int) -> tuple[str, list[str]] | None:
    before = set(os.listdir("/dev/shm"))
    group = joined(rank, size)
    tensor = torch.ones(3_000_000)
    group.all_reduce(tensor).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.all_reduce(tensor)
    with pytest.raises(SharedMemoryError) as info:
        work.wait()
    return str(info.value), sorted(name for name in set(os.listdir("/dev/shm")) - before if "drivetrain" in name)


def test_a_killed_peer_is_named_and_leaves_nothing() -> None:
    survivor, _ = run_ranks(killed, 2, may_die={1})
    assert survivor == ("all_reduce sum failed on rank 0: of rank 1: its process has ended", [])


def late(rank: int, size: int) -> str:
    group = joined(rank, size, timeout=0.3)
    text = ""
    if rank == 0:
        with pytest.raises(SharedMemoryError) as info:
            group.all_reduce(torch.ones(3)).wait()
        text = str(info.value)
    exchange_through_store(rank, size, "rank 0 gave up")(b"")
    if rank == 1:
        group.all_reduce(torch.ones(3)).wait()  # rank 0 did its part of this one
    with pytest.raises(SharedMemoryError):
        group.all_reduce(torch.ones(3)).wait()
    return text


def test_a_peer_that_issues_nothing_is_named() -> None:
    text = run_ranks(late, 2)[0]
    assert text == (
        "all_reduce sum failed on rank 0: of rank 1: nothing came from it for 0.3 s: it is stuck, or issued fewer calls"
    )


def forking(rank: int, size: int) -> None:
    group = joined(rank, size)
    tensor = torch.ones(200_000)
    pending = group.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        try:
            for act in (pending.wait, lambda: group.all_reduce(torch.ones(2))):
                with pytest.raises(RuntimeError, match="from which this one was forked"):
                    act()
            group.close()
            lonely = [None]
            with pytest.raises(SharedMemoryError):  # what it needs of the core starts afresh in a child
                SharedMemoryGroup(0, 2, lambda mine: [mine, b'{"refusal": "made up"}'])
            os._exit(len(lonely) - 1)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    pending.wait()
    group.all_reduce(tensor).wait()
    assert tensor.unique().tolist() == [float(size * size)]


def test_a_forked_child_leaves_the_group_alone() -> None:
    run_ranks(forking, 2)


def interrupted(rank: int, size: int) -> None:
    group = joined(rank, size)
    exchange = exchange_through_store(rank, size, "interrupted")

    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    work = group.all_reduce(torch.ones(5)) if rank == 0 else None
    if work is not None:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            work.wait()
    exchange(b"")
    tensor = torch.ones(5)
    (work or group.all_reduce(tensor)).wait()  # and may be waited for again


def test_a_signal_interrupts_a_wait() -> None:
    run_ranks(interrupted, 2)


def dropping(rank: int, size: int) -> None:
    """Works and tensors that nobody keeps, in a group that is dropped while the other rank still needs it."""
    group = joined(rank, size)
    for _ in range(30):
        group.all_reduce(torch.ones(100_000))
    last = torch.ones(50_000)
    group.all_reduce(last).wait()
    assert last.unique().tolist() == [2.0]
    assert group._under_way == []
    alive = weakref.ref(group)
    group.all_reduce(last)
    del group
    assert alive() is None  # which ended the call; on the other rank too, if it had not completed


def test_dropped_works_complete() -> None:
    run_ranks(dropping, 2)


EXIT = """
import os, torch
from drivetrain.kernels import SharedMemoryError, SharedMemoryGroup

parent, child = os.pipe(), os.pipe()
rank = 0 if os.fork() else 1
reader, writer = (parent[0], child[1]) if rank == 0 else (child[0], parent[1])

def exchange(mine):
    os.write(writer, mine.ljust(1024))
    theirs = os.read(reader, 1024).strip()
    return [mine, theirs] if rank == 0 else [theirs, mine]

group = SharedMemoryGroup(rank, 2, exchange)
work = group.all_reduce(torch.ones(8_000_000))
if rank == 1:
    late = group.all_reduce(torch.ones(8_000_000))  # rank 0 never issues it
    del work
else:
    try:
        work.wait()
    except SharedMemoryError:  # rank 1 left in the middle of it
        pass
    os.wait()
print("rank", rank, "ends", flush=True)
"""


def test_a_program_may_end_with_calls_under_way(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXIT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]
    assert done.stderr == ""
