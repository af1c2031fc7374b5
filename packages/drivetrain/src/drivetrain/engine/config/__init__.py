"""The configuration: one strict loader at the rim, plain data behind it.

    config = load("config.json")              # or a dict, or base64; raises ConfigError with every problem
    config.zero_optimization.stage            # frozen models, attribute names are the JSON keys
    config.resolve_batch(data_parallel_size)  # the batch triad

The keys are those of the de-facto standard, so a file is valid for both; `reference_markdown()` says for each key
what it means, whether this version has it, and how it differs. Read next: `loading.py`, `schema/keys.py`,
`schema/top.py`.
"""

from __future__ import annotations

from drivetrain.engine.config.batch import BatchSizes
from drivetrain.engine.config.loading import Examination, examine, load
from drivetrain.engine.config.problems import ConfigError, Notice, Problem, describe
from drivetrain.engine.config.reference import json_schema, reference_markdown
from drivetrain.engine.config.schema.keys import Section, Status
from drivetrain.engine.config.schema.observe import CommsLogger, CsvMonitor, Timers
from drivetrain.engine.config.schema.optimizer import Optimizer
from drivetrain.engine.config.schema.persist import Checkpoint
from drivetrain.engine.config.schema.precision import Bf16, DataTypes, Fp16
from drivetrain.engine.config.schema.scheduler import Scheduler
from drivetrain.engine.config.schema.top import Config, Drivetrain
from drivetrain.engine.config.schema.zero import Aio, OffloadOptimizer, OffloadParam, ZeroOptimization

__all__ = [
    "Aio",
    "BatchSizes",
    "Bf16",
    "Checkpoint",
    "CommsLogger",
    "Config",
    "ConfigError",
    "CsvMonitor",
    "DataTypes",
    "Drivetrain",
    "Examination",
    "Fp16",
    "Notice",
    "OffloadOptimizer",
    "OffloadParam",
    "Optimizer",
    "Problem",
    "Scheduler",
    "Section",
    "Status",
    "Timers",
    "ZeroOptimization",
    "describe",
    "examine",
    "json_schema",
    "load",
    "reference_markdown",
]
