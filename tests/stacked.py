"""The model that most tests of behaviours train: blocks with residuals between two layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from behaving import Side
from torch import Tensor, nn

WIDTH, INPUTS = 5, 4


class Block(nn.Module):
    """Odd row lengths and a 0-D parameter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 7), nn.Linear(7, width)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.widen(x))) * self.scale


class Stack(nn.Module):
    """Runs its blocks once each, or as told."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        x = self.first(x)
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        return self.last(x)


def sharded(side: Side, model: Stack, **options: object) -> Stack:
    """Every block a unit, then the rest."""
    side.shard(*model.blocks, model, **options)
    return model


def make_stack(side: Side, blocks: int = 2, **options: object) -> Stack:
    """A new stack, the same on every rank."""
    torch.manual_seed(1)
    return sharded(side, Stack(blocks), **options)


def square(output: Tensor) -> Tensor:
    """A loss that needs the output."""
    return output.square().mean()


def run_steps(side: Side, model: nn.Module, body: Callable[[int], None], steps: int) -> None:
    """AdamW on the gradients that ``body`` leaves in each step.

    Noted are the last gradients and the weights after them: what was wrong in an earlier step, None
    for zero included, is in these weights. Each note is a collective for each tensor.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        body(step)
        if step == steps - 1:
            side.note_model(model)
        optimizer.step()
        optimizer.zero_grad()
    side.note_model(model, grads=False)
