"""Save and load in one process, every cut played by hand; what is refused, and with which words."""

from __future__ import annotations

import json
import logging
import pickle
import random
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from drivetrain.engine.checkpoint import (
    CheckpointError,
    CheckpointNotFoundError,
    LoadOptions,
    RandomState,
    SaveOptions,
    list_checkpoints,
    load,
    open_checkpoint,
    save,
    verify_checkpoint,
)
from drivetrain.zero import FlatSlice


def whole(tensor: torch.Tensor) -> FlatSlice:
    return FlatSlice(data=tensor.reshape(-1), offset=0, shape=tensor.shape)


def example() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "model/w": torch.randn(5, 7, generator=generator),
        "model/b": torch.randn(3, generator=generator).bfloat16(),
        "model/seen": torch.tensor(12, dtype=torch.int64),
        "model/mask": torch.tensor([True, False, True]),
        "model/none": torch.empty(0, 4),
        "optimizer/w/exp_avg": torch.randn(5, 7, generator=generator),
        "optimizer/w/step": torch.tensor(3.0),
    }


def slices(tensors: Mapping[str, torch.Tensor]) -> dict[str, FlatSlice]:
    return {name: whole(tensor) for name, tensor in tensors.items()}


def empty_like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, "step1", tensors=slices(example()), metadata={"step": 1}, client_state={"note": "hello"})
    return tmp_path


def test_everything_comes_back(saved: Path) -> None:
    target = empty_like(example())
    loaded = load(saved, tensors=slices(target))
    for name, tensor in example().items():
        assert torch.equal(target[name], tensor), name
    assert loaded.metadata == {"step": 1}
    assert loaded.client_state == {"note": "hello"}
    assert loaded.random_state is None
    assert loaded.world_size == 1
    assert loaded.report.filled == tuple(sorted(example()))
    assert loaded.report.complete
    assert str(loaded.report) == f"loaded {saved / 'step1'} (step1): 7 tensors filled"
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step1"]
    assert sorted(path.name for path in (saved / "step1").iterdir()) == [
        "client_state.pt",
        "manifest.json",
        "rank-00000.safetensors",
    ]


def test_a_part_of_a_tensor_is_loaded_with_a_cast(saved: Path) -> None:
    part = torch.zeros(6, dtype=torch.float64)
    load(saved, tensors={"model/w": FlatSlice(data=part, offset=11, shape=torch.Size([5, 7]))})
    assert torch.equal(part, example()["model/w"].flatten()[11:17].double())


def test_only_parameters_that_need_no_gradient_bookkeeping_are_written_to(saved: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, 7))
    load(saved, tensors={"model/w": FlatSlice(data=parameter.view(-1), offset=0, shape=parameter.shape)})
    assert torch.equal(parameter.detach(), example()["model/w"])


def test_missing_unexpected_and_reshaped_tensors_are_reported(saved: Path) -> None:
    target = {"model/w": torch.zeros(7, 5), "model/new": torch.ones(2), "model/b": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError) as caught:
        load(saved, tensors=slices(target))
    text = str(caught.value)
    assert "nothing was loaded: 1 tensors are not in it: model/new; " in text
    assert "1 tensors have another shape: model/w (saved as [5, 7], wanted as [7, 5])" in text
    assert "With strict=False the rest is loaded" in text
    assert not target["model/b"].any()
    report = load(saved, tensors=slices(target), options=LoadOptions(strict=False)).report
    assert report.filled == ("model/b",)
    assert report.missing == ("model/new",)
    assert report.unexpected == ("model/mask", "model/none", "model/seen", "optimizer/w/exp_avg", "optimizer/w/step")
    assert [(entry.name, entry.saved, entry.wanted) for entry in report.reshaped] == [("model/w", (5, 7), (7, 5))]
    assert not report.complete
    assert torch.equal(target["model/b"], example()["model/b"])
    assert torch.equal(target["model/new"], torch.ones(2))
    assert "1 missing: model/new" in str(report)


def test_the_module_alone_is_loaded(saved: Path) -> None:
    target = empty_like(example())
    report = load(saved, tensors=slices(target), options=LoadOptions(prefixes=("model/",))).report
    assert len(report.filled) == 5
    assert report.unexpected == ()
    assert not target["optimizer/w/exp_avg"].any()


