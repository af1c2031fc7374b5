"""Finds the native core, or says why it isn't there.

Problem: the compiled extension may be missing (a source tree that was not built) or unusable (built for another
Python); importing the package must work all the same, and the reason must be readable later.
Idea: the one place that tries to import it. Nothing is compiled, printed or started here.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Final

import torch

__all__ = [
    "CORE",
    "NativeCore",
    "choose_instruction_set",
    "get_num_threads",
    "instruction_sets",
    "set_num_threads",
]

_VARIABLE: Final = "DRIVETRAIN_INSTRUCTION_SET"


@dataclass(frozen=True, kw_only=True)
class NativeCore:
    """`module` is the extension, or None, in which case `reason` says why."""

    module: ModuleType | None
    reason: str


def _load() -> NativeCore:
    name = f"{__package__}._native"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        built = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
        return NativeCore(module=None, reason=f"the native core is not built for {built}")
    except ImportError as error:
        return NativeCore(module=None, reason=f"the native core does not load: {error}")
    wanted = os.environ.get(_VARIABLE, "")
    if wanted:
        try:
            module.choose_instruction_set(wanted)
        except ValueError as error:
            raise ValueError(f"{_VARIABLE}: {error}") from None
    return NativeCore(module=module, reason="")


CORE: Final = _load()


def instruction_sets() -> tuple[str, ...]:
    """Instruction sets of the native core that this machine can run, slowest first; empty without the core."""
    return () if CORE.module is None else tuple(CORE.module.usable_instruction_sets())


def choose_instruction_set(name: str) -> None:
    """Use `name` (one of `instruction_sets()`) from now on.

    All of them give the same bits (products with quantised weights may differ in the last ones); this is for tests and
    for a CPU that lists an instruction set that doesn't work. The environment variable DRIVETRAIN_INSTRUCTION_SET does
    the same from the start.
    """
    if CORE.module is None:
        raise RuntimeError(f"no instruction set to choose: {CORE.reason}")
    CORE.module.choose_instruction_set(name)


def set_num_threads(threads: int | None) -> None:
    """Number of threads of the native core in this process; None follows `torch.get_num_threads()`, which is the
    default."""
    if threads is not None and threads < 1:
        raise ValueError(f"set_num_threads: expected a number of at least 1, or None to follow torch; found {threads}")
    if CORE.module is not None:
        CORE.module.set_threads(threads or 0)


def get_num_threads() -> int:
    """Number of threads that the native core uses."""
    setting = 0 if CORE.module is None else int(CORE.module.thread_setting())
    return setting or torch.get_num_threads()
