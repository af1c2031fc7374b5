"""What all stores agree on: how a record lies in memory, and what is said of wrong use.

A record is a list of 1-D tensors under a key. In memory, and in a file, it is one piece of whole pages in which the
tensors lie one after another, each at a multiple of 64 bytes: one request moves a record, directly and without a copy,
and vector instructions find aligned tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["PAGE", "RecordLayout", "closed", "in_use", "not_filled", "not_in_use", "unknown", "whole_pages"]

PAGE: Final = 4096
_TENSOR: Final = 64
_SHOWN: Final = 8


def whole_pages(size: int) -> int:
    """Bytes of the pages, at least one, that hold `size` bytes."""
    return max(1, -(-size // PAGE)) * PAGE


@dataclass(frozen=True)
class RecordLayout:
    """Where the tensors of a record lie in its memory: tensor i has `numels[i]` elements from byte `starts[i]`.

    `bytes`: of the tensors alone. `room`: of the piece, whole pages.
    """

    dtypes: tuple[torch.dtype, ...]
    numels: tuple[int, ...]
    starts: tuple[int, ...]
    bytes: int
    room: int

    @classmethod
    def of(cls, like: Sequence[Tensor]) -> RecordLayout:
        """The layout of tensors of these dtypes and numbers of elements, on whatever device they are."""
        starts: list[int] = []
        end = 0
        for tensor in like:
            starts.append(-(-end // _TENSOR) * _TENSOR)
            end = starts[-1] + tensor.numel() * tensor.dtype.itemsize
        return cls(
            dtypes=tuple(tensor.dtype for tensor in like),
            numels=tuple(tensor.numel() for tensor in like),
            starts=tuple(starts),
            bytes=sum(tensor.numel() * tensor.dtype.itemsize for tensor in like),
            room=whole_pages(end),
        )

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """The tensors as views of `memory`, uint8[room or more] that begins at a page."""
        return [
            memory[start : start + numel * dtype.itemsize].view(dtype)
            for dtype, numel, start in zip(self.dtypes, self.numels, self.starts, strict=True)
        ]


def unknown(doing: str, key: str, known: Iterable[str]) -> KeyError:
    """No record has this key."""
    names = list(known)
    shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return KeyError(f"{doing}: no record {key!r}; there are {shown or 'none'}")


def in_use(doing: str, key: str) -> RuntimeError:
    """It was fetched or made, and not yet released."""
    return RuntimeError(f"{doing}: record {key!r} is in use; release it first")


def not_in_use(key: str, doing: str = "release") -> RuntimeError:
    """Released twice, or never fetched."""
    return RuntimeError(f"{doing}: record {key!r} is not in use; fetch it first, and release it once")


def not_filled(key: str, doing: str = "release") -> RuntimeError:
    """A new record was released as if it held something."""
    return RuntimeError(
        f"{doing}: record {key!r} is new and has not been filled; release it with changed=True, or drop it"
    )


def closed(store: str) -> ValueError:
    """Used after `close`."""
    return ValueError(f"{store} is closed; its records are gone")
