"""Train the demo's language model. The script that `drivetrain run` starts, once to begin and once to go on:

    drivetrain run --nproc 2 examples/demo/train.py runs/demo
    drivetrain run --nproc 1 examples/demo/train.py runs/demo --resume --stage 1

The first saves a checkpoint when four fifths of the steps are done. The second loads it, with another number of ranks
and another ZeRO stage, trains the rest and exports the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from data import TOKENIZER, TRAIN, VALID, Windows, validation_batches
from model import Llama
from plan import CHECKPOINTS, DATA, METRICS, MODEL, PARTS, TABLE, Plan, device_of, read_json, write_json
from tokenizer import Tokenizer, save_for_transformers

from drivetrain.comm import Mesh, all_gather_object, init, shutdown
from drivetrain.engine import Engine, initialize
from drivetrain.engine.monitor import (
    CsvSink,
    JsonlSink,
    ProgressBar,
    Sink,
    SinkGroup,
    ThroughputTimer,
    peak_memory_bytes,
)

PATIENCE = 2.0  # a part may take this many times as long as planned; then it ends early rather than keep one waiting
LEAST_PATIENCE = 20.0  # seconds

Batches = Sequence[dict[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part of the training did, for the summary.

    Attributes:
        ranks, stage, micro_batch, accumulation: as run.
        first_step, last_step: optimizer steps done before and after.
        seconds: of the steps, validations included.
        tokens_per_second: over all ranks, validations not included.
        peak_bytes: peak memory by rank.
        model_state_bytes: what rank 0 holds of parameters, master weights and moments between two steps.
        valid_loss_before, valid_loss_after: nats per token on the held-out files.
        stopped_early: there was no time for all steps.
    """

    ranks: int
    stage: int
    micro_batch: int
    accumulation: int
    first_step: int
    last_step: int
    seconds: float
    tokens_per_second: float
    peak_bytes: list[int]
    model_state_bytes: int
    valid_loss_before: float
    valid_loss_after: float
    stopped_early: bool


class Training:
    """An engine with its data, metrics and display."""

    def __init__(self, plan: Plan, engine: Engine, folder: Path) -> None:
        self.plan = plan
        self.engine = engine
        self.leads = engine.rank == 0
        self._axis = engine.mesh.axis("shard")
        self._validation: Batches = validation_batches(
            Windows(folder / DATA / VALID, plan.model.context),
            micro=engine.batch.micro,
            rank=engine.rank,
            ranks=engine.world_size,
        )
        files: list[Sink] = [JsonlSink(folder / METRICS), CsvSink(folder / TABLE)] if self.leads else []
        self._sinks = SinkGroup(files)
        self._sinks.rewind(engine.global_steps)

    def say(self, text: str) -> None:
        """A line from rank 0."""
        if self.leads:
            print(f"      {text}", flush=True)

    def validate(self) -> float:
        """The mean loss on the held-out selection, the same on every rank. Collective."""
        losses = [self.engine.eval_batch(batch) for batch in self._validation]
        return torch.stack(losses).mean().item()

    def run(self, until: int, before: float) -> Part:
        """Train up to step `until`; `before` is the validation loss so far. Collective."""
        engine, first = self.engine, self.engine.global_steps
        limit = max(LEAST_PATIENCE, PATIENCE * (until - first) * self.plan.seconds_per_step)
        after = before
        if first == 0:
            self._sinks.write(0, {"valid_loss": before})
        timer = ThroughputTimer(device=engine.device)
        peaks: list[int] = []
        late = False
        began = time.monotonic()
        with ProgressBar(until, start=first, title="train", show=self.leads) as bar:
            while engine.global_steps < until and not late:
                timer.start()
                loss = engine.train_batch().item()
                timer.stop(samples=engine.batch.train, tokens=engine.batch.train * self.plan.model.context)
                step, record = engine.global_steps, engine.last_step
                assert record is not None
                # One exchange for both: peaks are for the display, and all ranks go by the clock of the first.
                facts = all_gather_object([peak_memory_bytes(engine.device), time.monotonic() - began], self._axis)
                peaks = [int(peak) for peak, _ in facts]
                late = facts[0][1] > limit
                values = {
                    "loss": loss,
                    "lr": record.lr,
                    "grad_norm": record.grad_norm,
                    "tokens_per_second": timer.tokens_per_second,
                    "peak_bytes": max(peaks),
                    "ranks": engine.world_size,
                }
                if step % self.plan.validate_every == 0 or step == until or late:
                    after = values["valid_loss"] = self.validate()
                    bar.message(f"      step {step:>4}  validation loss {after:.3f}")
                self._sinks.write(step, values)
                bar.update(step, loss=loss, tokens_per_second=timer.tokens_per_second or None, peak_bytes=peaks)
        held = engine.sharded.bytes()
        return Part(
            ranks=engine.world_size,
            stage=engine.config.zero_optimization.stage,
            micro_batch=engine.batch.micro,
            accumulation=engine.batch.accumulation,
            first_step=first,
            last_step=engine.global_steps,
            seconds=time.monotonic() - began,
            tokens_per_second=timer.average_tokens_per_second,
            peak_bytes=peaks,
            model_state_bytes=held.parameters + held.master + (engine.optimizer.state_bytes if engine.optimizer else 0),
            valid_loss_before=before,
            valid_loss_after=after,
            stopped_early=engine.global_steps < until,
        )

    def close(self) -> None:
        """Close files."""
        self._sinks.close()
        self.engine.close()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path, help="of the run; run.py has put the data and the plan there")
    arguments.add_argument("--resume", action="store_true", help="go on from the checkpoint and train to the end")
    arguments.add_argument("--stage", type=int, help="ZeRO stage, in place of the one in config.json")
    given = arguments.parse_args()
    folder: Path = given.folder
    plan = Plan.load(folder)
    mesh = Mesh.create(init(device=device_of(plan)))
    torch.manual_seed(0)
    engine = initialize(
        Llama(plan.model),
        plan.config(stage=given.stage),
        mesh=mesh,
        training_data=Windows(folder / DATA / TRAIN, plan.model.context),
    )
    loaded = engine.load(folder / CHECKPOINTS) if given.resume else None
    training = Training(plan, engine, folder)
    training.say(description(engine))
    before = training.validate()
    if loaded is not None:
        report, saved = loaded.report, read_json(folder / PARTS[0])["valid_loss_after"]
        training.say(f"loaded {report.tag}, saved by {loaded.world_size} ranks: {len(report.filled)} tensors")
        training.say(f"validation loss before the save {saved:.4f}, after the load {before:.4f}")
    part = training.run(plan.steps if given.resume else plan.save_at, before)
    if given.resume:
        exported = engine.export(folder / MODEL)
        training.say(f"exported {exported.nbytes / 2**20:.0f} MiB as safetensors to {exported.path}")
        if training.leads:
            save_for_transformers(Tokenizer.load(folder / DATA / TOKENIZER), folder / MODEL)
    else:
        training.say(f"saved {engine.save(folder / CHECKPOINTS)}")
    if training.leads:
        write_json(folder / PARTS[given.resume], asdict(part))
    training.close()
    shutdown()


def description(engine: Engine) -> str:
    """What runs here, in a line."""
    batch, ranks = engine.batch, engine.world_size
    where = f"{ranks} {'rank' if ranks == 1 else 'ranks'} ({engine.mesh.world.backend}, {engine.device.type})"
    return (
        f"ZeRO stage {engine.config.zero_optimization.stage} on {where}; "
        f"batch of {batch.train} = {batch.micro} x {batch.accumulation} accumulated x {ranks}"
    )


if __name__ == "__main__":
    main()
