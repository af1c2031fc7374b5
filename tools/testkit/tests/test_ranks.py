from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from drivetrain_testkit import RankError, run_ranks


@dataclass
class Point:
    x: int


def report(rank: int, world_size: int, point: Point) -> tuple[int, int, Point, str, int]:
    print(f"hello from {rank}")
    return rank, world_size, Point(point.x + rank), os.environ["MARK"], torch.get_num_threads()


def reduce_natively(rank: int, world_size: int) -> float:
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def one_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the second rank is unwell")


def asserts(rank: int, world_size: int) -> None:
    found = [rank, world_size]
    assert found == [0, 3]


def sleeps(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def dies(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_values_environment_and_output(capsys: pytest.CaptureFixture[str]) -> None:
    results = run_ranks(report, 2, Point(5), env={"MARK": "here"})
    assert results == [(0, 2, Point(5), "here", 1), (1, 2, Point(6), "here", 1)]
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"


def test_ranks_find_each_other() -> None:
    assert run_ranks(reduce_natively, 3) == [6.0, 6.0, 6.0]


def test_a_failure_carries_its_rank_and_traceback() -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1 raised:.*in one_fails.*ValueError: the second rank is unwell"
    ) as info:
        run_ranks(one_fails, 2)
    assert info.value.rank == 1
    assert info.value.error_type == "builtins.ValueError"


def test_a_failed_assertion_shows_its_values() -> None:
    with pytest.raises(RankError, match=r"assert \[0, 1\] == \[0, 3\]"):
        run_ranks(asserts, 1)


def test_a_timeout_shows_where_the_rank_was() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 still ran after 3 s.*in sleeps") as info:
        run_ranks(sleeps, 2, timeout=3)
    assert info.value.error_type == "timeout"


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
        run_ranks(dies, 2)


def test_a_death_can_be_part_of_the_test() -> None:
    assert run_ranks(dies, 2, may_die={1}) == ["alive", None]


def test_a_local_function_is_refused() -> None:
    with pytest.raises(ValueError, match="run_ranks needs a function at module level"):
        run_ranks(lambda rank, world_size: None, 1)
