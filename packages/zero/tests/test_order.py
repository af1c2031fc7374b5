"""The recorded order of uses, and what is predicted from it."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.zero.order import Phase, UseOrder

UNITS = st.integers(0, 4)
PASSES = st.lists(UNITS, min_size=1, max_size=12)


def play(order: UseOrder, units: list[int], phase: Phase = Phase.FORWARD) -> list[int | None]:
    """Record ``units``, and before each of them note what was predicted; the first use of a pass has no prediction."""
    predicted = []
    for unit in units:
        predicted.append(next(order.upcoming(), None))
        order.record(unit, phase)
    return predicted


def train(order: UseOrder, forward: list[int], backward: list[int]) -> list[int | None]:
    order.restart()
    return play(order, forward) + play(order, backward, Phase.BACKWARD)


def test_nothing_is_predicted_before_anything_was_seen() -> None:
    order = UseOrder()
    assert list(order.upcoming()) == []
    assert train(order, [0, 1, 2], [2, 1, 0]) == [None] * 6
    assert order.wrong == 0


def test_the_second_pass_is_predicted_whole() -> None:
    order = UseOrder()
    train(order, [0, 1, 2], [2, 1, 0])
    order.restart()
    order.record(0, Phase.FORWARD)
    assert list(order.upcoming()) == [1, 2, 2, 1, 0]
    assert train(order, [0, 1, 2], [2, 1, 0]) == [None, 1, 2, 2, 1, 0]
    assert order.wrong == 0


def test_each_use_of_a_module_has_its_own_successor() -> None:
    order = UseOrder()
    forward, backward = [0, 1, 0, 2, 0, 0], [0, 0, 2, 0, 1, 0]
    train(order, forward, backward)
    assert train(order, forward, backward) == [None, *forward[1:], *backward]
    assert order.wrong == 0


def test_a_changed_order_is_counted_once_and_learned() -> None:
    order = UseOrder()
    train(order, [0, 1, 2, 3], [])
    assert train(order, [0, 2, 3], []) == [None, 1, 3]
    assert order.wrong == 1
    assert train(order, [0, 2, 3], []) == [None, 2, 3]
    assert order.wrong == 1


def test_a_shorter_pass_is_not_wrong() -> None:
    """Calling a module less often than before leaves a prediction open, which costs a prefetch and no more."""
    order = UseOrder()
    train(order, [0, 1, 1, 1], [])
    assert train(order, [0, 1], []) == [None, 1]
    assert order.wrong == 0
    assert train(order, [0, 1, 1, 1], []) == [None, 1, 1, 1]


def test_evaluation_in_between_spoils_nothing() -> None:
    order = UseOrder()
    train(order, [0, 1, 2], [2, 1, 0])
    for _ in range(2):
        order.restart()
        play(order, [0, 2, 1], Phase.INFERENCE)
    assert train(order, [0, 1, 2], [2, 1, 0]) == [None, 1, 2, 2, 1, 0]
    order.restart()
    assert play(order, [0, 2, 1], Phase.INFERENCE) == [None, 2, 1]
    assert order.wrong == 0


def test_a_pass_is_not_the_successor_of_the_one_before() -> None:
    order = UseOrder()
    train(order, [0, 1], [1, 0])
    train(order, [2, 1], [1, 2])
    order.restart()
    play(order, [0, 1])
    assert list(islice(order.upcoming(), 1)) == [1]


@given(forward=PASSES, backward=PASSES)
def test_any_repeated_pass_is_predicted_exactly(forward: list[int], backward: list[int]) -> None:
    order = UseOrder()
    train(order, forward, backward)
    assert train(order, forward, backward) == [None, *forward[1:], *backward]
    assert order.wrong == 0


@given(passes=st.lists(st.tuples(PASSES, PASSES), min_size=1, max_size=6))
def test_predictions_end_and_a_change_is_learned_at_once(passes: list[tuple[list[int], list[int]]]) -> None:
    order = UseOrder()
    for forward, backward in passes:
        order.restart()
        for unit, phase in [*((u, Phase.FORWARD) for u in forward), *((u, Phase.BACKWARD) for u in backward)]:
            order.record(unit, phase)
            assert len(list(order.upcoming())) <= 3 * 5 * 12  # every use at most once: phases, units, counts
        assert train(order, forward, backward) == [None, *forward[1:], *backward]


@given(forward=PASSES, backward=PASSES)
def test_a_unit_is_expected_again_while_the_pass_before_used_it_again(forward: list[int], backward: list[int]) -> None:
    order = UseOrder()
    train(order, forward, backward)
    order.restart()
    uses = [(unit, Phase.FORWARD) for unit in forward] + [(unit, Phase.BACKWARD) for unit in backward]
    for done, (unit, phase) in enumerate(uses, start=1):
        order.record(unit, phase)
        assert order.expects_again(unit) == (unit in [later for later, _ in uses[done:]])


def test_a_return_that_did_not_happen_is_no_longer_expected() -> None:
    order = UseOrder()
    train(order, [0, 1], [1, 0])
    train(order, [0, 1], [])
    order.restart()
    order.record(0, Phase.FORWARD)
    assert not order.expects_again(0)
    assert not order.expects_again(3)
