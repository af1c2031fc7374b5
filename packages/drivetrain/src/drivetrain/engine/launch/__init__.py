"""Start one process per rank on torch's elastic agent, and report a failure by its cause.

`launch(LaunchSpec(...))` runs a job; the command `drivetrain run` is a thin layer over it. Read `job.py` first.
"""

from __future__ import annotations

from drivetrain.engine.launch.failure import ErrorRecord, RankFailure, describe, root_cause
from drivetrain.engine.launch.host import available_cores
from drivetrain.engine.launch.job import Outcome, launch, plan_text
from drivetrain.engine.launch.spec import LaunchError, LaunchSpec, default_nproc

__all__ = [
    "ErrorRecord",
    "LaunchError",
    "LaunchSpec",
    "Outcome",
    "RankFailure",
    "available_cores",
    "default_nproc",
    "describe",
    "launch",
    "plan_text",
    "root_cause",
]
