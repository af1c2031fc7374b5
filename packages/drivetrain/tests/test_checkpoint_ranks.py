"""Saved by some ranks in some cut, loaded by others in another; ranks that fail; ranks that are killed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drivetrain.comm import Axis, Mesh, init, shutdown
from drivetrain.engine.checkpoint import (
    CheckpointError,
    LoadOptions,
    RandomState,
    SaveOptions,
    list_checkpoints,
    load,
    save,
)
from drivetrain.engine.checkpoint.files import BlockWriter
from drivetrain.zero import FlatSlice
from drivetrain_testkit import run_ranks

SHAPES = {"model/w": (5, 7), "model/b": (3,), "model/step": (), "optimizer/w/exp_avg": (5, 7), "model/none": (0,)}
DTYPES = {"model/b": torch.bfloat16, "model/step": torch.int64}

# A cut says where the parts of the ranks end, as fractions of a tensor's elements; equal ends make empty parts.
EVEN = {1: (), 2: (0.5,), 3: (1 / 3, 2 / 3)}
SKEWED = {1: (), 2: (0.9,), 3: (0.0, 0.25)}
EMPTY = {1: (), 2: (0.0,), 3: (1.0, 1.0)}


def whole(name: str, value: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(value * 100 + sorted(SHAPES).index(name))
    return (torch.randn(SHAPES[name], generator=generator) * 100).to(DTYPES.get(name, torch.float32))


def parts(rank: int, world_size: int, cut: dict[int, tuple[float, ...]], value: int | None) -> dict[str, FlatSlice]:
    """This rank's slices; zeros to be loaded into if `value` is None."""
    out = {}
    for name, shape in SHAPES.items():
        full = whole(name, 0 if value is None else value).flatten()
        ends = [0, *(int(fraction * full.numel()) for fraction in cut[world_size]), full.numel()]
        own = full[ends[rank] : ends[rank + 1]].clone()
        if value is None:
            own.zero_()
        out[name] = FlatSlice(data=own, offset=ends[rank], shape=torch.Size(shape))
    return out


def everybody() -> Axis:
    return Mesh.create(init()).axis("shard")


def save_rank(
    rank: int, world_size: int, directory: str, cut: dict[int, tuple[float, ...]], tag: str, value: int
) -> None:
    axis = everybody()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    save(
        directory,
        tag,
        tensors=parts(rank, world_size, cut, value),
        axis=axis,
        metadata={"value": value},
        client_state={"from": rank},
        random_state=RandomState.capture(axis.device),
    )
    shutdown()


def load_rank(
    rank: int, world_size: int, directory: str, cut: dict[int, tuple[float, ...]], value: int
) -> dict[str, Any]:
    axis = everybody()
    wanted, target = parts(rank, world_size, cut, value), parts(rank, world_size, cut, None)
    loaded = load(directory, tensors=target, axis=axis)
    assert loaded.random_state is not None
    loaded.random_state.restore(axis.device)
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    shutdown()
    return {
        "wrong": [name for name in SHAPES if not torch.equal(target[name].data, wanted[name].data)],
        "filled": loaded.report.filled,
        "notices": loaded.report.notices,
        "client_state": loaded.client_state,
        "metadata": loaded.metadata,
        "drawn": drawn,
    }


def drawn_by(rank: int) -> tuple[float, float, float]:
    python, numpy, cpu = random.Random(rank), np.random.RandomState(rank), torch.Generator().manual_seed(rank)
    return python.random(), float(numpy.rand()), float(torch.rand((), generator=cpu))


@pytest.mark.parametrize("saved_cut", [EVEN, SKEWED, EMPTY], ids=["even", "skewed", "empty"])
def test_saved_by_two_ranks_loaded_by_one_two_and_three(
    tmp_path: Path, saved_cut: dict[int, tuple[float, ...]]
) -> None:
    run_ranks(save_rank, 2, str(tmp_path), saved_cut, "t", 1)
    for world_size, cut in ((1, EVEN), (2, SKEWED), (3, EVEN), (3, SKEWED), (3, EMPTY)):
        results = run_ranks(load_rank, world_size, str(tmp_path), cut, 1)
        for rank, result in enumerate(results):
            assert result["wrong"] == []
            assert result["filled"] == tuple(sorted(SHAPES))
            assert result["client_state"] == {"from": 0}
            assert result["metadata"] == {"value": 1}
            if world_size == 2:
                assert result["drawn"] == drawn_by(rank)
                assert result["notices"] == ()
            else:
                assert result["notices"][0].startswith(f"saved by 2 ranks, loaded by {world_size}: random numbers")
        assert len({result["drawn"] for result in results}) == world_size


def test_saved_by_three_ranks_loaded_by_two(tmp_path: Path) -> None:
    run_ranks(save_rank, 3, str(tmp_path), SKEWED, "t", 4)
    assert [result["wrong"] for result in run_ranks(load_rank, 2, str(tmp_path), EVEN, 4)] == [[], []]


