"""Steps that all ranks take together: either it worked everywhere, or every rank raises the same error.

Problem: a rank that fails alone leaves the others waiting in the next collective.
Idea: each rank runs its part, catches what goes wrong, and tells all others before anybody goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint.api import CheckpointException

from drivetrain.comm import Axis, all_gather_object

from .errors import CheckpointError, CheckpointNotFoundError

__all__ = ["agree", "gather", "planned"]

T = TypeVar("T")


def gather(value: T, axis: Axis | None, purpose: str) -> list[T]:
    """`value` of every rank, in order. JSON only. Without an axis the process is alone. `purpose` is for errors."""
    return [value] if axis is None else cast("list[T]", all_gather_object(value, axis, purpose=purpose))


def agree(action: Callable[[], T], axis: Axis | None, purpose: str) -> list[T]:
    """Runs `action` on every rank and returns its (JSON) results by rank. `purpose` is what a rank that waits tells.

    Raises CheckpointError on all ranks if it raised on any; CheckpointNotFoundError if that was the error of all
    that failed.
    """
    failure: Exception | None = None
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = action()
    except Exception as error:
        failure = error
        outcome["fault"] = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        outcome["not_found"] = isinstance(error, CheckpointNotFoundError)
    outcomes = gather(outcome, axis, purpose)
    faults = {rank: found for rank, found in enumerate(outcomes) if "fault" in found}
    if faults:
        kind = CheckpointNotFoundError if all(found["not_found"] for found in faults.values()) else CheckpointError
        raise kind(_text({rank: found["fault"] for rank, found in faults.items()}, len(outcomes), axis)) from failure
    return [found["value"] for found in outcomes]


def planned(run: Callable[[], object], axis: Axis | None) -> None:
    """Runs a collective of torch.distributed.checkpoint, turning its exception (one failure per rank) into ours."""
    try:
        run()
    except CheckpointException as error:
        failures = {rank: failure for rank, (failure, _) in error.failures.items()}
        faults = {
            rank: str(failure) if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: {failure}"
            for rank, failure in failures.items()
        }
        raise CheckpointError(_text(faults, 1 if axis is None else axis.size, axis)) from next(iter(failures.values()))
    except (
        RuntimeError
    ) as error:  # what a rank's own part raises comes by the exception above: this is the communication
        raise CheckpointError(f"the connection to another rank was lost: {error}") from error


def _text(faults: dict[int, str], size: int, axis: Axis | None) -> str:
    """One text for all ranks; the ranks are named (by their global number) unless every one says the same."""
    if len(faults) == size and len(set(faults.values())) == 1:
        return next(iter(faults.values()))
    return "; ".join(f"rank {rank if axis is None else axis.ranks[rank]}: {fault}" for rank, fault in faults.items())
