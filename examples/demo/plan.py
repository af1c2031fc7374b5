"""What the parts of the demo tell each other: sizes, steps and results, as JSON in the folder of the run."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from model import LlamaConfig

HERE = Path(__file__).parent
CONFIG = HERE / "config.json"

DATA, CHECKPOINTS, MODEL = "data", "checkpoints", "model"
PLAN, MEMORY, METRICS, TABLE, SUMMARY = "plan.json", "memory.json", "metrics.jsonl", "metrics.csv", "summary.json"
LOSS_PICTURE, MEMORY_PICTURE, SAMPLE = "loss.png", "memory.png", "sample.txt"
PARTS = ("part-1.json", "part-2.json")
"""Results of the training before and after the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the model is trained on this machine.

    Attributes:
        device: "cpu" or "cuda".
        ranks: of the measurement and of the first part of the training.
        quick: a model and a training small enough for a test.
        vocabulary: tokens.
        seconds: time that the training may take.
        seconds_per_step: as measured.
        steps: optimizer steps of the whole training, which the schedule ends with.
        save_at: the step after which the first part saves and stops.
        validate_every: steps between two validations.
    """

    device: str
    ranks: int
    quick: bool
    vocabulary: int
    seconds: float
    seconds_per_step: float = 0.0
    steps: int = 0
    save_at: int = 0
    validate_every: int = 0

    @property
    def model(self) -> LlamaConfig:
        """The model to train: about ten million parameters, or a very small one."""
        if self.quick:
            return LlamaConfig(
                vocab_size=self.vocabulary,
                width=128,
                inner_width=320,
                layers=2,
                heads=2,
                context=64,
                end_token=self.vocabulary - 1,
            )
        return LlamaConfig(vocab_size=self.vocabulary, end_token=self.vocabulary - 1)

    def with_speed(self, seconds_per_step: float) -> Plan:
        """The plan once the length of a step is known.

        As many steps as fit into the time, within limits: with fewer than the least the model would not learn enough to
        show for it. Four fifths are trained before the checkpoint.
        """
        least, most = (60, 120) if self.quick else (150, 1000)
        steps = min(max(int(self.seconds / seconds_per_step), least), most)
        save_at = steps * 4 // 5
        return replace(
            self, seconds_per_step=seconds_per_step, steps=steps, save_at=save_at, validate_every=-(-save_at // 6)
        )

    def config(self, *, stage: int | None = None) -> dict[str, Any]:
        """`config.json` with what is decided at run time, for `drivetrain.engine.initialize`."""
        config: dict[str, Any] = copy.deepcopy(read_json(CONFIG))
        zero = config["zero_optimization"]
        if stage is not None:
            zero["stage"] = stage
        if zero["stage"] < 3:
            del zero["stage3_param_persistence_threshold"]  # only stage 3 reads it
        if self.steps:
            schedule = config["scheduler"]["params"]
            schedule["total_num_steps"] = self.steps
            schedule["warmup_num_steps"] = max(2, self.steps // 10)
        return config

    def save(self, folder: Path) -> None:
        write_json(folder / PLAN, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Plan:
        return cls(**read_json(folder / PLAN))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write through a temporary name, so that a file that is there is whole."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def device_of(plan: Plan) -> torch.device | str | None:
    """What to hand to `drivetrain.comm.init`: the CPU must be asked for where there is a GPU too."""
    return "cpu" if plan.device == "cpu" else None
