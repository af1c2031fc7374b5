"""Activations that leave between forward and backward, while parameters are sharded: the same to the last bit."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.engine import Engine, initialize
from drivetrain.offload import ActivationOptions, OffloadActivations
from drivetrain_testkit import run_ranks

WIDTH, STEPS = 64, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].up.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x).float()


def train(engine: Engine, rank: int, offload: OffloadActivations | None) -> list[tuple[float, float]]:
    found = []
    for step in range(STEPS):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        if offload is None:
            loss = engine(x).square().mean()
        else:
            with offload:
                loss = engine(x).square().mean()
        engine.backward(loss)
        found.append((float(loss.detach()), engine.step().grad_norm))
    return found


def compare(rank: int, world_size: int, folder: str) -> int:
    mesh, moved = Mesh.create(init()), 0
    to_files = ActivationOptions(
        min_bytes=1024, host_capacity=4096, nvme=(folder,), in_flight=1 << 16, prefetch=1 << 15
    )
    to_host = ActivationOptions(min_bytes=1024, force=True)
    for stage in (1, 3):
        for recompute in (False, True):
            for bf16 in (False, True):
                zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
                config = {
                    "train_micro_batch_size_per_gpu": 32,
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                    "zero_optimization": zero,
                    "bf16": {"enabled": bf16},
                }
                expected = train(initialize(Net(recompute), config, mesh=mesh), rank, None)
                for options in (to_files, to_host):
                    offload = OffloadActivations(options)
                    assert train(initialize(Net(recompute), config, mesh=mesh), rank, offload) == expected
                    moved += offload.statistics().to_host + offload.statistics().to_files
                    offload.close()
    return moved


def test_offloaded_activations_give_the_same_bits_at_every_stage(tmp_path: Path) -> None:
    assert min(run_ranks(compare, 2, str(tmp_path), timeout=110)) > 1 << 20
