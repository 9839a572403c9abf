"""Forwards, backwards, steps and calls of units in orders of all kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import Stack, make_stack, run_steps, sharded, square
from torch import Tensor, nn

from polyshard import SchedulePolicy


def loss_on(side: Side, model: Stack, seed: int, *arguments: object) -> Tensor:
    """The mean loss on every rank's own data."""
    inputs = side.data(seed, 6, 4)
    return side.mean(lambda rank: square(model(inputs[rank], *arguments)))


# -- several forwards, several backwards ------------------------------------------------------


def interleaved(side: Side, order: Sequence[int], scoped: bool) -> None:
    model = make_stack(side)

    def body(step: int) -> None:
        losses = []
        for micro in range(3):
            with side.microbatch(model, not scoped or micro == 2):
                losses.append(loss_on(side, model, 10 * step + micro))
        for index in order:
            losses[index].backward()

    run_steps(side, model, body, 3 if scoped else 10)


@pytest.mark.behaviour(14)
@over_strategies
@pytest.mark.parametrize(
    ("order", "scoped"),
    [((0, 1, 2), False), ((2, 1, 0), False), ((1, 2, 0), False), ((0, 1, 2), True)],
    ids=["same", "reverse", "mixed", "microbatches"],
)
def test_forwards_before_their_backwards(
    order: tuple[int, ...], scoped: bool, strategy: str
) -> None:
    """Several forwards, then their backwards in the same, the reverse or any order: gradients add
    up."""
    compare(functools.partial(interleaved, order=order, scoped=scoped), strategy)


def repeated(side: Side) -> None:
    model = make_stack(side)

    def body(step: int) -> None:
        for micro in range(2):
            with side.microbatch(model, micro == 1):
                loss = loss_on(side, model, 10 * step + micro)
            loss.backward(retain_graph=True)
            with torch.no_grad():
                loss_on(side, model, 7)
            (0.5 * loss).backward(retain_graph=True)
            loss.backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(14)
@over_strategies
def test_backwards_through_one_graph(strategy: str) -> None:
    """A graph that is retained may be run any number of times, also in microbatches and with
    evaluations in between; contributions add up."""
    compare(repeated, strategy)


class TwoOutputs(Stack):
    def forward(self, x: Tensor, order: object = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        early = self.blocks[0](self.first(x))
        return self.last(early), self.last(self.blocks[1](early))


def two_losses(side: Side) -> None:
    torch.manual_seed(1)
    model = sharded(side, TwoOutputs())

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        outputs = [model(inputs[rank]) for rank in side.ranks]
        torch.stack([square(early) for early, _ in outputs]).mean().backward(retain_graph=True)
        torch.stack([square(late) for _, late in outputs]).mean().backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(14)
@over_strategies
def test_a_backward_through_a_part(strategy: str) -> None:
    """Two outputs of one forward have a backward each; the first goes through some units only."""
    compare(two_losses, strategy)


# -- orders of units --------------------------------------------------------------------------

ORDERS = [(0, 1, 2, 3), (0, 2, 3), (3, 2, 1, 0), (1,), (), (2, 2, 0), (3, 0), (1, 2, 1, 2), (2,)]


def changing_orders(side: Side, ahead: int, evaluated: bool) -> None:
    policy = SchedulePolicy(ahead, ahead)
    model = make_stack(side, 4, schedule_policy=policy)

    def body(step: int) -> None:
        loss = loss_on(side, model, step, ORDERS[step % len(ORDERS)])
        if evaluated:
            with torch.inference_mode():
                loss_on(side, model, 3, ORDERS[-step % len(ORDERS)])
        loss.backward()

    run_steps(side, model, body, len(ORDERS) + 2)


@pytest.mark.behaviour(15)
@over_strategies
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_changing_orders(ahead: int, strategy: str) -> None:
    """Units that are skipped after they were gathered ahead, repeated, or come in another order
    than last time train as in a plain process, however far ahead is gathered; so they do with
    evaluations in yet another order between forward and backward."""
    scenario = functools.partial(changing_orders, ahead=ahead, evaluated=ahead == 1)
    compare(scenario, strategy)


class Dropping(Stack):
    """Drops what some blocks computed, or computes some blocks without gradients."""

    def forward(self, x: Tensor, dropped: tuple[int, ...] = (), graph: bool = True) -> Tensor:  # type: ignore[override]
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            if index not in dropped:
                x = block(x)
            elif graph:
                block(x)
            else:
                with torch.no_grad():
                    x = x + block(x)
        return self.last(x)


def dropped_outputs(side: Side, graph: bool) -> None:
    torch.manual_seed(1)
    model = sharded(side, Dropping(4))

    def body(step: int) -> None:
        dropped = [(0,), (1, 2), (), (3,), (0, 1, 2, 3)][step]
        loss_on(side, model, step, dropped, graph).backward()

    run_steps(side, model, body, 5)


@pytest.mark.behaviour(15)
@over_strategies
@pytest.mark.parametrize("graph", [True, False], ids=["dropped", "no-grad"])
def test_units_that_backward_skips(graph: bool, strategy: str) -> None:
    """A unit whose output goes nowhere, or that ran under no_grad, is skipped by backward: its
    gradient is None where a plain process has None, and the others' are right."""
    compare(functools.partial(dropped_outputs, graph=graph), strategy)


# -- units alone ------------------------------------------------------------------------------


def alone(side: Side, plan: str) -> None:
    """By letter: p, the parent; c and d, its children; e, a child's evaluation."""
    model = make_stack(side)

    def part(what: str, seed: int) -> Tensor:
        if what == "p":
            return loss_on(side, model, seed)
        inputs = side.data(seed, 6, 5)
        child = model.blocks["cd".index(what)]
        return side.mean(lambda rank: square(child(inputs[rank])))

    def body(step: int) -> None:
        for place, entry in enumerate(plan.split()):
            seed = 100 * step + 10 * place
            if entry == "e":
                with torch.no_grad():
                    part("c", seed)
            elif "+" in entry:  # all in one backward
                sum(part(what, seed + i) for i, what in enumerate(entry.split("+"))).backward()
            else:  # all forwards, then the backwards: "pd/dp"
                forwards, _, backwards = entry.partition("/")
                losses = {what: part(what, seed + i) for i, what in enumerate(forwards)}
                for what in backwards or forwards:
                    losses[what].backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(29)
@over_strategies
@pytest.mark.parametrize(
    "plan", ["c p", "p c", "e p e", "c d p c e", "p+c", "pd/pd pd/dp", "dp/dp"]
)
def test_units_alone(plan: str, strategy: str) -> None:
    """A child unit called alone, then its parent, or the other way round, between the other's
    forward and backward, or in one backward with it: training is plain training."""
    compare(functools.partial(alone, plan=plan), strategy)


def children_only(side: Side) -> None:
    """The parent runs for the first time long after its children."""
    model = make_stack(side)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 5)
        first, second = model.blocks
        side.mean(lambda rank: square(second(first(inputs[rank])))).backward()
        if step == 2:
            loss_on(side, model, step).backward()

    run_steps(side, model, body, 4)


