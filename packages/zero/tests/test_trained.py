"""Freezing and unfreezing between steps: against plain torch, bit for bit, and what it costs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, Safeguards, init
from drivetrain.zero import INT8_WEIGHTS, ParameterAccess, Policy, ShardedModule, ShardedOptimizer, shard
from drivetrain_testkit import RankError, run_ranks
from drivetrain_testkit.transports import shared_memory

WIDTH, BATCH, RANKS = 72, 3, 2
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()


def inputs(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def change(model: Net, step: int) -> None:
    """What the program does before a step."""
    if step == 2:
        model.blocks[1].requires_grad_(True)
    elif step == 3:
        model.blocks[0].requires_grad_(False)
        model.blocks[1].linear.requires_grad_(False)
    elif step == 5:
        model.blocks[0].requires_grad_(True)
        model.head.bias.requires_grad_(False)
    elif step == 6:
        model.requires_grad_(True)


STEPS = 8


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


class Plain:
    """Plain torch over the data of all ranks, with master weights where ``dtype`` is below fp32.

    Weights that are frozen from the start have no master weights until they are unfrozen, as where they are sharded.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = Net().to(dtype)
        exact = dict(Net().named_parameters())
        self.masters = {
            name: nn.Parameter(exact[name].detach().clone() if p.requires_grad else p.detach().float())
            for name, p in self.model.named_parameters()
        }
        self.optimizer = adam(self.masters.values())

    def step(self, step: int) -> None:
        sums: dict[str, torch.Tensor] = {}
        for rank in range(RANKS):
            self.model.zero_grad()
            self.model(inputs(step, rank, self.dtype)).backward()
            for name, p in self.model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums[name] + p.grad.float() if rank else p.grad.float()
        for name, master in self.masters.items():
            master.grad = sums[name] / RANKS if name in sums else None
        self.optimizer.step()
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.masters[name])


def policy(stage: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
    return Policy(
        stage=stage, param_dtype=dtype, accumulate_dtype=torch.float32, **{"persistence_numel": 100, **settings}
    )


def weights(sharded: ShardedModule) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in sharded.full_parameters()}


def train_beside_plain(rank: int, world_size: int) -> list[str]:
    mesh, wrong = Mesh.create(init(), shared_memory=shared_memory()), []
    for dtype in (torch.float32, torch.bfloat16):
        plain, expected = Plain(dtype), []
        for step in range(STEPS):
            change(plain.model, step)
            plain.step(step)
            expected.append({name: p.detach().float() for name, p in copy.deepcopy(plain.model).named_parameters()})
        for stage in STAGES:
            for bucket_numel in (500, 10**6):
                model = Net()
                sharded = shard(model, mesh, policy(stage, dtype, bucket_numel=bucket_numel))
                optimizer = ShardedOptimizer(sharded, adam(model.parameters()), require_all=True)
                for step in range(STEPS):
                    change(model, step)
                    model(inputs(step, rank, dtype)).backward()
                    optimizer.step()
                    for name, value in weights(sharded).items():
                        if not torch.equal(value, expected[step][name]):
                            wrong.append(f"{dtype} stage {stage}, buckets of {bucket_numel}, step {step}: {name}")
    return wrong


def test_the_same_as_plain_torch() -> None:
    for wrong in run_ranks(train_beside_plain, RANKS, timeout=120):
        assert wrong == []


def reduced_bytes(rank: int, world_size: int, stage: int) -> list[int]:
    """Bytes of gradients that each step reduces: one block is frozen before step 1, and unfrozen before step 3."""
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    model = Net().requires_grad_(True)
    sharded = shard(model, mesh, policy(stage, bucket_numel=1, persistence_numel=0))
    optimizer = ShardedOptimizer(sharded, adam(model.parameters()))
    found = []
    for step in range(4):
        model.blocks[0].linear.requires_grad_(step not in (1, 2))
        model.blocks[0].norm.requires_grad_(step not in (1, 2))
        mesh.ledger.reset()
        model(inputs(step, rank, torch.float32)).backward()
        sharded.reducer.drain()  # the ledger has what is completed
        reduction = "all_reduce" if stage == 0 else "reduce_scatter"
        found.append(mesh.ledger.total_bytes(op=reduction) - (24 if stage == 0 and step in (1, 3) else 0))  # compared
        optimizer.step()
    held = sum(b.numel * 4 for b in sharded.buckets if any(slot.name.startswith("blocks.0") for slot in b.slots))
    return [*found, held]


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_buckets_are_not_reduced(stage: int) -> None:
    for first, frozen, again, unfrozen, held in run_ranks(reduced_bytes, RANKS, stage):
        assert frozen == again < first == unfrozen
        assert first - frozen >= 4 * (WIDTH * WIDTH) or stage < 3
        assert first - frozen <= held


