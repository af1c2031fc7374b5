"""The watch: who asks, who answers, what it costs while all is well, and when it ends."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.comm import CollectiveError, Mesh, Safeguards, all_gather_object, all_reduce, init
from drivetrain.comm.trail import Trail
from drivetrain.comm.watch import Attendant, Pace, Reporter
from drivetrain_testkit import run_ranks
from drivetrain_testkit.transports import shared_memory


class CountedStore:
    """A store in this process' memory that counts what it is asked."""

    def __init__(self) -> None:
        self.calls = 0
        self._store = dist.HashStore()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


class Party:
    """One rank of two, without a process of its own."""

    def __init__(self, rank: int, store: Any, timeout: float = 8.0) -> None:
        self.trail = Trail("shard", "main", rank, (0, 1))
        self.trail.token = "7"
        self.reporter = Reporter(rank, threading.get_ident(), Pace(timeout=timeout))
        self.reporter.follow(self.trail, store)
        self.attendant = Attendant(self.reporter)

    def issue(self, what: str) -> Any:
        return self.trail.add("all_reduce", "sum", torch.ones(2), what)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountedStore:
    counted = CountedStore()
    monkeypatch.setattr("drivetrain.comm.mailbox.dist.PrefixStore", lambda prefix, store: store)
    return counted


def test_nothing_is_sent_while_collectives_go_on(store: CountedStore) -> None:
    party = Party(0, store)
    for second in range(20):
        party.trail.enter(party.issue("x"))
        party.trail.leave()
        party.attendant.look(float(second))
    assert store.calls == 0
    party.attendant.look(20.9)
    assert store.calls == 0
    party.attendant.look(21.1)  # more than a quarter of the timeout after the last one
    assert store.calls == 1


def test_a_question_is_answered_once(store: CountedStore) -> None:
    asking, quiet = Party(0, store), Party(1, store, timeout=0.01)
    quiet.issue("the first")
    quiet.attendant.look(0.0)
    quiet.attendant.look(1.0)
    assert asking.reporter._account(asking.trail).mailbox.told(1) is None
    asking.issue("the first")
    second = asking.issue("the second")
    answering = threading.Thread(target=lambda: [time.sleep(0.05), quiet.attendant.look(2.0)])
    answering.start()
    text = asking.reporter.explain(asking.trail, second, "nothing came", late=True)
    answering.join()
    assert text.startswith(
        "nothing came. It is number 1 of axis 'shard', all_reduce sum of 2 float32: the second. Rank 1"
    )
    assert "rank 1: is in no collective, since 2.0 s at " in text
    assert "its last one on axis 'shard' was number 0, all_reduce sum of 2 float32: the first" in text
    before = store.calls
    quiet.attendant.look(3.0)
    assert store.calls == before + 1  # it looks, and has answered already
    # Whoever asks later is given what the first has found.
    again = asking.reporter.explain(asking.trail, second, "still nothing", late=True)
    assert again.startswith("still nothing. It is number 1")
    assert again.splitlines()[2] == text.splitlines()[2]


def test_a_rank_that_gave_up_is_quoted_though_it_is_gone(store: CountedStore) -> None:
    party, gone = Party(0, store), Party(1, store)
    gone.reporter.give_up(gone.trail, gone.issue("x"), "no such\n token", late=False)
    text = party.reporter.explain(party.trail, party.issue("y"), "the connection is gone", late=False)
    assert "rank 1: issued all_reduce sum of 2 float32: x" in text  # they even issued different ones
    other = Trail("data", "main", 0, (0, 1))
    other.token = "7"
    party.reporter.follow(other, store)
    text = party.reporter.explain(other, other.add("barrier", "", torch.ones(1), ""), "gone", late=False)
    assert "rank 1 gave no answer" not in text


