"""How a mesh guards against ranks that go different ways: from the caller, or from the environment, which wins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

TIMEOUT_VARIABLE: Final = "DRIVETRAIN_COLLECTIVE_TIMEOUT"
"""The environment variable that says how many seconds a collective may make no progress."""

CHECK_VARIABLE: Final = "DRIVETRAIN_CHECK_COLLECTIVES"
"""The environment variable that switches `Safeguards.check` on (1) or off (0)."""


@dataclass(frozen=True, kw_only=True)
class Safeguards:
    """How long ranks wait for each other, and how closely they look.

    Attributes:
        timeout: seconds without progress after which a collective is an error that tells what every rank does. None:
            that of the world, or else torch's default for the backend (half an hour on gloo).
        check: before a collective is waited for, all ranks of the axis compare what they have issued, through the store
            of the rendezvous. Slow: for finding where ranks part. One rank that asks for it is enough.
    """

    timeout: float | None = None
    check: bool = False

    def __post_init__(self) -> None:
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout={self.timeout} is not a positive number of seconds")

    def overridden(self, environment: Mapping[str, str]) -> Safeguards:
        """These, but for what the environment says.

        Raises:
            ValueError: it says something that is not understood.
        """
        return Safeguards(
            timeout=_seconds(environment[TIMEOUT_VARIABLE]) if TIMEOUT_VARIABLE in environment else self.timeout,
            check=_switch(environment[CHECK_VARIABLE]) if CHECK_VARIABLE in environment else self.check,
        )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{TIMEOUT_VARIABLE}={text!r} is not a positive number of seconds")
    return seconds


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"{CHECK_VARIABLE}={text!r} is neither 1, which compares collectives, nor 0, which doesn't")
    return text == "1"
