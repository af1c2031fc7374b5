"""What the launchers ask before they launch: which tensors the kernels serve, and how large the GPU is."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import triton

__all__ = ["DTYPES", "processors", "serves"]

DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DEVICES: Final = frozenset({"cuda", "cpu"} if triton.knobs.runtime.interpret else {"cuda"})
_INTERPRETED_PROCESSORS: Final = 4


def serves(device: torch.device) -> bool:
    """Whether kernels can run on tensors of `device`: GPUs, and the host in Triton's interpreter."""
    return device.type in _DEVICES


@cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few in the interpreter, so that what depends on them is tested."""
    return _multiprocessors(device.index or 0) if device.type == "cuda" else _INTERPRETED_PROCESSORS
