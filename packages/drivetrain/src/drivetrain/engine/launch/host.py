"""What the machine offers, asked from the operating system: cores, memory, the loopback interface.

The number of cores is what this process may use, not what the board has: the affinity mask and a container's CPU
quota both count, since a rank that starts a thread per core of the board in a small container gets slower, not faster.
"""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Cores that this process may use: its affinity mask, cut by a cgroup v2 CPU quota; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = cpu_quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """CPU time per wall time that the container may use (1.5 is one and a half cores), or `None` if unlimited."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def threads_per_rank(nproc: int, cores: int) -> int:
    """An equal share of the cores for each rank of a node, at least one thread."""
    return max(1, cores // nproc)


def loopback_interface() -> str | None:
    """Name of the loopback interface (`lo`, `lo0`), or `None` if the system shows none by these names."""
    try:
        names = {name for _, name in socket.if_nameindex()}
    except OSError:
        return None
    return next((name for name in ("lo", "lo0") if name in names), None)
