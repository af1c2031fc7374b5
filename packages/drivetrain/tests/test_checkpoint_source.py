"""Slices of safetensors files, as other libraries write them, and a model that goes from them into its shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.engine import CheckpointError, SafetensorsSource
from drivetrain.zero import Policy, shard
from drivetrain_testkit import run_ranks


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7, generator=generator),
        "b.weight": torch.randn(3, 4, generator=generator).bfloat16(),
        "b.steps": torch.tensor(4),
        "c.mask": torch.tensor([True, False, True]),
        "c.none": torch.empty(0, 2),
    }


def in_parts(folder: Path, parts: dict[str, list[str]]) -> Path:
    """Files and the index that names them."""
    content = tensors()
    for file, names in parts.items():
        save_file({name: content[name] for name in names}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in parts.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


PARTS = {"one.safetensors": ["a.weight", "c.mask"], "two.safetensors": ["b.weight", "b.steps", "c.none"]}


def test_every_slice_of_every_tensor_is_read(tmp_path: Path) -> None:
    single, other = tmp_path / "single", tmp_path / "other"
    for folder in (single, other):
        folder.mkdir()
    save_file(tensors(), single / "model.safetensors")
    save_file(tensors(), other / "weights.safetensors")
    for path in (single, single / "model.safetensors", other, in_parts(tmp_path, PARTS), tmp_path, str(tmp_path)):
        source = SafetensorsSource(path)
        assert set(source.names()) == tensors().keys()
        for name, tensor in tensors().items():
            assert source.shape(name) == tensor.shape
            flat = tensor.reshape(-1)
            for start in range(tensor.numel() + 1):
                for stop in range(start, tensor.numel() + 1, 3):
                    found = source.read(name, start, stop)
                    assert found.dtype == tensor.dtype
                    assert torch.equal(found, flat[start:stop])
    with pytest.raises(ValueError, match=r"'a.weight' has 35 elements, asked for 3 to 36"):
        source.read("a.weight", 3, 36)


def test_names_are_changed_or_left_out(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, rename=lambda name: f"model.{name}" if name.startswith("b") else None)
    assert set(source.names()) == {"model.b.weight", "model.b.steps"}
    with pytest.raises(CheckpointError, match="both have a tensor named 'x'"):
        SafetensorsSource(tmp_path, rename=lambda name: "x")


def change_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_what_is_damaged_or_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no file or folder {tmp_path}/nowhere"):
        SafetensorsSource(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors.index.json nor .*, and 0 other"):
        SafetensorsSource(tmp_path)
    index = in_parts(tmp_path, PARTS)
    file = tmp_path / "one.safetensors"
    whole = file.read_bytes()
    faults: list[tuple[str, Callable[[], object]]] = [
        ("one.safetensors is cut: 'c.mask' ends at byte", lambda: file.write_bytes(whole[:-3])),
        ("one.safetensors is no safetensors file, or is cut", lambda: file.write_bytes(b"PK" * 40)),
        ("one.safetensors is no safetensors file, or is cut", lambda: file.write_bytes(b"")),
        ("has a header that cannot be read .*dtype U7 is not one of", lambda: rewrite({"dtype": "U7"})),
        ("has a header that cannot be read .*shape .5, 8. does not take bytes", lambda: rewrite({"shape": [5, 8]})),
        ("has a header that cannot be read .*does not take bytes -4", lambda: rewrite({"data_offsets": [-4, 136]})),
        ("one.safetensors lacks 'a.weight', which the index says", lambda: change_header(file, lambda h: h.clear())),
        ("there is no file .*one.safetensors", file.unlink),
    ]

    def rewrite(values: dict[str, object]) -> None:
        change_header(file, lambda header: header["a.weight"].update(values))

    for text, damage in faults:
        file.write_bytes(whole)
        damage()
        with pytest.raises(CheckpointError, match=text):
            SafetensorsSource(index)
    index.write_text("[1]")
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        SafetensorsSource(index)
    file.write_bytes(whole)
    source = SafetensorsSource(file)
    file.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match=r"ended while 'c.mask' was read"):
        source.read("c.mask", 0, 3)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def stream(rank: int, world_size: int, folder: Path) -> None:
    expected = net()
    with torch.device("meta"):
        model = net()
    sharded = shard(model, Mesh.create(init()), Policy(stage=3, persistence_numel=9), values=SafetensorsSource(folder))
    for name, found in sharded.full_parameters():
        assert torch.equal(found, expected.get_parameter(name)), name
    assert torch.equal(model[1].running_var, expected[1].running_var)


def test_a_model_goes_from_files_into_shards(tmp_path: Path) -> None:
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    run_ranks(stream, 2, tmp_path)
