"""The model that the parity matrix trains, in all its shapes, and the data that it is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, VOCABULARY = 10, 16, 17
BATCH, LENGTH = 2, 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is special about a model. Features set these.

    Attributes:
        tied: the output layer's weight is the embedding's.
        frozen: a whole block, and one matrix of another.
        twice: two blocks are applied once more, after the others.
        recompute: which kind of activation checkpointing is around the blocks.
        small: parameters of one element and of no dimension.
        empty: parameters of no elements.
        unused: a layer that no forward pass reaches.
        batch_norm: a layer, always in fp32, with buffers that change in forward.
        dropout: blocks drop elements while they train.
        sparse: the embedding's gradient comes as rows.
        experts: each token goes through the expert that its number says; some have none on some ranks.
    """

    tied: bool = False
    frozen: bool = False
    twice: bool = False
    recompute: Literal["none", "reentrant", "non-reentrant"] = "none"
    small: bool = False
    empty: bool = False
    unused: bool = False
    batch_norm: bool = False
    dropout: bool = False
    sparse: bool = False
    experts: bool = False


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.full((1,), 1.1)) if shape.small else None
        self.nothing = nn.Parameter(torch.zeros(2, 0)) if shape.empty else None
        self.rate = 0.2 if shape.dropout else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(self.norm(x)))
        if self.rate:
            h = nn.functional.dropout(h, self.rate, self.training)
        h = self.down(h)
        if self.gain is not None:
            h = h * self.gain
        if self.nothing is not None:
            h = h + self.nothing.sum()
        return x + h


class Experts(nn.Module):
    """Tokens choose among experts by their number, so that rounding cannot change a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        for index, expert in enumerate(self.experts):
            chosen = tokens % len(self.experts) == index
            if bool(chosen.any()):
                out[chosen] = out[chosen] + torch.tanh(expert(x[chosen]))
        return out


class Model(nn.Module):
    """Embedding, blocks and output layer; forward gives the loss.

    ``depth`` is how many blocks forward uses; the training loop may change it.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=shape.sparse)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.9)) if shape.small else None
        self.nothing = nn.Parameter(torch.zeros(0)) if shape.empty else None
        self.never = nn.Linear(3, 5) if shape.unused else None
        self.mixture = Experts() if shape.experts else None
        self.batch_norm = nn.BatchNorm1d(WIDTH, affine=False) if shape.batch_norm else None
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.depth = len(self.blocks)
        if shape.tied:
            self.lm_head.weight = self.embed.weight
        if shape.frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.weight.requires_grad_(False)

    def _apply_block(self, index: int, h: torch.Tensor) -> torch.Tensor:
        block, how = self.blocks[index], self.shape.recompute
        if how == "none" or not torch.is_grad_enabled():
            return block(h)
        return checkpoint(block, h, use_reentrant=how == "reentrant")

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for index in range(self.depth):
            h = self._apply_block(index, h)
        if self.mixture is not None:
            h = self.mixture(h, tokens)
        if self.shape.twice:
            h = self._apply_block(0, h) + self._apply_block(2, h.flip(0))
        if self.scale is not None:
            h = h * self.scale
        if self.nothing is not None:
            h = h + self.nothing.sum()
        if self.batch_norm is not None:
            h = h + self.batch_norm(h.flatten(0, 1).float()).to(h.dtype).view_as(h)
        return nn.functional.cross_entropy(self.lm_head(h).float().flatten(0, 1), targets.flatten())


def set_seed(value: int) -> None:
    """As ``torch.manual_seed``, which also notes a stack trace for each other device, at ten times the cost."""
    torch.default_generator.manual_seed(value)


def build(shape: Shape, seed: int = 11) -> Model:
    """The same model each time, for one seed."""
    set_seed(seed)
    return Model(shape)


Batch = tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=1000)
def batch(step: int, micro: int, rank: int, *, salt: int = 0, uneven: bool = False) -> Batch:
    """Tokens and targets [samples, LENGTH]. ``uneven``: odd ranks get a sample more."""
    generator = torch.Generator().manual_seed(1 + step + 10 * micro + 100 * rank + 10_000 * salt)
    samples = BATCH + (rank % 2 if uneven else 0)
    tokens = torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    return tokens, (tokens * 5 + 3) % VOCABULARY
