"""States that live in a store: training is the same to the bit, and a record is looked at only while it is at hand.

`MemoryStore` fills what it gave out with NaN once that is released, so whoever looks too long computes NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

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
    gathered,
    shard,
)
from drivetrain_testkit import run_ranks
from drivetrain_testkit.stores import MemoryStore

WIDTH, STEPS = 32, 4
KINDS = ("states", "gradients", "parameters")


def by_shape(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in parameters if (p.dim() == 2) == wanted] for wanted in (True, False))
    return [{"params": matrices}, {"params": vectors, "use_muon": False}]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "FusedAdam": lambda parameters: FusedAdam(parameters, lr=1e-2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Muon": lambda parameters: Muon(by_shape(list(parameters)), lr=1e-2),
}


class Net(nn.Module):
    """Blocks that are released, small parameters that are not, a frozen one, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.blocks[1][0].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.to(self.head.weight.dtype))
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return self.head(x).float()


@dataclass(frozen=True, kw_only=True)
class Case:
    stage: int
    dtype: torch.dtype | None = None
    optimizer: str = "AdamW"
    kinds: tuple[str, ...] = KINDS
    share: float = 1.0
    ranks: int = 2
    replicas: int = 1
    reduce_op: str = "mean"
    accumulate_dtype: torch.dtype | None = None
    gather_in_two: bool = False

    def policy(self) -> Policy:
        return Policy(
            stage=self.stage,
            param_dtype=self.dtype,
            accumulate_dtype=self.accumulate_dtype,
            persistence_numel=100,
            bucket_numel=2500,
            reduce_op=self.reduce_op,  # type: ignore[arg-type]
            gather_in_two=self.gather_in_two,
            node_ranks=2 if self.gather_in_two else None,
        )


@dataclass(frozen=True)
class Trained:
    norms: list[float]
    tensors: dict[str, torch.Tensor]
    store: MemoryStore


def batches(rank: int, step: int) -> Iterator[torch.Tensor]:
    for micro in range(2):
        yield torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def build(mesh: Mesh, case: Case, stored: bool) -> tuple[ShardedModule, ShardedOptimizer, MemoryStore]:
    store = MemoryStore()
    where = dict.fromkeys(case.kinds, store)
    stores = Stores(**where, share=case.share) if stored else None  # type: ignore[arg-type]
    sharded = shard(Net(), mesh, case.policy(), stores=stores)
    scaler = LossScaler(LossScalePolicy(initial=2.0**4)) if case.dtype is torch.float16 else None
    made = OPTIMIZERS[case.optimizer](sharded.module.parameters())
    return sharded, ShardedOptimizer(sharded, made, max_norm=0.5, scaler=scaler), store


def train(sharded: ShardedModule, optimizer: ShardedOptimizer, rank: int, steps: range) -> list[float]:
    norms = []
    for step in steps:
        for micro, x in enumerate(batches(rank, step)):
            sharded.closes_step = micro == 1
            sharded.scaled(sharded.module(x).square().mean(), optimizer.scaler.scale).backward()
        norms.append(optimizer.step().grad_norm)
    return norms


def run(mesh: Mesh, rank: int, case: Case, *, stored: bool) -> Trained:
    sharded, optimizer, store = build(mesh, case, stored)
    norms = train(sharded, optimizer, rank, range(STEPS))
    slices = {**sharded.model_slices(), **optimizer.state_slices("save")}
    tensors = {name: read(part) for name, part in slices.items()}
    tensors |= {f"whole {name}": value for name, value in sharded.full_parameters()}
    parameters = [p for p in sharded.module.parameters() if p.requires_grad]
    access = ParameterAccess(sharded, optimizer)
    for index, whole in enumerate(access.master.full_many(parameters)):
        assert whole is not None
        tensors[f"master {index}"] = whole
    key = "momentum_buffer" if case.optimizer in ("SGD", "Muon") else "exp_avg"
    parameters = [p for p in parameters if p.dim() == 2 or case.optimizer != "Muon"]
    for index, whole in enumerate(access.state(key).full_many(parameters)):
        if whole is not None:
            tensors[f"state {index}"] = whole
    return Trained(norms, tensors, store)


def read(part: FlatSlice) -> torch.Tensor:
    """In two pieces, as a checkpoint that is read in pieces would."""
    half = part.data.numel() // 2
    return torch.cat((part.read(0, half), part.read(half, part.data.numel() - half))).clone()


