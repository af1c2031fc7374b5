"""The model that the systems train: a decoder-only transformer, the same code for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder. All dimensions in elements."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    hidden: int


SHAPES = {
    "25M": Shape(vocabulary=8192, width=512, layers=6, heads=8, hidden=1408),
    "135M": Shape(vocabulary=49152, width=576, layers=30, heads=9, hidden=1536),
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm_mlp = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.attend(x_BTD)
        hidden = self.norm_mlp(x_BTD)
        return x_BTD + self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))

    def attend(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTD.shape
        qkv = self.qkv(self.norm_attention(x_BTD)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Decoder(nn.Module):
    """Tokens [B, T] and targets [B, T] to the mean cross entropy. Embedding and head are tied."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
