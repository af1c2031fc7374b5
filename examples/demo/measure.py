"""Shard the model at each ZeRO stage and look at what a rank holds; then time steps, to know how many fit.

drivetrain run --nproc 2 examples/demo/measure.py runs/demo
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from data import TRAIN, Windows
from model import Llama
from plan import DATA, MEMORY, Plan, device_of, write_json

from drivetrain.comm import Mesh, all_gather_object, init, shutdown
from drivetrain.engine import Engine, initialize
from drivetrain.engine.monitor import ModelStates

WARM_UP, TIMED = 2, 5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The model states of rank 0 at one stage, in bytes, and what the published formulas say."""

    stage: int
    measured: ModelStates
    formula: ModelStates


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    folder: Path = arguments.parse_args().folder
    plan = Plan.load(folder)
    world = init(device=device_of(plan))
    mesh = Mesh.create(world)
    say = print if world.rank == 0 else _silent
    say(bf16_note(world.device), end="", flush=True)
    say("      MiB on a rank   parameters  gradients  optimizer      total    formula", flush=True)
    rows = []
    seconds = 0.0
    for stage in range(4):
        torch.manual_seed(0)
        model = Llama(plan.model)
        count = model.parameter_count
        windows = Windows(folder / DATA / TRAIN, plan.model.context)
        engine = initialize(model, plan.config(stage=stage), mesh=mesh, training_data=windows)
        engine.train_batch()
        row = Measured(stage=stage, measured=states(engine), formula=by_formula(count, stage, world.size))
        rows.append(row)
        say(line_of(row), flush=True)
        if stage == 3:
            seconds = seconds_per_step(engine)
        del engine, model
    slowest = max(all_gather_object(seconds, mesh.axis("shard")))
    plan = plan.with_speed(slowest)
    if world.rank == 0:
        write_json(folder / MEMORY, {"parameters": count, "ranks": world.size, "stages": [asdict(row) for row in rows]})
        plan.save(folder)
    say(
        f"      A step at stage 3 takes {slowest:.2f} s, so the training gets {plan.steps} steps: "
        f"about {plan.steps * slowest / 60:.1f} minutes.",
        flush=True,
    )
    shutdown()


def states(engine: Engine) -> ModelStates:
    """Bytes of model states that this rank holds between the micro-batches of a step, gradients accumulating."""
    assert engine.optimizer is not None
    assert engine.train_loader is not None
    with engine.no_sync():
        engine.backward(engine.call_with(next(iter(engine.train_loader))))
    engine.sharded.reducer.drain()  # what is still on its way would not be counted
    held = engine.sharded.bytes()
    engine.optimizer.zero_grad()
    return ModelStates(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.master + engine.optimizer.state_bytes,
    )


def by_formula(parameters: int, stage: int, ranks: int) -> ModelStates:
    """bf16 parameters and gradients (2 bytes each), fp32 master weights and two moments (12), per parameter.

    From Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020: stage 1
    divides the optimizer's part by the number of ranks, stage 2 the gradients too, stage 3 the parameters too.
    """
    return ModelStates(
        parameters=2 * parameters / (ranks if stage >= 3 else 1),
        gradients=2 * parameters / (ranks if stage >= 2 else 1),
        optimizer=12 * parameters / (ranks if stage >= 1 else 1),
    )


def seconds_per_step(engine: Engine) -> float:
    """The median length of an optimizer step."""
    taken = []
    for _ in range(WARM_UP + TIMED):
        began = time.perf_counter()
        engine.train_batch().item()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_UP:])


def bf16_note(device: torch.device) -> str:
    """A line that warns where bf16 is emulated; empty where it is not."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(512, 512, device=device, dtype=dtype)
        taken = []
        for _ in range(5):
            began = time.perf_counter()
            (matrix @ matrix)[0, 0].item()
            taken.append(time.perf_counter() - began)
        seconds[dtype] = min(taken)
    ratio = seconds[torch.bfloat16] / seconds[torch.float32]
    if ratio <= 2:
        return ""
    return f"      This processor computes bf16 {ratio:.0f} times slower than fp32; the demo goes on, more slowly.\n"


def line_of(row: Measured) -> str:
    measured, formula = row.measured, row.formula
    numbers = (measured.parameters, measured.gradients, measured.optimizer, measured.total, formula.total)
    one, two, three, total, expected = (number / 2**20 for number in numbers)
    return f"      stage {row.stage:<13}{one:>10.1f}{two:>11.1f}{three:>11.1f}{total:>11.1f}{expected:>11.1f}"


def _silent(*_: object, **__: object) -> None:
    """Other ranks say nothing."""


if __name__ == "__main__":
    main()