def keeps_state(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """A frozen parameter keeps its optimizer state and master weights, and goes on with them."""
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    model = Net()
    sharded = shard(model, mesh, policy(stage, torch.bfloat16))
    optimizer = ShardedOptimizer(sharded, adam(model.parameters()))
    access = ParameterAccess(sharded, optimizer)
    weight = model.blocks[0].linear.weight
    names = ("exp_avg", "exp_avg_sq")

    def states() -> list[torch.Tensor | None]:
        return [access.master.full(weight), *(access.state(name).full(weight) for name in names)]

    def step(number: int) -> None:
        model(inputs(number, rank, torch.bfloat16)).backward()
        optimizer.step()

    step(0)
    before = states()
    model.blocks[0].requires_grad_(False)
    step(1)
    frozen = states()
    model.blocks[0].requires_grad_(True)
    step(2)
    known = access.gradient.full(weight) is None
    return {
        "kept": all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True) if a is not None and b is not None),
        "moved": not torch.equal(states()[0], frozen[0]),  # type: ignore[arg-type]
        "steps": optimizer.state_of(weight).get("step", torch.tensor(2.0)).item(),
        "known": known,
    }


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_frozen_parameters_waits(stage: int) -> None:
    for found in run_ranks(keeps_state, RANKS, stage):
        assert found == {"kept": True, "moved": True, "steps": 2.0, "known": True}


def mid_step(rank: int, world_size: int, stage: int) -> list[str]:
    """Frozen between the micro-batches of one step, as plain torch has it: what is there already counts.

    And a part of the module is called by itself after it was unfrozen, which no hook of the whole sees.
    """
    mesh, wrong = Mesh.create(init(), shared_memory=shared_memory()), []
    model, plain = Net(), Net()
    sharded = shard(model, mesh, policy(stage, persistence_numel=0))
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)

    def compare(what: str) -> None:
        for name, value in weights(sharded).items():
            if not torch.allclose(value, plain.get_parameter(name), rtol=1e-6, atol=1e-7):
                wrong.append(f"{what}: {name}")

    for micro in range(3):
        for net in (model, plain):
            net.blocks[0].requires_grad_(micro != 1)
        with sharded.no_sync():
            model(inputs(micro, rank, torch.float32)).backward()
        for other in range(RANKS):
            (plain(inputs(micro, other, torch.float32)) / RANKS).backward()
    optimizer.step()
    reference.step()
    reference.zero_grad()
    compare("frozen in the middle")
    for net in (model, plain):
        net.blocks[0].requires_grad_(False)
        net.blocks[1].requires_grad_(True)
    model.blocks[1](inputs(5, rank, torch.float32)).square().mean().backward()
    optimizer.step()
    for other in range(RANKS):
        (plain.blocks[1](inputs(5, other, torch.float32)).square().mean() / RANKS).backward()
    reference.step()
    compare("a part by itself")
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_in_the_middle_of_a_step(stage: int) -> None:
    for wrong in run_ranks(mid_step, RANKS, stage):
        assert wrong == []


# Ranks that differ ----------------------------------------------------------------------------------------------------