def test_a_tied_tensor_is_found_under_each_of_its_names(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    save(tmp_path, "t", tensors={"model/embed": whole(tensor)}, aliases={"model/head": "model/embed"})
    embed, head = torch.zeros(6), torch.zeros(6)
    report = load(tmp_path, tensors={"model/embed": whole(embed), "model/head": whole(head)}).report
    assert torch.equal(embed, tensor)
    assert torch.equal(head, tensor)
    assert report.filled == ("model/embed", "model/head")
    assert report.unexpected == ()


def test_saving_a_tag_again_replaces_it(saved: Path) -> None:
    save(saved, "step1", tensors={"model/w": whole(torch.full((5, 7), 2.0))})
    target = torch.zeros(5, 7)
    loaded = load(saved, tensors={"model/w": whole(target)})
    assert torch.equal(target, torch.full((5, 7), 2.0))
    assert loaded.report.unexpected == ()
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step1"]


def test_latest_names_the_newest_unless_told_not_to(saved: Path) -> None:
    save(saved, "step2", tensors=slices(example()))
    assert (saved / "latest").read_text() == "step2"
    save(saved, "best", tensors=slices(example()), options=SaveOptions(update_latest=False))
    assert load(saved, tensors={}).report.tag == "step2"
    assert load(saved, "step1", tensors={}).metadata == {"step": 1}


def test_checkpoints_are_listed_in_order_with_their_faults(saved: Path) -> None:
    for tag in ("step10", "step9", "x²"):
        save(saved, tag, tensors=slices(example()))
    (saved / "notes").mkdir()
    (saved / "step10" / "rank-00000.safetensors").unlink()
    listed = list_checkpoints(saved)
    assert [(entry.tag, entry.latest, entry.tensors, entry.world_size) for entry in listed] == [
        ("step1", False, 7, 1),
        ("step9", False, 7, 1),
        ("step10", False, 7, 1),
        ("x²", True, 7, 1),
    ]
    assert [entry.fault for entry in listed[:2]] == [None, None]
    assert "file rank-00000.safetensors is missing" in str(listed[2].fault)


def test_a_stored_checkpoint_can_be_looked_into(saved: Path) -> None:
    stored = open_checkpoint(saved)
    assert stored.manifest.tensors["model/w"].shape == (5, 7)
    assert stored.manifest.tensors["model/b"].dtype == torch.bfloat16
    assert torch.equal(stored.read_tensor("model/w"), example()["model/w"])
    assert stored.read_tensor("model/none").shape == (0, 4)
    assert verify_checkpoint(saved) == []


# ---------------------------------------------------------------------------------------------- what isn't there


def test_nothing_there(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint directory .*nowhere does not exist"):
        load(tmp_path / "nowhere", tensors={})
    with pytest.raises(
        FileNotFoundError, match=r"'step7' is not in .* \(asked for it\); checkpoints that are there: step1"
    ):
        load(saved, "step7", tensors={})
    (saved / "latest").write_text("step8")
    with pytest.raises(
        CheckpointNotFoundError, match=r"'step8' is not in .* \(.*latest names it\); checkpoints that are there"
    ):
        load(saved, tensors={})
    (saved / "latest").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"has no file 'latest' .*; checkpoints that are there: step1"):
        load(saved, tensors={})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"has no file 'latest' .*; no checkpoints are there"):
        load(tmp_path / "empty", tensors={})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="is a file; expected the folder"):
        load(tmp_path / "file", tensors={})


def test_a_folder_without_a_manifest_is_not_a_checkpoint(saved: Path) -> None:
    (saved / "step2").mkdir()
    (saved / "step2" / "mp_rank_00_model_states.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointNotFoundError, match=r"has no manifest\.json, which is written last \(it holds mp_rank_00"
    ):
        load(saved, "step2", tensors={})
    with pytest.raises(
        CheckpointError, match="step2 exists and is not a checkpoint of this program; choose another tag"
    ):
        save(saved, "step2", tensors={})
    assert (saved / "step2" / "mp_rank_00_model_states.pt").exists()


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "a\\b", ".hidden", "latest", "x\n", "y" * 201, "ü" * 101])
def test_tags_that_are_no_folder_names_are_refused(tmp_path: Path, tag: str) -> None:
    with pytest.raises(CheckpointError, match="can't be the tag of a checkpoint"):
        save(tmp_path, tag, tensors={})
    assert list(tmp_path.iterdir()) == []


