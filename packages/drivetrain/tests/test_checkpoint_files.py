"""Checked files, the safetensors layout and the manifest."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain.engine.checkpoint.errors import CheckpointError
from drivetrain.engine.checkpoint.files import (
    BlockReader,
    BlockWriter,
    FileRecord,
    block_size,
    file_fault,
    replace_file,
    write_file,
)
from drivetrain.engine.checkpoint.manifest import Chunk, Manifest, TensorRecord, decode_manifest, encode_manifest
from drivetrain.engine.checkpoint.tensorfile import DTYPE_NAMES, TensorEntry, as_bytes, plan_tensor_file

SMALL = FileRecord(name="f", size=1000, block=64, checksums=())


def recorded(path: Path, content: bytes, block: int) -> FileRecord:
    """A record with small blocks, so that a small file has many."""
    path.write_bytes(content)
    crcs = tuple(zlib.crc32(content[at : at + block]) for at in range(0, len(content), block))
    return FileRecord(name=path.name, size=len(content), block=block, checksums=crcs)


@given(st.integers(0, 1 << 45))
def test_blocks_are_few_and_not_small(size: int) -> None:
    block = block_size(size)
    assert block >= 1 << 18
    assert -(-size // block) <= 1024
    assert block == 1 << 18 or -(-size // (block // 2)) > 1024


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.binary(max_size=300_000), max_size=4))
def test_what_was_written_is_what_is_read(tmp_path: Path, pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    with BlockWriter(tmp_path / "f", len(content)) as out:
        for piece in pieces:
            out.write(piece)
        record = out.finish()
    assert record == recorded(tmp_path / "f", content, block_size(len(content)))
    with BlockReader(tmp_path, record) as file:
        assert file.read_all() == content
        assert list(file.faults()) == []


def test_a_writer_notices_that_it_wrote_another_size(tmp_path: Path) -> None:
    with BlockWriter(tmp_path / "f", 5) as out:
        out.write(b"four")
        with pytest.raises(CheckpointError, match="4 bytes were written, 5 were planned"):
            out.finish()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80)
@given(st.integers(1, 400), st.data())
def test_a_read_touches_exactly_the_damage_that_lies_in_its_blocks(
    tmp_path: Path, size: int, data: st.DataObject
) -> None:
    content = bytes(number % 251 for number in range(size))
    record = recorded(tmp_path / "f", content, 32)
    damaged = data.draw(st.integers(0, size - 1))
    (tmp_path / "f").write_bytes(content[:damaged] + bytes([content[damaged] ^ 1]) + content[damaged + 1 :])
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start + 1, size))
    hit = start // 32 <= damaged // 32 <= (stop - 1) // 32
    target = bytearray(stop - start)
    with BlockReader(tmp_path, record) as file:
        if hit:
            with pytest.raises(CheckpointError, match=r"file f is corrupted in bytes \["):
                file.read_into(start, memoryview(target))
        else:
            file.read_into(start, memoryview(target))
            assert target == content[start:stop]
        assert len(list(file.faults())) == 1


def test_sizes_are_told(tmp_path: Path) -> None:
    record = recorded(tmp_path / "f", b"x" * 100, 32)
    assert file_fault(tmp_path, record) is None
    (tmp_path / "f").write_bytes(b"x" * 99)
    assert file_fault(tmp_path, record) == f"checkpoint {tmp_path}: file f is truncated (found 99 bytes, expected 100)"
    (tmp_path / "f").write_bytes(b"x" * 101)
    assert file_fault(tmp_path, record) == f"checkpoint {tmp_path}: file f is too long (found 101 bytes, expected 100)"
    (tmp_path / "f").unlink()
    assert file_fault(tmp_path, record) == f"checkpoint {tmp_path}: file f is missing"
    with pytest.raises(CheckpointError, match="file f is missing"):
        BlockReader(tmp_path, record)


def test_a_replaced_file_has_the_new_content_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("old")
    replace_file(tmp_path / "latest", b"new", suffix="1")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "new")]


def test_tensor_files_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    torch.manual_seed(0)
    raw = torch.randint(0, 100, (7,))
    tensors = {f"t{number}": raw.to(dtype) for number, dtype in enumerate(DTYPE_NAMES) if not dtype.is_complex}
    tensors |= {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "matrix": torch.randn(3, 5, dtype=torch.bfloat16),
    }
    entries = [
        TensorEntry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    layout = plan_tensor_file(entries, {"format": "pt"})
    with BlockWriter(tmp_path / "f.safetensors", layout.size) as out:
        out.write(layout.header)
        for entry, position in zip(layout.entries, layout.positions, strict=True):
            assert position % entry.dtype.itemsize == 0
            for piece in as_bytes(tensors[entry.name].flatten()):
                out.write(piece)
        out.finish()
    loaded = safetensors.torch.load_file(tmp_path / "f.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
        assert loaded[name].shape == tensor.shape


def example() -> Manifest:
    files = {"a": write_record("a", 64), "b": write_record("b", 64)}
    chunks = (Chunk(offset=0, numel=4, file="b", position=8), Chunk(offset=4, numel=2, file="a", position=16))
    tensor = TensorRecord(dtype=torch.float32, shape=torch.Size([2, 3]), chunks=chunks)
    return Manifest(
        tag="step1",
        created="2024-01-01T00:00:00+00:00",
        world_size=2,
        producer={"torch": "2.9"},
        metadata={"step": 1, "lr": 0.1, "name": "ü"},
        aliases={"y": "x"},
        tensors={"x": tensor, "e": TensorRecord(dtype=torch.int8, shape=torch.Size([0, 2]), chunks=())},
        files=files,
    )


def write_record(name: str, size: int) -> FileRecord:
    return FileRecord(name=name, size=size, block=1 << 18, checksums=(7,))


def test_a_manifest_comes_back_as_it_was_and_is_json() -> None:
    raw = encode_manifest(example())
    assert decode_manifest(raw, Path("x")) == example()
    assert json.loads(raw)["manifest"]["tensors"]["x"]["chunks"] == [[0, 4, 1, 8], [4, 2, 0, 16]]


@given(st.data())
def test_any_changed_byte_or_cut_of_a_manifest_is_refused(data: st.DataObject) -> None:
    raw = encode_manifest(example())
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + bytes([raw[at] ^ data.draw(st.integers(1, 255))]) + raw[at + 1 :]
    for damaged in (changed, raw[:at]):
        with pytest.raises(CheckpointError, match=r"checkpoint x: file manifest\.json can't be used"):
            decode_manifest(damaged, Path("x"))


def forged(change: str, value: object, *path: str) -> bytes:
    """A manifest with one entry changed and a right checksum."""
    body = json.loads(encode_manifest(example()))["manifest"]
    place = body
    for key in path:
        place = place[key]
    place[change] = value
    text = json.dumps(body).encode()
    return b'{"crc32":"' + f"{zlib.crc32(text):08x}".encode() + b'","manifest":\n' + text + b"}\n"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (forged("version", 2), "has format drivetrain-checkpoint version 2, and this program reads"),
        (forged("format", "zip"), "has format zip version 1"),
        (forged("tensors", 3), "'tensors' is a int, expected a dict"),
        (forged("world_size", True), "'world_size' is a bool, expected a int"),
        (forged("aliases", {"z": "nobody"}), "z is an alias of nobody, which is not there"),
        (forged("../../etc/passwd", {"size": 0, "block": 64, "crc32": ""}, "files"), "not the plain name of a file"),
        (forged("a", {"size": 9, "block": 64, "crc32": ""}, "files"), "the record of file a is not consistent"),
        (forged("dtype", "PICKLE", "tensors", "x"), "tensor x has the unknown dtype 'PICKLE'"),
        (forged("shape", [2, 4], "tensors", "x"), r"tensor x: elements \[6, 8\) of 8 are in nobody's part"),
        (forged("shape", [-1], "tensors", "x"), r"tensor x has the shape \[-1\]"),
        (forged("chunks", [[0, 6, 1, 44]], "tensors", "x"), "a chunk of tensor x does not lie in file b"),
        (forged("chunks", [[0, 6, 1, 9]], "tensors", "x"), "a chunk of tensor x does not lie in file b"),
        (forged("chunks", [[0, 6, -1, 8]], "tensors", "x"), r"a chunk of tensor x is \[0, 6, -1, 8\], expected four"),
        (forged("chunks", [[0, 6, 2, 8]], "tensors", "x"), "list index out of range"),
        (forged("chunks", [[0, 6]], "tensors", "x"), "not enough values"),
        (forged("chunks", [[0, 6.0, 1, 8]], "tensors", "x"), "a chunk of tensor x is"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        decode_manifest(raw, Path("x"))


def test_a_whole_file_is_written_durably(tmp_path: Path) -> None:
    assert write_file(tmp_path / "f", b"abc") == FileRecord(
        name="f", size=3, block=1 << 18, checksums=(zlib.crc32(b"abc"),)
    )
