"""Orders are permutations that look random; splits give each sample to one rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.data.order import Explicit, Sequential, Shuffled, mixed_seed
from drivetrain.engine.data.split import Split


def indices(order: Shuffled) -> list[int]:
    return order.take(np.arange(len(order)))


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 10**6))
def test_a_shuffle_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    assert sorted(indices(Shuffled(samples=samples, seed=seed, epoch=epoch))) == list(range(samples))


@given(st.integers(1, 2**62), st.data())
def test_elements_of_a_huge_shuffle_are_computed_alone(samples: int, data: st.DataObject) -> None:
    order = Shuffled(samples=samples, seed=1, epoch=2)
    positions = data.draw(st.lists(st.integers(0, samples - 1), min_size=1, max_size=20, unique=True))
    together = order.take(np.array(positions))
    assert together == [order.take(np.array([position]))[0] for position in positions]
    assert len(set(together)) == len(positions)
    assert all(0 <= index < samples for index in together)


def test_an_order_is_the_same_in_every_version_of_everything() -> None:
    assert indices(Shuffled(samples=10, seed=42, epoch=0)) == [8, 9, 4, 3, 2, 0, 7, 6, 1, 5]
    assert indices(Shuffled(samples=10, seed=42, epoch=1)) == [9, 8, 0, 1, 3, 4, 2, 5, 6, 7]
    huge = Shuffled(samples=10**9, seed=42, epoch=3)
    assert huge.take(np.arange(4)) == [857184276, 60285607, 521838367, 961437423]


@pytest.mark.parametrize("samples", [2, 3, 5, 17, 256, 1000])
def test_every_sample_comes_to_every_place_about_equally_often(samples: int) -> None:
    """Chi-square over the cells (place, sample): its mean is (n - 1)^2, its deviation about sqrt(2) (n - 1)."""
    trials = 300
    counts = np.zeros((samples, samples))
    places = np.arange(samples)
    for epoch in range(trials):
        counts[places, indices(Shuffled(samples=samples, seed=7, epoch=epoch))] += 1
    expected = trials / samples
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - (samples - 1) ** 2) < 6 * np.sqrt(2) * (samples - 1)


def test_all_orders_of_a_small_set_occur_about_equally_often() -> None:
    trials = 1200
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(trials):
        order = tuple(indices(Shuffled(samples=4, seed=epoch % 7, epoch=epoch)))
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    chi_square = sum((count - trials / 24) ** 2 / (trials / 24) for count in seen.values())
    assert chi_square < 23 + 6 * np.sqrt(2 * 23)


def test_neighbours_are_not_kept_together_and_epochs_are_not_alike() -> None:
    first = np.array(indices(Shuffled(samples=10_000, seed=1, epoch=0)))
    second = np.array(indices(Shuffled(samples=10_000, seed=1, epoch=1)))
    other = np.array(indices(Shuffled(samples=10_000, seed=2, epoch=0)))
    for a, b in ((first[:-1], first[1:]), (first, second), (first, other), (first, np.arange(10_000))):
        assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.05
        assert int((a == b).sum()) < 12


def test_the_other_orders() -> None:
    assert Sequential(samples=5).take(np.array([3, 1])) == [3, 1]
    assert Explicit(indices=np.array([5, 5, 9])).take(np.array([2, 0])) == [9, 5]
    assert len(Explicit(indices=np.array([5, 5, 9]))) == 3
    assert mixed_seed(1, 2) != mixed_seed(2, 1)
    assert 0 <= mixed_seed(0) < 2**63


splits = st.builds(
    Split,
    samples=st.integers(1, 200),
    micro_batch_size=st.integers(1, 9),
    ranks=st.integers(1, 7),
    drop_last=st.booleans(),
)


@given(splits, st.data())
def test_an_epoch_gives_each_sample_to_one_rank(split: Split, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, split.samples))
    steps = list(split.walk(begin))
    assert len(steps) == split.batches(begin)
    seen: list[int] = []
    position = begin
    for number, (start, after) in enumerate(steps):
        assert start == position
        shares = [split.positions(start, rank).tolist() for rank in range(split.ranks)]
        sizes = {len(share) for share in shares}
        assert len(sizes) == 1, "all ranks get micro-batches of one size"
        last = number == len(steps) - 1
        assert sizes == {split.micro_batch_size} or (last and not split.drop_last)
        seen += [place for share in shares for place in share]
        position = after
    left = list(range(begin, split.samples))
    if split.drop_last:
        assert seen == left[: len(left) // split.width * split.width]
    else:
        assert seen[: len(left)] == left
        extra = seen[len(left) :]
        assert len(extra) < split.ranks
        assert extra == [number % split.samples for number in range(len(extra))]
