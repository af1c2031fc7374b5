"""Files and tensors: contents, alignment, errors with their place, and tensors that are dropped too early."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.kernels import AsyncFile, AsyncFileOptions, aligned_empty, instruction_sets

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")


def _ring_works(folder: Path) -> bool:
    try:
        AsyncFile(folder / "probe", "w", options=AsyncFileOptions(engine="io_uring")).close()
    except RuntimeError:
        return False
    return True


@pytest.fixture(params=["io_uring", "threads", "buffered"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncFileOptions:
    """Each engine, with small blocks so that every request is cut; "buffered" is threads without O_DIRECT."""
    if request.param == "io_uring" and not _ring_works(tmp_path):
        pytest.skip("io_uring is forbidden here")
    engine = "io_uring" if request.param == "io_uring" else "threads"
    return AsyncFileOptions(block_size=8192, queue_depth=4, engine=engine, direct=request.param != "buffered")  # type: ignore[arg-type]


def _bytes(count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("size", [0, 1, 5, 123, 4096, 4097, 100_003])
@pytest.mark.parametrize("offset", [0, 1, 4096, 5000])
def test_what_is_written_is_read(tmp_path: Path, options: AsyncFileOptions, size: int, offset: int) -> None:
    data = _bytes(size)
    with AsyncFile(tmp_path / "file", "w", options=options) as file:
        file.write(data, offset).wait()
    raw = (tmp_path / "file").read_bytes()
    assert raw == (b"\0" * offset + bytes(data.tolist()) if size else b"")
    back = torch.zeros_like(data)
    with AsyncFile(tmp_path / "file", options=options) as file:
        ticket = file.read(back, offset)
        ticket.wait()
        ticket.wait()
        assert ticket.done()
    assert torch.equal(back, data)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=8), st.integers(0, 63), st.booleans())
def test_pieces_in_any_cut(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], shift: int, threads: bool
) -> None:
    """Requests next to each other, from memory at any address, do not disturb one another."""
    path = tmp_path_factory.mktemp("cut") / "file"
    options = AsyncFileOptions(block_size=4096, queue_depth=8, engine="threads" if threads else "auto")
    data = _bytes(sum(cuts) + shift)[shift:]
    with AsyncFile(path, "w", options=options) as file:
        start = 0
        for size in cuts:
            file.write(data[start : start + size], start)
            start += size
        file.wait()
        back = aligned_empty(len(data), dtype=torch.uint8)
        file.read(back)
        file.sync()
    assert torch.equal(back, data)


def test_every_dtype_and_shape(tmp_path: Path, options: AsyncFileOptions) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        data = (torch.randn(7, 131) * 10).to(dtype)
        back = aligned_empty(7, 131, dtype=dtype)
        assert back.data_ptr() % 4096 == 0
        with AsyncFile(tmp_path / "file", "w", options=options) as file:
            file.write(data).wait()
            file.read(back).wait()
        assert torch.equal(back, data)


def test_a_dropped_tensor_is_kept_until_its_request_has_ended(tmp_path: Path, options: AsyncFileOptions) -> None:
    with AsyncFile(tmp_path / "file", "w", options=options) as file:
        for index in range(20):
            file.write(torch.full((50_000,), index, dtype=torch.uint8), index * 50_000)
            torch.full((50_000,), 99, dtype=torch.uint8)  # takes the memory of a tensor that is gone
    raw = (tmp_path / "file").read_bytes()
    assert all(raw[index * 50_000 : (index + 1) * 50_000] == bytes([index]) * 50_000 for index in range(20))
    dropped = AsyncFile(tmp_path / "other", "w", options=options)
    dropped.write(torch.full((500_000,), 7, dtype=torch.uint8))
    del dropped
    assert (tmp_path / "other").read_bytes() == bytes([7]) * 500_000


def test_a_short_file_and_a_missing_one(tmp_path: Path, options: AsyncFileOptions) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    file = AsyncFile(path, options=options)
    ticket = file.read(torch.empty(20_000, dtype=torch.uint8), 5)
    with pytest.raises(EOFError, match=r"read of 20000 bytes at offset 5 .*the file ends at offset 10000"):
        ticket.wait()
    file.wait()  # raised already
    file.read(torch.empty(1, dtype=torch.uint8), 10_000)
    with pytest.raises(EOFError):
        file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.read(torch.empty(1))
    with pytest.raises(FileNotFoundError) as caught:
        AsyncFile(tmp_path / "none", options=options)
    assert caught.value.filename == str(tmp_path / "none")


def test_a_limit_of_the_file_size_is_raised_with_its_place(tmp_path: Path, options: AsyncFileOptions) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with AsyncFile(tmp_path / "file", "w", options=options) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
        try:
            ticket = file.write(_bytes(200_000))
            with pytest.raises(
                OSError, match=r"write of 200000 bytes at offset 0 of .*at offset \d+: File too large"
            ) as caught:
                ticket.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "file")


def test_a_full_disk(tmp_path: Path, options: AsyncFileOptions) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        file = AsyncFile(folder / "file", "w", options=options)
        file.write(_bytes(1_000_000))
        with pytest.raises(OSError, match="No space left") as caught:
            file.close()
        assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", folder], check=True)


def _in_child(file: AsyncFile, queue: multiprocessing.SimpleQueue[str]) -> None:
    try:
        file.read(torch.empty(1, dtype=torch.uint8))
    except RuntimeError as error:
        queue.put(str(error))
    file.close()


def test_a_forked_child_is_refused_in_words_and_harms_nothing(tmp_path: Path, options: AsyncFileOptions) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    with AsyncFile(tmp_path / "file", "w", options=options) as file:
        file.write(_bytes(10_000)).wait()
        child = context.Process(target=_in_child, args=(file, queue))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert "forked; open it again here" in queue.get()
        back = torch.empty(10_000, dtype=torch.uint8)
        file.read(back).wait()
    assert torch.equal(back, _bytes(10_000))


def test_an_exit_with_requests_under_way_is_clean(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from drivetrain.kernels import AsyncFile;"
        "f = AsyncFile(sys.argv[1], 'w'); f.write(torch.ones(3_000_000))"
    )
    path = tmp_path / "file"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert path.stat().st_size == 12_000_000


def test_wrong_use_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with AsyncFile(path) as file:
        assert file.engine in ("io_uring", "threads")
        with pytest.raises(ValueError, match="open for reading only"):
            file.write(torch.zeros(1))
        with pytest.raises(ValueError, match="isn't contiguous"):
            file.read(torch.zeros(3, 3).t())
        with pytest.raises(ValueError, match="offset must not be negative"):
            file.read(torch.zeros(1), -1)
        with pytest.raises(ValueError, match="host memory only"):
            file.read(torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="mode: expected"):
        AsyncFile(path, "a")  # type: ignore[arg-type]
    for wrong in ({"block_size": 1000}, {"queue_depth": 0}, {"parallelism": 99}, {"engine": "aio"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
            AsyncFileOptions(**wrong)  # type: ignore[arg-type]
    assert os.path.getsize(path) == 100
