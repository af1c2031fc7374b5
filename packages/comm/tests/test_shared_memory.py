"""Who carries an axis: agreed on by all its ranks, whatever each of them could do; and the reason is told."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from drivetrain.comm import CollectiveError, Mesh, all_reduce, init, shutdown
from drivetrain_testkit import run_ranks
from drivetrain_testkit.transports import refusal, shared_memory


class Told(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def refusing(rank: int, size: int, exchange: Callable[[bytes], Sequence[bytes]], *, timeout: float) -> Any:
    """Exchanges records of different lengths, and finds that they cannot share memory."""
    records = exchange(b"x" * 1000 * rank)
    assert [len(record) for record in records] == [1000 * index for index in range(size)]
    assert set(b"".join(records)) <= set(b"x")
    with pytest.raises(ValueError, match="a record of 1023 bytes; at most 1022 can be exchanged"):
        exchange(b"x" * 1023)
    raise RuntimeError(f"no memory is shared between {size} ranks for {timeout:g} s")


def given(rank: int, kind: str) -> Any:
    if kind == "refused":
        return refusing
    if kind == "switched off on rank 1" and rank == 1:
        os.environ["DRIVETRAIN_SHARED_MEMORY"] = "0"
    return None if kind == "lacking on rank 0" and rank == 0 else shared_memory() or refusing


def carried(rank: int, world_size: int, kind: str) -> tuple[str, list[str]]:
    told = Told()
    logger = logging.getLogger("drivetrain.comm")
    logger.addHandler(told)
    logger.setLevel(logging.DEBUG)
    mesh = Mesh.create(init(), shared_memory=given(rank, kind))
    axis = mesh.axis("shard")
    assert mesh.ledger.entries() == []  # agreeing is not counted
    total = torch.full((3,), float(rank))
    all_reduce(total, axis).wait()
    assert total.tolist() == [sum(range(world_size))] * 3
    shutdown()
    return axis.carrier, [line for line in told.lines if "carried by" in line]


REASONS = {
    "refused": "no memory is shared between 2 ranks for 1800 s",
    "lacking on rank 0": "on rank 0, Mesh.create was given no shared_memory",
    "switched off on rank 1": "on rank 1, DRIVETRAIN_SHARED_MEMORY=0 switches it off",
}


@pytest.mark.parametrize("kind", REASONS)
def test_where_one_rank_cannot_all_use_gloo(kind: str) -> None:
    line = f"axis shard, channel main: carried by gloo, not shared memory: {REASONS[kind]}"
    assert run_ranks(carried, 2, kind) == [("gloo", [line])] * 2


@pytest.mark.skipif(refusal("shared memory") != "", reason="no shared memory here")
def test_shared_memory_carries_where_it_can() -> None:
    line = "axis shard, channel main: carried by shared memory"
    assert run_ranks(carried, 3, "given") == [("shared memory", [line])] * 3


def two_axes(rank: int, world_size: int) -> list[list[float]]:
    """Groups along two axes, of different ranks, each with memory of its own."""
    mesh = Mesh.create(init(), data=2, shard=2, shared_memory=shared_memory())
    axes = [mesh.axis("data"), mesh.axis("shard"), mesh.axis("data", "shard")]
    assert {axis.carrier for axis in axes} == {"shared memory"}
    tensors = [torch.tensor([float(rank)]) for _ in axes]
    for handle in [all_reduce(tensor, axis) for tensor, axis in zip(tensors, axes, strict=True)]:
        handle.wait()
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.skipif(refusal("shared memory") != "", reason="no shared memory here")
def test_groups_of_several_axes() -> None:
    expected = [[[2.0], [1.0], [6.0]], [[4.0], [1.0], [6.0]], [[2.0], [5.0], [6.0]], [[4.0], [5.0], [6.0]]]
    assert run_ranks(two_axes, 4) == expected


def wrong_setting(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init(), shared_memory=refusing)
    with pytest.raises(ValueError, match="DRIVETRAIN_SHARED_MEMORY='no' is neither 1"):
        mesh.axis("shard")


def test_a_wrong_setting_is_refused() -> None:
    run_ranks(wrong_setting, 2, env={"DRIVETRAIN_SHARED_MEMORY": "no"})


def leaving(rank: int, world_size: int) -> str:
    """Rank 1 lets its mesh go while rank 0 waits for it."""
    axis = Mesh.create(init(), shared_memory=shared_memory()).axis("shard")
    if rank == 1:
        del axis
        return ""
    with pytest.raises(CollectiveError) as info:
        all_reduce(torch.ones(3), axis).wait()
    return str(info.value)


@pytest.mark.skipif(refusal("shared memory") != "", reason="no shared memory here")
def test_a_peer_that_let_its_mesh_go_is_named() -> None:
    assert "rank 1 will not do its part: it" in run_ranks(leaving, 2)[0]
