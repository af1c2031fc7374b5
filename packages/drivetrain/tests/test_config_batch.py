"""The batch triad."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.config import BatchSizes, ConfigError, load

sizes = st.integers(min_value=1, max_value=64)
ranks = st.integers(min_value=1, max_value=16)


def resolve(ranks: int, **given: int | None) -> BatchSizes:
    names = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    return load({names[key]: value for key, value in given.items()}).resolve_batch(ranks)


@given(micro=sizes, accumulation=sizes, ranks=ranks)
def test_any_two_give_the_third(micro: int, accumulation: int, ranks: int) -> None:
    train = micro * accumulation * ranks
    expected = BatchSizes(train=train, micro=micro, accumulation=accumulation)
    assert resolve(ranks, train=train, micro=micro, accumulation=accumulation) == expected
    assert resolve(ranks, train=train, micro=micro) == expected
    assert resolve(ranks, train=train, accumulation=accumulation) == expected
    assert resolve(ranks, micro=micro, accumulation=accumulation) == expected


@given(micro=sizes, ranks=ranks)
def test_one_is_enough_when_it_counts_samples(micro: int, ranks: int) -> None:
    expected = BatchSizes(train=micro * ranks, micro=micro, accumulation=1)
    assert resolve(ranks, micro=micro) == expected
    assert resolve(ranks, train=micro * ranks) == expected


@given(
    train=st.none() | st.integers(1, 300),
    micro=st.none() | sizes,
    accumulation=st.none() | sizes,
    ranks=ranks,
)
def test_the_product_is_exact_or_it_is_refused(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    try:
        found = resolve(ranks, train=train, micro=micro, accumulation=accumulation)
    except ConfigError:
        return
    assert found.train == found.micro * found.accumulation * ranks
    assert train in (None, found.train)
    assert micro in (None, found.micro)
    assert accumulation in (None, found.accumulation)


@given(train=st.integers(1, 300), micro=sizes, ranks=ranks)
def test_what_a_refusal_proposes_works(train: int, micro: int, ranks: int) -> None:
    try:
        resolve(ranks, train=train, micro=micro)
    except ConfigError as error:
        hint = error.problems[0].hint
        proposals = hint.split("set train_batch_size to ")[1].split(",")[0].split(" or ")
        for proposal in proposals:
            resolve(ranks, train=int(proposal), micro=micro)
        if "set train_micro_batch_size_per_gpu to " in hint:
            other = int(hint.split("set train_micro_batch_size_per_gpu to ")[1].split(",")[0])
            resolve(ranks, train=train, micro=other)


REFUSALS: list[tuple[int, dict[str, int], str, str]] = [
    (
        2,
        {"train": 7, "micro": 2, "accumulation": 1},
        "the batch sizes don't fit together: train_micro_batch_size_per_gpu 2 * gradient_accumulation_steps 1 * "
        "2 data-parallel ranks = 4, not 7",
        "set train_batch_size to 4, or drop train_batch_size and let it follow from the other two",
    ),
    (
        2,
        {"train": 16, "micro": 2, "accumulation": 2},
        "the batch sizes don't fit together: train_micro_batch_size_per_gpu 2 * gradient_accumulation_steps 2 * "
        "2 data-parallel ranks = 8, not 16",
        "set train_batch_size to 8, or set gradient_accumulation_steps to 4, or set "
        "train_micro_batch_size_per_gpu to 4, or run on 4 data-parallel ranks, or drop train_batch_size and let it "
        "follow from the other two",
    ),
    (
        2,
        {"train": 7, "micro": 2},
        "train_batch_size 7 can't be divided by train_micro_batch_size_per_gpu 2 * 2 data-parallel ranks = 4 without a "
        "remainder, so there is no gradient_accumulation_steps",
        "set train_batch_size to 4 or 8, or drop train_batch_size and give gradient_accumulation_steps instead",
    ),
    (
        2,
        {"train": 12, "accumulation": 4},
        "train_batch_size 12 can't be divided by gradient_accumulation_steps 4 * 2 data-parallel ranks = 8 without a "
        "remainder, so there is no train_micro_batch_size_per_gpu",
        "set train_batch_size to 8 or 16, or set gradient_accumulation_steps to 3",
    ),
    (
        4,
        {"train": 3},
        "train_batch_size 3 can't be divided by 4 data-parallel ranks without a remainder, so there is no "
        "train_micro_batch_size_per_gpu",
        "set train_batch_size to 4",
    ),
    (
        1,
        {"accumulation": 8},
        "the batch size can't be found: neither train_batch_size nor train_micro_batch_size_per_gpu has a value, and "
        "gradient_accumulation_steps = 8 alone does not say it",
        "give train_micro_batch_size_per_gpu (samples that fit on one rank), train_batch_size, or both; "
        'for "auto" give them as hints',
    ),
    (
        1,
        {},
        "the batch size can't be found: neither train_batch_size nor train_micro_batch_size_per_gpu has a value",
        "give train_micro_batch_size_per_gpu (samples that fit on one rank), train_batch_size, or both; "
        'for "auto" give them as hints',
    ),
]


@pytest.mark.parametrize(("ranks", "given_sizes", "message", "hint"), REFUSALS)
def test_refusals(ranks: int, given_sizes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(ranks, **given_sizes)
    (problem,) = caught.value.problems
    assert (problem.message, problem.hint) == (message, hint)


def test_no_ranks() -> None:
    with pytest.raises(ValueError, match="data_parallel_size is 0; it must be at least 1"):
        load({"train_batch_size": 1}).resolve_batch(0)


def test_auto_is_found_from_the_others() -> None:
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    expected = BatchSizes(train=24, micro=4, accumulation=3)
    assert load({**auto, "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}).resolve_batch(2) == expected
    hints = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    assert load(auto, hints=hints).resolve_batch(2) == expected
    with pytest.raises(ConfigError, match="the batch size can't be found"):
        load(auto).resolve_batch(2)
