"""Which save is expected next: the reverse of saving, until another order has been seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.offload.activation_order import LearnedOrders, SavePass


def one_pass(orders: LearnedOrders, sizes: list[int], asked: list[int]) -> tuple[SavePass, list[list[int]]]:
    saves = SavePass(orders)
    for record, size in enumerate(sizes):
        assert saves.add(record, size) == record
    return saves, [list(saves.ask(index)) for index in asked]


def test_the_reverse_of_saving_is_expected() -> None:
    saves, expected = one_pass(LearnedOrders(), [5, 6, 7], [2, 1, 0])
    assert expected == [[1, 0], [0], []]
    assert saves.surprises == 0
    assert saves.asked


def test_another_order_is_learned_for_saves_of_these_sizes() -> None:
    orders = LearnedOrders()
    saves, _ = one_pass(orders, [5, 6, 7, 8], [1, 3, 0])
    assert saves.surprises > 0
    del saves
    saves, expected = one_pass(orders, [5, 6, 7, 8], [1, 3, 0, 2])
    assert expected == [[3, 0, 2], [0, 2], [2], []]
    assert saves.surprises == 0
    assert one_pass(orders, [5, 6, 7, 9], [3])[1] == [[2, 1, 0]]


def test_asking_twice_is_no_surprise() -> None:
    saves, expected = one_pass(LearnedOrders(), [5, 6, 7], [2, 2, 1, 2, 0])
    assert saves.surprises == 0
    assert expected == [[1, 0], [1, 0], [0], [0], []]


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=8).flatmap(
        lambda x: st.tuples(st.just(x), st.permutations(range(len(x))))
    )
)
def test_every_order_is_foretold_the_second_time(case: tuple[list[int], list[int]]) -> None:
    sizes, asked = case
    orders = LearnedOrders()
    one_pass(orders, sizes, asked)
    saves, expected = one_pass(orders, sizes, asked)
    assert saves.surprises == 0
    assert expected == [list(asked[place + 1 :]) for place in range(len(asked))]


def test_the_latest_orders_are_kept() -> None:
    orders = LearnedOrders()
    for length in range(2, 40):
        one_pass(orders, [1] * length, list(range(length)))
    assert orders.predict((1, 1)) == range(1, -1, -1)
    assert orders.predict((1,) * 39) == tuple(range(39))
