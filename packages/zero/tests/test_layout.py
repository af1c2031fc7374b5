"""Properties of the layout of buckets: every element has exactly one owner, and every cut is aligned."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.zero.layout import ALIGNMENT, BucketLayout, Piece, fill_buckets, round_up

# Sizes that matter: nothing, one element, around the alignment, smaller and larger than the world.
SIZES = st.lists(
    st.one_of(
        st.integers(0, 5),
        st.integers(ALIGNMENT - 2, ALIGNMENT + 2),
        st.integers(2 * ALIGNMENT, 9 * ALIGNMENT),
        st.integers(0, 5000),
    ),
    max_size=12,
)
WORLDS = st.integers(1, 9)


@given(numels=SIZES, world_size=WORLDS)
def test_every_element_has_one_owner(numels: list[int], world_size: int) -> None:
    layout = BucketLayout(tuple(numels), world_size)
    for index, numel in enumerate(numels):
        covered = [0] * numel
        for rank in range(world_size):
            piece = layout.piece(index, rank)
            for element in range(piece.start, piece.start + piece.numel):
                covered[element] += 1
        assert covered == [1] * numel


@given(numels=SIZES, world_size=WORLDS)
def test_pieces_of_a_parameter_come_in_the_order_of_ranks(numels: list[int], world_size: int) -> None:
    layout = BucketLayout(tuple(numels), world_size)
    for index in range(len(numels)):
        reached = 0
        for rank in range(world_size):
            piece = layout.piece(index, rank)
            assert (piece.numel > 0) == (rank in layout.ranks_of(index))
            if piece.numel:
                assert piece.start == reached
                reached = piece.start + piece.numel
        assert reached == numels[index]


@given(numels=SIZES, world_size=WORLDS)
def test_pieces_lie_inside_the_shard_and_do_not_overlap(numels: list[int], world_size: int) -> None:
    layout = BucketLayout(tuple(numels), world_size)
    for rank in range(world_size):
        taken: set[int] = set()
        for index in range(len(numels)):
            piece = layout.piece(index, rank)
            places = set(range(piece.shard_offset, piece.shard_offset + piece.numel))
            assert places <= set(range(layout.shard_numel))
            assert not places & taken
            taken |= places


@given(numels=SIZES, world_size=WORLDS)
def test_a_piece_is_the_shards_part_of_the_parameter(numels: list[int], world_size: int) -> None:
    """With a bucket whose elements are numbered, a piece of the shard holds the numbers of the parameter."""
    layout = BucketLayout(tuple(numels), world_size)
    for rank in range(world_size):
        low, high = layout.shard_range(rank)
        shard = range(low, high)
        for index, start in enumerate(layout.starts):
            piece = layout.piece(index, rank)
            found = list(shard[piece.shard_offset : piece.shard_offset + piece.numel])
            assert found == list(range(start + piece.start, start + piece.start + piece.numel))


@given(numels=SIZES, world_size=WORLDS)
def test_shards_are_equal_and_every_cut_is_aligned(numels: list[int], world_size: int) -> None:
    layout = BucketLayout(tuple(numels), world_size)
    ranges = [layout.shard_range(rank) for rank in range(world_size)]
    assert [high - low for low, high in ranges] == [layout.shard_numel] * world_size
    assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])]
    assert ranges[-1][1] == layout.padded_numel
    assert all(cut % ALIGNMENT == 0 for cut in (*layout.starts, *(low for low, _ in ranges), layout.padded_numel))


@given(numels=SIZES, world_size=WORLDS)
def test_padding_is_bounded(numels: list[int], world_size: int) -> None:
    """Less than one alignment per parameter and one per shard, and none of it where sizes are aligned already."""
    layout = BucketLayout(tuple(numels), world_size)
    padding = layout.padded_numel - sum(numels)
    assert 0 <= padding < ALIGNMENT * (len(numels) + world_size)
    aligned = BucketLayout(tuple(n * ALIGNMENT * world_size for n in numels), world_size)
    assert aligned.padded_numel == sum(aligned.numels)


@given(numels=SIZES, world_size=WORLDS)
def test_starts_do_not_depend_on_the_world(numels: list[int], world_size: int) -> None:
    """What makes a checkpoint of one world size readable, element by element, in another."""
    assert BucketLayout(tuple(numels), world_size).starts == BucketLayout(tuple(numels), 1).starts


def test_a_parameter_smaller_than_the_world_has_one_owner() -> None:
    layout = BucketLayout((3,), 4)
    assert layout.shard_numel == ALIGNMENT
    assert [layout.piece(0, rank) for rank in range(4)] == [Piece(0, 3, 0), *[Piece(0, 0, 0)] * 3]


def test_a_parameter_straddles_the_border() -> None:
    """Two parameters of 100 and 130 elements, aligned to 64, take 320; two ranks get 192 each after alignment."""
    layout = BucketLayout((100, 130), 2)
    assert layout.starts == (0, 128)
    assert layout.shard_numel == 192
    assert layout.piece(0, 0) == Piece(0, 100, 0)
    assert layout.piece(0, 1) == Piece(0, 0, 0)
    assert layout.piece(1, 0) == Piece(0, 64, 128)
    assert layout.piece(1, 1) == Piece(64, 66, 0)


def test_an_empty_bucket_has_empty_shards() -> None:
    for numels in ((), (0,), (0, 0)):
        layout = BucketLayout(numels, 3)
        assert (layout.shard_numel, layout.padded_numel) == (0, 0)
        assert all(layout.piece(index, 2) == Piece(0, 0, 0) for index in range(len(numels)))


@pytest.mark.parametrize(
    ("numels", "world_size", "text"),
    [((1,), 0, "at least one rank, got world_size=0"), ((4, -1), 2, r"cannot be negative, got \(4, -1\)")],
)
def test_wrong_layouts_are_refused(numels: tuple[int, ...], world_size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BucketLayout(numels, world_size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of the 2 ranks"):
        BucketLayout((10,), 2).piece(0, rank)


@given(value=st.integers(0, 10_000), multiple=st.integers(1, 300))
def test_round_up(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@given(numels=SIZES, limit=st.integers(1, 6000))
def test_buckets_hold_every_parameter_once_in_order(numels: list[int], limit: int) -> None:
    runs = fill_buckets(numels, limit)
    assert [index for run in runs for index in run] == list(range(len(numels)))
    assert all(runs)


@given(numels=SIZES, limit=st.integers(1, 6000))
def test_a_bucket_exceeds_its_limit_only_for_one_large_parameter(numels: list[int], limit: int) -> None:
    for run in fill_buckets(numels, limit):
        total = sum(numels[index] for index in run)
        large = [index for index in run if numels[index] > limit]
        assert total <= limit or (len(large) == 1 and total == numels[large[0]])


@given(numels=SIZES, limit=st.integers(1, 6000))
def test_buckets_are_as_few_as_in_order_filling_allows(numels: list[int], limit: int) -> None:
    runs = fill_buckets(numels, limit)
    for run, following in pairwise(runs):
        assert sum(numels[index] for index in run) + numels[following[0]] > limit


def test_a_bucket_of_less_than_one_element_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one element, got a limit of 0"):
        fill_buckets([1], 0)
