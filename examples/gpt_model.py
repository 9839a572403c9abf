"""A small GPT over bytes. Knows nothing of ranks, sharding or training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model; the vocabulary is the 256 byte values."""

    num_blocks: int = 4
    num_heads: int = 4
    width: int = 256
    context: int = 64
    vocabulary: int = 256


class Block(nn.Module):
    """Causal self-attention and an MLP, each normalised before and added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """``x``: ``[batch, time, width]``, like the result; ``angles``: those of its positions."""
        batch, time, width = x.shape
        heads = self.attention_in(self.attention_norm(x))
        heads = heads.view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Normalised queries and keys keep attention calm at a learning rate that is worth having.
        query, key = (rotate(F.rms_norm(t, t.shape[-1:]), angles) for t in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


def rotation_angles(time: int, head_width: int) -> Tensor:
    """``[time, head_width / 2]``: how far each position turns each pair of features."""
    pairs = head_width // 2
    return torch.arange(time)[:, None] * 1000.0 ** (-torch.arange(pairs) / pairs)


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of features of ``[..., time, head_width]`` by position (Su et al. 2021)."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class GPT(nn.Module):
    """Byte embedding, blocks with rotary positions, and a head that is tied to the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.byte_embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.byte_embedding.weight
        self._initialise(config)

    def _initialise(self, config: GPTConfig) -> None:
        # Each block adds twice to the residual stream; scaling those two projections keeps the
        # variance of its sum independent of the depth (Radford et al. 2019, section 2.3).
        residual_scale = (2 * config.num_blocks) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = residual_scale if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """``inputs`` and ``targets``: ``[batch, time]``, int64.

        Returns the mean cross-entropy in nats per byte, or without targets the logits
        ``[batch, time, 256]``.
        """
        angles = rotation_angles(inputs.shape[1], self.head_width)
        x = self.byte_embedding(inputs)
        for block in self.blocks:
            x = block(x, angles)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: bytes,
    num_bytes: int,
    *,
    context: int,
    temperature: float = 0.7,
    seed: int = 0,
) -> bytes:
    """Continue ``prompt`` by ``num_bytes`` sampled bytes; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(num_bytes):
        logits = model(text[:, -context:])[:, -1].float()
        chances = torch.softmax(logits / temperature, dim=-1)
        drawn = torch.multinomial(chances, num_samples=1, generator=generator)
        text = torch.cat([text, drawn], dim=1)
    return bytes(text[0].tolist())
