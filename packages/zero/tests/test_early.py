"""Updates that begin in backward are those of the step, to the bit, and leave no trace where they must not happen.

`MemoryStore` tells what was called, and fills what it gave out with NaN once that is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.kernels import FusedAdam, Lamb, Muon
from drivetrain.zero import (
    FlatSlice,
    LossScalePolicy,
    LossScaler,
    ParameterAccess,
    Policy,
    ShardedModule,
    ShardedOptimizer,
    Stores,
    shard,
)
from drivetrain.zero.early import EarlyUpdates
from drivetrain_testkit import run_ranks
from drivetrain_testkit.stores import MemoryStore

WIDTH, BLOCKS, STEPS = 24, 6, 9
MAX_NORM = 1.0
HUGE = (4, 6)  # steps whose norms are clipped
INFINITE = (2, 8)  # steps whose gradients are not finite


def by_shape(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) == wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": vectors, "use_muon": False}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "tensor lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-2), foreach=False),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=1e-2),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Muon": lambda parameters: Muon(by_shape(list(parameters)), lr=1e-2),
}


class Net(nn.Module):
    """Blocks, and with ``again`` the first used a second time, whose gradients then come in two parts."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.again = again
        self.inner = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.to(self.head.weight.dtype))
        for block in (*self.blocks, self.blocks[0]) if self.again else self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=True) if self.again else block(x))
        return self.head(x).float()


@dataclass(frozen=True, kw_only=True)
class Case:
    stage: int
    dtype: torch.dtype | None = torch.bfloat16
    optimizer: str = "AdamW"
    kinds: tuple[str, ...] = ("states", "gradients", "parameters")
    max_norm: float = MAX_NORM
    micro_batches: int = 1
    again: bool = False
    share: float = 1.0
    accumulate_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Trained:
    results: list[tuple[float, float, bool]]
    tensors: dict[str, torch.Tensor]
    settings: list[dict[str, Any]]
    policy: EarlyUpdates | None


def build(mesh: Mesh, case: Case, early: bool) -> tuple[ShardedModule, ShardedOptimizer, MemoryStore]:
    store = MemoryStore()
    policy = Policy(
        stage=case.stage,
        param_dtype=case.dtype,
        accumulate_dtype=case.accumulate_dtype,
        persistence_numel=100,
        bucket_numel=1300,
    )
    stores = Stores(**dict.fromkeys(case.kinds, store), share=case.share)  # type: ignore[arg-type]
    sharded = shard(Net(case.again), mesh, policy, stores=stores)
    half = case.dtype is torch.float16
    scaler = LossScaler(LossScalePolicy(initial=2.0**6, window=3)) if half else None
    made = OPTIMIZERS[case.optimizer](sharded.module.parameters())
    return sharded, ShardedOptimizer(sharded, made, max_norm=case.max_norm, scaler=scaler, early=early), store


def backward(sharded: ShardedModule, optimizer: ShardedOptimizer, rank: int, step: int, micro_batches: int = 1) -> None:
    """Small gradients, but for those steps that the tables above name."""
    factor = 1e-3 if step not in HUGE else 30.0
    for micro in range(micro_batches):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
        if sharded.module.again:
            x.requires_grad_()
        sharded.closes_step = micro == micro_batches - 1
        output = sharded.module(x)
        loss = sharded.scaled(output.square().mean() * factor, optimizer.scaler.scale)
        if step in INFINITE and rank == 0 and sharded.closes_step:
            handle = sharded.module.inner.bias.register_hook(_spoil)  # among the last to get its gradient
            loss.backward()
            handle.remove()
        else:
            loss.backward()


