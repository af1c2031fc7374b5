"""Lost peers and ranks that disagree: an error that names them, promptly, and never wrong data."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch

from drivetrain.comm import (
    Axis,
    CollectiveError,
    Handle,
    Mesh,
    Purpose,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    init,
    reduce_scatter,
)
from drivetrain_testkit import run_ranks
from drivetrain_testkit.transports import shared_memory

SMALL, LARGE = 10, 4_000_000

LOST = {
    "gloo": "the connection to rank 1 is gone",
    "shared memory": "rank 1 will not do its part: its process has ended",
}
CALLS: dict[str, Callable[[Axis, int], Handle]] = {
    "all_reduce": lambda axis, n: all_reduce(torch.ones(n), axis),
    "all_gather": lambda axis, n: all_gather(torch.empty(n * axis.size), torch.ones(n), axis),
    "reduce_scatter": lambda axis, n: reduce_scatter(torch.empty(n), torch.ones(n * axis.size), axis),
    "broadcast": lambda axis, n: broadcast(torch.ones(n), axis, src=1),
    "all_to_all": lambda axis, n: all_to_all(torch.empty(n * axis.size), torch.ones(n * axis.size), axis),
}


def rank_one_dies(rank: int, world_size: int, op: str, length: int) -> tuple[str, str, int, int | None, str] | None:
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    barrier(axis)
    if rank == 1:
        time.sleep(0.3)  # the others are in wait()
        os.kill(os.getpid(), signal.SIGKILL)
    handle = CALLS[op](axis, length)
    with pytest.raises(CollectiveError) as first:
        handle.wait()
    with pytest.raises(CollectiveError) as second:
        handle.wait()
    assert second.value is first.value
    with pytest.raises(CollectiveError):  # at the issue or at the wait, but not a hang
        CALLS[op](axis, length).wait()
    error = first.value
    return error.op, error.axis, error.rank, error.peer, str(error)


@pytest.mark.parametrize("length", [LARGE, pytest.param(SMALL, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("op", CALLS)
def test_a_killed_peer_is_named(transport: str, op: str, length: int) -> None:
    survivor, dead = run_ranks(rank_one_dies, 2, op, length, timeout=30, may_die={1})
    assert dead is None
    assert survivor[:4] == (op, "shard", 0, 1)
    assert f"{op} on axis 'shard' failed on rank 0: {LOST[transport]}" in survivor[4]


def one_of_three_dies(rank: int, world_size: int) -> int | None:
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    other = Mesh.create(init(), shared_memory=shared_memory()).axis("shard", channel="other")
    barrier(axis)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CollectiveError) as info:
        all_reduce(torch.ones(3_000_000), axis).wait()
    with pytest.raises(CollectiveError):
        barrier(other)
    return info.value.peer


def test_survivors_of_three(transport: str) -> None:
    """Both end. Each names the dead rank, or the other survivor if that gave up first."""
    zero, one, two = run_ranks(one_of_three_dies, 3, timeout=30, may_die={1})
    assert one is None
    assert zero in (1, 2)
    assert two in (0, 1)
    assert 1 in (zero, two)


def disagree(rank: int, world_size: int, calls: tuple[tuple[str, int], tuple[str, int]]) -> str:
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    axis, quiet = mesh.axis("shard"), mesh.axis("shard", channel="quiet")
    op, length = calls[rank]
    try:
        CALLS[op](axis, length).wait()
        text = "it completed"
    except CollectiveError as error:
        text = str(error)
    all_gather_object(0, quiet)  # nobody leaves before all have compared
    return text


@pytest.mark.parametrize(
    "calls",
    [
        (("all_gather", 10), ("reduce_scatter", 10)),
        (("all_gather", 1_000_000), ("reduce_scatter", 1_000_000)),
        (("all_gather", 10), ("all_gather", 20)),
        (("all_gather", 2_000_000), ("all_gather", 1_000_000)),
        (("all_reduce", 10), ("all_reduce", 2_000_000)),
        (("reduce_scatter", 2_000_000), ("reduce_scatter", 10)),
        (("all_to_all", 5000), ("all_gather", 5000)),
    ],
)
def test_ranks_that_disagree(transport: str, calls: tuple[tuple[str, int], tuple[str, int]]) -> None:
    texts = run_ranks(disagree, 2, calls, timeout=30)
    for rank, text in enumerate(texts):
        mine, theirs = calls[rank][0], calls[1 - rank][0]
        assert (
            f"{mine} on axis 'shard' failed on rank {rank}: the ranks issued different collectives as number 0" in text
        )
        assert f"  rank {rank}: issued {mine}" in text
        assert f"  rank {1 - rank}: issued {theirs}" in text


def two_dtypes(rank: int, world_size: int) -> str:
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    axis, quiet = mesh.axis("shard"), mesh.axis("shard", channel="quiet")
    dtype = (torch.float32, torch.int32)[rank]
    with pytest.raises(CollectiveError) as info:
        all_reduce(torch.ones(100, dtype=dtype), axis).wait()
    all_gather_object(0, quiet)
    return str(info.value)


def test_two_dtypes_of_one_size(transport: str) -> None:
    zero, one = run_ranks(two_dtypes, 2, timeout=30)
    for text in (zero, one):
        assert (
            "\n  rank 0: issued all_reduce sum of 100 float32\n  rank 1: issued all_reduce sum of 100 int32\n" in text
        )


def one_call_too_few(rank: int, world_size: int) -> str:
    """Rank 2 does other things, and the others wait for it on different axes."""
    mesh = Mesh.create(init(timeout=timedelta(seconds=3)), shared_memory=shared_memory())
    axis, other = mesh.axis("shard"), mesh.axis("shard", channel="other")
    all_reduce(torch.ones(3), axis, purpose="the first").wait()
    text = ""
    if rank == 2:
        await_others(rank, world_size)
    else:
        with pytest.raises(CollectiveError) as info:
            all_reduce(torch.ones(3), (axis, other)[rank], purpose=Purpose("the second", "a test")).wait()
        text = str(info.value)
        assert info.value.purpose == "the second"
    await_others(rank, world_size)
    return text


def await_others(rank: int, world_size: int) -> None:
    """A barrier that is no collective."""
    store = torch.distributed.distributed_c10d._get_default_store()
    store.add("here", 1)
    while store.add("here", 0) < (world_size if rank < 2 else 2):
        time.sleep(0.02)


def test_a_call_that_a_peer_never_makes_times_out(transport: str) -> None:
    """Both name the rank that does something else, the line that it is in, and what each other waits for."""
    zero, one, _ = run_ranks(one_call_too_few, 3, timeout=30)
    here, there = "axis 'shard'", "axis 'shard' (channel 'other')"
    second = "all_reduce sum of 3 float32: the second, in a test"
    assert "all_reduce on axis 'shard' failed on rank 0: nothing came from rank 1 for 3 s" in zero
    assert (
        f"It is number 1 of {here}, {second}. Ranks 1 and 2 have not issued it.\n  rank 0: waits for it, since" in zero
    )
    assert f"number 0 of {there}, {second}" in zero
    assert f"It is number 0 of {there}, {second}. Ranks 0 and 2 have not issued it.\n" in one
    assert f"number 1 of {here}, {second}" in one
    for text in (zero, one):
        (two,) = [line for line in text.splitlines() if line.startswith("  rank 2: ")]
        assert "rank 2: is in no collective, since " in two
        assert "in await_others: " in two  # in either line of its loop
    assert "its last one on axis 'shard' was number 0, all_reduce sum of 3 float32: the first" in zero