def test_a_tag_in_latest_does_not_lead_out_of_the_directory(saved: Path) -> None:
    shutil.copytree(saved / "step1", saved / "sub" / "step1")
    (saved / "latest").write_text("sub/step1")
    with pytest.raises(CheckpointError, match="'sub/step1' can't be the tag"):
        load(saved, tensors={})


# -------------------------------------------------------------------------------------------------------- damage


def test_damaged_files_are_named(saved: Path) -> None:
    path = saved / "step1" / "rank-00000.safetensors"
    content = path.read_bytes()
    target = slices(empty_like(example()))

    path.write_bytes(content[:-1])
    expected = rf"file rank-00000\.safetensors is truncated \(found {len(content) - 1} bytes, expected {len(content)}\)"
    with pytest.raises(CheckpointError, match=rf"checkpoint .*step1: {expected}"):
        load(saved, tensors=target)
    assert len(verify_checkpoint(saved)) == 1

    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"file rank-00000\.safetensors is corrupted in bytes \[0, "):
        load(saved, tensors=target)
    assert len(verify_checkpoint(saved)) == 1

    path.unlink()
    with pytest.raises(CheckpointError, match=r"file rank-00000\.safetensors is missing"):
        load(saved, tensors=target)

    path.write_bytes(content)
    manifest = saved / "step1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-40])
    with pytest.raises(
        CheckpointError, match=r"file manifest\.json can't be used: its checksum is wrong, it was cut or changed"
    ):
        load(saved, tensors=target)


