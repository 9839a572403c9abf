"""Activation checkpointing of both kinds, around units and inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import Block, Stack, run_steps, sharded, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from polyshard.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
kinds = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])


class Recomputing(Stack):
    """Recomputes what the name of a method says."""

    def __init__(self, what: str, reentrant: bool) -> None:
        super().__init__(3)
        self.what, self.reentrant = what, reentrant
        if what == "inside":
            self.blocks = nn.ModuleList(RecomputingBlock(reentrant) for _ in self.blocks)

    def forward(self, x: Tensor, order: object = None) -> Tensor:
        if self.what == "whole":
            return self.again(self.around, x)
        return self.last(getattr(self, self.what)(self.first(x)))

    def again(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def inside(self, x: Tensor) -> Tensor:
        return nn.Sequential(*self.blocks)(x)

    def around(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.what == "whole" else x
        for block in self.blocks:
            x = self.again(block, x)
        return self.last(x) if self.what == "whole" else x

    def several(self, x: Tensor) -> Tensor:
        x = self.again(lambda y: self.blocks[1](self.blocks[0](y)), x)
        return self.again(self.blocks[2], x)

    def sequential(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=self.reentrant)

    def nested(self, x: Tensor) -> Tensor:
        return self.again(lambda y: self.again(self.blocks[1], self.blocks[0](y)), x)

    def mixed(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return self.blocks[2](x)

    # -- one module, used several times ---------------------------------------------------------

    def twice(self, x: Tensor) -> Tensor:
        """And a third time without."""
        x = self.again(self.blocks[0], self.again(self.blocks[0], x))
        return self.blocks[0](x)

    def twice_at_once(self, x: Tensor) -> Tensor:
        return self.again(lambda y: self.blocks[0](self.blocks[0](y)), x)

    def twice_nested(self, x: Tensor) -> Tensor:
        return self.again(lambda y: self.again(self.blocks[0], self.blocks[0](y)), x)

    def side_by_side(self, x: Tensor) -> Tensor:
        return self.again(self.blocks[0], x) + self.again(self.blocks[0], 2 * x)


class RecomputingBlock(Block):
    """Recomputes all of its forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def recompute(side: Side, what: str, reentrant: bool, options: dict[str, Any]) -> None:
    """Steps of one backward, then of microbatches."""
    torch.manual_seed(1)
    model = sharded(side, Recomputing(what, reentrant), **options)

    def body(step: int) -> None:
        for micro in range(1 if step < 2 else 3):
            inputs = side.data(10 * step + micro, 6, 4)
            with side.microbatch(model, step < 2 or micro == 2):
                # Where the whole model is recomputed, its input has to need a gradient.
                loss = side.mean(lambda rank, x=inputs: square(model(x[rank].requires_grad_())))
            loss.backward()

    run_steps(side, model, body, 4)


@pytest.mark.behaviour(16)
@over_strategies
@kinds
@pytest.mark.parametrize(
    "what", ["around", "inside", "whole", "several", "sequential", "nested", "mixed"]
)
def test_recomputed_units(what: str, reentrant: bool, strategy: str) -> None:
    """What is recomputed in backward, one unit, several, a part of one, all, or one region inside
    another, trains as in a plain process, in microbatches too."""
    scenario = functools.partial(recompute, what=what, reentrant=reentrant, options={})
    compare(scenario, strategy)


@pytest.mark.behaviour(32)
@over_strategies
@kinds
@pytest.mark.parametrize("what", ["twice", "twice_at_once", "twice_nested", "side_by_side"])
def test_a_recomputed_module_used_twice(what: str, reentrant: bool, strategy: str) -> None:
    """Gradients of a module that is recomputed at several uses add up once for each."""
    options = {"reshard_after_forward": what != "twice_nested"}
    scenario = functools.partial(recompute, what=what, reentrant=reentrant, options=options)
    compare(scenario, strategy)


def other_forwards_in_between(side: Side, reentrant: bool) -> None:
    """Two forwards and an evaluation before the backwards; one block frozen from step to step."""
    torch.manual_seed(1)
    model = sharded(side, Recomputing("around", reentrant))

    def body(step: int) -> None:
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index != step)
        losses = []
        for seed in (step, 50 + step):
            inputs = side.data(seed, 6, 4)
            losses.append(side.mean(lambda rank, x=inputs: square(model(x[rank]))))
            with torch.no_grad():
                model(inputs[side.ranks[0]])
        for loss in losses:
            loss.backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(16)
