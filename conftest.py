"""Settings of all tests."""

from __future__ import annotations

import gc

from hypothesis import settings

# A busy machine is slow, and slowness is not a fault: no example fails for the time that it takes.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """What is imported by now stays: a full collection need not look through it again and again."""
    gc.freeze()
