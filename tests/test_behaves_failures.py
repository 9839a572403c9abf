"""Exceptions in the middle of a pass, and the steps after them."""

from __future__ import annotations

import functools

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import Stack, make_stack, run_steps, sharded, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Mishap(Exception):
    """What goes wrong in user code."""


class Fuse:
    """Makes a module fail where it is told, while it is lit."""

    def __init__(self, module: nn.Module, when: str, kind: type[BaseException] = Mishap) -> None:
        self.lit, self.when, self.kind = False, when, kind
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: object) -> None:
        if self.lit and self.when == "before forward":
            raise self.kind

    def _after(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.lit and self.when == "after forward":
            raise self.kind
        # What is recomputed in a backward is not the first forward.
        inside = torch._C._current_graph_task_id() != -1
        if self.lit and self.when == "recomputation" and inside:
            raise self.kind
        if self.lit and self.when == "in backward" and output.requires_grad:
            output.register_hook(self._blow)

    def _blow(self, grad: Tensor) -> None:
        if self.lit:
            raise self.kind

    def blows(self, side: Side, run: object) -> None:
        """Run what is to fail, on the sharded side; the plain side is as if it had not happened."""
        if side.sharded:
            self.lit = True
            with pytest.raises(self.kind):
                run()  # type: ignore[operator]
            self.lit = False


def interrupted(side: Side, place: str, when: str) -> None:
    """In the first step and in a later one, in the last of two microbatches."""
    model = make_stack(side, 3)
    fuse = Fuse(model.get_submodule(place), when)

    def run(step: int, micro: int) -> None:
        inputs = side.data(10 * step + micro, 6, 4)
        with side.microbatch(model, micro == 1):
            loss = side.mean(lambda rank: square(model(inputs[rank])))
        loss.backward()

    def body(step: int) -> None:
        run(step, 0)
        if step in (0, 2):
            fuse.blows(side, lambda: run(step, 1))
            if side.sharded and when == "in backward":
                model.zero_grad()  # some of it may have been added up
                run(step, 0)
        run(step, 1)

    run_steps(side, model, body, 4)


@pytest.mark.behaviour(19)
@over_strategies
@pytest.mark.parametrize("when", ["before forward", "after forward", "in backward"])
@pytest.mark.parametrize("place", ["", "blocks.1", "blocks.1.narrow"])
def test_the_step_after_an_exception(place: str, when: str, strategy: str) -> None:
    """After an exception in the root, in a unit or inside one, in forward or backward, training is
    as if it had not happened."""
    compare(functools.partial(interrupted, place=place, when=when), strategy)


def evaluations_that_fail(side: Side) -> None:
    """Between a forward and its backward."""
    model = make_stack(side)
    fuse = Fuse(model.blocks[0].widen, "after forward")

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        loss = side.mean(lambda rank: square(model(inputs[rank])))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                fuse.blows(side, lambda: model(inputs[side.ranks[0]]))
        loss.backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(19)
@over_strategies
def test_evaluations_that_fail(strategy: str) -> None:
    """An evaluation that raises between a forward and its backward leaves that backward as it
    was."""
    compare(evaluations_that_fail, strategy)


def interrupts(side: Side, evaluating: bool) -> None:
    model = make_stack(side)
    fuse = Fuse(model.blocks[0].widen, "after forward", KeyboardInterrupt)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        with torch.set_grad_enabled(not evaluating):
            fuse.blows(side, lambda: model(inputs[side.ranks[0]]))
        side.mean(lambda rank: square(model(inputs[rank]))).backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(19)
@over_strategies
@pytest.mark.parametrize("evaluating", [True, False], ids=["evaluation", "training"])
def test_forwards_that_are_interrupted(evaluating: bool, strategy: str) -> None:
    """After a forward that ended by Ctrl-C, of which no hook is told, the next step is as if it had
    not happened."""
    compare(functools.partial(interrupts, evaluating=evaluating), strategy)


class Recomputing(Stack):
    reentrant = True

    def forward(self, x: Tensor, order: object = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def failing_recomputation(side: Side, reentrant: bool) -> None:
    torch.manual_seed(1)
    model = sharded(side, Recomputing(3))
    model.reentrant = reentrant
    fuse = Fuse(model.blocks[1].narrow, "recomputation")

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)

        def run() -> None:
            side.mean(lambda rank: square(model(inputs[rank]))).backward()

        fuse.blows(side, run)
        model.zero_grad()
        run()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(16, 19)
@over_strategies
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
def test_an_exception_while_recomputing(reentrant: bool, strategy: str) -> None:
    """After an exception in a recomputed forward, the next step is as if it had not happened."""
    compare(functools.partial(failing_recomputation, reentrant=reentrant), strategy)


def failing_second_derivatives(side: Side) -> None:
    model = make_stack(side)
    fuse = Fuse(model.blocks[0], "in backward")

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)

        def loss_of(rank: int, fails: bool) -> Tensor:
            lit, fuse.lit = fuse.lit, False  # the first derivative succeeds
            x = inputs[rank].clone().requires_grad_()
            if fails:
                fuse.lit = True
            output = model(x)
            fuse.lit = False
            (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
            fuse.lit = lit
            return square(output) + square(grad)

        fuse.blows(side, lambda: side.mean(lambda rank: loss_of(rank, True)).backward())
        model.zero_grad()
        side.mean(lambda rank: loss_of(rank, False)).backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(14, 19)
@over_strategies
def test_an_exception_in_second_derivatives(strategy: str) -> None:
    """A backward that fails in what `create_graph` recorded leaves the next step as it would be."""
    compare(failing_second_derivatives, strategy)
