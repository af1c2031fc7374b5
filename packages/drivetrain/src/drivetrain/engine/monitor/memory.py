"""How much memory this process uses, and has used at most.

On the CPU the measure is resident memory: pages that the process really holds, with the interpreter and all libraries.
On Linux its peak is VmHWM of /proc/self/status. (`ru_maxrss` would be wrong: a process inherits it from the one that
started it.) On CUDA the measure is what torch's allocator has handed out, on that device, by this process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if sys.platform != "win32":
    import resource

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets VmHWM to the present resident size


def peak_memory_bytes(device: torch.device | str | None = None) -> int:
    """The most memory that this process has used: of a CUDA device if given one, else resident memory."""
    chosen = torch.device("cpu" if device is None else device)
    if chosen.type == "cuda":
        return torch.cuda.max_memory_allocated(chosen)
    return peak_resident_bytes()


def reset_peak_memory(device: torch.device | str | None = None) -> bool:
    """Begin a new measurement of the peak; False where the system has no such thing."""
    chosen = torch.device("cpu" if device is None else device)
    if chosen.type == "cuda":
        torch.cuda.reset_peak_memory_stats(chosen)
        return True
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far, in bytes; 0 where the system does not tell."""
    peak = _status_bytes("VmHWM")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return 0
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024  # bytes on macOS, KiB elsewhere


def resident_bytes() -> int:
    """The present resident memory of this process, in bytes; 0 where the system does not tell."""
    return _status_bytes("VmRSS") or 0


def _status_bytes(field: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None
