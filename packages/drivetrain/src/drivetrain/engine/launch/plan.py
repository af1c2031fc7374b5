"""The command and the environment of every rank, as pure functions of the spec.

The environment is torchrun's, so that any script written for torchrun runs unchanged. Two variables are added when the
person has not set them: OMP_NUM_THREADS (a share of the cores: without it each rank starts a thread per core and they
fight) and, for one node on the CPU, GLOO_SOCKET_IFNAME (the loopback interface: gloo otherwise resolves the host's
name, which fails or goes to an outside address on many laptops).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from drivetrain.engine.launch.host import available_cores, loopback_interface, threads_per_rank
from drivetrain.engine.launch.rendezvous import LOOPBACK
from drivetrain.engine.launch.spec import LaunchSpec

ROLE = "rank"
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


def command(spec: LaunchSpec) -> list[str]:
    """The command line of a rank, the same for each. Unbuffered, so that the last words before a crash are seen."""
    if spec.kind == "command":
        return [spec.target, *spec.args]
    return [sys.executable, "-u", str(_BOOTSTRAP), spec.kind, spec.target, *spec.args]


def added_environment(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """What ranks get on top of the launcher's own environment `environ` and of torchrun's variables."""
    added: dict[str, str] = {}
    if spec.threads_per_rank is not None:
        added["OMP_NUM_THREADS"] = str(spec.threads_per_rank)
    elif "OMP_NUM_THREADS" not in environ:
        added["OMP_NUM_THREADS"] = str(threads_per_rank(spec.nproc, available_cores()))
    interface = loopback_interface()
    if spec.nnodes == 1 and spec.master_addr is None and "GLOO_SOCKET_IFNAME" not in environ and interface:
        added["GLOO_SOCKET_IFNAME"] = interface
    return added


def rank_environment(
    spec: LaunchSpec, local_rank: int, *, port: int, run_id: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """All variables that a rank's environment has beyond the launcher's, in the order in which they are printed.

    TORCHELASTIC_ERROR_FILE is not among them: it names a file of the running launcher.
    """
    rank, world = str(spec.rank_of(local_rank)), str(spec.world_size)
    return {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(spec.nproc),
        "MASTER_ADDR": spec.master_addr or LOOPBACK,
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(spec.node_rank),
        "GROUP_WORLD_SIZE": str(spec.nnodes),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **added_environment(spec, environ),
    }


def dry_run(spec: LaunchSpec, *, port: int, run_id: str, environ: Mapping[str, str]) -> str:
    """The commands and environments of this node's ranks, one shell line each, under two lines of comment."""
    ranks = f"{spec.nproc} rank{'s' if spec.nproc > 1 else ''}"
    lines = [
        f"# node {spec.node_rank} of {spec.nnodes}: {ranks}, of {spec.world_size} in all. "
        "The launcher runs these and holds the store at MASTER_ADDR:MASTER_PORT.",
        "# To start them by hand, leave TORCHELASTIC_USE_AGENT_STORE out: rank 0 then holds the store.",
    ]
    for local_rank in range(spec.nproc):
        variables = rank_environment(spec, local_rank, port=port, run_id=run_id, environ=environ)
        assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        lines.append(f"{assignments} {shlex.join(command(spec))}")
    return "\n".join(lines)
