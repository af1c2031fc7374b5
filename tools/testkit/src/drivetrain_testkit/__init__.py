"""What Drivetrain's own tests stand on: local ranks, tolerances, tiny models."""

from __future__ import annotations

from drivetrain_testkit.ranks import RankError, run_ranks
from drivetrain_testkit.tolerances import relative_error

__all__ = ["RankError", "relative_error", "run_ranks"]
