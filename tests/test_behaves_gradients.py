"""Gradients that were cleared, scaled, replaced or added to, and what backwards add to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from behaving import Side, compare, over_strategies
from odd_net import Net, make_net, mean_square, note_grads
from torch import Tensor

from polyshard import UnsupportedError
from polyshard.testing import run_ranks

# -- cleared gradients ---------------------------------------------------------------------------


def every_gradient(change: Callable[[Tensor], object]) -> Callable[[Net], None]:
    def run(net: Net) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return run


def replace_gradients(make: Callable[[Tensor], Tensor]) -> Callable[[Net], None]:
    def run(net: Net) -> None:
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad = make(parameter.grad)

    return run


def clear_every_other(net: Net) -> None:
    for index, parameter in enumerate(net.parameters()):
        if index % 2:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def delete_gradients(net: Net) -> None:
    for parameter in net.parameters():
        del parameter.grad


CLEAR: dict[str, Callable[[Net], None]] = {
    "deleted": delete_gradients,
    "zeroed": every_gradient(lambda grad: grad.zero_()),
    "zeroed as data": every_gradient(lambda grad: grad.data.zero_()),
    "detached and zeroed": every_gradient(lambda grad: grad.detach_().zero_()),
    "halved": every_gradient(lambda grad: grad.mul_(0.5)),
    "zeroed in one call": lambda net: torch._foreach_zero_(
        [p.grad for p in net.parameters() if p.grad is not None]
    ),
    "replaced by zeros": replace_gradients(torch.zeros_like),
    "replaced by a half": replace_gradients(lambda grad: grad * 0.5),
    "some zeroed, some dropped": clear_every_other,
    "of one unit zeroed": lambda net: net.widen.zero_grad(set_to_none=False),
    "of one unit dropped": lambda net: net.widen.zero_grad(),
}


#: By letters: a backward alone, of a first or a last microbatch; clear; step.
PLANS = ["aacasca", "fcflsca", "facl", "fflcffls"]


def follow(side: Side, plan: str, clear: Callable[[Net], None]) -> None:
    net = make_net(side)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for seed, letter in enumerate(plan):
        if letter == "c":
            clear(net)
        elif letter == "s":
            optimizer.step()
        elif letter == "a":
            mean_square(side, net, seed).backward()
            note_grads(side, net)
        else:
            with side.microbatch(net, letter == "l"):
                loss = mean_square(side, net, seed)
            loss.backward()
            if letter == "l":
                note_grads(side, net)
    side.note_model(net)


def follow_all(side: Side, how: str) -> None:
    for plan in PLANS:
        follow(side, plan, CLEAR[how])


@pytest.mark.behaviour(5)
@over_strategies
@pytest.mark.parametrize("how", CLEAR)
def test_gradients_cleared_in_every_way(how: str, strategy: str) -> None:
    """However gradients are cleared, scaled or replaced, between steps or between microbatches,
    what comes next adds to what is there and to nothing else."""
    compare(partial(follow_all, how=how), strategy)


# -- penalties -----------------------------------------------------------------------------------


def penalty(net: Net) -> Tensor:
    """Of the weights at rest, the same on every rank."""
    return 0.05 * torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()


def penalised(side: Side, first: str, together: bool) -> None:
    net = make_net(side)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(10):
        if first == "penalty":
            terms = [penalty(net), mean_square(side, net, step)]
        else:
            terms = [mean_square(side, net, step), penalty(net)]
        if together:
            (terms[0] + terms[1]).backward()
        else:
            terms[0].backward()
            terms[1].backward()
        note_grads(side, net)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 4 == 1)
    side.note_model(net)


@pytest.mark.behaviour(2, 6, 7)
@over_strategies
@pytest.mark.parametrize("together", [True, False], ids=["one backward", "two backwards"])
@pytest.mark.parametrize("first", ["penalty", "loss"])
def test_penalties_on_weights_at_rest(first: str, together: bool, strategy: str) -> None:
    """A penalty on model.parameters() adds to gradients once, whether it was computed before the
    forward or after it, and whether backward takes both at once."""
    compare(partial(penalised, first=first, together=together), strategy)


def penalised_in_a_first_microbatch(side: Side) -> None:
    net = make_net(side)
    for step in range(3):
        for micro in range(2):
            with side.microbatch(net, micro == 1):
                loss = mean_square(side, net, 2 * step + micro)
            (loss if micro else loss + penalty(net)).backward()
        note_grads(side, net)
        net.zero_grad(set_to_none=step == 0)


@pytest.mark.behaviour(2, 7)
@over_strategies
def test_a_penalty_in_the_first_microbatch(strategy: str) -> None:
    """A penalty in the first microbatch of a step is in the finished gradient, once."""
    compare(penalised_in_a_first_microbatch, strategy)


def penalised_in_a_later_microbatch(rank: int, strategy: str) -> tuple[str, bool]:
    """What is said; and whether the next step is as if it had not happened."""
    side = Side(2, rank, strategy)
    net, other = make_net(side), make_net(side)
    said = ""
    with side.microbatch(net, False):
        mean_square(side, net, 0).backward()
    with side.microbatch(net, True):
        try:
            (mean_square(side, net, 1) + penalty(net)).backward()
        except UnsupportedError as error:
            said = str(error)
    for each in (net, other):
        each.zero_grad()
        mean_square(side, each, 2).backward()
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return said, all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in pairs)


@pytest.mark.behaviour(7)
@pytest.mark.parametrize("strategy", ["zero1", "hfsdp", "ddp"])
def test_a_penalty_in_a_later_microbatch(strategy: str) -> None:
    """Where gradients wait for the last microbatch, a penalty in a later one is an error on every
    rank that says where to put it."""
    for said, same in run_ranks(2, penalised_in_a_later_microbatch, strategy):
        assert "a gradient that waits for the last microbatch" in said
        assert "the gradient of a penalty on sharded weights" in said
        assert "to the loss of the first microbatch" in said
        assert same
