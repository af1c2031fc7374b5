"""Which blocks of an attention matrix are computed, as layouts made by rule, and as lists for kernels.

Problem: long sequences need attention that grows less than with the square of their length; which key blocks a query
block sees is a matter of the model.
Idea: a layout is a bool tensor [heads, blocks, blocks], True where a query block sees a key block. The rules are those
of DeepSpeed's sparse attention, as frozen records with the same parameters: local windows with summary blocks (Sparse
Transformers, arXiv:1904.10509), windows with global and random blocks (Longformer, arXiv:2004.05150; BigBird,
arXiv:2007.14062). Any other bool tensor will do as well.
Invariants: "unidirectional" layouts have nothing above the diagonal; heads are alike unless they are allowed to differ
(`different_layout_per_head`); random blocks depend on `seed`, head and number of blocks alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

__all__ = [
    "BSLongformerLayout",
    "BigBirdLayout",
    "BlockLists",
    "DenseLayout",
    "Direction",
    "FixedLayout",
    "LocalSlidingWindowLayout",
    "SparseLayout",
    "VariableLayout",
]

Direction = Literal["bidirectional", "unidirectional"]

_DIRECTIONS: Final = ("bidirectional", "unidirectional")
_SMALLEST_BLOCK: Final = 16


def check_block(block: int) -> None:
    """Tiles are made of whole blocks or blocks of whole tiles, so both are powers of two."""
    if block < _SMALLEST_BLOCK or block & (block - 1):
        raise ValueError(f"block: expected a power of two, {_SMALLEST_BLOCK} or more; found {block}")


def _check_at_least(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name}: expected {least} or more; found {count}")


def _window(blocks: int, width: int) -> Tensor:
    """Bool [blocks, blocks]: up to `width // 2` blocks to either side."""
    place = torch.arange(blocks)
    return (place[:, None] - place).abs() <= width // 2


def _random(blocks: int, count: int, seed: int, head: int, direction: Direction) -> Tensor:
    """Bool [blocks, blocks]: `count` blocks of every row, or as many as it may have, drawn without replacement."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + head) % 2**63)
    chosen = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks if count else 0):
        among = blocks if direction == "bidirectional" else row + 1
        chosen[row, torch.randperm(among, generator=generator)[:count]] = True
    return chosen


@dataclass(frozen=True, kw_only=True)
class SparseLayout(ABC):
    """What all rules have: `num_heads` heads, blocks of `block` tokens (a power of two, 16 or more), and whether
    attention looks ahead. What a short sequence has no room for is left out."""

    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False
    attention: Direction = "bidirectional"

    def __post_init__(self) -> None:
        check_block(self.block)
        _check_at_least(1, num_heads=self.num_heads)
        if self.attention not in _DIRECTIONS:
            raise ValueError(f"attention: expected one of {', '.join(_DIRECTIONS)}; found {self.attention!r}")

    def layout(self, seq_len: int) -> Tensor:
        """Bool [num_heads, seq_len / block, seq_len / block]; ValueError unless `block` divides `seq_len`."""
        if seq_len < 0 or seq_len % self.block:
            raise ValueError(
                f"seq_len: expected a multiple of the block of {self.block}; found {seq_len}: pad the sequence and "
                "hide the padding with key_padding_mask"
            )
        blocks = seq_len // self.block
        different = self.num_heads if self.different_layout_per_head else 1
        heads = torch.stack([self._head(head, blocks) for head in range(different)])
        if self.attention == "unidirectional":
            heads = heads.tril()
        return heads.expand(self.num_heads, -1, -1).clone()

    @abstractmethod
    def _head(self, head: int, blocks: int) -> Tensor:
        """Bool [blocks, blocks] of one head; what lies above the diagonal of unidirectional layouts is taken away."""


