"""In which order an epoch visits the samples.

Problem: every rank must know the same shuffled order, resume in the middle of it, and must not keep an index of a
data set of billions of samples in memory. The order must also not depend on the version of a library's random
generator, or a run could not be resumed after an update.
Idea: a keyed bijection on [0, n), computed element by element. A Feistel network (Luby and Rackoff, "How to
construct pseudorandom permutations", 1988) is a bijection on [0, 2^b) for any round function; values that fall
outside of [0, n) are sent through again until they fall inside ("cycle walking", Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). The round function is the finalizer of SplitMix64 (Steele, Lea, Flood, 2014); the
keys are a hash of (seed, epoch).
Invariants: an order is a permutation of [0, n); it depends on n, seed and epoch only; nothing here holds state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Explicit", "Order", "Sequential", "Shuffled", "mixed_seed"]

Positions = npt.NDArray[np.int64]

_ROUNDS = 8
_SMALLEST_BITS = 6  # below that, the halves of the network are too small to mix well


class Order(Protocol):
    """A finite sequence of sample indices."""

    def __len__(self) -> int: ...

    def take(self, positions: Positions) -> list[int]:
        """The sample indices at `positions` (each in [0, len))."""
        ...


def mixed_seed(*parts: int) -> int:
    """A seed in [0, 2^63) that depends on all parts and on their order."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Sequential:
    """0, 1, ..., n - 1."""

    samples: int

    def __len__(self) -> int:
        return self.samples

    def take(self, positions: Positions) -> list[int]:
        return [int(position) for position in positions]


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """The order that a sampler gave."""

    indices: Positions

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, positions: Positions) -> list[int]:
        return [int(index) for index in self.indices[positions]]


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """A pseudorandom permutation of 0 ... n - 1, another one for each (seed, epoch)."""

    samples: int
    seed: int
    epoch: int

    def __len__(self) -> int:
        return self.samples

    def take(self, positions: Positions) -> list[int]:
        values = positions.astype(np.uint64)
        keys = self._keys()
        outside = np.ones(len(values), dtype=bool)
        while outside.any():
            values[outside] = self._network(values[outside], keys)
            outside = values >= np.uint64(self.samples)
        return [int(value) for value in values]

    def _keys(self) -> npt.NDArray[np.uint64]:
        digest = hashlib.blake2b(f"{self.seed}:{self.epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8")

    def _network(self, values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        bits = max((self.samples - 1).bit_length(), _SMALLEST_BITS)
        low_bits = np.uint64(bits // 2)
        low_mask = np.uint64((1 << (bits // 2)) - 1)
        high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        low, high = values & low_mask, values >> low_bits
        for number, key in enumerate(keys):
            if number % 2 == 0:
                high = high ^ (_mix(low ^ key) & high_mask)
            else:
                low = low ^ (_mix(high ^ key) & low_mask)
        return (high << low_bits) | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
