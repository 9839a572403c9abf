"""Models that checks train, and their data. Knows no ranks and no sharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: How a model recomputes its blocks: not at all, or by a kind of activation checkpointing.
RECOMPUTE: dict[str, bool | None] = {"nothing": None, "reentrant": True, "saved": False}


class OddBlock(nn.Module):
    """Odd row lengths, a 0-D parameter, a frozen one and an unused one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x))) * self.scale + self.shift


class OddModel(nn.Module):
    """Odd blocks between a tied embedding and head; ``tokens`` to logits."""

    vocabulary = 13

    def __init__(self, width: int = 6, blocks: int = 2, recompute: bool | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.blocks = nn.ModuleList(OddBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, self.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


@dataclass(frozen=True)
class Size:
    """Of a transformer and of its batch."""

    blocks: int
    width: int
    heads: int = 4
    tokens: int = 64
    batch: int = 4
    vocabulary: int = 256


class Block(nn.Module):
    """Causal self-attention and an MLP, ``[batch, tokens, width]`` to the same."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.attend = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.attend(self.norms[0](x)).view(batch, tokens, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.narrow(F.gelu(self.widen(self.norms[1](x))))


class Transformer(nn.Module):
    """``tokens`` of shape ``[batch, tokens]`` to the mean cross entropy of guessing the next."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def transformer(size: Size, device: torch.device, seed: int = 0) -> Transformer:
    """The same at every call."""
    torch.manual_seed(seed)
    return Transformer(size).to(device)


def units_of(model: nn.Module) -> list[nn.Module]:
    """What is made a unit, bottom-up: each block, and the rest."""
    return [*model.blocks, model]  # type: ignore[misc]


def batches(size: Size, device: torch.device, seed: int = 1) -> Callable[[int], Tensor]:
    """Tokens of a step, by its number."""

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        shape = (size.batch, size.tokens)
        return torch.randint(size.vocabulary, shape, generator=generator).to(device)

    return batch
