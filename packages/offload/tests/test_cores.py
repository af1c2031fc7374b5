"""Plans of cores: what every machine gets, from one cpu to many; what sysfs says; binding and what forbids it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.offload import CoreBinding, CoreShares, Cpu, plan_cores, read_cpus

PARTS = ("compute", "optimizer", "loading", "communication")


def machine(nodes: int, cores: int, threads: int) -> list[Cpu]:
    """Numbered as Linux does: first threads of all cores, then second ones."""
    total = nodes * cores
    return [
        Cpu(node=core // cores, package=core // cores, core=core % cores, number=core + thread * total)
        for thread in range(threads)
        for core in range(total)
    ]


def test_a_rank_that_only_computes_has_everything() -> None:
    for cpus in (machine(1, 1, 1), machine(1, 2, 1), machine(2, 16, 2)):
        plan = plan_cores(cpus)
        assert plan.all == plan.compute == plan.optimizer == plan.loading == {cpu.number for cpu in cpus}
        assert not plan.overlapping


def test_one_cpu_does_everything() -> None:
    plan = plan_cores(machine(1, 1, 1), shares=CoreShares(compute=0.2, optimizer=0.8))
    assert [getattr(plan, part) for part in PARTS] == [{0}] * 4
    assert plan.overlapping


def test_two_cpus() -> None:
    plan = plan_cores(machine(1, 2, 1), shares=CoreShares.for_optimizer(0.8))
    assert (plan.compute, plan.optimizer, plan.overlapping) == ({0}, {1}, False)
    # Threads of one core, if there is no other.
    plan = plan_cores(machine(1, 1, 2), shares=CoreShares.for_optimizer(0.8))
    assert (plan.compute, plan.optimizer, plan.overlapping) == ({0}, {1}, False)
    # More parts than cpus: computing keeps its own.
    plan = plan_cores(machine(1, 2, 1), shares=CoreShares(compute=0.1, optimizer=0.5, loading=0.2, communication=0.2))
    assert [getattr(plan, part) for part in PARTS] == [{0}, {1}, {1}, {1}]
    assert plan.overlapping


def test_four_cpus() -> None:
    plan = plan_cores(machine(1, 4, 1), shares=CoreShares.for_optimizer(0.8))
    assert (plan.compute, plan.optimizer) == ({0}, {1, 2, 3})
    plan = plan_cores(machine(1, 4, 1), shares=CoreShares(compute=2, optimizer=1, loading=1))
    assert (plan.compute, plan.optimizer, plan.loading, plan.communication) == ({0, 1}, {2}, {3}, {0, 1})
    # Two cores of two threads: each goes to one part.
    plan = plan_cores(machine(1, 2, 2), shares=CoreShares.for_optimizer(0.5))
    assert (plan.compute, plan.optimizer) == ({0, 2}, {1, 3})


def test_sixty_four_cpus_and_eight_ranks() -> None:
    cpus = machine(2, 16, 2)
    taken: list[int] = []
    for rank in range(8):
        plan = plan_cores(cpus, local_rank=rank, local_world_size=8, shares=CoreShares.for_optimizer(0.8))
        assert len(plan.compute) == 2
        assert len(plan.optimizer) == 6
        assert {number % 32 // 16 for number in plan.all} == {rank // 4}  # one node
        assert {number + 32 for number in plan.all if number < 32} == {number for number in plan.all if number >= 32}
        assert not plan.overlapping
        taken += plan.all
    assert sorted(taken) == list(range(64))
    plan = plan_cores(cpus, shares=CoreShares.for_optimizer(0.5))
    assert len(plan.compute) == len(plan.optimizer) == 32


def test_more_ranks_than_cpus_share() -> None:
    plans = [plan_cores(machine(1, 2, 1), local_rank=rank, local_world_size=4) for rank in range(4)]
    assert [plan.compute for plan in plans] == [{0}, {1}, {0}, {1}]
    assert all(plan.overlapping for plan in plans)


SHARES = st.builds(
    CoreShares,
    compute=st.floats(0.01, 10),
    optimizer=st.floats(0, 10),
    loading=st.floats(0, 10),
    communication=st.floats(0, 10),
)


@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 2)),
    hidden=st.sets(st.integers(0, 71)),
    ranks=st.integers(1, 9),
    shares=SHARES,
)
def test_nobody_is_without_a_cpu_and_all_cpus_serve(
    size: tuple[int, int, int], hidden: set[int], ranks: int, shares: CoreShares
) -> None:
    cpus = [cpu for cpu in machine(*size) if cpu.number not in hidden] or machine(1, 1, 1)
    plans = [plan_cores(cpus, local_rank=rank, local_world_size=ranks, shares=shares) for rank in range(ranks)]
    everything = {cpu.number for cpu in cpus}
    served = set()
    for plan in plans:
        parts = [getattr(plan, part) for part in PARTS if getattr(shares, part) > 0]
        assert all(parts)
        assert plan.all <= everything
        if not plan.overlapping:
            assert sum(map(len, parts)) == len(plan.all)
            assert len(plan.all) >= len(parts)
        served |= plan.all
    if not any(plan.overlapping for plan in plans):
        assert served == everything
        assert sum(len(plan.all) for plan in plans) == len(everything)


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="cpus: expected at least one"):
        plan_cores([])
    with pytest.raises(ValueError, match="local_rank: expected 0 to 1; found 2"):
        plan_cores(machine(1, 2, 1), local_rank=2, local_world_size=2)
    with pytest.raises(ValueError, match="loading: expected a share of at least 0; found -1"):
        CoreShares(loading=-1)
    with pytest.raises(ValueError, match="compute: expected a share above 0"):
        CoreShares(compute=0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        CoreShares.for_optimizer(1.0)
    with pytest.raises(ValueError, match="cpus: expected at least one"):
        CoreBinding([])


def test_what_sysfs_says(tmp_path: Path) -> None:
    for number, (node, package, core) in {0: (0, 0, 0), 1: (1, 1, 0), 2: (0, 0, 0), 3: (1, 1, 0)}.items():
        folder = tmp_path / "cpu" / f"cpu{number}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology" / "physical_package_id").write_text(f"{package}\n")
        (folder / "topology" / "core_id").write_text(f"{core}\n")
    (tmp_path / "cpu" / "cpu4" / "topology").mkdir(parents=True)  # says nothing
    (tmp_path / "cpu" / "cpu5" / "topology").mkdir(parents=True)
    (tmp_path / "cpu" / "cpu5" / "topology" / "core_id").write_text("-1\n")  # as some virtual machines do
    assert read_cpus([3, 1, 2, 0], system=tmp_path) == (
        Cpu(0, 0, 0, 0),
        Cpu(0, 0, 0, 2),
        Cpu(1, 1, 0, 1),
        Cpu(1, 1, 0, 3),
    )
    assert read_cpus([4, 5, 6], system=tmp_path) == (Cpu(0, 0, 4, 4), Cpu(0, 0, 5, 5), Cpu(0, 0, 6, 6))


needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")


@needs_affinity
def test_this_machine() -> None:
    allowed = os.sched_getaffinity(0)
    assert {cpu.number for cpu in read_cpus()} == allowed
    assert plan_cores(read_cpus(), shares=CoreShares.for_optimizer(0.8)).all == allowed


@needs_affinity
def test_a_thread_is_bound_and_let_go() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    with CoreBinding(one) as binding:
        assert binding.bound
        assert binding.reason is None
        assert os.sched_getaffinity(0) == one
        inherited: list[set[int]] = []
        thread = threading.Thread(target=lambda: inherited.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert inherited == [one]
    assert os.sched_getaffinity(0) == before
    assert not binding.bound
    binding.restore()  # nothing happens


@needs_affinity
def test_another_thread_is_bound_and_one_that_ended_is_no_error() -> None:
    before = os.sched_getaffinity(0)
    started, end = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    assert thread.native_id is not None
    binding = CoreBinding({min(before)}, thread=thread.native_id)
    assert os.sched_getaffinity(thread.native_id) == {min(before)}
    assert os.sched_getaffinity(0) == before
    end.set()
    thread.join()
    binding.restore()


@needs_affinity
def test_cpus_that_are_forbidden_are_no_error_but_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    with CoreBinding({1000, 1001, 1005}) as binding:
        assert not binding.bound
        assert binding.reason is not None
        assert "refused to bind thread" in binding.reason
        assert "to cpus 1000-1001, 1005: Invalid argument" in binding.reason
    assert os.sched_getaffinity(0) == before
    monkeypatch.delattr(os, "sched_setaffinity")
    binding = CoreBinding(before)
    assert not binding.bound
    assert binding.reason == "this system doesn't let a thread choose its cpus"