def compare(rank: int, world_size: int, cases: list[Case]) -> None:
    meshes: dict[int, Mesh] = {}
    world = init()
    for case in cases:
        if case.replicas not in meshes:
            meshes[case.replicas] = Mesh.create(world, data=case.replicas, shard=world_size // case.replicas)
        mesh = meshes[case.replicas]
        plain, kept = (run(mesh, rank, case, stored=stored) for stored in (False, True))
        assert kept.norms == plain.norms, case
        assert kept.tensors.keys() == plain.tensors.keys(), case
        for name, value in plain.tensors.items():
            assert torch.equal(kept.tensors[name], value), (case, name)
        least = {"states": 0, "gradients": 1, "parameters": 3}  # the stage that splits it, but for states
        if case.share == 1.0 and any(case.stage >= least[kind] for kind in case.kinds):
            assert kept.store.operations, case


def every_subset() -> list[Case]:
    subsets = [(kind,) for kind in KINDS] + [KINDS]
    formats = (None, torch.bfloat16)
    return [Case(stage=stage, dtype=dtype, kinds=kinds) for stage, dtype, kinds in product(range(4), formats, subsets)]


def cases() -> list[Case]:
    half = torch.bfloat16
    found = [Case(stage=stage, dtype=dtype) for stage, dtype in ((0, half), (1, None), (2, half), (3, None), (3, half))]
    found += [Case(stage=3, dtype=half, kinds=(kind,)) for kind in KINDS]
    found += [Case(stage=stage, optimizer=name) for stage, name in product((1, 3), OPTIMIZERS) if name != "AdamW"]
    found += [Case(stage=3, dtype=dtype, share=share) for dtype in (None, torch.bfloat16) for share in (0.0, 0.4, 0.8)]
    found += [Case(stage=2, dtype=torch.bfloat16, share=0.5), Case(stage=2, dtype=torch.float16)]
    return [*found, Case(stage=3, dtype=torch.bfloat16, accumulate_dtype=torch.float32)]


def test_training_is_the_same_to_the_bit() -> None:
    run_ranks(compare, 2, cases(), timeout=110)


@pytest.mark.thorough
def test_so_it_is_whatever_lives_elsewhere() -> None:
    run_ranks(compare, 2, every_subset(), timeout=110)


@pytest.mark.thorough
def test_so_it_is_on_any_ranks() -> None:
    half = torch.bfloat16
    run_ranks(compare, 3, [Case(stage=stage, dtype=half) for stage in (1, 3)], timeout=110)
    replicas = [Case(stage=stage, dtype=half, replicas=2, reduce_op=op) for stage in (2, 3) for op in ("mean", "sum")]
    run_ranks(compare, 4, [*replicas, Case(stage=3, dtype=half, gather_in_two=True)], timeout=110)


def alone(rank: int, world_size: int) -> tuple[int, int]:
    """One rank at stage 3 still releases its parameters, if they live elsewhere."""
    mesh = Mesh.create(init())
    found = []
    for stored in (False, True):
        sharded, optimizer, store = build(mesh, Case(stage=3, dtype=torch.bfloat16), stored)
        norms = train(sharded, optimizer, rank, range(2))
        found.append((norms, dict(sharded.full_parameters())))
    (norms, plain), (stored_norms, kept) = found
    assert stored_norms == norms
    assert all(torch.equal(kept[name], value) for name, value in plain.items())
    assert sharded.bytes().gathered == 0
    return sharded.bytes().parameters, store.bytes


def test_one_rank_keeps_little() -> None:
    ((here, away),) = run_ranks(alone, 1)
    trained = sum(p.numel() for p in Net().parameters() if p.requires_grad)
    assert here < 0.3 * 2 * trained  # small ones
    assert away > 12 * trained  # masters, two moments, and most parameters


def reload(rank: int, world_size: int) -> None:
    """Slices that one run saved are loaded into another, which has its states elsewhere, and the other way round."""
    mesh = Mesh.create(init())
    for first, second in ((True, False), (False, True), (True, True)):
        case = Case(stage=3, dtype=torch.bfloat16)
        sharded, optimizer, _ = build(mesh, case, first)
        train(sharded, optimizer, rank, range(2))
        slices = {**sharded.model_slices(), **optimizer.state_slices("save")}
        saved = {name: read(part) for name, part in slices.items()}
        schema, groups = optimizer.state_schema(), optimizer.hyperparameters()
        expected = train(sharded, optimizer, rank, range(2, 4))

        other, resumed, _ = build(mesh, case, second)
        keys: dict[str, dict[str, torch.Size]] = {}
        for name, part in slices.items():
            parameter, _, key = name.rpartition("/")
            if parameter:
                keys.setdefault(parameter, {})[key] = part.shape
        resumed.prepare_state(keys, schema)
        for name, part in {**other.model_slices(), **resumed.state_slices("load")}.items():
            half = part.data.numel() // 2
            for start, values in ((0, saved[name][:half]), (half, saved[name][half:])):
                target = part.target(start, values.numel())
                target.copy_(values)
                part.commit(start, target)
        other.refresh_parameters()
        resumed.finish_load()
        resumed.load_hyperparameters(groups)
        assert train(other, resumed, rank, range(2, 4)) == expected, (first, second)


def test_state_is_saved_and_loaded_wherever_it_lives() -> None:
    run_ranks(reload, 2)


def edit(rank: int, world_size: int) -> None:
    """What is written to masters, moments, gradients and whole parameters is what training goes on with."""
    mesh = Mesh.create(init())
    found = []
    for stored in (False, True):
        sharded, optimizer, _ = build(mesh, Case(stage=3, dtype=torch.bfloat16), stored)
        train(sharded, optimizer, rank, range(1))
        access, weight = ParameterAccess(sharded, optimizer), sharded.module.blocks[2][0].weight
        access.master.set_full(weight, torch.full(weight.shape, 0.125))
        access.state("exp_avg").set_full(weight, torch.full(weight.shape, 0.5))
        with gathered(sharded, [sharded.module.inner.weight], modifier_rank=0):
            if rank == 0:
                sharded.module.inner.weight.data.mul_(2.0)
        for micro, x in enumerate(batches(rank, 7)):
            sharded.closes_step = micro == 1
            sharded.module(x).square().mean().backward()
        gradient = access.gradient.full(weight)
        assert gradient is not None
        access.gradient.set_full(weight, gradient * 2)
        norm = optimizer.step().grad_norm
        found.append((norm, [t.clone() for _, t in sharded.full_parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_edits_reach_the_store() -> None:
    run_ranks(edit, 2)


def skip(rank: int, world_size: int) -> None:
    """A step that is skipped leaves what is stored as it was, and forgets the gradients."""
    sharded, optimizer, store = build(Mesh.create(init()), Case(stage=2, dtype=torch.float16), True)
    train(sharded, optimizer, rank, range(1))
    before = {name: read(part) for name, part in {**sharded.model_slices(), **optimizer.state_slices("save")}.items()}
    kept = store.bytes
    (sharded.module(next(batches(rank, 5))).sum() * float("inf")).backward()
    assert not optimizer.step().stepped
    assert store.bytes == kept
    for name, part in {**sharded.model_slices(), **optimizer.state_slices("save")}.items():
        assert torch.equal(read(part), before[name])


def test_a_skipped_step_changes_nothing() -> None:
    run_ranks(skip, 2)


def change(rank: int, world_size: int) -> None:
    """Parameters are frozen, unfrozen and replaced between steps."""
    mesh = Mesh.create(init())
    for stage, dtype in ((1, torch.bfloat16), (3, torch.bfloat16), (3, None)):
        found = []
        for stored in (False, True):
            sharded, optimizer, store = build(mesh, Case(stage=stage, dtype=dtype), stored)
            module = sharded.module
            norms = train(sharded, optimizer, rank, range(2))
            module.blocks[0].requires_grad_(False)
            module.blocks[1][0].requires_grad_(True)
            norms += train(sharded, optimizer, rank, range(2, 4))
            module.blocks[0].requires_grad_(True)
            torch.manual_seed(9)
            module.head = nn.Linear(WIDTH, 3)
            optimizer.adopt()
            norms += train(sharded, optimizer, rank, range(4, 6))
            found.append((norms, {name: value.clone() for name, value in sharded.full_parameters()}))
            assert not stored or store.bytes
        assert found[0][0] == found[1][0], (stage, dtype)
        for name, value in found[0][1].items():
            assert torch.equal(found[1][1][name], value), (stage, dtype, name)


def test_what_is_trained_may_change() -> None:
    run_ranks(change, 2)


def order(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    sharded, optimizer, store = build(Mesh.create(init()), Case(stage=3, dtype=torch.bfloat16), True)
    train(sharded, optimizer, rank, range(2))
    store.operations.clear()
    train(sharded, optimizer, rank, range(2, 3))
    return store.operations


def test_what_is_fetched_was_expected_and_one_record_is_fetched_once_in_a_step() -> None:
    (operations,) = run_ranks(order, 1)
    expected: set[str] = set()
    told = 0
    for name, *rest in operations:
        if name == "expect":
            expected.update(rest)
        elif name == "fetch":
            told += rest[0] in expected
    fetches = [rest[0] for name, *rest in operations if name == "fetch"]
    assert told >= 0.75 * len(fetches)  # all but the first of a pass
    states = [key for key in fetches if key.startswith("states of")]
    assert len(states) == len(set(states)) > 3


def refuse(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init())
    sharded = shard(Net(), mesh, Policy(stage=2), stores=Stores(states=MemoryStore()))
    with pytest.raises(ValueError, match="Lamb needs the norms of all parameters before it updates one"):
        ShardedOptimizer(sharded, Lamb(sharded.module.parameters(), lr=1e-3))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got 1.5"):
        Stores(share=1.5)


def test_what_cannot_work_is_refused() -> None:
    run_ranks(refuse, 1)