# ------------------------------------------------------------------------------------------ replicas and subsets


def replicated(rank: int, world_size: int, directory: str) -> str:
    axis = everybody()
    both = whole("model/w", 1)
    tensors = {
        "model/w": FlatSlice(data=both.flatten(), offset=0, shape=both.shape, writes=rank == 1),
        f"model/own{rank}": FlatSlice(data=torch.full((2,), float(rank)), offset=0, shape=torch.Size([2])),
    }
    save(directory, "t", tensors=tensors, axis=axis)
    target = torch.zeros(35)
    own = torch.zeros(2)
    wanted = {
        "model/w": FlatSlice(data=target, offset=0, shape=torch.Size([5, 7]), writes=False),
        f"model/own{1 - rank}": FlatSlice(data=own, offset=0, shape=torch.Size([2])),
    }
    report = load(directory, tensors=wanted, axis=axis).report
    assert torch.equal(target, both.flatten())
    assert own.tolist() == [1.0 - rank] * 2
    report_of_one = load(directory, tensors=wanted if rank == 0 else {}, axis=axis, options=LoadOptions()).report
    assert report_of_one.unexpected == ("model/own0",)
    shutdown()
    return str(report)


def test_replicas_are_written_once_and_ranks_may_hold_different_tensors(tmp_path: Path) -> None:
    reports = run_ranks(replicated, 2, str(tmp_path))
    assert reports[0] == reports[1]
    assert "3 tensors filled" in reports[0]
    assert (tmp_path / "t" / "rank-00001.safetensors").stat().st_size > 35 * 4


# ----------------------------------------------------------------------------------------------- ranks that fail


def fails(rank: int, world_size: int, directory: str) -> list[str]:
    """What each of several bad saves and loads says on this rank."""
    axis = everybody()
    texts = []

    def attempt(
        tag: str = "bad", *, tensors: dict[str, FlatSlice], options: SaveOptions | None = None, **more: Any
    ) -> None:
        with pytest.raises(CheckpointError) as caught:
            save(directory, tag, tensors=tensors, axis=axis, options=options, **more)
        texts.append(str(caught.value))

    good = parts(rank, world_size, EVEN, 2)
    flat = torch.zeros(4)
    attempt(tensors={"x": FlatSlice(data=flat, offset=0, shape=torch.Size([4]))})
    attempt(tensors={"x": FlatSlice(data=flat[: 2 - rank], offset=2 * rank, shape=torch.Size([4]))})
    attempt(tensors={"x": FlatSlice(data=flat, offset=0, shape=torch.Size([4 + rank]), writes=rank == 0)})
    attempt(
        tensors={
            "x": FlatSlice(
                data=flat.to(DTYPES["model/b"] if rank else flat.dtype), offset=4 * rank, shape=torch.Size([8])
            )
        }
    )
    attempt(
        tensors={
            "x": FlatSlice(data=flat.view(2, 2) if rank else flat, offset=0, shape=torch.Size([4]), writes=rank == 0)
        }
    )
    attempt(f"bad{rank}", tensors=good, options=SaveOptions(tag_validation="fail"))
    attempt(tensors=good, client_state=Path("/") if rank == 0 else None)

    def full_disk(phase: str) -> None:
        if rank == 1 and phase == "data-written":
            raise OSError(28, "No space left on device")

    attempt(tensors=good, options=SaveOptions(on_phase=full_disk))

    for tensors in (
        {"model/w": FlatSlice(data=torch.zeros(2 + rank), offset=0, shape=torch.Size([2 + rank]))},
        {f"model/new{rank}": FlatSlice(data=flat, offset=0, shape=torch.Size([4]))},
    ):
        with pytest.raises(CheckpointError) as caught:
            load(directory, tensors=tensors, axis=axis)
        texts.append(str(caught.value))
    with pytest.raises(CheckpointError) as caught:
        load(directory if rank == 0 else directory + "/nowhere", tensors={}, axis=axis)
    texts.append(str(caught.value))
    shutdown()
    return texts


