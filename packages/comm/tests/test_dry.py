"""A world that nobody runs: everything is checked and counted, and nothing moves."""

from __future__ import annotations

import pytest
import torch

from drivetrain.comm import (
    Mesh,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    dry_world,
    reduce_scatter,
)


def test_it_has_a_place_for_every_rank() -> None:
    world = dry_world(64, rank=21, local_size=8)
    assert (world.rank, world.size, world.local_rank, world.local_size, world.dry) == (21, 64, 5, 8, True)
    mesh = Mesh.create(world, data=4)
    assert mesh.axis("shard").ranks == tuple(range(16, 32))
    assert mesh.axis("shard").rank == 5
    assert mesh.axis("data").ranks == (5, 21, 37, 53)
    within, between = mesh.split("shard", 8)
    assert (within.size, within.rank, between.size, between.rank) == (8, 5, 2, 0)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_collectives_are_counted_and_move_nothing(device: str) -> None:
    mesh = Mesh.create(dry_world(4, rank=1, device=device))
    axis = mesh.axis("shard")
    whole, part = torch.arange(8.0, device=device), torch.full((2,), 9.0, device=device)
    all_reduce(whole, axis).wait()
    all_gather(whole, whole[2:4], axis).wait()
    reduce_scatter(part, whole, axis).wait()
    broadcast(part, axis).wait()
    all_to_all(torch.empty_like(whole), whole, axis).wait()
    barrier(axis)
    assert {entry.op: (entry.calls, entry.bytes) for entry in mesh.ledger.entries()} == {
        "all_reduce": (1, 32),
        "all_gather": (1, 32),
        "reduce_scatter": (1, 32),
        "broadcast": (1, 8),
        "all_to_all": (1, 32),
        "barrier": (1, 1),
    }
    if device == "cpu":
        assert whole.tolist() == list(range(8))
        assert part.tolist() == [9.0, 9.0]
    assert all_gather_object({"rank": 1}, axis) == [{"rank": 1}] * 4


def test_numbers_that_a_program_reads_have_values_on_the_meta_device() -> None:
    axis = Mesh.create(dry_world(4)).axis("shard")
    assert axis.device.type == "meta"
    numbers = torch.tensor([3.0, 4.0], device=axis.control_device)
    all_reduce(numbers, axis, op="max").wait()
    assert numbers.tolist() == [3.0, 4.0]


def test_what_real_ranks_would_refuse_is_refused() -> None:
    axis = Mesh.create(dry_world(4)).axis("shard")
    with pytest.raises(ValueError, match="must have 4 times as many"):
        all_gather(torch.empty(9, device="meta"), torch.empty(2, device="meta"), axis)
    with pytest.raises(RuntimeError, match="belongs to a dry world, in which no process group exists"):
        _ = axis.group
    with pytest.raises(ValueError, match="a dry world of 4 ranks, 1 on each host, has no rank 4"):
        dry_world(4, rank=4)
