"""Export to safetensors, from a checkpoint and from live shards, read by the libraries that it is meant for."""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from drivetrain.comm import Mesh, init, shutdown
from drivetrain.engine.checkpoint import CheckpointError, ExportOptions, export_checkpoint, export_tensors, load, save
from drivetrain.zero import FlatSlice
from drivetrain_testkit import run_ranks


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(11, 6, generator=generator),
        "norm.weight": torch.randn(6, generator=generator).bfloat16(),
        "steps": torch.tensor(3),
        "none": torch.empty(0, 2),
        "z.weight": torch.randn(4, 6, generator=generator),
    }


def slices(tensors: Mapping[str, torch.Tensor], prefix: str = "model/") -> dict[str, FlatSlice]:
    return {
        prefix + name: FlatSlice(data=tensor.detach().reshape(-1), offset=0, shape=tensor.shape)
        for name, tensor in tensors.items()
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(
        tmp_path / "run",
        "t",
        tensors=slices(weights()) | slices(weights(), "optimizer/"),
        aliases={"model/head.weight": "model/embed.weight", "optimizer/head": "optimizer/z.weight"},
        metadata={"model_config": {"model_type": "tiny"}},
    )
    return tmp_path / "run"


def check(out: Path, expected: Mapping[str, torch.Tensor]) -> None:
    loaded: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        loaded |= safetensors.torch.load_file(path)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_one_file_with_aliases_and_config(saved: Path, tmp_path: Path) -> None:
    exported = export_checkpoint(saved, tmp_path / "out")
    assert exported.files == ("model.safetensors",)
    assert exported.tensors == 5
    assert exported.nbytes == sum(tensor.nbytes for tensor in weights().values())
    check(tmp_path / "out", weights())
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "tiny"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_several_files_with_an_index_replace_an_earlier_export(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(saved, out)
    (out / "tokenizer.json").write_text("{}")
    exported = export_checkpoint(saved, out, options=ExportOptions(max_shard_bytes=100))
    assert exported.files == tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == exported.nbytes
    assert index["weight_map"].keys() == weights().keys()
    for name, file in index["weight_map"].items():
        assert name in safetensors.torch.load_file(out / file)
    check(out, weights())
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        *exported.files,
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert export_checkpoint(saved, out).files == ("model.safetensors",)
    check(out, weights())
    assert not (out / "model.safetensors.index.json").exists()


def test_a_cast_concerns_floating_point_only_and_is_told_to_the_config(saved: Path, tmp_path: Path) -> None:
    export_checkpoint(saved, tmp_path / "out", options=ExportOptions(dtype=torch.bfloat16, config={"dtype": "float32"}))
    cast = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights().items()}
    check(tmp_path / "out", cast)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16"}


def test_what_can_not_be_exported_is_said(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_checkpoint(saved, out)
    with pytest.raises(CheckpointError, match="nothing to export: no tensor's name starts with 'weights/'"):
        export_checkpoint(saved, out, options=ExportOptions(prefix="weights/"))
    with pytest.raises(CheckpointError, match="does not exist"):
        export_checkpoint(tmp_path / "nowhere", out)
    with pytest.raises(ValueError, match="max_shard_bytes must be at least 1, found 0"):
        ExportOptions(max_shard_bytes=0)
    with pytest.raises(ValueError, match=r"dtype must be a floating point dtype, found torch\.int8"):
        ExportOptions(dtype=torch.int8)
    path = saved / "t" / "rank-00000.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is corrupted"):
        export_checkpoint(saved, out)
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is truncated"):
        export_checkpoint(saved, out)
    check(out, weights())
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_the_other_libraries_load_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    names = dict(model.named_parameters())
    aliases = {"model/lm_head.weight": "model/transformer.wte.weight"}
    assert model.lm_head.weight is model.transformer.wte.weight
    save(tmp_path / "run", "t", tensors=slices(names), aliases=aliases, metadata={"model_config": config.to_dict()})
    for out, options in ((tmp_path / "one", ExportOptions()), (tmp_path / "many", ExportOptions(max_shard_bytes=2000))):
        export_checkpoint(tmp_path / "run", out, options=options)
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        tokens = torch.arange(10)[None]
        assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    export_checkpoint(tmp_path / "run", tmp_path / "half", options=ExportOptions(dtype=torch.bfloat16))
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16


def export_live(rank: int, world_size: int, out: str) -> tuple[str, ...]:
    axis = Mesh.create(init()).axis("shard")
    tensors = {}
    for name, part in slices(weights()).items():
        cut = part.data.numel() // 3
        start, stop = ((0, cut), (cut, cut), (cut, part.data.numel()))[rank]
        tensors[name] = FlatSlice(data=part.data[start:stop], offset=start, shape=part.shape)
    tensors["model/norm.weight"] = FlatSlice(
        data=weights()["norm.weight"], offset=0, shape=torch.Size([6]), writes=rank == 2
    )
    aliases = {"model/head.weight": "model/embed.weight"}
    exported = export_tensors(tensors, out, axis=axis, aliases=aliases, options=ExportOptions(max_shard_bytes=100))
    with pytest.raises(CheckpointError, match=r"rank 0: \w*Error: "):
        export_tensors(tensors, f"{out}/config.json/x" if rank == 0 else out, axis=axis)
    tensors.pop("model/z.weight") if rank == 2 else None
    with pytest.raises(
        CheckpointError, match=r"z\.weight can't be exported: elements \[8, 24\) of 24 are in nobody's part"
    ):
        export_tensors(tensors, out, axis=axis)
    shutdown()
    return exported.files


def test_live_shards_of_three_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    results = run_ranks(export_live, 3, str(out))
    assert results == [tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))] * 3
    check(out, weights())


def peak_growth(rank: int, world_size: int, directory: str) -> list[int]:
    """By how many bytes the peak of resident memory grows in a save, a load and an export of 256 MiB."""
    tensors = {f"w{number}": torch.ones(1 << 22) for number in range(8)} | {"large": torch.ones(1 << 25)}
    parts = slices(tensors)
    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]
    for action in (
        lambda: save(directory, "t", tensors=parts),
        lambda: load(directory, tensors=parts),
        lambda: export_checkpoint(directory, f"{directory}/out", options=ExportOptions(dtype=torch.bfloat16)),
    ):
        action()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return [(after - before) * 1024 for before, after in itertools.pairwise(peaks)]


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    (growth,) = run_ranks(peak_growth, 1, str(tmp_path))
    assert all(grown < 128 << 20 for grown in growth), growth
