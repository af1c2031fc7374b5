from __future__ import annotations

import itertools
import math
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.comm import AXES, Ledger, Mesh, World, all_gather, all_gather_object, barrier, init, shutdown
from drivetrain.comm.mesh import groups_along
from drivetrain_testkit import run_ranks

sizes_of_meshes = st.lists(st.integers(1, 4), min_size=6, max_size=6).map(lambda n: dict(zip(AXES, n, strict=True)))
names_of_axes = st.lists(st.sampled_from(AXES), min_size=1, max_size=6, unique=True).map(tuple)


@given(sizes=sizes_of_meshes, names=names_of_axes)
def test_groups_partition_the_ranks(sizes: dict[str, int], names: tuple[str, ...]) -> None:
    groups = list(groups_along(sizes, names))
    assert sorted(itertools.chain(*groups)) == list(range(math.prod(sizes.values())))
    assert {len(group) for group in groups} == {math.prod(sizes[name] for name in names)}
    assert all(list(group) == sorted(group) for group in groups)
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(sizes=sizes_of_meshes, names=names_of_axes)
def test_a_group_varies_only_along_its_names(sizes: dict[str, int], names: tuple[str, ...]) -> None:
    cells = list(itertools.product(*(range(size) for size in sizes.values())))
    for group in groups_along(sizes, names):
        for i, name in enumerate(AXES):
            values = {cells[rank][i] for rank in group}
            assert values == (set(range(sizes[name])) if name in names else {cells[group[0]][i]})


def test_a_mesh_of_two_by_three_by_hand() -> None:
    sizes = {"data": 2, "shard": 3}
    assert list(groups_along(sizes, ("shard",))) == [(0, 1, 2), (3, 4, 5)]
    assert list(groups_along(sizes, ("data",))) == [(0, 3), (1, 4), (2, 5)]
    assert list(groups_along(sizes, ("shard", "data"))) == [(0, 1, 2, 3, 4, 5)]


def world_of(size: int) -> World:
    return World(rank=0, size=size, local_rank=0, local_size=size, device=torch.device("cpu"), backend="gloo")


def test_shard_takes_what_is_left() -> None:
    assert Mesh.create(world_of(12), data=2, tensor=3).sizes == {
        "pipeline": 1,
        "data": 2,
        "shard": 2,
        "sequence": 1,
        "tensor": 3,
        "expert": 1,
    }


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"data": 0}, "mesh axis 'data' has size 0; it must be at least 1"),
        ({"data": 5}, "data 5.* = 5 does not divide the world of 8 ranks: no size is left for 'shard'"),
        ({"data": 2, "shard": 2}, "data 2 x shard 2.* = 4, but the world has 8 ranks; the product must be that number"),
        ({"shard": 16}, "= 16, but the world has 8 ranks"),
    ],
)
def test_wrong_sizes(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Mesh.create(world_of(8), **sizes)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ((), "axis\\(\\) takes one or several different names"),
        (("shard", "shard"), "takes one or several different names, got \\('shard', 'shard'\\)"),
        (("model",), "unknown mesh axis 'model'; the axes are pipeline, data, shard, sequence, tensor, expert"),
    ],
)
def test_wrong_names(names: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Mesh.create(world_of(1)).axis(*names)


def test_a_mesh_needs_a_process_group_only_to_communicate() -> None:
    mesh = Mesh.create(world_of(2))
    assert mesh.axis("data").size == 1
    with pytest.raises(RuntimeError, match=r"axis 'shard': no process group is running. Call drivetrain.comm.init\(\)"):
        mesh.axis("shard")


def axes_of_a_mesh(rank: int, world_size: int) -> None:
    world = init(timeout=timedelta(seconds=30))
    ledger = Ledger()
    mesh = Mesh.create(world, data=2, shard=2, ledger=ledger)
    data, shard, both, tensor = mesh.axis("data"), mesh.axis("shard"), mesh.axis("shard", "data"), mesh.axis("tensor")
    assert (shard.ranks, shard.rank) == (((0, 1), (2, 3))[rank // 2], rank % 2)
    assert (data.ranks, data.rank) == (((0, 2), (1, 3))[rank % 2], rank // 2)
    assert (both.name, both.ranks, both.rank) == ("data+shard", (0, 1, 2, 3), rank)
    assert (tensor.ranks, tensor.size) == ((rank,), 1)
    assert mesh.axis("data", "shard") is both
    assert data.ledger is mesh.ledger is ledger

    other = mesh.axis("shard", channel="other")
    assert other is not shard
    assert other.ranks == shard.ranks
    assert other.group is not shard.group

    for axis in (data, shard, both, other):
        assert all_gather_object(rank, axis) == list(axis.ranks)

    grid = mesh.device_mesh
    assert grid is mesh.device_mesh
    assert grid.mesh_dim_names == AXES
    assert grid.mesh.shape == (1, 2, 2, 1, 1, 1)
    assert grid["shard"].get_group() is shard.group
    assert grid["shard"].get_local_rank() == shard.rank
    assert list(grid.get_coordinate() or ()) == [0, rank // 2, rank % 2, 0, 0, 0]
    shutdown()


def channels_do_not_wait_for_each_other(rank: int, world_size: int) -> list[float]:
    """The ranks use two channels in opposite orders, which on one channel would be a mismatch."""
    mesh = Mesh.create(init())
    axes = [mesh.axis("shard", channel=name) for name in ("a", "b")]
    outputs = [torch.empty(2), torch.empty(2)]
    order = (0, 1) if rank == 0 else (1, 0)
    handles = {i: all_gather(outputs[i], torch.tensor([10.0 * i + rank]), axes[i]) for i in order}
    for i in (0, 1):
        handles[i].wait()
    barrier(axes[0])
    shutdown()
    return torch.cat(outputs).tolist()


def dtensor_on_the_mesh(rank: int, world_size: int) -> float:
    from torch.distributed.tensor import DTensor, Shard

    mesh = Mesh.create(init())
    local = torch.full((2,), float(rank))
    whole = DTensor.from_local(local, mesh.device_mesh["shard"], [Shard(0)])
    total = whole.full_tensor().sum().item()
    shutdown()
    return total


def test_axes_of_a_mesh() -> None:
    run_ranks(axes_of_a_mesh, 4)


def test_channels_do_not_wait_for_each_other() -> None:
    assert run_ranks(channels_do_not_wait_for_each_other, 2) == [[0.0, 1.0, 10.0, 11.0]] * 2


def test_dtensor_on_the_mesh() -> None:
    assert run_ranks(dtensor_on_the_mesh, 2) == [2.0, 2.0]
