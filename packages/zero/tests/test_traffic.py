"""Bytes that collectives carry in a step, as the ledger counts them, against the theory.

With psi bytes of parameters (and of gradients, in the same dtype), a step moves (Rajbhandari et al., 2020, section 7):

    stage 0   2 psi   all-reduce of gradients
    stage 1   2 psi   reduce-scatter of gradients, all-gather of updated parameters
    stage 2   2 psi   the same; with k micro-batches k psi of gradients and psi of parameters
    stage 3   3 psi   all-gather in forward, all-gather in backward, reduce-scatter
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedOptimizer, shard
from drivetrain_testkit import run_ranks

BLOCKS, WIDTH = 48, 64
NUMEL = BLOCKS * WIDTH * WIDTH


class Tower(nn.Module):
    """Equal blocks and a root of a few elements, so that what the root and the last block save does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.scale.dtype)
        for block in self.blocks:
            x = x + block(x)
        return (x * self.scale).float().square().mean()


def moved(rank: int, world_size: int) -> dict[str, float]:
    """Units of psi moved in the third step, by case; the first steps are where the order of uses is learned."""
    found = {}
    for dtype in (None, torch.bfloat16):
        psi = NUMEL * (4 if dtype is None else 2)
        for stage in range(4):
            for accumulation in (1, 3):
                for reuse in (0, -1) if stage == 3 else (0,):
                    mesh = Mesh.create(init())
                    model = Tower()
                    policy = Policy(stage=stage, param_dtype=dtype, persistence_numel=0, max_reuse_numel=reuse)
                    sharded = shard(model, mesh, policy)
                    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters()), max_norm=1.0)
                    x = torch.randn(2, WIDTH)
                    for _ in range(3):
                        mesh.ledger.reset()
                        for micro in range(accumulation):
                            sharded.closes_step = micro == accumulation - 1
                            model(x).backward()
                        optimizer.step()
                    key = f"{'fp32' if dtype is None else 'bf16'} stage {stage} x{accumulation} reuse {reuse}"
                    found[key] = mesh.ledger.total_moved_bytes() / psi
                    if stage == 3:
                        mesh.ledger.reset()
                        with torch.no_grad():
                            model(x)
                        found[key + " evaluation"] = mesh.ledger.total_moved_bytes() / psi
    return found


EXPECTED = {
    "stage 0 x1 reuse 0": 2,
    "stage 1 x1 reuse 0": 2,
    "stage 2 x1 reuse 0": 2,
    "stage 3 x1 reuse 0": 3,
    "stage 3 x1 reuse -1": 3,
    "stage 0 x3 reuse 0": 2,
    "stage 1 x3 reuse 0": 2,
    "stage 2 x3 reuse 0": 3 + 1,
    "stage 3 x3 reuse 0": 3 * 3,
    "stage 3 x3 reuse -1": 3 * 3,
    "stage 3 x1 reuse 0 evaluation": 1,
    "stage 3 x1 reuse -1 evaluation": 1,
    "stage 3 x3 reuse 0 evaluation": 1,
    "stage 3 x3 reuse -1 evaluation": 1,
}


@pytest.mark.parametrize("world_size", [2, 4])
def test_traffic_is_what_the_theory_says_within_two_percent(world_size: int) -> None:
    for found in run_ranks(moved, world_size):
        assert len(found) == 2 * len(EXPECTED)
        for key, units in found.items():
            assert units == pytest.approx(EXPECTED[key.split(" ", 1)[1]], rel=0.02), key
