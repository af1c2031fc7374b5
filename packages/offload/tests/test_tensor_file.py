"""Files by name, by many ranks, and through `torch.save`; whole or not there."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import pytest
import torch

from drivetrain.kernels import AsyncFileOptions, instruction_sets
from drivetrain.offload import TensorFiles, TensorFileWriter, share_file
from drivetrain_testkit import run_ranks

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")

OPTIONS = AsyncFileOptions(block_size=8192, queue_depth=4)


def test_blocking_and_not(tmp_path: Path) -> None:
    with TensorFiles(OPTIONS) as files:
        first, second = torch.randn(3001), torch.arange(7)
        files.write(first, tmp_path / "a")
        files.write(second, tmp_path / "a", offset=first.nbytes)
        files.start_write(second, tmp_path / "b")
        files.start_write(first, tmp_path / "c", 100)
        assert files.wait() == 2
        assert files.wait() == 0
        back = files.empty(3001)
        assert back.data_ptr() % 4096 == 0
        files.read(back, tmp_path / "a")
        assert torch.equal(back, first)
        integers = torch.zeros(7, dtype=torch.int64)
        transfer = files.start_read(integers, tmp_path / "a", first.nbytes)
        transfer.wait()
        transfer.wait()
        assert transfer.done()
        assert torch.equal(integers, second)
        files.sync()
    assert (tmp_path / "c").read_bytes() == bytes(100) + first.numpy().tobytes()
    with TensorFiles() as files:  # what is there is not emptied
        files.write(torch.zeros(1, dtype=torch.uint8), tmp_path / "c", 3)
    assert (tmp_path / "c").stat().st_size == 100 + first.nbytes


def test_failures_are_raised_once_with_their_place(tmp_path: Path) -> None:
    files = TensorFiles()
    with pytest.raises(FileNotFoundError):
        files.read(torch.empty(1), tmp_path / "none")
    (tmp_path / "short").write_bytes(b"12345")
    with pytest.raises(EOFError, match=r"short.*ends at offset 5"):
        files.read(torch.empty(9), tmp_path / "short")
    files.start_read(torch.empty(9), tmp_path / "short")
    with pytest.raises(EOFError, match=r"short.*ends at offset 5"):
        files.wait()
    files.close()
    files.close()
    for _ in range(600):
        files.write(torch.ones(2), tmp_path / "many")
    assert len(files._under_way) < 300
    files.close()


@pytest.mark.cuda
def test_tensors_of_a_gpu(tmp_path: Path) -> None:
    with TensorFiles(pin_memory=True) as files:
        data = torch.randn(5000, device="cuda")
        files.write(data, tmp_path / "a")
        back = torch.empty_like(data)
        transfer = files.start_read(back, tmp_path / "a")
        transfer.wait()
        assert torch.equal(back, data)
        assert files.empty(3).is_pinned()


def write_range(rank: int, world: int, path: Path) -> None:
    data = torch.arange(100_003, dtype=torch.int32)
    first, last = rank * len(data) // world, (rank + 1) * len(data) // world
    share_file(path, data.nbytes)
    with TensorFiles(OPTIONS) as files:
        for start in range(first, last, 3333):
            files.start_write(data[start : min(start + 3333, last)], path, 4 * start)


def test_many_ranks_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1_000_000)  # longer than what comes
    run_ranks(write_range, 3, path)
    back = torch.empty(100_003, dtype=torch.int32)
    assert path.stat().st_size == back.nbytes
    with TensorFiles() as files:
        files.read(back, path)
    assert torch.equal(back, torch.arange(100_003, dtype=torch.int32))


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 16])
def test_torch_save_through_a_writer(tmp_path: Path, atomic: bool, buffer_bytes: int) -> None:
    state = {"w": torch.randn(300, 301), "b": torch.arange(5), "n": {"lr": 0.1, "empty": torch.empty(0)}}
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    with TensorFileWriter(path, options=OPTIONS, buffer_bytes=buffer_bytes, buffer_count=3, atomic=atomic) as writer:
        assert writer.writable()
        torch.save(state, writer)
        assert (path.read_bytes() == b"old") is atomic
        size = writer.tell()
    assert writer.closed
    assert path.stat().st_size == size
    assert [each.name for each in tmp_path.iterdir()] == ["state.pt"]
    found = torch.load(path, weights_only=True)
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["b"], state["b"])
    assert found["n"]["lr"] == 0.1
    plain = tmp_path / "plain.pt"
    torch.save(state, plain)
    assert torch.equal(torch.load(plain, weights_only=True)["w"], found["w"])


def test_a_writer_takes_any_bytes(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "file", buffer_bytes=10) as writer:
        assert writer.write(b"") == 0
        assert writer.write(b"abc") == 3
        assert writer.write(bytearray(b"defghijklmnopqrstuvwxyz")) == 23
        assert writer.write(memoryview(torch.tensor([65, 66], dtype=torch.int16).numpy())) == 4
        writer.flush()
        assert writer.tell() == 30
    assert (tmp_path / "file").read_bytes() == b"abcdefghijklmnopqrstuvwxyzA\0B\0"
    writer.close()
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"more")


def test_what_is_not_finished_does_not_take_the_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with contextlib.suppress(KeyError), TensorFileWriter(path) as writer:
        writer.write(b"new")
        raise KeyError
    dropped = TensorFileWriter(path)
    dropped.write(b"new")
    del dropped
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="File too large"), TensorFileWriter(path, buffer_bytes=4096) as writer:
            writer.write(b"x" * 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_no_room_for_a_shared_file_is_told(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="File too large: 100000 more bytes wanted for a file of 0"):
            share_file(tmp_path / "file", 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
