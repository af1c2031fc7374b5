"""Hybrid sharding: shards held by several replicas, against one process and against plain sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import ParameterAccess, Policy, ShardedOptimizer, gathered, shard
from drivetrain.zero.policy import ReduceOp
from drivetrain_testkit import relative_error, run_ranks

RANKS, STEPS, MICRO = 4, 3, 2
GRIDS = ((2, 2), (4, 1), (1, 4))  # data x shard
OPS: tuple[ReduceOp, ...] = ("mean", "sum")
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Three blocks, one of which only some batches use, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([nn.Linear(9, 9) for _ in range(3)])
        self.head = nn.Linear(9, 9)
        self.head.weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor, *, skip: bool) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index != 1 or not skip:
                x = torch.tanh(block(x))
        return self.head(x).square().mean()


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 9, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def skips(rank: int, micro: int, stage: int) -> bool:
    """Whole replicas skip a block in some micro-batches, single ranks in others; at stage 3 all take the same path."""
    return stage < 3 and (rank < 2 if micro == 0 else rank == 3)


def plain(op: ReduceOp, stage: int) -> torch.Tensor:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            for rank in range(RANKS):
                loss = model(batch(step, micro, rank), skip=skips(rank, micro, stage)) / MICRO
                (loss if op == "sum" else loss / RANKS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return flat(dict(model.named_parameters()))


def flat(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameters[name].detach().float().flatten() for name in sorted(parameters)])


def _train(rank: int, world_size: int) -> dict[tuple[str, str, ReduceOp, int], torch.Tensor]:
    world, found = init(), {}
    for data, split in GRIDS:
        mesh = Mesh.create(world, data=data, shard=split)
        for stage in STAGES:
            for op in OPS if data == split else OPS[:1]:
                for closing in (True, False):
                    model = Net()
                    sharded = shard(model, mesh, Policy(stage=stage, persistence_numel=0, reduce_op=op))
                    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=0.01), max_norm=0.5)
                    for step in range(STEPS):
                        for micro in range(MICRO):
                            # A loop of one's own may say which backward pass is the last, and need not.
                            sharded.closes_step = closing or micro == MICRO - 1
                            loss = model(batch(step, micro, rank), skip=skips(rank, micro, stage)) / MICRO
                            loss.backward()
                        optimizer.step()
                    key = f"{data} x {split}", "each pass closes" if closing else "the last closes", op, stage
                    found[key] = flat(dict(sharded.full_parameters()))
    return found


def test_replicas_train_like_one_process() -> None:
    expected = {(op, stage): plain(op, stage) for op in OPS for stage in STAGES}
    everybody = run_ranks(_train, RANKS)
    for key in everybody[0]:
        for found in everybody:
            assert torch.equal(found[key], everybody[0][key]), key
        assert relative_error(everybody[0][key], expected[key[2:]]) < 1e-6, key


def _traffic(rank: int, world_size: int) -> dict[str, int]:
    mesh = Mesh.create(init(), data=2, shard=2)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    sharded = shard(model, mesh, Policy(stage=3, persistence_numel=0))
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        if step == 2:
            mesh.ledger.reset()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return {f"{entry.op} {entry.axis}": entry.bytes for entry in mesh.ledger.entries() if entry.bytes > 1000}


def test_gathers_stay_within_a_group_and_replicas_exchange_shards_once() -> None:
    size = 4 * 64 * 64 * 4
    for found in run_ranks(_traffic, RANKS):
        assert found["reduce_scatter shard"] == pytest.approx(size, rel=0.02)
        assert found["all_gather shard"] == pytest.approx(2 * size, rel=0.3)  # the last block is not gathered twice
        assert found["all_reduce data"] == pytest.approx(size / 2, rel=0.02)
        assert set(found) == {"reduce_scatter shard", "all_gather shard", "all_reduce data"}


def _edits(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init(), data=2, shard=2)
    for stage in (1, 3):
        model = Net()
        sharded = shard(model, mesh, Policy(stage=stage, persistence_numel=0))
        access = ParameterAccess(sharded)
        with gathered(sharded, model.head.bias, modifier_rank=3), torch.no_grad():
            if rank == 3:
                model.head.bias.fill_(7.0)
        assert access.master.full(model.head.bias).tolist() == [7.0] * 9
        with pytest.raises(ValueError, match=r"rank 2 has other values for 'head\.bias' than rank 0"):
            access.master.set_full(model.head.bias, torch.full((9,), float(rank // 2)))
        writers = [slices.writes for slices in sharded.model_slices().values()]
        assert writers == [rank < 2] * len(writers)


def test_edits_reach_all_replicas_and_one_of_them_writes_checkpoints() -> None:
    run_ranks(_edits, RANKS)