def _spoil(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * float("inf")


def train(
    sharded: ShardedModule, optimizer: ShardedOptimizer, rank: int, steps: range, micro_batches: int = 1
) -> list[tuple[float, float, bool]]:
    results = []
    for step in steps:
        backward(sharded, optimizer, rank, step, micro_batches)
        result = optimizer.step()
        results.append((result.grad_norm, result.clip_coefficient, result.stepped))
        for group in optimizer.param_groups:  # a schedule: the next step has another
            group["lr"] = group["lr"] * 0.9
    return results


def read(part: FlatSlice) -> torch.Tensor:
    return part.read(0, part.data.numel()).clone()


def everything(sharded: ShardedModule, optimizer: ShardedOptimizer) -> dict[str, torch.Tensor]:
    slices = {**sharded.model_slices(), **optimizer.state_slices("save")}
    tensors = {name: read(part) for name, part in slices.items()}
    return tensors | {f"whole {name}": value for name, value in sharded.full_parameters()}


def run(mesh: Mesh, rank: int, case: Case, *, early: bool) -> Trained:
    sharded, optimizer, _ = build(mesh, case, early)
    results = train(sharded, optimizer, rank, range(STEPS), case.micro_batches)
    policy = optimizer.policy if isinstance(optimizer.policy, EarlyUpdates) else None
    return Trained(results, everything(sharded, optimizer), optimizer.hyperparameters(), policy)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: object) -> None:
    assert found.keys() == wanted.keys(), what
    for name, value in wanted.items():
        assert torch.equal(found[name], value), (what, name)


def compare(rank: int, world_size: int, cases: list[Case]) -> None:
    mesh = Mesh.create(init())
    for case in cases:
        plain, kept = (run(mesh, rank, case, early=early) for early in (False, True))
        assert str(kept.results) == str(plain.results), case  # nan is nan
        same(kept.tensors, plain.tensors, case)
        assert str(kept.settings) == str(plain.settings), case
        clipped = [step for step, (_, coefficient, _) in enumerate(plain.results) if coefficient < 1.0]
        skipped = [step for step, (_, _, stepped) in enumerate(plain.results) if not stepped]
        assert tuple(clipped) == (HUGE if case.max_norm else ()), (case, clipped)
        assert tuple(skipped) == INFINITE, (case, skipped)
        if case.dtype is None or case.share == 0.0 or (case.optimizer == "Muon" and world_size > 1):
            assert kept.policy is None or (kept.policy.kept, kept.policy.fallen) == (0, 0), case
        else:
            assert kept.policy is not None
            assert kept.policy.kept > 5, (case, kept.policy.kept)
            assert kept.policy.fallen > 4, (case, kept.policy.fallen)


def cases() -> list[Case]:
    half = torch.float16
    found = [Case(stage=1, dtype=half), Case(stage=2, micro_batches=2), Case(stage=3, dtype=half, micro_batches=2)]
    return [*found, Case(stage=3, again=True), Case(stage=2, max_norm=0.0)]


def more_cases() -> list[Case]:
    half, both = torch.float16, ("states", "gradients")
    found = [Case(stage=stage, dtype=dtype) for stage, dtype in product((1, 2, 3), (torch.bfloat16, half))]
    found += [Case(stage=stage, micro_batches=2) for stage in (1, 3)]
    found += [Case(stage=stage, again=True, dtype=dtype) for stage, dtype in product((2, 3), (torch.bfloat16, half))]
    found += [Case(stage=3, kinds=kinds) for kinds in (("states",), both, ("states", "parameters"))]
    found += [Case(stage=2, kinds=("states",), dtype=half), Case(stage=0), Case(stage=3, dtype=None)]
    found += [Case(stage=2, share=share) for share in (0.0, 0.5)]
    found += [Case(stage=3, max_norm=0.0), Case(stage=2, max_norm=0.0, dtype=half, micro_batches=2)]
    return [*found, Case(stage=3, accumulate_dtype=torch.float32, micro_batches=2)]


def test_training_is_the_same_to_the_bit() -> None:
    run_ranks(compare, 2, cases(), timeout=110)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_so_it_is_at_every_setting() -> None:
    run_ranks(compare, 2, more_cases(), timeout=550)