def disagree(rank: int, world_size: int, stage: int, wishes: Mapping[int, Sequence[str]]) -> None:
    mesh = Mesh.create(init(), shared_memory=shared_memory(), safeguards=Safeguards(timeout=20.0))
    model = Net()
    sharded = shard(model, mesh, policy(stage, persistence_numel=0))
    optimizer = ShardedOptimizer(sharded, adam(model.parameters()))
    for step in range(2):
        for name in wishes.get(rank, ()) if step else ():
            model.get_parameter(name).requires_grad_(False)
        model(inputs(step, rank, torch.float32)).backward()
        optimizer.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ranks_that_freeze_other_parameters(stage: int) -> None:
    others = ["blocks.0.norm.weight", "blocks.2.norm.weight"]
    with pytest.raises(RankError) as caught:
        run_ranks(disagree, RANKS, stage, {rank: ["head.weight", name] for rank, name in enumerate(others)})
    text = str(caught.value)
    assert "requires_grad of parameter 'blocks.0.norm.weight' is False on rank 0 and True on rank 1" in text
    with pytest.raises(RankError) as caught:
        run_ranks(disagree, RANKS, stage, {0: others[:1], 1: others[1:]})
    text = str(caught.value)
    assert "comparison of what is trained, as requires_grad of 'blocks.0.norm.weight' is now False" in text
    assert "comparison of what is trained, as requires_grad of 'blocks.2.norm.weight' is now False" in text


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_that_freezes_alone(stage: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(disagree, RANKS, stage, {1: ["head.weight", "head.bias"]})
    text = str(caught.value)
    assert "rank 1: issued all_reduce" in text
    assert "comparison of what is trained, as requires_grad of 'head.weight' and of 1 more is now False" in text


# Parameter groups, and what cannot be trained -------------------------------------------------------------------------


def later_groups(rank: int, world_size: int, stage: int, direct: bool) -> list[str]:
    """A frozen block gets a parameter group, with a learning rate of its own, after it was unfrozen."""
    mesh, wrong = Mesh.create(init(), shared_memory=shared_memory()), []
    model, plain = Net(), Net()
    sharded = shard(model, mesh, policy(stage))
    inner = adam([p for p in model.parameters() if p.requires_grad])
    optimizer = ShardedOptimizer(sharded, inner)
    reference = adam([p for p in plain.parameters() if p.requires_grad])
    for step in range(4):
        if step == 2:
            model.blocks[1].requires_grad_(True)
            plain.blocks[1].requires_grad_(True)
            add: Callable[[dict[str, Any]], None] = inner.add_param_group if direct else optimizer.add_param_group
            add({"params": list(model.blocks[1].parameters()), "lr": 0.5})
            reference.add_param_group({"params": list(plain.blocks[1].parameters()), "lr": 0.5})
        model(inputs(step, rank, torch.float32)).backward()
        optimizer.step()
        reference.zero_grad()
        for other in range(RANKS):
            (plain(inputs(step, other, torch.float32)) / RANKS).backward()
        reference.step()
    assert [len(names) for names in optimizer.names] == [10, 4]
    for name, value in weights(sharded).items():
        if not torch.allclose(value, plain.get_parameter(name), rtol=1e-4, atol=1e-6):
            wrong.append(name)
    for group in ([nn.Parameter(torch.ones(2))], [model.head.weight]):
        with pytest.raises(ValueError, match=r"do not belong to|is in a parameter group"):
            optimizer.add_param_group({"params": group})
        assert len(optimizer.param_groups) == 2
    return wrong


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_groups_that_are_added(stage: int, direct: bool) -> None:
    for wrong in run_ranks(later_groups, RANKS, stage, direct):
        assert wrong == []


def test_parameters_in_no_group_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    sharded = shard(model, Mesh.create(init()), policy(2))
    optimizer = ShardedOptimizer(sharded, adam([p for p in model.parameters() if p.requires_grad]))
    before = model.blocks[1].linear.weight.clone()
    model.blocks[1].requires_grad_(True)
    with caplog.at_level(logging.WARNING, logger="drivetrain.zero"):
        for step in range(2):
            model(inputs(step, 0, torch.float32)).backward()
            optimizer.step()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("parameter 'blocks.1.norm.weight', one of 4 that were unfrozen, is in no parameter group")
    assert torch.equal(model.blocks[1].linear.weight, before)


def test_quantised_parameters_stay_frozen() -> None:
    model = Net()
    sharded = shard(model, Mesh.create(init()), policy(3, persistence_numel=0, frozen_rule=INT8_WEIGHTS))
    ShardedOptimizer(sharded, adam(model.parameters()))
    model.blocks[1].linear.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.linear\.weight' .*zero_quantized_nontrainable_weights"):
        model(inputs(0, 0, torch.float32))
    model.blocks[1].linear.weight.requires_grad_(False)
    model.blocks[1].norm.requires_grad_(True)
    model(inputs(0, 0, torch.float32)).backward()
