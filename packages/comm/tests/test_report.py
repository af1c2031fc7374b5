"""How failures read, and what ranks tell each other of themselves."""

from __future__ import annotations

import threading

import pytest
import torch

from drivetrain.comm.place import innermost, place_of
from drivetrain.comm.report import RankState, differing, hang_text, mismatch_text, ranks_text
from drivetrain.comm.trail import KEPT, LABEL_BYTES, Purpose, Trail, fitted


def test_ranks_are_listed_briefly() -> None:
    assert [ranks_text(ranks) for ranks in ([3], [0, 2], [0, 1, 2, 3], [1, 3, 5])] == [
        "rank 3",
        "ranks 0 and 2",
        "ranks 0 to 3",
        "ranks 1, 3 and 5",
    ]
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"


def test_the_rank_that_differs_is_of_the_fewest() -> None:
    labels = {0: "a", 1: "b", 2: "a", 3: "a"}
    assert [differing(labels, mine) for mine in labels] == [1, 0, 1, 1]
    assert differing({0: "a", 1: "a"}, 0) is None


def test_a_mismatch_groups_ranks_that_agree() -> None:
    text = mismatch_text("axis 'shard'", 7, {2: "x", 0: "x", 1: "y"}, during="forward")
    assert text.splitlines()[:3] == [
        "the ranks issued different collectives as number 7 of axis 'shard', here in forward. Rank 1 left the others.",
        "  ranks 0 and 2: issued x",
        "  rank 1: issued y",
    ]


def state(issued: int, **values: object) -> RankState:
    told = RankState(ask=1, issued=issued, recent={issued - 1: "all_gather of 4 float32"}, **values)  # type: ignore[arg-type]
    assert RankState.from_json(told.to_json()) == told
    return told


def test_a_hang_tells_who_has_not_come_and_what_each_does() -> None:
    states = {
        0: state(8, waits="number 7 of axis 'shard', x", waits_here=7, seconds=2.04, where="a.py:1 in f"),
        1: state(7, seconds=9.0, where="a.py:2 in g: while {}: pass"),
        2: None,
        3: state(7, failed="no such token"),
        4: state(8, waits="number 7 of axis 'shard', x", waits_here=7, seconds=2.6, where="a.py:1 in f"),
        5: state(7, waits="number 3 of axis 'data', y", seconds=1.0, failed="late", late=True),
    }
    text = hang_text("axis 'shard'", 7, "all_gather of 4 float32: z", states)
    last = "; its last one on axis 'shard' was number 6, all_gather of 4 float32"
    head, *lines = text.splitlines()
    assert head == (
        "It is number 7 of axis 'shard', all_gather of 4 float32: z. Ranks 1 and 5 have not issued it; rank 3 gave up "
        "before it; rank 2 gave no answer."
    )
    assert lines[0] == "  ranks 0 and 4: waits for it, since 2.0 s at a.py:1 in f"
    assert lines[1] == f"  rank 1: is in no collective, since 9.0 s at a.py:2 in g: while {{}}: pass{last}"
    assert lines[2].startswith("  rank 2: gave no answer: its process has ended or is stopped")
    assert lines[3] == f"  rank 3: has given up: no such token{last}"
    assert lines[4] == f"  rank 5: gave up waiting for number 3 of axis 'data', y, after 1.0 s{last}"


def test_a_hang_of_collectives_that_differ_is_a_mismatch() -> None:
    """Where the backend compares nothing, as NCCL."""
    states = {rank: RankState(ask=1, issued=3, recent={1: "a", 2: "bc"[rank]}) for rank in (0, 1)}
    text = hang_text("axis 'shard'", 2, "b", states)
    assert text.startswith("The ranks issued different collectives as number 2 of axis 'shard'.\n  rank 0: issued b\n")


def test_a_hang_of_all_is_no_fault_of_theirs() -> None:
    text = hang_text("axis 'shard'", 2, "b", dict.fromkeys((0, 1), RankState(ask=1, issued=3)))
    assert "All ranks have issued it, and its data do not arrive." in text
    many = hang_text("axis 'shard'", 2, "b", {rank: state(2, where=str(rank)) for rank in range(20)})
    assert many.splitlines()[-1] == "  and 8 more groups of ranks"


def test_labels_have_room_for_long_names() -> None:
    assert fitted("short") == "short"
    long = [fitted("gather of " + "x" * 500 + end) for end in "ab"]
    assert long[0] != long[1]
    assert {len(label) for label in long} == {LABEL_BYTES - 12 + 4 + 8}
    plain = fitted("gewichte über é")
    assert plain.isascii()
    assert plain != fitted("gewichte über è")
    assert plain.startswith("gewichte ?ber ?... ")


def test_a_trail_keeps_the_last_calls() -> None:
    trail = Trail("shard", "reduce", 0, (0, 1))
    for _ in range(KEPT + 2):
        issued = trail.add("all_reduce", "sum", torch.ones(2, 3), Purpose("norm", "step"))
    assert [call.number for call in trail.recent] == list(range(2, KEPT + 2))
    assert issued.label == "all_reduce sum of 6 float32: norm"
    assert issued.told == "all_reduce sum of 6 float32: norm, in step"
    assert trail.title == "axis 'shard' (channel 'reduce')"
    assert trail.add("barrier", "", torch.ones(1), "").told == "barrier of 1 float32"


def test_the_place_is_in_the_programs_own_code() -> None:
    inside = threading.Event()
    leave = threading.Event()

    def work() -> None:
        inside.set()
        leave.wait()  # in threading.py

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    assert thread.ident is not None
    place = place_of(thread.ident)
    leave.set()
    thread.join()
    assert place.endswith("in work: leave.wait()  # in threading.py") or "in work: inside.set()" in place
    assert "test_report.py:" in place
    assert place_of(thread.ident) == ""
    assert innermost(None) is None


@pytest.mark.parametrize("text", ["", "plain"])
def test_states_without_much_to_tell(text: str) -> None:
    found = hang_text("axis 'shard'", 0, "b", {0: RankState(ask=1, issued=0, where=text)})
    assert found.splitlines()[1].endswith("; it has issued none on axis 'shard'")