@pytest.mark.thorough
def test_so_it_is_with_any_optimizer() -> None:
    run_ranks(compare, 1, [Case(stage=2, optimizer=name, dtype=torch.float16) for name in OPTIMIZERS], timeout=110)
    run_ranks(compare, 2, [Case(stage=3, optimizer="Muon")], timeout=110)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_so_it_is_with_any_optimizer_at_every_stage() -> None:
    others = [Case(stage=stage, optimizer=name) for stage, name in product((2, 3), OPTIMIZERS) if name != "AdamW"]
    run_ranks(compare, 2, others, timeout=550)


def watch(rank: int, world_size: int) -> None:
    """What is called in backward, in a step whose early updates count, and in one where they do not."""
    sharded, optimizer, store = build(Mesh.create(init()), Case(stage=3), True)
    policy = optimizer.policy
    assert isinstance(policy, EarlyUpdates)
    train(sharded, optimizer, rank, range(1))
    before = everything(sharded, optimizer)
    size = store.bytes
    store.operations.clear()
    backward(sharded, optimizer, rank, 1)
    early = [key for name, key, *_ in _named(store) if name == "branch"]
    assert len(early) >= BLOCKS - 3
    assert all(key.startswith("states of") for key in early)
    same(everything(sharded, optimizer), before, "nothing has changed yet")

    store.operations.clear()
    optimizer.step()
    renamed = [new for name, _, new in (one[:3] for one in _named(store) if len(one) > 2) if name == "rename"]
    fetched = [key for name, key, *_ in _named(store) if name == "fetch"]
    assert set(early) <= set(renamed)
    assert not set(early) & set(fetched)
    assert not any("early" in key for key in fetched)
    assert policy.kept == len(early)
    assert policy.fallen == 0
    assert store.bytes == size

    before = everything(sharded, optimizer)
    store.operations.clear()
    backward(sharded, optimizer, rank, INFINITE[0])
    assert not optimizer.step().stepped
    dropped = [key for name, key, *_ in _named(store) if name == "drop" and key.startswith("states of")]
    assert dropped == [f"{key}, early" for key in early]
    assert policy.fallen == len(early)
    assert store.bytes == size
    same(everything(sharded, optimizer), before, "nothing has changed at all")


def _named(store: MemoryStore) -> Iterator[tuple[Any, ...]]:
    return (operation for operation in store.operations if len(operation) > 1)


def test_updates_run_in_backward_and_going_back_reads_and_writes_nothing() -> None:
    run_ranks(watch, 1)
    run_ranks(watch, 2)


