"""The loader: each epoch whole, over ranks and over resumes at other numbers of ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from drivetrain.engine.data import LoaderConfig, RepeatingLoader, StaleIteratorError, TrainLoader


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The numbers from 0, shifted by 1000 in each epoch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + self.samples))


def loaders(dataset: Dataset[Any], ranks: int, **config: Any) -> list[TrainLoader]:
    return [TrainLoader(dataset, LoaderConfig(rank=rank, ranks=ranks, **config)) for rank in range(ranks)]


def together(group: list[TrainLoader], steps: int | None = None) -> list[int]:
    """Samples of all ranks in the order of the micro-batches; checks that ranks stay in step."""
    out: list[int] = []
    iterators = [iter(loader) for loader in group]
    while steps is None or steps > 0:
        batches = [next(iterator, None) for iterator in iterators]
        assert len({batch is None for batch in batches}) == 1
        assert len({json.dumps(loader.state_dict()) for loader in group}) == 1
        if batches[0] is None:
            break
        assert len({len(batch) for batch in batches}) == 1
        out += [int(sample) for batch in batches for sample in batch]
        steps = None if steps is None else steps - 1
    return out


def test_each_epoch_is_whole_and_in_another_order() -> None:
    group = loaders(Numbers(24), 3, micro_batch_size=4, seed=5)
    assert len(group[0]) == 2
    first, second = together(group), together(group)
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first != list(range(24))
    assert group[0].epoch == 2
    assert together(loaders(Numbers(24), 1, micro_batch_size=6, seed=5)) == first, "the cut doesn't change the order"
    assert together(loaders(Numbers(24), 3, micro_batch_size=4, seed=6)) != first


def test_an_order_without_shuffling() -> None:
    assert together(loaders(Numbers(10), 2, micro_batch_size=2, shuffle=False)) == list(range(10))


def test_the_end_of_an_epoch() -> None:
    assert together(loaders(Numbers(11), 2, micro_batch_size=4, shuffle=False, drop_last=True)) == list(range(8))
    assert together(loaders(Numbers(11), 2, micro_batch_size=4, shuffle=False)) == [*range(11), 0]
    assert together(loaders(Numbers(2), 4, micro_batch_size=4, shuffle=False)) == [0, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(4, 60),
    legs=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 5),
)
def test_resumes_at_other_world_sizes_repeat_and_lose_nothing(
    samples: int, legs: list[tuple[int, int, int]], seed: int
) -> None:
    """Legs of a run: (ranks, micro-batch size, micro-batches until it is stopped)."""
    state = None
    epochs: dict[int, list[int]] = {}
    for ranks, micro_batch_size, steps in [*legs, (1, 1, samples)]:
        for _ in range(steps):
            group = loaders(Numbers(samples), ranks, micro_batch_size=micro_batch_size, seed=seed)
            if state is not None:
                for loader in group:
                    loader.load_state_dict(json.loads(json.dumps(state)))
            epoch, position = group[0].epoch, group[0].position
            got = together(group, steps=1)
            taken = min(samples - position, ranks * micro_batch_size)
            epochs.setdefault(epoch, []).extend(got[:taken])
            state = group[0].state_dict()
    for epoch in sorted(epochs)[:-1]:
        assert sorted(epochs[epoch]) == list(range(samples))
    last = epochs[max(epochs)]
    assert len(set(last)) == len(last)
    uninterrupted = loaders(Numbers(samples), 1, micro_batch_size=1, seed=seed)
    for epoch in sorted(epochs):
        assert together(uninterrupted)[: len(epochs[epoch])] == epochs[epoch], epoch


def test_a_state_saved_inside_of_the_loop_counts_the_micro_batch_in_hand() -> None:
    loader = TrainLoader(Numbers(6), LoaderConfig(micro_batch_size=2))
    positions = [(loader.epoch, loader.position) for _ in loader]
    assert positions == [(0, 2), (0, 4), (1, 0)]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_fetch_ahead_and_the_position_does_not(persistent: bool) -> None:
    config = LoaderConfig(micro_batch_size=2, num_workers=2, prefetch_factor=3, persistent_workers=persistent, seed=3)
    loader = TrainLoader(Numbers(20), config)
    plain = TrainLoader(Numbers(20), LoaderConfig(micro_batch_size=2, seed=3))
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    iterator = iter(loader)
    got = [next(iterator).tolist() for _ in range(3)]
    assert loader.position == 6
    state = loader.state_dict()
    got += [next(iterator).tolist() for _ in range(2)]
    assert got == expected[:5]
    loader.load_state_dict(state)
    with pytest.raises(StaleIteratorError):
        next(iterator)
    assert [batch.tolist() for _ in range(2) for batch in loader] == expected[3:]


def test_iterators_that_were_overtaken_say_so() -> None:
    loader = TrainLoader(Numbers(20), LoaderConfig(micro_batch_size=2, shuffle=False))
    old = iter(loader)
    assert next(old).tolist() == [0, 1]
    new = iter(loader)
    assert next(new).tolist() == [2, 3]
    with pytest.raises(StaleIteratorError, match="no longer valid"):
        next(old)
    assert next(new).tolist() == [4, 5]


def test_the_generators_of_the_process_are_left_alone() -> None:
    loader = TrainLoader(Numbers(12), LoaderConfig(micro_batch_size=2))
    sampled = TrainLoader(Numbers(12), LoaderConfig(micro_batch_size=2), sampler=RandomSampler(Numbers(12)))
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    list(loader)
    list(sampled)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


# ---------------------------------------------------------------------------------------- samplers and collation


def test_random_samplers_agree_over_ranks_and_resumes() -> None:
    dataset = Numbers(20)
    weights = [0.0] * 10 + [1.0] * 10
    for sampler in (RandomSampler(dataset), WeightedRandomSampler(weights, 20)):
        config = {"micro_batch_size": 2, "ranks": 2, "seed": 4}
        group = [TrainLoader(dataset, LoaderConfig(rank=rank, **config), sampler=sampler) for rank in range(2)]
        first, second = together(group), together(group)
        assert first != second
        if isinstance(sampler, RandomSampler):
            assert sorted(first) == list(range(20))
        else:
            assert min(first) >= 10
        torch.manual_seed(123)
        again = [TrainLoader(dataset, LoaderConfig(rank=rank, **config), sampler=sampler) for rank in range(2)]
        head = together(again, steps=2)
        state = again[0].state_dict()
        for loader in again:
            loader.load_state_dict(state)
        assert head + together(again) == first


def test_a_sampler_that_counts_epochs_is_told() -> None:
    class Rotated(list[int]):
        def set_epoch(self, epoch: int) -> None:
            self[:] = [(index + epoch) % 4 for index in range(4)]

    loader = TrainLoader(Numbers(4), LoaderConfig(micro_batch_size=4), sampler=Rotated(range(4)))
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[0, 1, 2, 3], [1, 2, 3, 0]]


def test_collation() -> None:
    config = LoaderConfig(micro_batch_size=2, shuffle=False)
    assert list(TrainLoader(Numbers(4), config, collate_fn=lambda samples: sum(samples))) == [1, 5]
    pairs = TensorDataset(torch.arange(4.0), torch.arange(4) * 10)
    x, y = next(iter(TrainLoader(pairs, config)))
    assert (x.tolist(), y.tolist()) == ([0.0, 1.0], [0, 10])
    assert list(TrainLoader(Stream(4), config, collate_fn=lambda samples: sum(samples))) == [1, 5]


# ------------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_stream_is_shared_out(num_workers: int) -> None:
    group = loaders(Stream(21), 2, micro_batch_size=4, num_workers=num_workers)
    assert together(group) == [*range(21), 16], "the short end is filled up from its own beginning"
    assert together(group)[:21] == list(range(1000, 1021))
    dropping = loaders(Stream(21), 2, micro_batch_size=4, drop_last=True, num_workers=num_workers)
    assert together(dropping) == list(range(16))
    with pytest.raises(TypeError, match="isn't known before its end"):
        len(group[0])


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 3))
def test_a_stream_resumes_by_skipping(samples: int, ranks: int, micro: int, steps: int, other: int) -> None:
    group = loaders(Stream(samples), ranks, micro_batch_size=micro)
    width = ranks * micro
    steps = min(steps, -(-samples // width))
    together(group, steps=steps)
    resumed = loaders(Stream(samples), other, micro_batch_size=2)
    for loader in resumed:
        loader.load_state_dict(group[0].state_dict())
    left = [*range(min(steps * width, samples), samples)] or [*range(1000, 1000 + samples)]
    assert together(resumed)[: len(left)] == left


def test_a_stream_that_is_too_short() -> None:
    loader = TrainLoader(Stream(3), LoaderConfig(micro_batch_size=4, drop_last=True))
    with pytest.raises(ValueError, match=r"gave fewer samples than one micro-batch over all ranks \(4\)"):
        next(iter(loader))


# ------------------------------------------------------------------------------------------------------- endless


def test_repeating_goes_on_for_ever_and_follows_a_loaded_state() -> None:
    loader = TrainLoader(Numbers(6), LoaderConfig(micro_batch_size=2))
    endless = RepeatingLoader(loader)
    samples = [int(sample) for _ in range(9) for sample in next(endless)]
    assert [sorted(samples[begin : begin + 6]) for begin in (0, 6, 12)] == [list(range(6))] * 3
    assert samples[:6] != samples[6:12]
    state = loader.state_dict()
    ahead = [next(endless).tolist() for _ in range(4)]
    loader.load_state_dict(state)
    assert [next(endless).tolist() for _ in range(4)] == ahead
    assert iter(endless) is endless


def test_repeating_another_loader_reshuffles_it() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(32), num_replicas=1, rank=0)
    endless = RepeatingLoader(DataLoader(Numbers(32), batch_size=32, sampler=sampler))
    first, second = next(endless).tolist(), next(endless).tolist()
    assert sorted(first) == sorted(second)
    assert first != second
    with pytest.raises(ValueError, match="gives no micro-batch at all"):
        next(RepeatingLoader([]))


# ------------------------------------------------------------------------------------------------------ refusals


def test_what_is_refused() -> None:
    config = LoaderConfig(micro_batch_size=4, ranks=2)
    with pytest.raises(ValueError, match="the data set has 0 samples, fewer than the 1 of"):
        TrainLoader(Numbers(0), config)
    with pytest.raises(
        ValueError, match=r"has 7 samples, fewer than the 8 .*\(micro_batch_size 4 x 2 data-parallel ranks"
    ):
        TrainLoader(Numbers(7), LoaderConfig(micro_batch_size=4, ranks=2, drop_last=True))
    with pytest.raises(TypeError, match="neither a length nor is it an IterableDataset"):
        TrainLoader(object(), config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a DistributedSampler gives each rank its part of the data"):
        TrainLoader(Numbers(8), config, sampler=DistributedSampler(Numbers(8), num_replicas=2, rank=0))
    with pytest.raises(TypeError, match="no indices that a sampler could choose"):
        TrainLoader(Stream(8), config, sampler=[0])
    for wrong, reason in (
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1, found 0"),
        ({"micro_batch_size": 1, "rank": 2, "ranks": 2}, "rank must be one of the 2 data-parallel ranks"),
        ({"micro_batch_size": 1, "num_workers": -1}, "num_workers must be at least 0"),
        ({"micro_batch_size": 1, "persistent_workers": True}, "need num_workers of at least 1, found 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            LoaderConfig(**wrong)


def test_positions_of_another_data_set_are_refused() -> None:
    state = TrainLoader(Numbers(9), LoaderConfig(micro_batch_size=2)).state_dict()
    with pytest.raises(ValueError, match="saved with samples 9 and this loader has 10"):
        TrainLoader(Numbers(10), LoaderConfig(micro_batch_size=2)).load_state_dict(state)
    with pytest.raises(ValueError, match="saved with shuffle True and this loader has False"):
        TrainLoader(Numbers(9), LoaderConfig(micro_batch_size=2, shuffle=False)).load_state_dict(state)
    with pytest.raises(ValueError, match="has version 7, this program reads 1"):
        TrainLoader(Numbers(9), LoaderConfig(micro_batch_size=2)).load_state_dict({**state, "version": 7})


def test_the_saved_seed_is_taken() -> None:
    saved = TrainLoader(Numbers(9), LoaderConfig(micro_batch_size=3, seed=1))
    next(iter(saved))
    other = TrainLoader(Numbers(9), LoaderConfig(micro_batch_size=3, seed=2))
    other.load_state_dict(saved.state_dict())
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in saved]
