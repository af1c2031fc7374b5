"""Parameters that join a module after it was sharded: trained, saved and named as if they had been there before."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import Init, ParameterAccess, Policy, ShardedModule, ShardedOptimizer, adopt, gathered, shard
from drivetrain_testkit import RankError, run_ranks
from drivetrain_testkit.transports import shared_memory

WIDTH, ROWS, BATCH, RANKS = 48, 21, 4, 2
STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bypass: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return x + torch.tanh(out if self.bypass is None else out + self.bypass(x))


class Bypass(nn.Module):
    """An adapter with a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, 3, bias=False)
        self.b = nn.Linear(3, WIDTH, bias=False)
        self.register_buffer("scale", torch.rand(1) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.b(self.a(x))


class Net(nn.Module):
    """Tied: the head scores the rows of the table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).float(), (tokens + 1) % ROWS)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (BATCH,), generator=torch.Generator().manual_seed(10 * step + rank))


def extend(model: Net, seed: int) -> None:
    """Adapters in every block, and another head beside the first one."""
    torch.manual_seed(seed)
    for block in model.blocks:
        block.bypass = Bypass()


def resize(model: Net) -> None:
    """As `resize_token_embeddings` does it: old rows are kept, the tie too."""
    old = model.table.weight
    model.table = nn.Embedding(ROWS + 7, WIDTH)
    with torch.no_grad():
        model.table.weight.fill_(0.01)
        model.table.weight[:ROWS] = old
    model.head = nn.Linear(WIDTH, ROWS + 7, bias=False)
    model.head.weight = model.table.weight


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def policy(stage: int, **settings: Any) -> Policy:
    return Policy(stage=stage, **{"persistence_numel": 60, **settings})


def weights(sharded: ShardedModule) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sharded.full_parameters()}


class Plain:
    """Plain torch over the data of all ranks, which adds gradients in the order of ranks."""

    def __init__(self) -> None:
        self.model = Net()
        self.optimizer = adam(self.model.parameters())

    def step(self, step: int) -> None:
        sums: dict[str, torch.Tensor] = {}
        for rank in range(RANKS):
            self.model.zero_grad()
            self.model(inputs(step, rank)).backward()
            for name, p in self.model.named_parameters():
                assert p.grad is not None
                sums[name] = sums[name] + p.grad if rank else p.grad.clone()
        for name, p in self.model.named_parameters():
            p.grad = sums[name] / RANKS
        self.optimizer.step()


def grow(rank: int, world_size: int, stage: int, bucket_numel: int) -> list[str]:
    mesh, wrong = Mesh.create(init(), shared_memory=shared_memory()), []
    plain, model = Plain(), Net()
    sharded = shard(model, mesh, policy(stage, bucket_numel=bucket_numel))
    optimizer = ShardedOptimizer(sharded, adam(model.parameters()))
    access = ParameterAccess(sharded, optimizer)
    old = model.table.weight
    for step in range(7):
        if step == 2:
            extend(plain.model, 9)
            extend(model, 9 + rank)  # rank 0's values count, of the buffer too
            joined = optimizer.adopt({"lr": 0.05}).joined
            assert list(joined) == [f"blocks.{i}.bypass.{n}.weight" for i in (0, 1) for n in "ab"]
            new = [p for name, p in plain.model.named_parameters() if "bypass" in name]
            plain.optimizer.add_param_group({"params": new, "lr": 0.05})
        if step == 4:
            resize(plain.model)
            with gathered(sharded, model.table):
                resize(model)
            adopted = optimizer.adopt()
            assert (list(adopted.joined), list(adopted.left)) == (["table.weight"], ["table.weight"])
            group = plain.optimizer.param_groups[0]
            group["params"] = [*plain.model.table.parameters(), *plain.model.blocks[0].linear.parameters()]
            group["params"] += plain.model.blocks[1].linear.parameters()
            with pytest.raises(KeyError):
                access.master.full(old)
        plain.step(step)
        model(inputs(step, rank)).backward()
        optimizer.step()
        found = weights(sharded)
        for name, value in plain.model.named_parameters():
            if not torch.allclose(found.pop(name), value, rtol=1e-5, atol=1e-6):
                wrong.append(f"step {step}: {name}")
        wrong += list(found)
        if access.master.full(model.table.weight) is None:
            wrong.append("no access")
    assert sorted(sharded.model_slices()) == sorted(name for name, _ in model.named_parameters())
    held = sharded.bytes()
    assert (held.gathered, held.gradients) == (0, 0)
    assert [len(names) for names in optimizer.names] == [5, 4]
    assert sharded.aliases() == {"table.weight": ("head.weight",)}
    return wrong


@pytest.mark.parametrize("bucket_numel", [1, 10**6])
@pytest.mark.parametrize("stage", STAGES)
def test_what_joins_is_trained_like_the_rest(stage: int, bucket_numel: int) -> None:
    for wrong in run_ranks(grow, RANKS, stage, bucket_numel):
        assert wrong == []


def adopt_badly(rank: int, world_size: int, how: str) -> None:
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    model = Net()
    sharded = shard(model, mesh, policy(3))
    optimizer = ShardedOptimizer(sharded, adam(model.parameters()))
    around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if how == "gradients":
        model(inputs(0, rank)).backward()
    elif how == "ranks differ" and rank:
        model.blocks[1].bypass = Bypass()
    elif how == "no values":
        with torch.device("meta"):
            model.blocks[0].bypass = Bypass()
    elif how == "Init":
        with Init(mesh):
            model.blocks[0].bypass = Bypass()
    elif how == "gathered":
        around = gathered(sharded, model.table)
    with around:
        optimizer.adopt()


REFUSED = {
    "gradients": "adopt() between a backward pass and the step that uses its gradients",
    "ranks differ": "rank 1 has another model than rank 0: 'blocks.1.bypass.a.weight' is not there on rank 0",
    "no values": "parameters and buffers are on the meta device and have no data: 'blocks.0.bypass.a.weight'",
    "Init": "adopt() of modules that were built under Init",
    "gathered": "adopt() inside a `gathered` or `resident` context",
}


@pytest.mark.parametrize("how", REFUSED)
def test_refused(how: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(adopt_badly, RANKS, how)
    assert REFUSED[how] in str(caught.value)


def test_names_follow_the_tree() -> None:
    """Wrapping moves what is known, and nothing else happens."""
    model = Net()
    sharded = shard(model, Mesh.create(init()), policy(2))
    model.blocks[0].linear = nn.Sequential(model.blocks[0].linear, nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
    adopted = adopt(sharded)
    assert list(adopted.joined) == ["blocks.0.linear.1.weight", "blocks.0.linear.1.bias"]
    assert not adopted.left
    assert set(sharded.model_slices()) == {name for name, _ in model.named_parameters()}
    model(inputs(0, 0)).backward()
