"""Work grows with units, with parameters and not with ranks: counted in calls, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import OneRank
from torch import Tensor, nn

from polyshard.layout import GlobalLayout
from polyshard.row_split import RowSplit


class Many(nn.Module):
    """Layers one after the other, each with a few parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calls_of(action: Callable[[], object]) -> int:
    """How many functions run, in Python and in C."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def wrap_and_step(world: OneRank, layers: int, each: bool) -> dict[str, int]:
    """Calls to make units of a model, and in its first and second step."""
    model = Many(layers)
    modules: list[Any] = [*model.layers, model] if each else [model]

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        model.zero_grad()

    wrapped = calls_of(lambda: world.shard(*modules))
    return {"wrap": wrapped, "first step": calls_of(step), "second step": calls_of(step)}


@pytest.mark.parametrize("each", [True, False], ids=["units", "parameters"])
def test_twice_as_many_cost_twice_as_much(world: OneRank, each: bool) -> None:
    """Twice the units, or the parameters of one unit, take little more than twice the calls."""
    wrap_and_step(world, 4, each)  # what is made once for all is made
    few, many = (wrap_and_step(world, layers, each) for layers in (40, 80))
    for phase, calls in many.items():
        assert calls <= 2.2 * few[phase], phase


def test_ranks_cost_nothing() -> None:
    """Where the rows of a tensor lie on a thousand ranks is said as fast as where on two."""
    shapes = [(64, 3), (1000,), (), (7, 5, 2)]

    def say(layout: GlobalLayout) -> None:
        for index in range(len(shapes)):
            ranges = layout.row_ranges(index)
            split = RowSplit(ranges, (0,))
            assert split == RowSplit(ranges, (0,))
            assert split.row_count == (shapes[index][0] if shapes[index] else 1)

    two, thousand = (GlobalLayout.build(shapes, shards) for shards in (2, 1024))
    say(two)
    assert calls_of(lambda: say(thousand)) <= calls_of(lambda: say(two)) + 8


@pytest.mark.parametrize("num_shards", [1, 3, 64])
def test_ranges_are_those_of_a_written_split(num_shards: int) -> None:
    """A split in five numbers equals, in value and hash, the one with every range written out."""
    layout = GlobalLayout.build([(6, 3), (1000,), (), (7, 5, 2), (0, 4), (4, 0)], num_shards)
    for index in range(len(layout.shapes)):
        ranges = layout.row_ranges(index)
        assert ranges[-1] == ranges[num_shards - 1]
        assert ranges[: num_shards // 2] == list(ranges)[: num_shards // 2]
        computed, written = RowSplit(ranges, (0,)), RowSplit(list(ranges), (0,))
        assert computed == written
        assert hash(computed) == hash(written)
        with pytest.raises(IndexError):
            ranges[num_shards]
