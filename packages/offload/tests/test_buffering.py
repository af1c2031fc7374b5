"""What is expected, beside a list."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.offload.buffering import Buffers, Expectation


@given(st.lists(st.sampled_from("abcde"), max_size=12), st.lists(st.sampled_from("abcdef"), max_size=20))
def test_beside_a_list(keys: list[str], met: list[str]) -> None:
    expected, left = Expectation(keys), list(keys)
    for key in met:
        expected.meet(key)
        if key in left:
            left.remove(key)
        assert list(expected) == left
        for each in "abcdef":
            assert (expected.distance(each) == math.inf) == (each not in left)
        order = sorted(set(left), key=expected.distance)
        assert order == sorted(set(left), key=left.index)
        if left:
            assert expected.distance(left[0]) == 0


@pytest.mark.parametrize("size", [None, 8192])
def test_buffers_are_used_again(size: int | None) -> None:
    buffers = Buffers(2, size, pin=False)
    first, second = buffers.take(4096), buffers.take(8192)
    held = buffers.bytes
    assert not buffers.free
    assert {len(first), len(second)} == {4096, 8192}
    for _ in range(10):
        buffers.give_back(first)
        assert buffers.free
        first = buffers.take(8192)
        first.fill_(1)
        second.fill_(2)
        assert first.eq(1).all()
    assert buffers.bytes == held