class Bomb:
    """Unpickling it creates the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return (open, (str(self.path), "w"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("name", ["manifest.json", "client_state.pt", "rank-00000.safetensors", "random-00000.json"])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_not_run(saved: Path, tmp_path: Path, name: str) -> None:
    save(saved, "step1", tensors=slices(example()), random_state=RandomState.capture(torch.device("cpu")))
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    folder = saved / "step1"
    (folder / name).write_bytes(bomb)
    with pytest.raises(CheckpointError):
        load(saved, tensors=slices(empty_like(example())))
    # the attacker knows the format, too
    if name != "manifest.json":
        outer = json.loads((folder / "manifest.json").read_bytes())["manifest"]
        outer["files"][name] = {"size": len(bomb), "block": 1 << 18, "crc32": f"{zlib.crc32(bomb):08x}"}
        text = json.dumps(outer).encode()
        head = b'{"crc32":"' + f"{zlib.crc32(text):08x}".encode() + b'","manifest":\n'
        (folder / "manifest.json").write_bytes(head + text + b"}\n")
        with pytest.raises(CheckpointError):
            load(saved, tensors=slices(empty_like(example())))
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)  # the bomb itself does go off
    assert (tmp_path / "exploded").exists()


def test_metadata_written_by_torch_is_never_looked_at(saved: Path, tmp_path: Path) -> None:
    (saved / "step1" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    load(saved, tensors={})
    assert not (tmp_path / "exploded").exists()


# ------------------------------------------------------------------------------------------- what can't be saved


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (FlatSlice(data=torch.zeros(2, 2), offset=0, shape=torch.Size([4])), "its local part has 2 dimensions"),
        (
            FlatSlice(data=torch.zeros(3), offset=2, shape=torch.Size([4])),
            r"x: elements \[2, 5\) are no part of shape \(4,\)",
        ),
        (
            FlatSlice(data=torch.zeros(3), offset=0, shape=torch.Size([4])),
            r"but elements \[3, 4\) of 4 are in nobody's part",
        ),
        (
            FlatSlice(data=torch.zeros(4), offset=0, shape=torch.Size([4]), writes=False),
            r"\[0, 4\) of 4 are in nobody's part",
        ),
        (whole(torch.zeros(2, dtype=torch.complex128)), r"x has dtype torch\.complex128, which can't be stored"),
    ],
)
def test_slices_that_are_not_the_whole_are_refused(saved: Path, part: FlatSlice, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        save(saved, "step2", tensors={"x": part})
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step1"]
    assert (saved / "latest").read_text() == "step1"


def test_state_that_could_not_be_loaded_safely_is_refused_at_save(saved: Path) -> None:
    state = {"fine": [1, "a", torch.zeros(2)], "run": {"paths": [3, Path("/tmp")]}}
    with pytest.raises(
        CheckpointError,
        match=r"client_state\['run'\]\['paths'\]\[1\] is a pathlib\.\w*PosixPath, which can't be loaded",
    ):
        save(saved, "step2", tensors={}, client_state=state)
    with pytest.raises(CheckpointError, match=r"client_state\['f'\] is a builtins\.function"):
        save(saved, "step2", tensors={}, client_state={"f": lambda: None})
    with pytest.raises(CheckpointError, match=r"metadata\['x'\] can't be written as JSON"):
        save(saved, "step2", tensors={}, metadata={"x": {1, 2}})
    with pytest.raises(CheckpointError, match="model/head is said to be an alias of model/embed, which no rank saves"):
        save(saved, "step2", tensors={}, aliases={"model/head": "model/embed"})
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step1"]


def test_client_state_of_plain_things_comes_back(tmp_path: Path) -> None:
    state = {"a": [1, 2.5, None, True, "x"], "t": torch.arange(3), 4: (1, 2), "s": {1, 2}, "d": torch.float16}
    save(tmp_path, "t", tensors={}, client_state=state)
    loaded = load(tmp_path, tensors={}).client_state
    assert isinstance(loaded, dict)
    assert torch.equal(loaded.pop("t"), state.pop("t"))
    assert loaded == state


def test_a_dtype_that_would_lose_the_meaning_is_refused(saved: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"model/w was saved as torch\.float32 and can't be loaded into torch\.int32"
    ):
        load(saved, tensors={"model/w": whole(torch.zeros(5, 7, dtype=torch.int32))})


def test_leftovers_of_a_crash_are_cleared_and_a_caught_checkpoint_gets_its_name_back(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / ".step2.partial-00ff").mkdir()
    (saved / ".step2.partial-00ff" / "rank-00000.safetensors").write_bytes(b"half")
    (saved / ".latest.00ff").write_text("ste")
    (saved / "step1").rename(saved / ".step1.replaced-00ff")
    assert load(saved, tensors={}).metadata == {"step": 1}
    assert [entry.tag for entry in list_checkpoints(saved)] == ["step1"]
    with caplog.at_level(logging.INFO, logger="drivetrain.engine.checkpoint"):
        save(saved, "step3", tensors={})
    assert ".step2.partial-00ff" in caplog.text
    assert sorted(path.name for path in saved.iterdir()) == ["latest", "step1", "step3"]
    assert load(saved, "step1", tensors={}).metadata == {"step": 1}


# ------------------------------------------------------------------------------------------------- random states


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    random.gauss(0, 1)  # leaves a second value in the generator's state
    save(tmp_path, "t", tensors={}, random_state=RandomState.capture(cpu))
    expected = (random.gauss(0, 1), *draw())
    draw()
    loaded = load(tmp_path, tensors={}).random_state
    assert loaded is not None
    loaded.restore(cpu)
    assert (random.gauss(0, 1), *draw()) == expected


def test_derived_states_differ_between_ranks_and_stay_the_same() -> None:
    cpu = torch.device("cpu")
    state = RandomState.capture(cpu)
    drawn = []
    for rank in (0, 1, 0):
        state.derived(rank).restore(cpu)
        drawn.append(draw())
    assert drawn[0] == drawn[2]
    assert all(a != b for a, b in zip(drawn[0], drawn[1], strict=True))


def test_random_states_of_damaged_content_are_refused() -> None:
    with pytest.raises(CheckpointError, match="here does not hold a random state"):
        RandomState.from_json(b'{"python": 1}', "here")
