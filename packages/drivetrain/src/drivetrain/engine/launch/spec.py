"""What one `drivetrain run` is asked to do, as data.

A `LaunchSpec` is checked when it is made for everything that can be judged without looking at the machine. What
depends on the machine (does the script exist, are there that many GPUs, is the port free) is judged by `preflight` and
by the rendezvous, so that a spec can be built and printed anywhere.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

DEFAULT_PORT = 29500
"""The port of the store when several nodes take part and none is named; torchrun's default too."""

TargetKind = Literal["script", "module", "command"]


class LaunchError(ValueError):
    """The job cannot be started as asked. The message is a sentence for the person who typed the command."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One job: what to run, on how many ranks, and where its output goes.

    Attributes:
        target: a Python script, a module name or a command, according to `kind`.
        args: the arguments handed to it, untouched.
        kind: `"script"` runs a file as `python file` would, `"module"` as `python -m`, `"command"` runs an executable.
        nproc: ranks on this node.
        nnodes, node_rank: how many launchers take part, and which of them this is.
        master_addr, master_port: where the launcher of node 0 holds the store. Both may be left out for one node:
            then the store listens on the loopback interface alone, on a free port.
        max_restarts: how many times all ranks are started again after a failure.
        threads_per_rank: OMP_NUM_THREADS of each rank; `None` keeps the variable if it is set, else shares the cores.
        log_dir: if given, `log_dir/rank<R>/{stdout,stderr}.log` receive everything a rank writes (appended).
        all_output: show the standard output of every rank, not of rank 0 alone.
        grace: seconds that ranks are given to end after a signal, before they are killed.

    Raises:
        LaunchError: a value is outside its range or contradicts another.
    """

    target: str
    args: tuple[str, ...] = ()
    kind: TargetKind = "script"
    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0
    threads_per_rank: int | None = None
    log_dir: Path | None = None
    all_output: bool = False
    grace: float = 5.0

    def __post_init__(self) -> None:
        _at_least("--nproc", self.nproc, 1, "one rank is the smallest job")
        _at_least("--nnodes", self.nnodes, 1, "one node is the smallest job")
        _at_least("--max-restarts", self.max_restarts, 0, "0 means that a failure ends the job")
        if self.threads_per_rank is not None:
            _at_least("--threads-per-rank", self.threads_per_rank, 1, "every rank needs a thread")
        if self.grace < 0:
            raise LaunchError(f"--grace is {self.grace:g}, but it must be 0 or more seconds.")
        if not 0 <= self.node_rank < self.nnodes:
            raise LaunchError(
                f"--node-rank is {self.node_rank}, but with --nnodes {self.nnodes} it must be between 0 and "
                f"{self.nnodes - 1}: each node gets its own."
            )
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise LaunchError(f"--master-port is {self.master_port}, but a port lies between 1 and 65535.")
        if self.nnodes > 1 and self.master_addr is None:
            raise LaunchError(
                f"--nnodes is {self.nnodes}, but --master-addr is missing: give the host name or address of node 0, "
                "the same on every node."
            )

    @property
    def world_size(self) -> int:
        """Ranks of the whole job; every node runs `nproc` of them."""
        return self.nproc * self.nnodes

    def rank_of(self, local_rank: int) -> int:
        """The global rank of a rank of this node."""
        return self.node_rank * self.nproc + local_rank


def preflight(spec: LaunchSpec) -> None:
    """Refuse, before anything starts, what this machine cannot do.

    Raises:
        LaunchError: the target does not exist, there are fewer GPUs than ranks, or the system is not POSIX.
    """
    if os.name != "posix":
        raise LaunchError("drivetrain run needs a POSIX system (Linux or macOS). On Windows start ranks with torchrun.")
    check = {"script": _check_script, "module": _check_module, "command": _check_command}
    check[spec.kind](spec.target)
    gpus = torch.cuda.device_count()
    if 0 < gpus < spec.nproc:
        raise LaunchError(
            f"--nproc is {spec.nproc}, but this machine has {gpus} GPU{'s' if gpus > 1 else ''} and each rank takes "
            f"its own. Use --nproc {gpus}, or set CUDA_VISIBLE_DEVICES='' to train on the CPU."
        )
    if spec.log_dir is not None and spec.log_dir.exists() and not spec.log_dir.is_dir():
        raise LaunchError(f"--log-dir {spec.log_dir} is a file; name a folder.")


def default_nproc() -> int:
    """One rank per visible GPU; one rank where there is none."""
    return max(1, torch.cuda.device_count())


def _at_least(flag: str, value: int, least: int, why: str) -> None:
    if value < least:
        raise LaunchError(f"{flag} is {value}, but it must be {least} or more: {why}.")


def _check_script(target: str) -> None:
    path = Path(target)
    if path.exists():
        return
    folder = path.parent
    nearby = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, nearby, n=1, cutoff=0.75)
    hint = f" Did you mean {folder / near[0]}?" if near else f" (Looked in {Path.cwd()}.)"
    raise LaunchError(f"the script {target} does not exist.{hint}")


def _check_module(target: str) -> None:
    # Only the outermost package is looked for: finding a submodule would import its parents into the launcher.
    package = target.partition(".")[0]
    if not package.isidentifier():
        raise LaunchError(f"-m expects a module name such as package.module, not {target!r}.")
    if importlib.machinery.PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None:
        raise LaunchError(f"no module named {package!r} is installed or lies in {Path.cwd()}.")


def _check_command(target: str) -> None:
    if shutil.which(target) is None:
        raise LaunchError(f"the command {target} is not an executable file and was not found on PATH.")