@dataclass(frozen=True, kw_only=True)
class DenseLayout(SparseLayout):
    """Everything; for comparisons."""

    def _head(self, head: int, blocks: int) -> Tensor:
        return torch.ones(blocks, blocks, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class FixedLayout(SparseLayout):
    """Windows of `num_local_blocks` that see themselves, and the last `num_global_blocks` of each, which all see.

    In unidirectional attention the latter are seen by what comes after them. With `horizontal_global_attention`
    (bidirectional only) they see everything as well. With `num_different_global_patterns` above 1 (needs
    `different_layout_per_head`) head `h` takes the global blocks `h % patterns` groups further to the front.
    """

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(
            1,
            num_local_blocks=self.num_local_blocks,
            num_global_blocks=self.num_global_blocks,
            num_different_global_patterns=self.num_different_global_patterns,
        )
        if self.num_local_blocks % self.num_global_blocks:
            raise ValueError(
                f"num_local_blocks: expected a multiple of num_global_blocks, {self.num_global_blocks}; found "
                f"{self.num_local_blocks}"
            )
        _check_horizontal(self.horizontal_global_attention, self.attention)
        patterns = self.num_local_blocks // self.num_global_blocks
        if self.num_different_global_patterns > 1 and not self.different_layout_per_head:
            raise ValueError("num_different_global_patterns above 1 needs different_layout_per_head=True")
        if self.num_different_global_patterns > patterns:
            raise ValueError(
                f"num_different_global_patterns: a window of {self.num_local_blocks} blocks has {patterns} groups of "
                f"{self.num_global_blocks}; found {self.num_different_global_patterns}"
            )

    def _head(self, head: int, blocks: int) -> Tensor:
        place = torch.arange(blocks)
        seen = (place // self.num_local_blocks)[:, None] == place // self.num_local_blocks
        shared = torch.zeros(blocks, dtype=torch.bool)
        offset = self.num_local_blocks - (1 + head % self.num_different_global_patterns) * self.num_global_blocks
        for start in range(0, blocks, self.num_local_blocks):
            # The last window may be short: its global blocks then are the last there are.
            first = max(0, min(start + offset, blocks - self.num_global_blocks))
            shared[first : first + self.num_global_blocks] = True
        seen = seen | shared
        return seen | shared[:, None] if self.horizontal_global_attention else seen


def _check_horizontal(horizontal: bool, attention: Direction) -> None:
    if horizontal and attention != "bidirectional":
        raise ValueError("horizontal_global_attention looks ahead and needs attention='bidirectional'")


def _check_global(starts: Sequence[int], ends: Sequence[int] | None) -> None:
    _check_at_least(0, **{f"global_block_indices[{i}]": start for i, start in enumerate(starts)})
    if ends is None:
        return
    if len(ends) != len(starts):
        raise ValueError(
            f"global_block_end_indices: expected one end for each of the {len(starts)} global_block_indices; found "
            f"{len(ends)}"
        )
    for start, end in zip(starts, ends, strict=True):
        if end <= start:
            raise ValueError(f"global_block_end_indices: {end} is not behind its start, {start}")


def _global_blocks(blocks: int, starts: Sequence[int], ends: Sequence[int] | None) -> Tensor:
    """Bool [blocks]; what lies beyond a short sequence is left out."""
    shared = torch.zeros(blocks, dtype=torch.bool)
    for start, end in zip(starts, [start + 1 for start in starts] if ends is None else ends, strict=True):
        shared[start:end] = True
    return shared


@dataclass(frozen=True, kw_only=True)
class VariableLayout(SparseLayout):
    """Windows of given widths, global blocks at given places, and random blocks.

    `local_window_blocks`: widths of the windows in order; the last is repeated to the end. `global_block_indices`:
    blocks that all see (in unidirectional attention: what comes after them), or with `global_block_end_indices` the
    starts of ranges that end before those. With `horizontal_global_attention` (bidirectional only) they see everything
    as well. `num_random_blocks` of every row are drawn from `seed`.
    """

    num_random_blocks: int = 0
    local_window_blocks: tuple[int, ...] = (4,)
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(0, num_random_blocks=self.num_random_blocks, seed=self.seed)
        if not self.local_window_blocks:
            raise ValueError("local_window_blocks: expected at least one width; found none")
        _check_at_least(1, **{f"local_window_blocks[{i}]": width for i, width in enumerate(self.local_window_blocks)})
        _check_global(self.global_block_indices, self.global_block_end_indices)
        _check_horizontal(self.horizontal_global_attention, self.attention)

    def _head(self, head: int, blocks: int) -> Tensor:
        window = torch.zeros(blocks, dtype=torch.long)  # the number of each block's window
        start, number = 0, 0
        while start < blocks:
            width = self.local_window_blocks[min(number, len(self.local_window_blocks) - 1)]
            window[start : start + width] = number
            start, number = start + width, number + 1
        shared = _global_blocks(blocks, self.global_block_indices, self.global_block_end_indices)
        seen = (window[:, None] == window) | shared
        if self.horizontal_global_attention:
            seen = seen | shared[:, None]
        return seen | _random(blocks, self.num_random_blocks, self.seed, head, self.attention)


@dataclass(frozen=True, kw_only=True)
class BigBirdLayout(SparseLayout):
    """A sliding window of `num_sliding_window_blocks` blocks, `num_global_blocks` at the front which see all and are
    seen by all, and `num_random_blocks` of every row, drawn from `seed`."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(
            0, num_random_blocks=self.num_random_blocks, num_global_blocks=self.num_global_blocks, seed=self.seed
        )
        _check_at_least(1, num_sliding_window_blocks=self.num_sliding_window_blocks)

    def _head(self, head: int, blocks: int) -> Tensor:
        shared = torch.arange(blocks) < self.num_global_blocks
        seen = _window(blocks, self.num_sliding_window_blocks) | shared | shared[:, None]
        return seen | _random(blocks, self.num_random_blocks, self.seed, head, self.attention)


@dataclass(frozen=True, kw_only=True)
class BSLongformerLayout(SparseLayout):
    """A sliding window of `num_sliding_window_blocks` blocks, and global blocks, which see all and are seen by all, at
    `global_block_indices` (with `global_block_end_indices`: ranges from there to before those)."""

    num_sliding_window_blocks: int = 3
    global_block_indices: tuple[int, ...] = (0,)
    global_block_end_indices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(1, num_sliding_window_blocks=self.num_sliding_window_blocks)
        _check_global(self.global_block_indices, self.global_block_end_indices)

    def _head(self, head: int, blocks: int) -> Tensor:
        shared = _global_blocks(blocks, self.global_block_indices, self.global_block_end_indices)
        return _window(blocks, self.num_sliding_window_blocks) | shared | shared[:, None]


@dataclass(frozen=True, kw_only=True)
class LocalSlidingWindowLayout(SparseLayout):
    """A sliding window of `num_sliding_window_blocks` blocks and nothing else; its front half in unidirectional
    attention."""

    attention: Direction = "unidirectional"
    num_sliding_window_blocks: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(1, num_sliding_window_blocks=self.num_sliding_window_blocks)

    def _head(self, head: int, blocks: int) -> Tensor:
        return _window(blocks, self.num_sliding_window_blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockLists:
    """A layout and the same as lists: for every row its blocks in ascending order, and for every column.

    Made once per model and device with `BlockLists.of(layout)`, which waits for the device; attention itself then does
    not. The lists of row `r` of head `h` are numbers `row_starts[h * blocks + r]` to the next start of `columns`; in
    causal attention they end at `row_ends`, behind the diagonal. For columns those of `rows`, from `column_begins`.
    """

    mask: Tensor  # bool [heads, blocks, blocks]
    row_starts: Tensor = field(repr=False)  # int32 [heads * blocks + 1]
    row_ends: Tensor = field(repr=False)  # int32 [heads * blocks]
    columns: Tensor = field(repr=False)  # int32 [blocks in the layout]
    column_starts: Tensor = field(repr=False)  # int32 [heads * blocks + 1]
    column_begins: Tensor = field(repr=False)  # int32 [heads * blocks]
    rows: Tensor = field(repr=False)  # int32 [blocks in the layout]

    @classmethod
    def of(cls, layout: Tensor) -> BlockLists:
        """The lists of a bool tensor [heads, blocks, blocks], on its device."""
        if layout.dim() != 3 or layout.shape[1] != layout.shape[2] or layout.dtype != torch.bool:
            raise ValueError(
                f"layout: expected bool [heads, blocks, blocks]; found {layout.dtype} of shape {tuple(layout.shape)}"
            )
        below = layout.tril()
        turned = layout.transpose(1, 2)
        row_starts, column_starts = _starts(layout.sum(dim=2)), _starts(layout.sum(dim=1))
        hidden = (turned & ~below.transpose(1, 2)).sum(dim=2).flatten()
        return cls(
            mask=layout,
            row_starts=row_starts,
            row_ends=(row_starts[:-1] + below.sum(dim=2).flatten()).to(torch.int32),
            columns=layout.nonzero()[:, 2].to(torch.int32),
            column_starts=column_starts,
            column_begins=(column_starts[:-1] + hidden).to(torch.int32),
            rows=turned.nonzero()[:, 2].to(torch.int32),
        )


def _starts(counts: Tensor) -> Tensor:
    """Where each list begins, and where the last ends."""
    return torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0)).to(torch.int32)
