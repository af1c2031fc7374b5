"""Memory of an arena: aligned, nobody else's, reused, and refused with both figures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.offload import ArenaFullError, HostArena


def test_a_capacity_is_taken_once_and_kept_to() -> None:
    arena = HostArena(10 * 4096)
    first, second = arena.take(5 * 4096), arena.take(4096 + 1)
    assert first.data_ptr() % 4096 == second.data_ptr() % 4096 == 0
    assert (arena.size, arena.free, len(second)) == (10 * 4096, 3 * 4096, 4097)
    with pytest.raises(
        ArenaFullError, match=r"takes 16384 bytes .*; 12288 of 40960 bytes are free, at most 12288"
    ) as told:
        arena.take(4 * 4096)
    assert (told.value.wanted, told.value.free, told.value.largest) == (16384, 12288, 12288)
    place = first.data_ptr()
    arena.give_back(first[:100].view(torch.float32))
    assert arena.take(5 * 4096).data_ptr() == place
    arena.give_back(second)
    for wrong in (second, torch.empty(5)):
        with pytest.raises(ValueError, match="handed out and hasn't got back"):
            arena.give_back(wrong)
    with pytest.raises(ValueError, match="at least one byte"):
        HostArena(0)


def test_without_a_capacity_it_grows_and_gives_back_what_is_empty() -> None:
    arena = HostArena()
    assert arena.size == 0
    small = [arena.take(1000) for _ in range(4)]
    one_slab = arena.size
    for memory in small:
        arena.give_back(memory)
    large = arena.take(3 * one_slab)
    assert arena.size == 3 * one_slab  # the empty slab went first
    arena.give_back(large)
    assert arena.free == arena.size
    nothing = arena.take(0)
    arena.give_back(nothing)
    assert arena.free == arena.size


def test_memory_of_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        memory = HostArena().take(100)
    memory.view(torch.float32).fill_(1)
    assert not memory.is_inference()


@given(st.lists(st.one_of(st.integers(0, 30_000), st.integers(-40, -1)), max_size=40), st.sampled_from([None, 100_000]))
def test_pieces_never_overlap(steps: list[int], capacity: int | None) -> None:
    arena = HostArena(capacity)
    taken: list[tuple[torch.Tensor, int]] = []
    for turn, step in enumerate(steps):
        if step >= 0:
            try:
                memory = arena.take(step)
            except ArenaFullError:
                assert capacity is not None
                continue
            memory.fill_(turn % 251)
            taken.append((memory, turn % 251))
        elif taken:
            memory, _ = taken.pop(step % len(taken))
            arena.give_back(memory)
        assert all(memory.eq(value).all() for memory, value in taken)
    for memory, _ in taken:
        arena.give_back(memory)
    assert arena.free == arena.size


@pytest.mark.cuda
def test_pinned_memory() -> None:
    arena = HostArena(1 << 20, pin=True)
    memory = arena.take(5000)
    assert arena.pinned
    assert memory.is_pinned()
    assert memory.data_ptr() % 4096 == 0
