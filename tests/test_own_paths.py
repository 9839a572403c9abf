"""Ranks whose backwards differ although all enter the same units: results are those of one process.

A parameter that only some ranks use completes at different moments; nothing that is collective may
depend on the moment.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from strategies import STRATEGIES
from torch import Tensor, nn
from torch.nn import functional as F

from polyshard import FsdpModule, fully_shard, microbatch
from polyshard.testing import run_ranks

RANKS, WIDTH = 2, 5

#: What a rank does to a model; it is given whose part of the data it is to take.
Scenario = Callable[[nn.Module, list[int]], None]


class Choosing(nn.Module):
    """A layer that is always used and one by choice; or its input, handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.chosen = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, what: str) -> Tensor:
        if what == "skip":
            return x
        x = torch.tanh(self.always(x))
        return x + self.chosen(x) if what == "both" else x


class Chain(nn.Module):
    """Blocks in any order, each as often as wanted."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Choosing() for _ in range(blocks))

    def forward(self, x: Tensor, order: list[int], what: list[str]) -> Tensor:
        x = self.first(x)
        for index, how in zip(order, what, strict=True):
            x = self.blocks[index](x, how)
        return x


def loss(model: nn.Module, ranks: list[int], order: list[int], what: list[list[str]]) -> Tensor:
    """The mean over these ranks' parts, each taking its own way."""
    data = torch.randn(RANKS, 4, WIDTH, generator=torch.Generator().manual_seed(5))
    losses = [model(data[rank], order, what[rank]).square().mean() for rank in ranks]
    return torch.stack(losses).mean()


ALL = [["both"] * 3] * RANKS
ALL_OF_TWO = [["both"] * 2] * RANKS
LAST_UNUSED = [["both"] * 3, ["both", "both", "always"]]


def another_order(model: nn.Module, ranks: list[int]) -> None:
    loss(model, ranks, [2, 1, 0], ALL).backward()
    loss(model, ranks, [0, 1, 2], LAST_UNUSED).backward()


def backward_twice(model: nn.Module, ranks: list[int]) -> None:
    loss(model, ranks, [2, 1, 0], ALL).backward()
    total = loss(model, ranks, [0, 1, 2], LAST_UNUSED)
    total.backward(retain_graph=True)
    total.backward()


def two_forwards(model: nn.Module, ranks: list[int]) -> None:
    loss(model, ranks, [2, 1, 0], ALL).backward()
    one, other = (loss(model, ranks, [0, 1, 2], LAST_UNUSED) for _ in range(2))
    one.backward()
    other.backward()


def kept_and_new(model: nn.Module, ranks: list[int]) -> None:
    """One backward goes through a graph that was kept and through one made since."""
    kept = loss(model, ranks, [0, 1, 2], ALL)
    kept.backward(retain_graph=True)
    (kept + loss(model, ranks, [2, 1, 0], LAST_UNUSED)).backward()


def a_unit_twice(model: nn.Module, ranks: list[int]) -> None:
    """On rank 0 all gradients of block 1 come with its later call, on rank 1 with its earlier."""
    what = [["always", "both", "always"], ["both", "always", "always"]]
    for _ in range(2):
        loss(model, ranks, [1, 1, 0], what).backward()
        loss(model, ranks, [1, 0, 1], what).backward()


def handed_on(model: nn.Module, ranks: list[int]) -> None:
    """A block returns its input on one rank, as stochastic depth does."""
    for what in (["both", "skip", "both"], ["both", "both", "skip"], ["skip", "both", "both"]):
        loss(model, ranks, [0, 1, 2], [["both"] * 3, what]).backward()


def many_after_one(model: nn.Module, ranks: list[int]) -> None:
    """The unit that backward enters first has its gradients on one rank only; seven follow."""
    for _ in range(2):
        ways = [["both"] * 8, [*["both"] * 7, "always"]]
        loss(model, ranks, list(range(8)), ways).backward()