@over_strategies
@kinds
def test_recomputed_after_other_forwards(reentrant: bool, strategy: str) -> None:
    """Forwards and evaluations between a forward and its recomputation, and blocks that are frozen
    and unfrozen, change nothing."""
    compare(functools.partial(other_forwards_in_between, reentrant=reentrant), strategy)


def changed_before_recomputation(side: Side, reentrant: bool, name: str) -> None:
    torch.manual_seed(1)
    model = sharded(side, Recomputing("around", reentrant))
    inputs = side.data(0, 6, 4)
    loss = side.mean(lambda rank: square(model(inputs[rank])))
    with torch.no_grad():
        model.get_parameter(name).mul_(1.5)
    with side.note_error():
        loss.backward()
    if name.startswith("blocks"):
        side.note_model(model)
    model.zero_grad()
    side.mean(lambda rank: square(model(inputs[rank]))).backward()
    side.note_model(model)


@pytest.mark.behaviour(16, 30)
@over_strategies
@kinds
@pytest.mark.parametrize("name", ["blocks.1.widen.weight", "last.weight"])
def test_weights_changed_before_recomputation(name: str, reentrant: bool, strategy: str) -> None:
    """A weight that changed since its forward is recomputed with as it is now, and is an error
    where it was saved, as in a plain process."""
    scenario = functools.partial(changed_before_recomputation, reentrant=reentrant, name=name)
    compare(scenario, strategy)


class Keeping(nn.Module):
    """Its second part keeps what the first, which is recomputed, has returned."""

    def __init__(self, reentrant: bool, returns: bool) -> None:
        super().__init__()
        self.reentrant, self.returns = reentrant, returns
        self.scale, self.last = Scale(), nn.Linear(4, 4)
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        self.kept = checkpoint(self.scale, x, use_reentrant=self.reentrant)
        output = self.last(self.kept)
        return (output, self.kept) if self.returns else output


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor.sin()


def make_keeping(side: Side, remedy: str) -> Keeping:
    torch.manual_seed(1)
    model = Keeping(reentrant=remedy != "saved", returns=remedy == "returned")
    side.shard(*([model.scale] if remedy == "a unit" else []), model)
    return model


def kept_of_what_is_recomputed(side: Side, remedy: str) -> None:
    model = make_keeping(side, remedy)
    inputs = side.data(0, 6, 4)

    def loss_of(rank: int) -> Tensor:
        model(inputs[rank].requires_grad_())
        return square(model.kept)

    side.mean(loss_of).backward()
    side.note_model(model)


@pytest.mark.behaviour(16, 18, 31)
@over_strategies
@pytest.mark.parametrize("remedy", ["saved", "returned", "a unit"])
def test_kept_of_what_is_recomputed(remedy: str, strategy: str) -> None:
    """A loss of only what was kept of a recomputed part has plain gradients where the checkpoint is
    not a reentrant one, the part is a unit of its own, or the forward returns what is kept."""
    compare(functools.partial(kept_of_what_is_recomputed, remedy=remedy), strategy)


def told_of_what_is_recomputed(rank: int, strategy: str) -> tuple[str, bool]:
    side = Side(2, rank, strategy)
    model, said = make_keeping(side, ""), ""
    x = side.data(0, 6, 4)[rank].requires_grad_()
    model(x)
    try:
        square(model.kept).backward()
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    square(model(x)).backward()
    return said, model.scale.factor.grad is not None


@pytest.mark.behaviour(31)
@over_strategies
def test_kept_of_a_reentrant_checkpoint(strategy: str) -> None:
    """Under a reentrant checkpoint inside a unit it is an error that says so and what to do, and
    the next backward works."""
    for said, works in run_ranks(2, told_of_what_is_recomputed, strategy):
        assert said.startswith("UnsupportedError: 'scale.factor'")
        assert "came there through no output of the unit" in said
        assert "use_reentrant=False" in said
        assert works
