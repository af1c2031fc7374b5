"""Leaf modules: what data decide inside them cannot make ranks wait for each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import LeafRule, Policy, ShardedOptimizer, shard
from drivetrain.zero.grouping import find_blocks
from drivetrain_testkit import relative_error, run_ranks


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Mixture(nn.Module):
    """Top-1 routing: an expert runs only where a token wants it."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x).softmax(-1)
        best = probabilities.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = best == index
            if mine.any():
                out[mine] = expert(x[mine]) * probabilities[mine, index].unsqueeze(-1)
        return x + out


class Net(nn.Module):
    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(width, width)
        self.mixture = Mixture(width, count)
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mixture(torch.tanh(self.first(x)))).square().mean()


class Tower(nn.Module):
    """More mixtures than reductions are kept under way. Where the first token is small, every expert has one."""

    def __init__(self, width: int = 8, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.mixtures = nn.ModuleList(Assigned(width, 4) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = torch.arange(len(x)) % 4 * int(x[0].mean() < 1.5)
        for mixture in self.mixtures:
            x = mixture(x, wanted)
        return self.last(x).square().mean()


class Assigned(nn.Module):
    """A mixture that is told which expert each token goes to."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index in wanted.unique().tolist():
            out[wanted == index] = self.experts[index](x[wanted == index])
        return x + out


class Odd(nn.Module):
    """Branches under names that tell nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = nn.Module()
        self.inner.ways = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.body = Branch(self.inner.ways)
        self.other = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return self.other(self.body(x, way)).square().mean()


class Branch(nn.Module):
    def __init__(self, ways: nn.ModuleList) -> None:
        super().__init__()
        self.ways = ways

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        return torch.tanh(self.ways[way](x))


def blocks(module: nn.Module, **rule: object) -> list[str]:
    return [name for name, _ in find_blocks(module, LeafRule(**rule))]  # type: ignore[arg-type]


def test_a_module_that_picks_among_experts_is_found() -> None:
    assert blocks(Net()) == ["mixture"]
    assert blocks(Net(), find=False) == [f"mixture.experts.{i}" for i in range(4)]
    net = Net()
    net.mixture.specialists = net.mixture.experts
    del net.mixture.experts
    assert blocks(net) == ["mixture"]  # by the class of what it holds
    assert blocks(nn.Sequential(Net(), Net())) == ["0", "1"]


def test_leaves_are_named_by_class_name_and_suffix() -> None:
    plain = ["inner.ways.0", "inner.ways.1", "inner.ways.2", "other.0", "other.1"]
    assert blocks(Odd()) == plain
    for rule in (
        {"classes": (Branch,)},
        {"classes": ("Branch",)},
        {"classes": (f"{Branch.__module__}.Branch",)},
        {"names": ("body",)},
    ):
        assert blocks(Odd(), **rule)[-3:] == ["body", "other.0", "other.1"], rule
    assert blocks(Odd(), suffixes=("other",)) == ["inner.ways.0", "inner.ways.1", "inner.ways.2", "other"]
    assert blocks(Odd(), suffixes=("ther",)) == plain
    assert blocks(Odd(), classes=("Odd",)) == []


def test_fine_grained_modules_are_gathered_together() -> None:
    # 42 parameters in each small linear layer: 84 in the pair, which is 3 modules, 28 for each.
    model = nn.Sequential(nn.Linear(40, 40), Odd().other)
    assert blocks(model, granularity_numel=29) == ["1"]
    assert blocks(model, granularity_numel=28) == ["1.0", "1.1"]


def batch(rank: int, step: int) -> torch.Tensor:
    """Tokens of one rank prefer an expert of its own."""
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(17 * step + rank)) + 3.0 * rank


def plain(make: type[nn.Module], ranks: int) -> torch.Tensor:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(ranks):
            (model(batch(rank, step)) / ranks).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def _mixtures(rank: int, ranks: int) -> list[tuple[torch.Tensor, set[str]]]:
    mesh, found = Mesh.create(init()), []
    for make in (Net, Tower):
        model = make()
        sharded = shard(model, mesh, Policy(stage=3, persistence_numel=0))
        optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=0.01))
        used: set[str] = set()
        for name, part in model.named_modules():
            if isinstance(part, Expert):
                part.register_forward_hook(lambda *_, used=used, name=name: used.add(name))
        for step in range(4):
            model(batch(rank, step)).backward()
            optimizer.step()
        found.append((torch.cat([p.flatten() for _, p in sorted(sharded.full_parameters())]), used))
    return found


def test_ranks_that_use_different_experts_train_like_one_process() -> None:
    """In a tower too: a reduction that waits for a rank with an idle expert must not keep that rank from gathers."""
    for make, *found in zip((Net, Tower), *run_ranks(_mixtures, 3), strict=True):
        assert len({frozenset(used) for _, used in found}) > 1, "the ranks must differ for this to prove anything"
        assert relative_error(found[0][0], plain(make, 3)) < 1e-6


def _branches(rank: int, ranks: int) -> None:
    rule = LeafRule(names=("body",))
    model = Odd()
    sharded = shard(model, Mesh.create(init()), Policy(stage=3, persistence_numel=0, leaf=rule))
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        model(torch.ones(2, 6), way=(rank + step) % 3).backward()
        assert optimizer.step().stepped
    with torch.no_grad():
        model(torch.ones(2, 6), way=rank)
    wrong = Policy(stage=3, leaf=LeafRule(classes=("Nowhere",), suffixes=("ways.x", "body")))
    with pytest.raises(ValueError, match=r"these rules for leaves match: class 'Nowhere', suffix 'ways\.x'"):
        shard(Odd(), Mesh.create(init()), wrong)


def test_a_named_leaf_lets_ranks_take_different_branches() -> None:
    run_ranks(_branches, 2)
