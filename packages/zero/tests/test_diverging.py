"""Ranks that go different ways: every case ends, in the right result or in an error that names ranks, calls and units.

Each case is a program of two ranks. They run side by side, as most of their time is waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from drivetrain.comm import CollectiveError, Mesh, Safeguards, barrier, init
from drivetrain.zero import LeafRule, Policy, ShardedOptimizer, shard
from drivetrain_testkit import RankError, relative_error, run_ranks
from drivetrain_testkit.transports import refusal, setting, shared_memory

TIMEOUT = 4.0
ALL = (0, 1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Net(nn.Module):
    """Blocks of one size: their gathers look alike to whoever only counts bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = ALL) -> torch.Tensor:
        x = self.first(x)
        for index in order:
            x = self.blocks[index](x)
        return x.square().mean()


def inputs(rank: int) -> torch.Tensor:
    return torch.full((2, 8), 1.0 + rank)


class Trainer:
    """A model in training that has taken a step, and what a test needs to lead ranks astray.

    Args:
        folder: where ranks tell each other that they have seen what they should.
    """

    def __init__(self, rank: int, stage: int, folder: Path) -> None:
        self.rank = rank
        self.mesh = Mesh.create(init(), shared_memory=shared_memory(), safeguards=Safeguards(timeout=TIMEOUT))
        self.model = Net()
        sharded = shard(self.model, self.mesh, Policy(stage=stage, persistence_numel=0, bucket_numel=100))
        self.optimizer = ShardedOptimizer(sharded, torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.folder = folder
        self.step()

    def forward(self, order: tuple[int, ...] = ALL) -> torch.Tensor:
        loss: torch.Tensor = self.model(inputs(self.rank), order)
        return loss

    def step(self, order: tuple[int, ...] = ALL) -> None:
        self.forward(order).backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.forward()

    def done(self) -> None:
        (self.folder / str(self.rank)).touch()

    def wait_for_other(self) -> None:
        while not (self.folder / str(1 - self.rank)).exists():
            time.sleep(0.02)


def one_step_more(trainer: Trainer) -> None:
    trainer.step()
    if trainer.rank == 1:
        trainer.optimizer.step()
    trainer.step()


def no_backward(trainer: Trainer) -> None:
    loss = trainer.forward()
    if trainer.rank == 0:
        loss.backward()
    trainer.optimizer.step()


def a_block_three_times(trainer: Trainer) -> None:
    trainer.step((0, 1, 1, 2, 1, 2) if trainer.rank == 1 else ALL)


def evaluation_alone(trainer: Trainer) -> None:
    if trainer.rank == 0:
        trainer.evaluate()
    trainer.step()
    trainer.step()


def longer_generation(trainer: Trainer) -> None:
    for _ in range(3 + trainer.rank):
        trainer.evaluate()
    barrier(trainer.mesh.axis("shard"), purpose="the end of generation")


def one_batch_more(trainer: Trainer) -> None:
    if trainer.rank == 0:
        trainer.wait_for_other()  # as a rank does that writes a file, say
    else:
        trainer.step()


WAYS = (one_step_more, no_backward, a_block_three_times, evaluation_alone, longer_generation, one_batch_more)


def astray(rank: int, ranks: int, name: str, stage: int, folder: Path) -> str:
    """The error that a rank ends in. It stays until the other has its own: its end would be one more reason."""
    trainer = Trainer(rank, stage, folder)
    text = "no error"
    try:
        next(way for way in WAYS if way.__name__ == name)(trainer)
    except CollectiveError as error:
        text = str(error)
    trainer.done()
    trainer.wait_for_other()
    return text


def leaving(rank: int, ranks: int, folder: Path) -> str:
    """Rank 0 is at its end while rank 1 has one batch more."""
    trainer = Trainer(rank, 3, folder)
    if rank == 0:
        return ""
    with pytest.raises(CollectiveError) as info:
        trainer.step()
    return str(info.value)


def raising(rank: int, ranks: int, folder: Path) -> None:
    trainer = Trainer(rank, 3, folder)
    if rank == 1:
        trainer.model.blocks[1].register_forward_pre_hook(refuse)
    trainer.step()


def refuse(module: nn.Module, args: object) -> None:
    raise ArithmeticError("no such token")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        out: torch.Tensor = self.net(x, order)
        return out


ORDERS = (ALL, (2, 0))  # what each rank runs: another order of gradients, and a block that only one rank uses


def parting(rank: int, ranks: int) -> list[torch.Tensor]:
    """Ranks go different ways inside of a leaf, and only one of them wants the collectives compared."""
    trained = []
    for stage in (0, 2, 3):
        safeguards = Safeguards(timeout=10.0, check=rank == 0)
        mesh = Mesh.create(init(), shared_memory=shared_memory(), safeguards=safeguards)
        model = Tower()
        policy = Policy(stage=stage, persistence_numel=0, bucket_numel=100, leaf=LeafRule(classes=(Net,)))
        sharded = shard(model, mesh, policy)
        optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(inputs(rank), ORDERS[rank]).backward()
            optimizer.step()
        assert mesh.axis("shard").comparison is not None
        trained.append(torch.cat([p.flatten() for _, p in sorted(sharded.full_parameters())]))
    return trained


def in_one_process() -> torch.Tensor:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank, order in enumerate(ORDERS):
            (model(inputs(rank), order) / len(ORDERS)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


# --------------------------------------------------------------------------------------------------------- side by side


class Cases:
    """Starts all cases, and gives what became of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(max_workers=4)
        shared = "gloo" if refusal("shared memory") else "shared memory"
        self._running = {
            "one_batch_more": self._start("gloo", astray, "one_batch_more", 3),
            "no_backward": self._start(shared, astray, "no_backward", 2),
            "evaluation_alone": self._start("gloo", astray, "evaluation_alone", 3),
            "a_block_three_times": self._start(shared, astray, "a_block_three_times", 3),
            "one_step_more": self._start("gloo", astray, "one_step_more", 3),
            "longer_generation": self._start(shared, astray, "longer_generation", 3),
            "leaving": self._start("gloo", leaving),
            "raising": self._start(shared, raising),
        }

    def _start(self, transport: str, fn: Callable[..., object], *args: object) -> Future[list[str]]:
        folder = self._folder / str(args[0] if args else fn.__name__)
        folder.mkdir()
        return self._pool.submit(run_ranks, fn, 2, *args, folder, env=setting(transport), timeout=60)

    def texts(self, name: str) -> list[str]:
        """What each rank returned."""
        return self._running[name].result()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("diverging"))


ROOT = "gather of unit 'root' (first parameter 'first.weight')"
SECOND = "gather of unit 'blocks.1' (first parameter 'blocks.1.up.weight')"


def test_a_rank_that_does_something_else_is_shown_at_its_line(cases: Cases) -> None:
    none, text = cases.texts("one_batch_more")
    assert none == "no error"
    first, zero, one = text.splitlines()
    assert first.startswith(
        "all_gather on axis 'shard' failed on rank 1: nothing came from rank 0 for 4 s. It is number"
    )
    assert first.endswith(f"{ROOT}, in forward. Rank 0 has not issued it.")
    assert zero.startswith("  rank 0: is in no collective, since ")
    assert "in wait_for_other: time.sleep(0.02); its last one on axis 'shard' was number " in zero
    assert one.startswith("  rank 1: waits for it, since ")
    assert "in forward: loss: torch.Tensor = self.model(inputs(self.rank), order)" in one


def test_a_rank_that_skips_backward_waits_elsewhere(cases: Cases) -> None:
    zero, one = cases.texts("no_backward")
    assert "failed on rank 0: nothing came from rank 1 for 4 s" in zero
    reduction = "(channel 'reduce'), reduce_scatter mean of 128 float32: reduction of the gradients of unit 'root'"
    norm = "all_reduce sum of 14 float64: gradient norm of optimizer step 2"
    for text, waits in ((zero, norm), (one, reduction)):
        assert reduction in text
        assert norm in text
        other = next(line for line in text.splitlines() if line.startswith(f"  rank {int(text is zero)}: "))
        assert "waits for number" in other or "gave up waiting for number" in other
        assert waits in other


@pytest.mark.parametrize(
    ("name", "zero", "one"),
    [
        ("evaluation_alone", ROOT, SECOND),
        ("a_block_three_times", "gather of unit 'blocks.0'", SECOND),
        ("one_step_more", ROOT, "gradient norm of optimizer step 3"),
        ("longer_generation", "the end of generation", ROOT),
    ],
)
def test_collectives_that_differ_are_told_with_what_they_are_for(cases: Cases, name: str, zero: str, one: str) -> None:
    """Most of these look alike but for that: without it, ranks would go on with each other's data."""
    for rank, text in enumerate(cases.texts(name)):
        head, first, second, advice = text.splitlines()
        assert f"on axis 'shard' failed on rank {rank}: the ranks issued different collectives as number " in head
        assert first.startswith("  rank 0: issued ")
        assert zero in first
        assert second.startswith("  rank 1: issued ")
        assert one in second
        assert advice.endswith("look for code that some ranks run and others don't, or not as often.")


def test_a_rank_that_is_at_its_end(cases: Cases) -> None:
    text = cases.texts("leaving")[1]
    assert text.startswith("all_gather on axis 'shard' failed on rank 1: the connection to rank 0 is gone (")
    assert f"{ROOT}, in forward. Rank 0 gave no answer." in text
    assert "rank 0: gave no answer: its process has ended" in text


def test_an_exception_on_one_rank_ends_the_others(cases: Cases) -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 raised:.*ArithmeticError: no such token") as info:
        cases.texts("raising")
    assert "then rank 0 failed: CollectiveError: all_gather on axis 'shard' failed on rank 0" in str(info.value)
    assert SECOND in str(info.value)


def test_ranks_may_part_inside_of_a_leaf() -> None:
    expected = in_one_process()
    for stages in run_ranks(parting, 2):
        for trained in stages:
            assert relative_error(trained, expected) < 1e-6
