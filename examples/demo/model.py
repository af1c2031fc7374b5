"""A decoder-only transformer of the Llama kind, with the parameter names that `transformers` gives it.

RMS normalisation before each part (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), SwiGLU (Shazeer,
2020), causal attention by torch's own kernel, input and output embedding tied. Because names, shapes and `config.json`
are those of `LlamaForCausalLM`, exported weights load there and give the same logits.

Shapes: B sequences, T positions, D model width, H heads of size K, F width inside the feed-forward part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINEAR_STD = 0.02
EMBEDDING_STD = 0.05
"""Above that of the other weights: the large steps of a short training would soon overwrite smaller values, which tell
tokens apart from the start."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of the model. `width` is heads times the size of a head, which is even."""

    vocab_size: int
    width: int = 384
    inner_width: int = 1152
    layers: int = 5
    heads: int = 6
    context: int = 128
    """Positions that the model is trained on."""
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    end_token: int | None = None

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` that `transformers` expects."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.inner_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_base,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_base},
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": LINEAR_STD,
            "bos_token_id": self.end_token,
            "eos_token_id": self.end_token,
            "torch_dtype": "float32",
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """Read what `to_dict` gave."""
        return cls(
            vocab_size=values["vocab_size"],
            width=values["hidden_size"],
            inner_width=values["intermediate_size"],
            layers=values["num_hidden_layers"],
            heads=values["num_attention_heads"],
            context=values["max_position_embeddings"],
            rope_base=values["rope_theta"],
            norm_eps=values["rms_norm_eps"],
            end_token=values["eos_token_id"],
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean of squares is taken in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Causal attention of H heads with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            project(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTK, k_BHTK = rotated(q_BHTK, cos_TK, sin_TK), rotated(k_BHTK, cos_TK, sin_TK)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        mixed: Tensor = self.o_proj(y_BHTK.transpose(1, 2).flatten(-2))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.inner_width, bias=False)
        self.down_proj = nn.Linear(config.inner_width, config.width, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return y_BTD


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to what flows by."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK)
        y_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return y_BTD


class Decoder(nn.Module):
    """Embedding, blocks, final normalisation."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed_tokens(tokens_BT)
        cos_TK, sin_TK = rotations(tokens_BT.shape[1], self.config, x_BTD)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TK, sin_TK)
        y_BTD: Tensor = self.norm(x_BTD)
        return y_BTD


class Llama(nn.Module):
    """The language model."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=LINEAR_STD)
        nn.init.normal_(self.model.embed_tokens.weight, std=EMBEDDING_STD)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, last_only: bool = False) -> Tensor:
        """The mean loss in nats per token (fp32) if there are targets, else logits.

        Args:
            tokens: B x T ids.
            targets: B x T ids, those that follow.
            last_only: logits of the last position only, B x 1 x V instead of B x T x V.
        """
        x_BTD = self.model(tokens)
        logits_BTV: Tensor = self.lm_head(x_BTD[:, -1:] if last_only else x_BTD)
        if targets is None:
            return logits_BTV
        loss: Tensor = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets.flatten())
        return loss

    @property
    def parameter_count(self) -> int:
        """Parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.parameters())


def rotations(length: int, config: LlamaConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each position, T x K; angles in fp32, results in the dtype of `like`.

    They are computed when needed, as a buffer would be one more thing to shard, save and cast.
    """
    halves = torch.arange(0, config.head_size, 2, device=like.device, dtype=torch.float32) / config.head_size
    positions = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_base**-halves).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Each pair (x[i], x[i + K/2]) turned by the angle of its position."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK
