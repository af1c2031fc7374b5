"""The safetensors file format, written as a stream.

Problem: weights must be written from any device into a file that anybody can read, without a second copy of them in
memory.
Idea: safetensors is eight bytes of header length (little-endian), a JSON header (name -> dtype, shape, byte range)
and the raw elements. All sizes are known before the first element is, so the header is written first and the
elements follow in pieces.
Invariants: elements start at a multiple of 8 and tensors lie in falling order of element size, so that every tensor
is aligned to its element size; a tensor is row-major and contiguous.

The format is specified at https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

__all__ = ["DTYPES", "DTYPE_NAMES", "TensorEntry", "TensorFileLayout", "as_bytes", "dtype_name", "plan_tensor_file"]

DTYPE_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int16: "I16",
        torch.uint16: "U16",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int32: "I32",
        torch.uint32: "U32",
        torch.float32: "F32",
        torch.int64: "I64",
        torch.uint64: "U64",
        torch.float64: "F64",
        torch.complex64: "C64",
    }
)
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType({name: dtype for dtype, name in DTYPE_NAMES.items()})

_ALIGNMENT = 8
_PIECE_BYTES = 1 << 24  # how much of a tensor is on its way from the device to the file at a time


def dtype_name(dtype: torch.dtype, owner: str) -> str:
    """The format's name of a dtype. Raises ValueError naming `owner` for one that the format doesn't have."""
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise ValueError(
            f"{owner} has dtype {dtype}, which can't be stored; those that can: {', '.join(map(str, DTYPE_NAMES))}"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a file to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorFileLayout:
    """A planned file: its first bytes, and its tensors in the order in which their elements follow.

    `positions[i]` is the byte of the file where the elements of `entries[i]` begin.
    """

    header: bytes
    entries: tuple[TensorEntry, ...]
    positions: tuple[int, ...]
    size: int


def plan_tensor_file(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> TensorFileLayout:
    """Lays out a file; entries of one dtype keep their order."""
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: list[int] = []
    end = 0
    for entry in ordered:
        if entry.name in header:
            raise ValueError(f"two tensors of one file are named {entry.name!r}")
        starts.append(end)
        end += entry.nbytes
        header[entry.name] = {
            "dtype": dtype_name(entry.dtype, f"tensor {entry.name}"),
            "shape": list(entry.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    first = len(text).to_bytes(8, "little") + text
    return TensorFileLayout(
        header=first,
        entries=tuple(ordered),
        positions=tuple(len(first) + start for start in starts),
        size=len(first) + end,
    )


def as_bytes(flat: torch.Tensor) -> Iterator[memoryview]:
    """The elements of a 1-D tensor on any device, as bytes in pieces of at most 16 MiB. A piece is valid until the
    next one is taken.
    """
    step = max(_PIECE_BYTES // flat.dtype.itemsize, 1)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step].detach().to("cpu").contiguous()
        yield piece.view(torch.uint8).numpy().data
