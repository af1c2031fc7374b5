"""Tiny models, each with one property that distributed training gets wrong easily.

All take floats ``x_BW`` (batch, width) or tokens ``t_BL`` (batch, length), and all are built the same on every rank
from the seed that is set before (``torch.manual_seed``). ``CASES`` names them with a batch and a loss, for
parametrised tests:

    @pytest.mark.parametrize("name", CASES)
    def test_something(name): run_ranks(train, 2, name)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """A residual two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x_BW + self.down(functional.gelu(self.up(x_BW)))
        return out


class MLP(nn.Module):
    """Repeated blocks in a ModuleList, as most real models have."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BW = block(x_BW)
        out: torch.Tensor = self.head(x_BW)
        return out


class TiedModel(nn.Module):
    """One parameter under two names: the embedding is the head."""

    def __init__(self, vocabulary: int = 13, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.block = Block(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, t_BL: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.block(self.embedding(t_BL)))
        return out


class TwiceUsed(nn.Module):
    """One block is applied twice in a forward pass: its gradients come in two parts."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = Block(width)
        self.shared = Block(width)
        self.head = nn.Linear(width, width)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.shared(self.shared(self.first(x_BW))))
        return out


class FrozenPart(nn.Module):
    """Trained blocks around one that is frozen, as in fine-tuning."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BW = block(x_BW)
        return x_BW


class Uneven(nn.Module):
    """Parameters of 1, 5 and 123 elements: fewer than the ranks, or not a multiple of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.shift = nn.Parameter(torch.randn(5))
        self.weight = nn.Parameter(torch.randn(3, 41) / 7)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        hidden_B5 = x_BW[:, :5] * self.scale + self.shift
        return hidden_B5[:, :3] @ self.weight


class UnusedBranch(nn.Module):
    """A parameter that no loss reaches: its gradient stays None."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.used = Block(width)
        self.unused = nn.Linear(width, width)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x_BW)
        return out


class WithBatchNorm(nn.Module):
    """Buffers that every forward pass changes, some of them integers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x_BW)
        return out


class DecoderBlock(nn.Module):
    """Causal self-attention and a perceptron, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Block(width)

    def forward(self, x_BLW: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BLW.shape
        qkv = self.qkv(self.attention_norm(x_BLW)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLW = x_BLW + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        out: torch.Tensor = x_BLW + self.mlp(self.mlp_norm(x_BLW))
        return out


class TinyTransformer(nn.Module):
    """A decoder-only language model, with tied embeddings."""

    def __init__(self, vocabulary: int = 31, width: int = 16, depth: int = 2, heads: int = 2, length: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) / 10)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, t_BL: torch.Tensor) -> torch.Tensor:
        x_BLW = self.tokens(t_BL) + self.positions[: t_BL.shape[1]]
        for block in self.blocks:
            x_BLW = block(x_BLW)
        out: torch.Tensor = self.head(self.norm(x_BLW))
        return out


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and what to train it on.

    Attributes:
        make: builds the model; the same on every rank after the same ``torch.manual_seed``.
        vocabulary: how many tokens the inputs and targets take; 0 for a model of floats, trained to a squared error.
        outputs: width of the output of a model of floats.
    """

    make: Callable[[], nn.Module]
    vocabulary: int = 0
    outputs: int = 16

    def batch(self, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of ``size`` samples, the same for the same seed. Slices of a batch are batches."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            tokens = torch.randint(self.vocabulary, (size, 9), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        return torch.randn(size, 16, generator=generator), torch.randn(size, self.outputs, generator=generator)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean over the batch, so that the mean over ranks of equal batches is the loss of all."""
        if self.vocabulary:
            return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())
        return functional.mse_loss(output.float(), target)


CASES: Final[dict[str, Case]] = {
    "mlp": Case(make=MLP),
    "tied": Case(make=TiedModel, vocabulary=13),
    "twice_used": Case(make=TwiceUsed),
    "frozen_part": Case(make=FrozenPart),
    "uneven": Case(make=Uneven, outputs=41),
    "unused_branch": Case(make=UnusedBranch),
    "batch_norm": Case(make=WithBatchNorm),
    "transformer": Case(make=TinyTransformer, vocabulary=31),
}
