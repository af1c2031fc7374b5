"""What launchers ask of a device: whether kernels run there, how large it is, and how numbers get there."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Final

import torch
import triton
from torch import Tensor

__all__ = ["DTYPES", "float32_products", "numbers_on", "processors", "send", "serves", "stream_of"]

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


def float32_products() -> str:
    """How tensor cores may take float32: "tf32" where torch's own products may, else "ieee", without them."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def stream_of(device: torch.device) -> int:
    """The current stream: what was sent in one stream may not have arrived for another."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def send(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, by a copy that only the current stream waits for."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


@lru_cache(maxsize=64)
def _numbers(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return send(torch.tensor(numbers, dtype=torch.int64), device)


def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Addresses and lengths as int64 on `device`; sent again only when they, or the stream, have changed."""
    return _numbers(numbers, device, stream_of(device))
