"""How a recursive forward is told from one that was interrupted and never left."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyshard.hooks import _runs_inside_itself


class Nesting(nn.Module):
    """Notes at every depth whether an outer call of it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: Tensor, more: int) -> Tensor:
        self.seen.append(_runs_inside_itself(self))
        return self(x, more - 1) if more else x


def test_an_outer_call_is_on_the_stack() -> None:
    """Each call of a module is a frame of nn.Module's `_call_impl` with the module as `self`."""
    model = Nesting()
    model(torch.ones(1), 2)
    assert model.seen == [False, True, True]


def test_other_modules_calls_do_not_count() -> None:
    inner = Nesting()

    class Outer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return inner(x, 0)

    Outer()(torch.ones(1))
    assert inner.seen == [False]
