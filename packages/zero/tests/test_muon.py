"""Muon on slices: every matrix is orthogonalised whole, once in all, and training is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.kernels import Muon
from drivetrain.zero import Policy, ShardedOptimizer, shard
from drivetrain.zero import matrices as zero_matrices
from drivetrain.zero.matrices import deal
from drivetrain_testkit import relative_error, run_ranks

STEPS, MICRO = 4, 2


class Net(nn.Module):
    """Matrices of several shapes (wide, tall, one column), a convolution, vectors, and a matrix that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embed = nn.Embedding(11, 20)
        self.blocks = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.conv = nn.Conv1d(20, 6, 3)
        self.tall = nn.Linear(6, 33)
        self.column = nn.Linear(33, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(4, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.column(torch.tanh(self.tall(x))).float().square().mean()


def optimizer_of(model: Net, form: str) -> Muon:
    rest = [model.embed.weight, *(p for p in model.parameters() if p.dim() < 2)]
    known = {id(p) for p in rest}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if id(p) not in known]},
        {"params": rest, "use_muon": False, "lr": 0.003},
    ]
    return Muon(groups, lr=0.02, ns_form=form)  # type: ignore[arg-type]


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(31 * step + rank))


def flat(parameters: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for _, p in sorted(parameters)])


def plain(ranks: int, form: str) -> torch.Tensor:
    model = Net()
    optimizer = optimizer_of(model, form)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            for rank in range(ranks):
                (model(batch(rank, MICRO * step + micro)) / ranks / MICRO).backward()
        optimizer.step()
    return flat(model.named_parameters())


def _train(rank: int, ranks: int, form: str) -> dict[int, tuple[torch.Tensor, int]]:
    found, mesh = {}, Mesh.create(init())
    for stage in (0, 1, 2, 3):
        model = Net()
        policy = Policy(stage=stage, persistence_numel=0, reduce_every_micro_batch=True, bucket_numel=900)
        sharded = shard(model, mesh, policy)
        inner = optimizer_of(model, form)
        optimizer = ShardedOptimizer(sharded, inner)
        worked = 0
        exchange = inner.matrix_exchange
        if exchange is not None:
            map_whole = exchange.map_whole

            def counting(params: Any, values: Any, function: Any, map_whole: Any = map_whole) -> Any:
                def count(wholes: list[torch.Tensor]) -> list[torch.Tensor]:
                    nonlocal worked
                    worked += len(wholes)
                    return function(wholes)  # type: ignore[no-any-return]

                return map_whole(params, values, count)

            exchange.map_whole = counting  # type: ignore[method-assign]
        for step in range(STEPS):
            for micro in range(MICRO):
                (model(batch(rank, MICRO * step + micro)) / MICRO).backward()
            optimizer.step()
        found[stage] = (flat(sharded.full_parameters()), worked)
    return found


@pytest.mark.parametrize("form", ["standard", "gram"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_stage_equals_one_process(ranks: int, form: str) -> None:
    expected, start = plain(ranks, form), flat(Net().named_parameters())
    everybody = run_ranks(_train, ranks, form)
    for stage in (0, 1, 2, 3):
        for found in everybody:
            assert torch.equal(found[stage][0], everybody[0][stage][0])
        # Products are in 16 bits: where a sum over ranks rounds otherwise, so do they. In units of the distance moved.
        assert relative_error(everybody[0][stage][0] - start, expected - start) < 3e-2, stage
    for stage in (1, 2, 3):
        assert sum(found[stage][1] for found in everybody) == STEPS * 6, "each matrix that is used, once in a step"
        assert all(found[stage][1] > 0 for found in everybody), "all ranks share the work"


def _straddling(rank: int, ranks: int) -> None:
    """A weight that the border between shards cuts (DeepSpeed#7807): the update is that of the whole, averaged one."""
    for stage in (1, 2, 3):
        model = nn.Linear(16, 24, bias=False)
        nn.init.zeros_(model.weight)
        sharded = shard(model, Mesh.create(init()), Policy(stage=stage, persistence_numel=0))
        optimizer = ShardedOptimizer(sharded, Muon(model.parameters(), lr=1.0, weight_decay=0.0))
        gradient = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank))
        (model(torch.eye(16)).T * gradient).sum().backward()
        optimizer.step()
        (update,) = (whole for _, whole in sharded.full_parameters())
        singular = torch.linalg.svdvals(update) / (24 / 16) ** 0.5
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3, (stage, singular)
        mean = sum(torch.randn(24, 16, generator=torch.Generator().manual_seed(r)) for r in range(ranks)) / ranks
        left, _, right = torch.linalg.svd(mean, full_matrices=False)
        assert float((-update * (left @ right)).sum() / update.norm() / (left @ right).norm()) > 0.97, stage


def test_a_weight_across_the_border_is_orthogonalised_whole() -> None:
    run_ranks(_straddling, 2)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
def test_work_is_dealt_out_evenly_and_to_known_ranks(work: list[int], ranks: int) -> None:
    owners = deal(work, ranks)
    load = [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(ranks)]
    assert set(owners) <= set(range(ranks))
    assert max(load) - min(load) <= max(work, default=0)
    assert zero_matrices.deal(work, ranks) == owners
