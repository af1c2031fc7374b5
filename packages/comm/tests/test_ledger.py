from __future__ import annotations

import pytest

from drivetrain.comm.ledger import Ledger, bus_factor


class Span:
    """A time that is known from the start, or only once it is waited for."""

    def __init__(self, seconds: float, over: bool = True) -> None:
        self._seconds, self._over = seconds, over

    def over(self) -> bool:
        return self._over

    def seconds(self) -> float:
        return self._seconds


def test_sums_by_operation_and_axis() -> None:
    ledger = Ledger()
    for seconds in (1.0, 3.0):
        ledger.record(op="all_reduce", axis="data", size=4, nbytes=1000, span=Span(seconds), waited=0.5)
    ledger.record(op="all_gather", axis="shard", size=2, nbytes=600, span=Span(2.0), waited=2.0)
    first, second = ledger.entries()
    assert (first.op, first.axis, first.calls, first.bytes, first.moved_bytes) == ("all_reduce", "data", 2, 2000, 4000)
    assert (first.seconds, first.waited_seconds) == (4.0, 1.0)
    assert (first.algorithm_bandwidth, first.bus_bandwidth) == (500.0, 750.0)
    assert (second.bytes, second.moved_bytes, second.bus_bandwidth) == (600, 600, 150.0)
    assert ledger.total_bytes() == 2600
    assert ledger.total_bytes(op="all_reduce") == 2000
    assert ledger.total_bytes(axis="shard") == 600
    assert ledger.total_bytes(op="all_gather", axis="data") == 0
    assert ledger.total_moved_bytes() == 4600


def test_reset_forgets_and_no_time_gives_no_bandwidth() -> None:
    ledger = Ledger()
    ledger.record(op="broadcast", axis="data", size=2, nbytes=10, span=Span(0.0), waited=0.0)
    assert ledger.entries()[0].bus_bandwidth == 0.0
    ledger.reset()
    assert ledger.entries() == []


def test_times_that_are_known_later() -> None:
    ledger = Ledger()
    for over in (False, True):
        ledger.record(op="all_gather", axis="shard", size=2, nbytes=8, span=Span(2.0, over), waited=0.0)
    assert ledger.entries()[0].seconds == 4.0
    assert ledger.entries()[0].seconds == 4.0


@pytest.mark.parametrize(
    ("op", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bus_factors_of_four_ranks(op: str, factor: float) -> None:
    assert bus_factor(op, 4) == factor