def change_rate(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    optimizer.param_groups[0]["lr"] = 3e-2
    return 1.0


def change_betas(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    return 1.0


def change_divisor(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    return 3.0


def change_scale(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    optimizer.scaler.load_state_dict({**optimizer.scaler.state_dict(), "scale": 4.0})
    return 1.0


def change_gradient(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    weight = sharded.module.blocks[5][0].weight
    ParameterAccess(sharded, optimizer).gradient.set_full(weight, torch.full(weight.shape, 1e-3))
    return 1.0


def change_state(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    weight = sharded.module.blocks[5][0].weight
    ParameterAccess(sharded, optimizer).state("exp_avg").set_full(weight, torch.full(weight.shape, 1e-3))
    return 1.0


def change_master(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    weight = sharded.module.blocks[5][0].weight
    ParameterAccess(sharded, optimizer).master.set_full(weight, torch.full(weight.shape, 0.125))
    return 1.0


def one_more_pass(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    sharded.scaled(sharded.module(torch.ones(2, 8)).square().mean() * 1e-3, optimizer.scaler.scale).backward()
    return 1.0


def forget(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    sharded.zero_grad()
    return one_more_pass(sharded, optimizer)


def a_pass_that_fails(sharded: ShardedModule, optimizer: ShardedOptimizer) -> float:
    loss = sharded.module(torch.ones(2, 8)).square().mean() * 1e-3
    handle = sharded.module.blocks[2][0].weight.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        sharded.scaled(loss, optimizer.scaler.scale).backward()
    handle.remove()
    return one_more_pass(sharded, optimizer)


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError


INTERVENTIONS = (
    change_rate,
    change_betas,
    change_divisor,
    change_scale,
    change_gradient,
    change_state,
    change_master,
    one_more_pass,
    forget,
    a_pass_that_fails,
)


def intervene(rank: int, world_size: int, stage: int) -> None:
    mesh = Mesh.create(init())
    for intervention in INTERVENTIONS:
        found = []
        for early in (False, True):
            sharded, optimizer, store = build(mesh, Case(stage=stage, dtype=torch.float16), early)
            train(sharded, optimizer, rank, range(1))
            store.operations.clear()
            backward(sharded, optimizer, rank, 3)
            assert any(name == "branch" for name, *_ in store.operations) is early
            optimizer.step(divisor=intervention(sharded, optimizer))
            train(sharded, optimizer, rank, range(5, 6))
            found.append(everything(sharded, optimizer))
            if isinstance(optimizer.policy, EarlyUpdates):
                assert optimizer.policy.fallen > 0, intervention
        same(found[1], found[0], (stage, intervention))


def test_whatever_is_changed_between_backward_and_step_counts() -> None:
    run_ranks(intervene, 1, 3, timeout=110)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_so_it_does_on_two_ranks(stage: int) -> None:
    run_ranks(intervene, 2, stage, timeout=110)


class FailingStore(MemoryStore):
    """Fails once, when a record is branched or made for the ``left``-th time."""

    left = -1

    def _note(self, *operation: Any) -> None:
        super()._note(*operation)
        if operation[0] in ("branch", "create"):
            self.left -= 1
            if self.left == 0:
                raise OSError("no room")


def fail(rank: int, world_size: int) -> None:
    """A store that has no room in backward: the pass fails, all is as before, and training goes on from there."""
    mesh = Mesh.create(init())
    plain, expected, _ = build(mesh, Case(stage=3), False)
    train(plain, expected, rank, range(2))
    wanted = everything(plain, expected)
    failures = 0
    for left in range(1, 40, 3):
        store = FailingStore()
        policy = Policy(stage=3, param_dtype=torch.bfloat16, persistence_numel=100, bucket_numel=1300)
        sharded = shard(Net(False), mesh, policy, stores=Stores(parameters=store, states=store, gradients=store))
        made = torch.optim.AdamW(sharded.module.parameters(), lr=1e-2)
        optimizer = ShardedOptimizer(sharded, made, max_norm=MAX_NORM, early=True)
        train(sharded, optimizer, rank, range(1))
        store.left = left
        try:
            backward(sharded, optimizer, rank, 1)
        except OSError:
            failures += 1
            assert not sharded.holds_gradients
            backward(sharded, optimizer, rank, 1)
        store.left = -1
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        same(everything(sharded, optimizer), wanted, left)
    assert failures > 4


def test_a_store_that_fails_in_backward_leaves_everything_as_it_was() -> None:
    run_ranks(fail, 1)


def refuse(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init())
    for optimizer, stores, text in (
        (Lamb, Stores(states=MemoryStore()), "Lamb needs the norms of all parameters"),
        (torch.optim.AdamW, Stores(), "states that live in a store, and there is none"),
    ):
        sharded = shard(Net(False), mesh, Policy(stage=2), stores=stores)
        with pytest.raises(ValueError, match=text):
            ShardedOptimizer(sharded, optimizer(sharded.module.parameters(), lr=1e-3), early=True)


def refuse_replicas(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init(), data=2, shard=1)
    sharded = shard(Net(False), mesh, Policy(stage=2), stores=Stores(states=MemoryStore()))
    with pytest.raises(ValueError, match="averaged over the 2 replicas"):
        ShardedOptimizer(sharded, torch.optim.AdamW(sharded.module.parameters()), early=True)


def test_what_cannot_work_is_refused() -> None:
    run_ranks(refuse_replicas, 2)
    run_ranks(refuse, 1)
