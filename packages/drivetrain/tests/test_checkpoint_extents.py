"""Coverage and overlap of ranges, against the same questions asked element by element."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.checkpoint.extents import Extent, coverage_fault, overlaps


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[Extent]]:
    total = draw(st.integers(0, 40))
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
    edges = [0, *cuts, total]
    pairs = itertools.pairwise(edges)
    return total, [Extent(start=a, stop=b, owner=f"rank {number}") for number, (a, b) in enumerate(pairs)]


@given(partitions(), st.randoms())
def test_a_partition_has_no_fault_in_any_order(partition: tuple[int, list[Extent]], random: object) -> None:
    total, extents = partition
    random.shuffle(extents)  # type: ignore[attr-defined]
    assert coverage_fault(extents, total) is None


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(-2, 14), st.integers(0, 6)), max_size=5))
def test_fault_is_found_exactly_where_elements_are_not_covered_once(total: int, raw: list[tuple[int, int]]) -> None:
    extents = [Extent(start=start, stop=start + numel, owner="x") for start, numel in raw]
    covered = sorted(element for extent in extents for element in range(extent.start, extent.stop))
    assert (coverage_fault(extents, total) is None) == (covered == list(range(total)))


def test_fault_names_the_elements_and_the_ranks() -> None:
    a, b = Extent(start=0, stop=4, owner="rank 0"), Extent(start=3, stop=6, owner="rank 1")
    assert coverage_fault([a, b], 6) == "elements [3, 4) of 6 are both in the part of rank 0 and in that of rank 1"
    assert coverage_fault([a], 6) == "elements [4, 6) of 6 are in nobody's part"
    assert coverage_fault([a, Extent(start=5, stop=6)], 6) == "elements [4, 5) of 6 are in nobody's part"
    assert coverage_fault([b], 5) == "elements [3, 6) of rank 1 lie outside the 5 elements"


@given(partitions(), st.data())
def test_overlaps_bring_each_requested_element_once_from_where_it_is(
    partition: tuple[int, list[Extent]], data: st.DataObject
) -> None:
    total, extents = partition
    stored = [extent for extent in extents if extent.numel > 0]
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    got = {}
    for part in overlaps(stored, start, stop):
        for step in range(part.numel):
            assert part.target + step not in got
            got[part.target + step] = stored[part.stored].start + part.source + step
    assert got == {index: start + index for index in range(stop - start)}
