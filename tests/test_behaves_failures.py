"""Exceptions in the middle of a pass, and the steps after them."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from contextlib import suppress

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import Stack, make_stack, run_steps, sharded, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyshard.testing import run_ranks


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


def faces(model: nn.Module) -> set[str]:
    return {type(parameter).__name__ for parameter in model.parameters()}


class Catching(Stack):
    """Goes on where a block is interrupted."""

    def forward(self, x: Tensor, order: object = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            try:
                x = block(x)
            except KeyboardInterrupt:
                x = x + 1.0
        return self.last(x)


def interrupts_between_passes(
    rank: int, strategy: str, mode: str, catches: bool, reshard: bool
) -> list[set[str]]:
    """What parameters are, after each event; the open forward's gradients are as ever."""
    side = Side(2, rank, strategy)
    torch.manual_seed(1)
    model = sharded(side, Catching() if catches else Stack(), reshard_after_forward=reshard)
    x = side.data(0, 6, 4)[rank]
    square(model(x)).backward()
    wanted = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    fuse = Fuse(model.blocks[0].widen, "after forward", KeyboardInterrupt)
    loss, seen = square(model(x)), []
    fuse.lit = True
    with torch.no_grad() if mode == "evaluation" else torch.enable_grad():
        try:
            model(x)
            assert catches
        except KeyboardInterrupt:
            seen.append(faces(model))
    fuse.lit = False
    seen.append(faces(model))
    loss.backward()
    seen.append(faces(model))
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), grad)
    return seen


@pytest.mark.behaviour(19)
@over_strategies
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("catches", [False, True], ids=["goes through", "is caught"])
@pytest.mark.parametrize("mode", ["evaluation", "training"])
def test_parameters_after_an_interrupt(
    mode: str, catches: bool, reshard: bool, strategy: str
) -> None:
    """Ctrl-C in a forward, whether it goes through or is caught inside, leaves parameters sharded,
    and the backward of an earlier forward as it was."""
    for seen in run_ranks(2, interrupts_between_passes, strategy, mode, catches, reshard):
        assert all(kinds == {"ShardedTensor"} for kinds in seen)


def dropped_after_an_interrupt(rank: int) -> bool:
    model = make_stack(Side(2, rank, "zero3"))
    Fuse(model.blocks[0].widen, "after forward", KeyboardInterrupt).lit = True
    gc.disable()
    with suppress(KeyboardInterrupt):
        model(torch.ones(2, 4))
    reference = weakref.ref(model.last.weight)
    del model
    gone = reference() is None
    gc.enable()
    return gone


@pytest.mark.behaviour(19, 23)
def test_a_model_dropped_after_an_interrupt() -> None:
    """A model whose forward ended by Ctrl-C frees its memory at once when it is deleted."""
    assert run_ranks(2, dropped_after_an_interrupt) == [True, True]


def be_late(module: nn.Module, args: object, output: Tensor) -> None:
    """In backward, before the module is reached."""
    output.register_hook(lambda grad: time.sleep(0.3))


def dropped_with_a_gather_under_way(rank: int) -> bool:
    side = Side(2, rank, "zero3")
    model = Stack(3)
    model.blocks[1].widen.requires_grad_(False)  # two groups, so two gathers
    sharded(side, model)
    square(model(torch.ones(2, 4))).backward()
    Fuse(model.blocks[2].narrow, "in backward").lit = True
    if rank:
        model.blocks[2].register_forward_hook(be_late)
    loss = square(model(torch.ones(2, 4)))
    with pytest.raises(Mishap):
        loss.backward()
    # The first rank's lane gathers the next block, and waits for the other rank.
    del model, loss
    gc.collect()
    model = make_stack(side, 3)
    square(model(torch.ones(2, 4))).backward()
    return model.last.weight.grad is not None


@pytest.mark.behaviour(19, 23)
def test_a_model_dropped_with_a_gather_under_way() -> None:
    """A model that is dropped right after a backward failed, while a gather ahead waits for another
    rank, leaves its lanes to the next model."""
    assert run_ranks(2, dropped_with_a_gather_under_way) == [True, True]
