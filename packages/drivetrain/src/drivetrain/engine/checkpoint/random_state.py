"""The state of the random number generators of one rank: Python's, NumPy's, PyTorch's on the CPU and on the rank's GPU.

Problem: a resumed run should draw the numbers that the run would have drawn. At another number of ranks that has no
meaning, and ranks must still draw different numbers, the same at every resume.
Idea: states are stored per rank. Where a rank has no state of its own, one is derived from rank 0's saved state and
the rank.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from .errors import CheckpointError

__all__ = ["RandomState"]


@dataclass(frozen=True, kw_only=True)
class RandomState:
    """One rank's generators.

    Attributes:
        python: `random.getstate()` as [version, words, next Gaussian or None].
        numpy: the legacy global generator: [name, words, position, has Gaussian, Gaussian].
        cpu: base64 of the CPU generator's state.
        gpu: base64 of the state of the current GPU's generator; None where there was no GPU.
    """

    python: list[Any]
    numpy: list[Any]
    cpu: str
    gpu: str | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        """The present state of this process; `device` is the one that the rank computes on."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return cls(
            python=[version, list(words), gauss],
            numpy=[str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
            cpu=_encode(torch.get_rng_state()),
            gpu=_encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
        )

    def restore(self, device: torch.device) -> None:
        """Puts the generators of this process into this state."""
        version, words, gauss = self.python
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_decode(self.cpu))
        if device.type == "cuda":
            if self.gpu is None:  # saved without a GPU
                torch.cuda.manual_seed(_seed(self, 0))
            else:
                torch.cuda.set_rng_state(_decode(self.gpu), device)

    def derived(self, rank: int) -> RandomState:
        """A state for `rank` that depends on this one and on nothing else, and differs between ranks."""
        seed = _seed(self, rank)
        python = random.Random(seed).getstate()
        name, keys, position, has_gauss, cached = np.random.RandomState(seed % 2**32).get_state(legacy=True)
        return RandomState(
            python=[python[0], list(python[1]), python[2]],
            numpy=[str(name), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
            cpu=_encode(torch.Generator().manual_seed(seed).get_state()),
            gpu=None,
        )

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> RandomState:
        try:
            return cls(**json.loads(raw))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{where} does not hold a random state: {error}") from error


def _seed(state: RandomState, rank: int) -> int:
    digest = hashlib.sha256(f"{state.cpu}|{state.python[1]}|{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes signed 64-bit seeds


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
