"""Free parts never overlap, are joined, and are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.offload.extents import Extents


def test_neighbours_are_joined() -> None:
    extents = Extents(10)
    assert [extents.take(3), extents.take(3), extents.take(4), extents.take(1)] == [0, 3, 6, None]
    extents.give_back(0, 3)
    extents.give_back(6, 4)
    assert (extents.free, extents.largest, extents.free_at_end) == (7, 4, 4)
    assert extents.take(5) is None
    extents.give_back(3, 3)
    assert (extents.free, extents.largest) == (10, 10)
    extents.grow(2)
    assert (extents.size, extents.free_at_end) == (12, 12)
    for start, length in ((0, 1), (11, 2), (5, 0)):
        with pytest.raises(ValueError, match="were not taken"):
            extents.give_back(start, length)


@given(st.lists(st.one_of(st.integers(1, 30), st.integers(-40, -1)), max_size=80))
def test_beside_a_list_of_bytes(steps: list[int]) -> None:
    """Positive: take so many. Negative: give back one of those taken, or grow where there is none."""
    extents = Extents(40)
    owner = [0] * 40
    taken: list[tuple[int, int]] = []
    for turn, step in enumerate(steps, start=1):
        if step > 0:
            start = extents.take(step)
            fits = next((at for at in range(len(owner)) if owner[at : at + step] == [0] * step), None)
            assert start == fits
            if start is not None:
                owner[start : start + step] = [turn] * step
                taken.append((start, step))
        elif taken:
            start, length = taken.pop(step % len(taken))
            extents.give_back(start, length)
            owner[start : start + length] = [0] * length
        else:
            extents.grow(-step)
            owner.extend([0] * -step)
        assert extents.free == owner.count(0)
        assert extents.size == len(owner)
