"""What one rank of a job of 8 or 1,024 ranks costs in Python, without the machines: seconds, MB and calls.

    python benchmarks/zero/scale.py [--models 70B 1T 1T-moe] [--ranks 8 1024] [--stages 1 2 3]

Models are on the meta device, in a world that nobody runs: collectives are counted and move nothing. A start is `shard`
and `ShardedOptimizer`; the MB are what Python has allocated for it, and calls are those of this project's functions
during one step, and of C functions by them. A step's seconds are mostly those of torch's kernels for the meta device,
which are written in Python, so they are not shown.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from drivetrain.comm import Mesh, dry_world
from drivetrain.zero import Policy, ShardedModule, ShardedOptimizer, shard

sys.path.insert(0, str(Path(__file__).parent))
from transformer import Block, Decoder, Shape

RESULTS = Path(__file__).parent / "results"


class Experts(nn.Module):
    """A mixture of which two experts compute: which ones is no matter for what is counted here."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {
                    "gate": nn.Linear(width, hidden, bias=False),
                    "up": nn.Linear(width, hidden, bias=False),
                    "down": nn.Linear(hidden, width, bias=False),
                }
            )
            for _ in range(experts)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        weights = self.router(x_BTD).softmax(-1)
        out = torch.zeros_like(x_BTD)
        for index in (0, len(self.experts) - 1):
            expert = self.experts[index]
            hidden = nn.functional.silu(expert["gate"](x_BTD)) * expert["up"](x_BTD)
            out = out + weights[..., index, None] * expert["down"](hidden)
        return out


class MixtureBlock(Block):
    """The decoder's block with a mixture of experts in place of its perceptron."""

    def __init__(self, shape: Shape, experts: int) -> None:
        super().__init__(Shape(**{**vars(shape), "hidden": 1}))
        del self.gate, self.up, self.down
        self.mixture = Experts(shape.width, shape.hidden, experts)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.attend(x_BTD)
        return x_BTD + self.mixture(self.norm_mlp(x_BTD))


def mixture(shape: Shape, experts: int) -> nn.Module:
    model = Decoder(Shape(**{**vars(shape), "layers": 0}))
    model.blocks.extend(MixtureBlock(shape, experts) for _ in range(shape.layers))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "70B": lambda: Decoder(Shape(vocabulary=32000, width=8192, layers=80, heads=64, hidden=24576)),
    "1T": lambda: Decoder(Shape(vocabulary=32000, width=25600, layers=128, heads=200, hidden=68096)),
    "1T-moe": lambda: mixture(Shape(vocabulary=32000, width=8192, layers=128, heads=64, hidden=4800), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 1024])
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 2, 3], choices=[1, 2, 3])
    options = parser.parse_args()
    start(MODELS[options.models[0]], 8, 3)  # what torch imports and makes only once
    rows = []
    for model in options.models:
        for ranks in options.ranks:
            for stage in options.stages:
                row = {"model": model, "ranks": ranks, "stage": stage, **measure(MODELS[model], ranks, stage)}
                print(row, file=sys.stderr, flush=True)
                rows.append(row)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "scale.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    text = table(rows)
    (RESULTS / "scale.md").write_text(text)
    print(text)


def measure(make: Callable[[], nn.Module], ranks: int, stage: int) -> dict[str, float]:
    began = time.perf_counter()
    sharded, _, mesh = start(make, ranks, stage)
    seconds = time.perf_counter() - began
    numel = sum(slot.numel for bucket in sharded.buckets for slot in bucket.slots)
    held = sharded.bytes()
    del sharded, mesh
    gc.collect()
    with torch.device("meta"):
        model = make()
    tracemalloc.start()
    _, optimizer, mesh = start(lambda: model, ranks, stage)
    gc.collect()
    megabytes = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    step(model, optimizer)
    mesh.ledger.reset()
    calls = calls_in(lambda: step(model, optimizer))
    return {
        "parameters": numel,
        "seconds": round(seconds, 2),
        "python_mb": round(megabytes, 2),
        "calls_per_step": calls,
        "collectives_per_step": sum(entry.calls for entry in mesh.ledger.entries()),
        "state_gb": round((held.parameters + held.master + 2 * held.master) / 1e9, 2),
    }


def start(make: Callable[[], nn.Module], ranks: int, stage: int) -> tuple[ShardedModule, ShardedOptimizer, Mesh]:
    mesh = Mesh.create(dry_world(ranks, rank=ranks // 2, local_size=8))
    with torch.device("meta"):
        model = make()
    policy = Policy(
        stage=stage,
        param_dtype=torch.bfloat16,
        prefetch_numel=50_000_000,
        max_reuse_numel=10**9,
        max_live_numel=10**9,
    )
    sharded = shard(model, mesh, policy)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return sharded, ShardedOptimizer(sharded, optimizer, max_norm=1.0), mesh


def step(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    model(tokens, tokens).backward()
    optimizer.step()


def calls_in(work: Callable[[], object]) -> int:
    count = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call") and "drivetrain" in frame.f_globals.get("__name__", "")

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def table(rows: list[dict]) -> str:
    lines = [
        "# One rank of many, without the machines\n",
        f"torch {torch.__version__}, meta device. States: parameters, master weights and Adam's moments.\n",
        "| model | parameters | ranks | stage | start, seconds | Python MB | calls per step | collectives per step "
        "| states, GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['parameters'] / 1e9:.0f}B | {row['ranks']} | {row['stage']} | {row['seconds']} "
            f"| {row['python_mb']} | {row['calls_per_step']} | {row['collectives_per_step']} | {row['state_gb']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
