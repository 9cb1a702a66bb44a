"""A small decoder-only transformer that knows nothing of torch_bwattn: its attention is plain PyTorch.

RMSNorm before each block (Zhang and Sennrich, 2019), rotary positions (Su et al., 2021), grouped-query attention
(Ainslie et al., 2023), SwiGLU (Shazeer, 2020), and the embedding shared with the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; its width is `heads * head_dim`.

    Attributes:
        vocabulary: number of distinct tokens.
        layers: number of blocks.
        heads: query heads.
        kv_heads: key and value heads; must divide `heads`.
        head_dim: width of one head; even, because rotary positions turn pairs.
        seq_len: longest sequence, in tokens.
    """

    vocabulary: int
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    seq_len: int = 128

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads != 0:
            msg = f"heads must be a multiple of kv_heads, got heads={self.heads} and kv_heads={self.kv_heads}"
            raise ValueError(msg)
        if self.head_dim % 2 != 0:
            msg = f"head_dim must be even, got {self.head_dim}"
            raise ValueError(msg)

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.heads * self.head_dim


def rotary_table(seq_len: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, each fp32 of shape [seq_len, head_dim // 2]."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (x[i], x[i + head_dim // 2]) of a [B, H, S, D] tensor by its position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.project_in = nn.Linear(config.width, (config.heads + 2 * config.kv_heads) * config.head_dim, bias=False)
        self.project_out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attends within [B, S, width]; cos and sin are [S, head_dim // 2]."""
        batch, length, width = x.shape
        qkv = self.project_in(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        out = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        return self.project_out(out.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """SwiGLU, three times as wide as the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, 6 * config.width, bias=False)
        self.narrow = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, width] to the same shape."""
        gate, up = self.widen(x).chunk(2, dim=-1)
        return self.narrow(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Maps [B, S, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Predicts each next token."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        cos, sin = rotary_table(config.seq_len, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write to the residual stream start smaller, so that its variance does not grow with depth.
                writes_residual = name.endswith(("project_out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5 if writes_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [B, S, vocabulary] for int64 tokens [B, S]."""
        length = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a token, of int64 targets [B, S]."""
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