@pytest.mark.behaviour(29)
@over_strategies
def test_children_before_their_parent_ever_ran(strategy: str) -> None:
    """Children that run one after the other, each as a root of its own, in one backward."""
    compare(children_only, strategy)


# -- several roots ----------------------------------------------------------------------------


class Skipping(nn.Module):
    """Two units, of which a forward may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.one(x)
        return x if skip else self.other(torch.tanh(x))


def a_unit_skipped(first: Skipping, second: Skipping, x: Tensor, rank: int) -> Tensor:
    """One rank skips a unit of the root whose backward comes first."""
    return first(x) + second(x, skip=rank == 1)


def a_forward_for_nothing(first: Skipping, second: Skipping, x: Tensor, rank: int) -> Tensor:
    """One rank does not use the last forward, after which the other's backward begins."""
    total = first(x) + second(x)
    again = first(2 * x)
    return total if rank == 1 else total + again


def two_roots(side: Side, way: Callable[[Skipping, Skipping, Tensor, int], Tensor]) -> None:
    first, second = Skipping(), Skipping()
    for model in (first, second):
        side.shard(model.one, model.other, model)
    for step in range(3):
        data = side.data(step, 6, 4)
        side.mean(lambda rank, data=data: square(way(first, second, data[rank], rank))).backward()
        side.note_model(first)
        side.note_model(second)


@pytest.mark.parametrize("way", [a_unit_skipped, a_forward_for_nothing])
def test_several_roots(way: Callable[[Skipping, Skipping, Tensor, int], Tensor]) -> None:
    """Roots that are never gathered reduce in one order, whatever of them each rank uses."""
    compare(functools.partial(two_roots, way=way), "ddp")


# -- weights that change in between -----------------------------------------------------------


def changed(side: Side, name: str, how: str, backwards: int) -> None:
    model = make_stack(side)
    loss = loss_on(side, model, 0)
    for _ in range(backwards - 1):
        loss.backward(retain_graph=True)
    parameter = model.get_parameter(name)
    with torch.no_grad():
        if how == "in place":
            parameter.mul_(1.1)
        elif how == "detached":
            parameter.detach().mul_(1.1)
        elif how == "foreach":
            torch._foreach_mul_([parameter], 1.1)
        else:
            parameter.grad = torch.ones_like(parameter)
            torch.optim.AdamW([parameter]).step()
    with side.note_error():
        loss.backward()
    model.zero_grad()
    loss_on(side, model, 0).backward()
    side.note_model(model)


@pytest.mark.behaviour(30)
@over_strategies
@pytest.mark.parametrize(
    ("name", "how", "backwards"),
    [
        ("blocks.0.widen.weight", "in place", 1),
        ("blocks.0.widen.weight", "foreach", 1),
        ("blocks.0.scale", "step", 1),
        ("last.weight", "detached", 2),
        ("first.weight", "foreach", 1),  # not needed
        ("blocks.1.narrow.bias", "step", 2),  # not needed
    ],
)
def test_changed_weights(name: str, how: str, backwards: int, strategy: str) -> None:
    """A weight that was written between a forward and its backward, or between two backwards, is
    an error on every rank where it is one in a plain process, and only there; the next step is as
    good as any."""
    compare(functools.partial(changed, name=name, how=how, backwards=backwards), strategy)
