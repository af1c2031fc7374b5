"""The inside of one rank: take the environment, find the function, call it, write down what came of it."""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from _pytest.assertion.rewrite import rewrite_asserts


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a rank needs. Plain data, so that it unpickles before any test module is loaded."""

    module: str
    file: str
    qualname: str
    rank: int
    world_size: int
    pickled_args: bytes
    env: dict[str, str]
    result_path: str
    output_path: str
    stacks_path: str


@dataclass(frozen=True, kw_only=True)
class Success:
    value: Any


@dataclass(frozen=True, kw_only=True)
class Failure:
    when: float
    error_type: str
    summary: str
    traceback: str


def run_job(job: Job) -> None:
    """Entry point of a rank's process. Ends the process itself, so that no destructor can hang it."""
    gc.freeze()  # a collection would touch, and so copy, every page of what was imported before the fork
    _redirect_output(job.output_path)
    stacks = open(job.stacks_path, "w")  # noqa: SIM115 (faulthandler keeps the descriptor for the process's life)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.clear()
    os.environ.update(job.env)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        fn = _find(job)
        value = fn(job.rank, job.world_size, *pickle.loads(job.pickled_args))
        payload = pickle.dumps(Success(value=value))
    except BaseException as error:
        traceback.print_exc()
        payload = pickle.dumps(
            Failure(
                when=time.monotonic(),
                error_type=f"{type(error).__module__}.{type(error).__qualname__}",
                summary=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )
        )
    _write(job.result_path, payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (standard output of this process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _find(job: Job) -> Callable[..., Any]:
    found: Any = _load(job.module, job.file)
    for name in job.qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _load(name: str, file: str) -> ModuleType:
    """The module from its file, under the parent's name for it, so that pickles of its classes resolve on both
    sides.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    for end in (index for index, letter in enumerate(name) if letter == "."):
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))  # pickle imports them on its way to the module
    sys.modules[name] = module
    exec(_with_told_assertions(file), module.__dict__)
    return module


def _with_told_assertions(file: str) -> CodeType:
    """The module's code, its asserts rewritten by pytest so that a failure shows the values, as it does in the
    parent.
    """
    source = Path(file).read_bytes()
    tree = ast.parse(source, file)
    rewrite_asserts(tree, source, file)
    return compile(tree, file, "exec", dont_inherit=True)


def _write(path: str, payload: bytes) -> None:
    """Written beside and renamed: the parent sees a whole result or none."""
    with open(path + ".part", "wb") as file:
        file.write(payload)
    os.replace(path + ".part", path)
