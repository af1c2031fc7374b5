"""Aligned memory, and buffers that are handed out, given back and used for files."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest
import torch

from drivetrain.kernels import (
    AsyncFile,
    AsyncFileOptions,
    BufferPool,
    aligned_empty,
    instruction_sets,
    prefer_large_pages,
)

needs_core = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")


@pytest.mark.parametrize("shape", [(0,), (1,), (7, 131), (0, 5), (1 << 19, 3), (1_500_001,)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_memory_is_aligned_and_all_of_it_usable(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = aligned_empty(*shape, dtype=dtype)
    assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    assert tensor.numel() == 0 or tensor.data_ptr() % 4096 == 0
    assert bool((tensor.fill_(1) == 1).all())
    view = tensor[1:]
    del tensor
    gc.collect()
    assert bool((view.fill_(2) == 2).all())  # a view keeps the memory


def test_a_pool_hands_each_buffer_to_one_at_a_time() -> None:
    pool = BufferPool(3, 5000)
    assert (pool.count, pool.size, pool.free, tuple(pool.memory.shape)) == (3, 5000, 3, (3, 8192))
    taken = [pool.acquire() for _ in range(3)]
    assert {buffer.data_ptr() for buffer in taken} == {row.data_ptr() for row in pool.memory}
    assert all(buffer.shape == (5000,) and buffer.dtype == torch.uint8 for buffer in taken)
    with pytest.raises(RuntimeError, match="all 3 buffers of the pool are taken; release one, or make the pool larger"):
        pool.acquire()
    pool.release(taken[1].view(torch.bfloat16)[:100])
    assert pool.free == 1
    for wrong in (taken[1], taken[0][1:], torch.zeros(3)):
        with pytest.raises(ValueError, match="doesn't begin where a buffer does that this pool handed out"):
            pool.release(wrong)
    assert pool.acquire().data_ptr() == taken[1].data_ptr()
    for count, size in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"at least one buffer of at least one byte; found {count} of {size}"):
            BufferPool(count, size)


@needs_core
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_file_through_buffers_that_are_used_again(tmp_path: Path, engine: str) -> None:
    pool = BufferPool(3, 100_000)
    pieces = [torch.randint(0, 256, (50_000 + 5_000 * index,), dtype=torch.uint8) for index in range(8)]
    starts = [sum(len(piece) for piece in pieces[:index]) for index in range(8)]
    options = AsyncFileOptions(block_size=8192, queue_depth=8, engine=engine)  # type: ignore[arg-type]
    with AsyncFile(tmp_path / "file", "w", options=options, buffers=pool) as file:
        assert file.holds_buffers == (file.engine == "io_uring")
        for start, piece in zip(starts, pieces, strict=True):
            buffer = pool.acquire()[: len(piece)]
            buffer.copy_(piece)
            file.write(buffer, start).wait()
            pool.release(buffer)
        under_way = []
        for start, piece in zip(starts, pieces, strict=True):
            if pool.free == 0:
                ticket, buffer, expected = under_way.pop(0)
                ticket.wait()
                assert torch.equal(buffer, expected)
                pool.release(buffer)
            buffer = pool.acquire()[: len(piece)]
            under_way.append((file.read(buffer, start), buffer, piece))
        other = torch.empty(starts[-1], dtype=torch.uint8)  # memory that is not the pool's works beside it
        file.read(other).wait()
        file.wait()
        assert all(torch.equal(buffer, expected) for _, buffer, expected in under_way)
    assert torch.equal(other, torch.cat(pieces[:-1]))


@needs_core
def test_a_file_keeps_the_memory_of_its_pool(tmp_path: Path) -> None:
    """What the kernel goes by is an address: nothing else may come to lie there while the file is open."""
    pool = BufferPool(1, 1 << 22)
    address = pool.memory.data_ptr()
    with AsyncFile(tmp_path / "file", "w", buffers=pool) as file:
        del pool
        gc.collect()
        data = aligned_empty(1 << 22, dtype=torch.uint8)
        assert data.data_ptr() != address
        data.fill_(7)
        file.write(data).wait()
    assert (tmp_path / "file").read_bytes() == bytes([7]) * (1 << 22)


@pytest.mark.parametrize("numel", [0, 1, 1000, (3 << 20) + 5])
def test_memory_that_asks_for_large_pages_is_the_same_memory(numel: int) -> None:
    """Any view will do, and memory that holds something keeps it."""
    tensor = torch.arange(numel + 3, dtype=torch.float32)[1 : numel + 1]
    expected, place = tensor.clone(), tensor.data_ptr()
    assert prefer_large_pages(tensor) is tensor
    assert tensor.data_ptr() == place
    assert torch.equal(tensor, expected)
    prefer_large_pages(torch.empty(1 << 24, device="meta"))


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
def test_large_pages_come_where_the_system_has_them() -> None:
    mode = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not mode.exists() or "[never]" in mode.read_text():
        pytest.skip("this system has no large pages")
    tensor = prefer_large_pages(torch.empty(64 << 20, dtype=torch.uint8)).zero_()
    assert large_bytes_at(tensor.data_ptr() + (16 << 20)) > 0


def large_bytes_at(address: int) -> int:
    """Bytes of large pages in the mapping that ``address`` lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head is not None:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0