def test_a_store_that_is_gone_is_said(store: CountedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    party = Party(0, store)
    monkeypatch.setattr(CountedStore, "__getattr__", lambda self, name: refuse)
    text = party.reporter.explain(party.trail, party.issue("x"), "late", late=True)
    assert text == "late. What the other ranks do can't be asked: nobody there"


def refuse(*args: object) -> None:
    raise dist.DistNetworkError("nobody there\nmore")


def test_a_device_that_does_not_get_on(store: CountedStore, caplog: pytest.LogCaptureFixture) -> None:
    party, gone = Party(0, store, timeout=2.0), Party(1, store)
    gone.reporter.give_up(gone.trail, gone.issue("the first"), "it was enough", late=False)
    done = [True, False]
    for index, what in enumerate(("the first", "the second")):
        party.reporter.enqueued(party.trail, party.issue(what), lambda index=index: done[index])
    for now in (0.0, 1.9):
        party.attendant.look(now)
    assert party.trail.failed is None
    with caplog.at_level(logging.ERROR, "drivetrain.comm"):
        party.attendant.look(2.1)
        party.attendant.look(9.0)
    assert [record.getMessage() for record in caplog.records] == [f"rank 0: all_reduce: {party.trail.failed}"]
    assert party.trail.failed is not None
    assert party.trail.failed.startswith(
        "the device has not completed it for 2 s. It is number 1 of axis 'shard', all_re"
    )


# with processes ------------------------------------------------------------------------------------------------------


def watches() -> int:
    return sum(thread.name == "drivetrain watch" for thread in threading.enumerate())


def ending(rank: int, ranks: int) -> list[int]:
    counts = [watches()]
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    axes = [mesh.axis("shard"), mesh.axis("shard", channel="other")]
    counts.append(watches())
    del mesh
    gc.collect()
    counts.append(watches())
    axes.clear()
    gc.collect()
    return [*counts, watches()]


def test_one_thread_for_a_mesh_which_ends_with_its_axes() -> None:
    assert run_ranks(ending, 2) == [[0, 1, 1, 0]] * 2


def one_rank_checks(rank: int, ranks: int) -> str:
    """Rank 1 of 3 leaves the path; rank 2 is the one that wants to know."""
    mesh = Mesh.create(init(), shared_memory=shared_memory(), safeguards=Safeguards(check=rank == 2))
    axis, quiet = mesh.axis("shard"), mesh.axis("shard", channel="quiet")
    for step in range(30):  # more than a trail keeps
        all_reduce(torch.ones(3), axis, purpose=f"step {step}").wait()
    handle = all_reduce(torch.ones(3), axis, purpose="left" if rank == 1 else "right")
    with pytest.raises(CollectiveError) as info:
        handle.wait()
    assert info.value.peer == (0 if rank == 1 else 1)
    store = dist.distributed_c10d._get_default_store()
    all_gather_object(0, quiet)
    if rank == 0:
        assert sum("/call/" in key for key in store.list_keys()) < 40  # what all have read is deleted
    all_gather_object(0, quiet)
    return str(info.value)


def test_comparing_gives_all_ranks_the_same_verdict(transport: str) -> None:
    texts = run_ranks(one_rank_checks, 3)
    for rank, text in enumerate(texts):
        head, first, second, _ = text.splitlines()
        assert head == (
            f"all_reduce on axis 'shard' failed on rank {rank}: the ranks issued different collectives as number 30 of "
            "axis 'shard'. Rank 1 left the others."
        )
        assert first == "  ranks 0 and 2: issued all_reduce sum of 3 float32: right"
        assert second == "  rank 1: issued all_reduce sum of 3 float32: left"


def another_backend(rank: int, ranks: int) -> str:
    """One that this package knows nothing of."""

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]

    dist.Backend.register_backend("other", make, devices=["cpu"])
    world = init(backend="other", device="cpu")
    mesh = Mesh.create(world, safeguards=Safeguards(timeout=2))
    axis = mesh.axis("shard")
    all_reduce(torch.ones(3), axis, purpose="the first").wait()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        while not store.check(["seen"]):
            time.sleep(0.02)
        return ""
    with pytest.raises(CollectiveError) as info:
        all_reduce(torch.ones(3), axis, purpose="the second").wait()
    store.set("seen", "")
    return str(info.value)


def test_any_backend_is_watched() -> None:
    text = run_ranks(another_backend, 2)[0]
    assert "Rank 1 has not issued it." in text
    assert "rank 1: is in no collective" in text
    assert "in another_backend: " in text


# settings ------------------------------------------------------------------------------------------------------------


def test_the_environment_comes_first() -> None:
    given = Safeguards(timeout=5.0, check=True)
    assert given.overridden({}) == given
    environment = {"DRIVETRAIN_COLLECTIVE_TIMEOUT": "7.5", "DRIVETRAIN_CHECK_COLLECTIVES": "0"}
    assert given.overridden(environment) == Safeguards(timeout=7.5, check=False)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("DRIVETRAIN_COLLECTIVE_TIMEOUT", "soon", "DRIVETRAIN_COLLECTIVE_TIMEOUT='soon' is not a positive number"),
        ("DRIVETRAIN_COLLECTIVE_TIMEOUT", "0", "DRIVETRAIN_COLLECTIVE_TIMEOUT='0' is not a positive number"),
        ("DRIVETRAIN_CHECK_COLLECTIVES", "yes", "DRIVETRAIN_CHECK_COLLECTIVES='yes' is neither 1, which compares"),
    ],
)
def test_wrong_settings(name: str, value: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Safeguards().overridden({name: value})
    with pytest.raises(ValueError, match="timeout=-1 is not a positive number of seconds"):
        Safeguards(timeout=-1)