def test_one_rank_that_fails_fails_all_with_the_same_words_and_harms_nothing(tmp_path: Path) -> None:
    run_ranks(save_rank, 2, str(tmp_path), EVEN, "good", 1)
    first, second = run_ranks(fails, 2, str(tmp_path))
    assert first == second
    assert (
        "x can't be saved: each element must be written by exactly one rank, but elements [0, 4) of 4 are both"
        in first[0]
    )
    assert "in the part of rank 0 and in that of rank 1" in first[0]
    assert "elements [3, 4) of 4 are in nobody's part" in first[1]
    assert "x can't be saved: it has shape (4,) and torch.float32 on rank 0, but shape (5,)" in first[2]
    assert "but shape (8,) and torch.bfloat16 on rank 1" in first[3]
    assert first[4] == "rank 1: x: its local part has 2 dimensions, expected a flat (1-D) one"
    assert first[5] == (
        "ranks pass different tags to save(): rank 0 passes 'bad0', rank 1 passes 'bad1'; all must pass the same one"
    )
    assert first[6].startswith("rank 0: client_state is a pathlib.")
    assert first[7] == "rank 1: OSError: [Errno 28] No space left on device"
    assert first[8] == "ranks ask for model/w in different shapes: [2] and [3]"
    assert "2 tensors are not in it: model/new0, model/new1" in first[9]
    assert first[10].startswith("rank 1: checkpoint directory")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]
    assert [result["wrong"] for result in run_ranks(load_rank, 2, str(tmp_path), EVEN, 1)] == [[], []]


def different_tags(rank: int, world_size: int, directory: str) -> str:
    axis = everybody()
    path = save(directory, f"tag{rank}", tensors=parts(rank, world_size, EVEN, 1), axis=axis)
    shutdown()
    return path.name


def test_different_tags_are_settled_by_rank_0(tmp_path: Path) -> None:
    assert run_ranks(different_tags, 2, str(tmp_path)) == ["tag0", "tag0"]


# ------------------------------------------------------------------------------------------------ ranks that die


def killed_in_save(rank: int, world_size: int, directory: str, tag: str, victim: int, phase: str) -> str | None:
    axis = everybody()

    def die(reached: str) -> None:
        if rank == victim and reached == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        save(directory, tag, tensors=parts(rank, world_size, EVEN, 2), axis=axis, options=SaveOptions(on_phase=die))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


PHASES = ["data-written", "manifest-written", "retired", "renamed", "latest-written"]


@pytest.mark.parametrize(
    ("tag", "phase"), [(tag, phase) for tag in ("old", "new") for phase in PHASES if (tag, phase) != ("new", "retired")]
)
def test_a_kill_at_any_phase_leaves_a_whole_checkpoint(tmp_path: Path, tag: str, phase: str) -> None:
    run_ranks(save_rank, 1, str(tmp_path), EVEN, "old", 1)
    run_ranks(killed_in_save, 1, str(tmp_path), tag, 0, phase, may_die=(0,))
    through = phase in {"renamed", "latest-written"} if tag == "old" else phase == "latest-written"
    (result,) = run_ranks(load_rank_any, 1, str(tmp_path))
    assert result == (2 if through else 1)
    assert all(entry.fault is None for entry in list_checkpoints(tmp_path))
    run_ranks(save_rank, 1, str(tmp_path), EVEN, "next", 3)
    kept = {"old", "next"} | ({"new"} if tag == "new" and phase in {"renamed", "latest-written"} else set())
    assert {path.name for path in tmp_path.iterdir()} == {"latest", *kept}
    assert run_ranks(load_rank_any, 1, str(tmp_path)) == [3]


def load_rank_any(rank: int, world_size: int, directory: str) -> int:
    """Which of the values 1, 2, 3 the latest checkpoint holds, in all of its tensors."""
    target = parts(rank, world_size, EVEN, None)
    load(directory, tensors=target)
    (value,) = [
        value
        for value in (1, 2, 3)
        if all(torch.equal(part.data, whole(name, value).flatten()) for name, part in target.items())
    ]
    return value


def killed_while_writing(rank: int, world_size: int, directory: str) -> str:
    axis = everybody()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(BlockWriter, "finish", lambda self: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(CheckpointError) as caught:
            save(directory, "new", tensors=parts(rank, world_size, EVEN, 2), axis=axis)
    return str(caught.value)


def test_a_rank_killed_with_its_file_half_written(tmp_path: Path) -> None:
    run_ranks(save_rank, 2, str(tmp_path), EVEN, "old", 1)
    text, _ = run_ranks(killed_while_writing, 2, str(tmp_path), may_die=(1,))
    assert text.startswith("the connection to another rank was lost: ")
    assert run_ranks(load_rank_any, 1, str(tmp_path)) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "old"]


@pytest.mark.parametrize(("victim", "phase"), [(1, "data-written"), (0, "data-written"), (0, "renamed")])
def test_the_others_hear_of_a_killed_rank(tmp_path: Path, victim: int, phase: str) -> None:
    run_ranks(save_rank, 2, str(tmp_path), EVEN, "old", 1)
    results = run_ranks(killed_in_save, 2, str(tmp_path), "new", victim, phase, may_die=(victim,))
    assert results[victim] is None
    assert str(results[1 - victim]).startswith("CollectiveError: ")
    assert run_ranks(load_rank_any, 1, str(tmp_path)) == [1]
    assert [result["wrong"] for result in run_ranks(load_rank, 2, str(tmp_path), SKEWED, 1)] == [[], []]
