"""Parameters that are used elsewhere than in the module that owns them, and other odd ways: beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedOptimizer, gathered, shard
from drivetrain_testkit import run_ranks
from drivetrain_testkit.transports import shared_memory

WIDTH, BATCH, RANKS, STEPS = 24, 3, 2, 3
STAGES = (0, 2, 3)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ReadByTheRoot(Tower):
    """Before and after the block's own call, and through ``.data`` and ``detach``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.blocks[0].linear, self.blocks[2].linear
        x = functional.linear(x, last.weight, bias=first.bias)
        x = super().forward(x)
        norm = first.weight.detach().norm() + last.weight.data.norm()
        return functional.linear(x, first.weight) * last.weight.mean(dim=0) / norm


class Peeking(Block):
    """Reads a weight of another block, which is none of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.other: list[nn.Linear] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x @ self.other[0].weight if self.other else x


class ReadByASibling(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].other.append(self.blocks[0].linear)
        self.blocks[2].other.append(self.blocks[1].linear)

    def block(self) -> nn.Module:
        return Peeking()


class ReadRecomputed(Tower):
    """A recomputed piece of the root's code reads it again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return checkpoint(lambda y: torch.tanh(y @ self.blocks[1].linear.weight), x, use_reentrant=False)


class Lender(Block):
    """Returns parameters: one as it is, one as a view."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.linear.bias, self.linear.weight.t()


class Lent(Tower):
    def block(self) -> nn.Module:
        return Lender()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        biases = []
        for block in self.blocks:
            x, bias, weight = block(x)
            biases.append(bias)
            x = torch.tanh(x @ weight)
        return x + biases[0] * biases[2]


class SkipsBias(nn.Linear):
    """Leaves its bias to the caller, as Megatron's layers do."""

    def forward(self, x: torch.Tensor) -> Any:
        return functional.linear(x, self.weight), self.bias


class LateBias(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = SkipsBias(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, bias = self.linear(x)
        return x + torch.tanh(out + bias)


class SkipsBiases(Tower):
    def block(self) -> nn.Module:
        return LateBias()


class WeightNorm(Tower):
    def block(self) -> nn.Module:
        block = Block()
        parametrizations.weight_norm(block.linear)
        return block


class Again(Tower):
    """The same blocks several times, in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(super().forward(x))
        return self.blocks[0](self.blocks[2](self.blocks[0](x)))


MODELS: tuple[Callable[[], Tower], ...] = (
    *(ReadByTheRoot, ReadByASibling, ReadRecomputed, Lent, SkipsBiases, WeightNorm, Again),
)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def compare(rank: int, world_size: int, stage: int) -> list[str]:
    """Trained and evaluated in turn."""
    mesh, wrong = Mesh.create(init(), shared_memory=shared_memory()), []
    for make in MODELS:
        plain, model = make(), make()
        sharded = shard(model, mesh, Policy(stage=stage, persistence_numel=0))
        optimizer = ShardedOptimizer(sharded, torch.optim.Adam(model.parameters(), lr=0.01))
        reference = torch.optim.Adam(plain.parameters(), lr=0.01)
        hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
        for step in range(STEPS):
            reference.zero_grad()
            for other in range(RANKS):
                (plain(inputs(step, other)).square().mean() / RANKS).backward()
            model(inputs(step, rank)).square().mean().backward()
            reference.step()
            optimizer.step()
            with torch.no_grad():
                found, expected = (net(inputs(step, 5)) for net in (model, plain))
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                wrong.append(f"{plain.__class__.__name__}: evaluated after step {step}")
            sharded.release()
            held = sharded.bytes()
            if (held.gathered, held.gradients) != (0, 0):
                wrong.append(f"{plain.__class__.__name__}: holds {held}")
        for name, value in sharded.full_parameters():
            if not torch.allclose(value, plain.get_parameter(name), rtol=1e-4, atol=1e-5):
                wrong.append(f"{plain.__class__.__name__}: {name}")
        if [len(p._backward_hooks or ()) for p in model.parameters()] != hooks:
            wrong.append(f"{plain.__class__.__name__}: hooks are left on parameters")
    return wrong


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_as_plain_torch(stage: int) -> None:
    for wrong in run_ranks(compare, RANKS, stage):
        assert wrong == []


def outside(rank: int, world_size: int) -> list[bool]:
    """Between passes a rank that looks finds a placeholder, and asks nobody: it may be alone."""
    mesh = Mesh.create(init(), shared_memory=shared_memory())
    model = ReadByTheRoot()
    sharded = shard(model, mesh, Policy(stage=3, persistence_numel=0))
    weight = model.blocks[0].linear.weight
    found = [isinstance(weight, nn.Parameter), weight.shape == (WIDTH, WIDTH), weight.requires_grad]
    if rank == 0:
        found.append(bool(weight.isnan().all()))
    with gathered(sharded, weight):
        found += [type(weight) is nn.Parameter, not weight.isnan().any()]
    with pytest.raises(ValueError, match="wrong in the middle"):
        model(WrongInTheMiddle())
    return [*found, bool(weight.isnan().all())]


class WrongInTheMiddle(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("wrong in the middle")


def test_outside_of_forward_nothing_is_gathered() -> None:
    for found in run_ranks(outside, RANKS):
        assert all(found), found


def applied(rank: int, world_size: int, stage: int) -> list[str]:
    """Functions that initialise, over the whole module."""

    def again(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)

    mesh = Mesh.create(init(), shared_memory=shared_memory())
    model, reference = Tower(), Tower().bfloat16()
    sharded = shard(model, mesh, Policy(stage=stage, param_dtype=torch.bfloat16, persistence_numel=0))
    torch.manual_seed(8)
    reference.apply(again)
    torch.manual_seed(8 + rank)
    with gathered(sharded, model, modifier_rank=0):
        model.apply(again)
    return [name for name, value in sharded.full_parameters() if not torch.equal(value, reference.get_parameter(name))]


@pytest.mark.parametrize("stage", STAGES)
def test_apply(stage: int) -> None:
    assert run_ranks(applied, RANKS, stage) == [[], []]