def scope(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """A microbatch of a sharded model; nothing for the plain one."""
    return microbatch(model, is_last) if isinstance(model, FsdpModule) else nullcontext()


def added_to_finished(model: nn.Module, ranks: list[int]) -> None:
    """Finished gradients are added to in a microbatch where one rank does not use them, and zeroed
    in place."""
    loss(model, ranks, [0, 1, 2], ALL).backward()
    with scope(model, False):
        another = loss(model, ranks, [0, 1, 2], LAST_UNUSED)
    another.backward()
    model.zero_grad(set_to_none=False)
    with scope(model, True):
        last = loss(model, ranks, [2, 1, 0], LAST_UNUSED)
    last.backward()


def last_comes_first(model: nn.Module, ranks: list[int]) -> None:
    """The backward of the last microbatch runs before an earlier one's; what that adds is finished
    with the next step, which does not enter all of its units."""
    with scope(model, False):
        earlier = loss(model, ranks, [1], [["both"], ["always"]])
    with scope(model, True):
        last = loss(model, ranks, [0, 2], ALL_OF_TWO)
    last.backward()
    earlier.backward()
    loss(model, ranks, [2, 0], ALL_OF_TWO).backward()


SCENARIOS: list[Scenario] = [
    added_to_finished,
    last_comes_first,
    kept_and_new,
    many_after_one,
    another_order,
    backward_twice,
    two_forwards,
    a_unit_twice,
    handed_on,
]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """The whole gradients by name."""
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def run(rank: int, strategy: str, scenario: Scenario) -> dict[str, Tensor | None]:
    model = make_chain()
    chosen = STRATEGIES[strategy]
    mesh = chosen.mesh((RANKS,) if strategy != "hfsdp" else (RANKS, 1))
    for block in model.blocks:
        fully_shard(block, mesh, chosen.placements)
    fully_shard(model, mesh, chosen.placements)
    scenario(model, [rank])
    return gradients(model)


def make_chain() -> Chain:
    torch.manual_seed(0)
    return Chain(8)


@pytest.mark.behaviour(11)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hfsdp", "ddp"])
def test_gradients_are_those_of_one_process(strategy: str, scenario: Scenario) -> None:
    """What a rank leaves out counts as zero there, and the others' gradients arrive."""
    plain = make_chain()
    scenario(plain, list(range(RANKS)))
    expected = gradients(plain)
    for found in run_ranks(RANKS, run, strategy, scenario):
        torch.testing.assert_close(found, expected)


class Detached(nn.Module):
    """Uses its weight beside itself, as data or detached; backward is slow to get there."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        aside = self.weight.data if self.use == "data" else self.weight.detach()
        return F.linear(Lingering.apply(F.linear(x, aside) * aside[0]), self.weight)


class Lingering(torch.autograd.Function):
    """Gives lanes the time to release what was given up too early."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        for _ in range(200):
            grad = grad.clone()
        return grad


def use_aside(rank: int, strategy: str, use: str) -> tuple[dict[str, Tensor | None], ...]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached(use), nn.Linear(WIDTH, 3))
    plain = copy.deepcopy(model)
    data = torch.randn(RANKS, 4, WIDTH)
    chosen = STRATEGIES[strategy]
    mesh = chosen.mesh((RANKS,))
    fully_shard(model[1], mesh, chosen.placements)
    fully_shard(model, mesh, chosen.placements)
    model(data[rank]).square().mean().backward()
    plain(data.flatten(0, 1)).square().mean().backward()
    return gradients(model), gradients(plain)


@pytest.mark.parametrize("use", ["data", "detach"])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_a_weight_is_there_until_backward_has_left_its_unit(strategy: str, use: str) -> None:
    """A weight's gradient may come before the last use of what was detached from it."""
    for found, expected in run_ranks(RANKS, use_aside, strategy, use):
        torch.testing.assert_close(found, expected)


class Complex(nn.Module):
    """Complex parameters, one of them used by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor, order: list[int], what: list[str]) -> Tensor:
        y = x.to(torch.complex64) @ self.mix
        return (y + self.shift if "both" in what else y).abs()


def complex_by_choice(rank: int, strategy: str) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = Complex()
    chosen = STRATEGIES[strategy]
    fully_shard(model, chosen.mesh((RANKS,)), chosen.placements)
    loss(model, [rank], [], [["both"], []]).backward()
    return gradients(model)


@pytest.mark.behaviour(10, 11)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_complex_parameter_that_some_ranks_used(strategy: str) -> None:
    """It counts as zero on the others, as a real one does."""
    torch.manual_seed(0)
    plain = Complex()
    loss(plain, [0, 1], [], [["both"], []]).backward()
    for found in run_ranks(RANKS, complex_by_choice, strategy):
        torch.testing.assert_close(found, gradients(plain))


def keep_a_gradient(rank: int, strategy: str) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    model = make_chain()
    chosen = STRATEGIES[strategy]
    fully_shard(model, chosen.mesh((RANKS,)), chosen.placements)
    loss(model, [rank], [0, 1, 2], ALL).backward()
    kept = model.first.weight.grad
    assert kept is not None
    before = kept.full_tensor()
    model.first.weight.grad = None
    loss(model, [rank], [2, 2], [["both", "skip"], ["both", "always"]]).backward()
    assert not torch.equal(before, model.first.weight.grad.full_tensor())
    return before, kept.full_tensor(), gradients(model)


@pytest.mark.behaviour(5)
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
def test_a_gradient_that_was_taken_away_keeps_its_values(strategy: str) -> None:
    """What was `.grad` belongs to its keeper once another gradient takes its place."""
    plain = make_chain()
    loss(plain, [0, 1], [0, 1, 2], ALL).backward()
    plain.first.weight.grad = None
    loss(plain, [0, 1], [2, 2], [["both", "skip"], ["both", "always"]]).backward()
    for before, after, found in run_ranks(RANKS, keep_a_gradient, strategy):
        assert torch.equal(before, after)
        torch.testing.assert_close(found, gradients(plain))
