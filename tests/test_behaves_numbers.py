"""Averages, microbatches and fresh weights: numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch
from behaving import Side, compare, over_strategies
from odd_net import Net, make_net, mean_square, note_grads
from strategies import mesh_for
from torch import nn

from polyshard import Flat, Partial, Placements, Replicate, fully_shard, unsharded

# -- averages ------------------------------------------------------------------------------------

PLACEMENTS = {
    "zero3": Placements.zero3("dp"),
    "ddp": Placements.ddp("dp"),
    "zero1-sum": Placements(("dp",), (Replicate(),), (Partial("sum"),), (Flat(),)),
    "hfsdp": Placements.hfsdp("outer", "inner"),
    "hsdp-sum": Placements(
        ("outer", "inner"),
        (Replicate(), Flat()),
        (Partial("sum"), Flat()),
        (Replicate(), Flat()),
    ),
}


def average(side: Side, name: str, shape: tuple[int, ...], divisor: float) -> None:
    placements = PLACEMENTS[name]
    torch.manual_seed(0)
    net = Net()
    if side.sharded:
        mesh = mesh_for(placements, shape)
        for module in (net.widen, net):
            fully_shard(module, mesh, placements, grad_divisor=divisor)
    factor = (shape[0] if name.endswith("sum") else 1) / divisor
    for seed, (scope, is_last) in enumerate([(0, 1), (1, 0), (1, 0), (1, 1), (0, 1)]):
        if scope:
            with side.microbatch(net, bool(is_last)):
                loss = mean_square(side, net, seed)
        else:
            loss = mean_square(side, net, seed)
        (loss if side.sharded else loss * factor).backward()
        if is_last:
            note_grads(side, net)


@pytest.mark.behaviour(1, 2, 3)
@pytest.mark.parametrize("divisor", [1.0, 4.0])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (ranks,)) for name in ("zero3", "ddp", "zero1-sum") for ranks in (1, 3)),
        *((name, shape) for name in ("hfsdp", "hsdp-sum") for shape in ((2, 2),)),
    ],
)
def test_averages_sums_and_divisors(name: str, shape: tuple[int, ...], divisor: float) -> None:
    """On 1, 3 and 4 ranks, sharded axes average, Partial ones do as they say, and grad_divisor
    divides once: in scopes, without, and both in turns."""
    ranks = torch.Size(shape).numel()
    # Each side makes its own mesh: the strategy's name is not used.
    compare(partial(average, name=name, shape=shape, divisor=divisor), "zero3", ranks=ranks)


def half_of_the_loss_twice(side: Side) -> None:
    net = make_net(side)
    for step in range(3):
        loss = mean_square(side, net, step)
        (loss * 0.5).backward(retain_graph=True)
        loss.backward(torch.tensor(0.5))
        note_grads(side, net)
        if step == 1:
            net.zero_grad()


@pytest.mark.behaviour(2)
@over_strategies
def test_scaled_backwards(strategy: str) -> None:
    """A backward given a gradient to start with, and a second one through the same graph, count as
    they do in one process."""
    compare(half_of_the_loss_twice, strategy)


# -- fresh weights -------------------------------------------------------------------------------


def no_grad() -> AbstractContextManager[object]:
    return torch.no_grad()


def inference() -> AbstractContextManager[object]:
    return torch.inference_mode()


def evaluate(
    side: Side, module: nn.Module, mode: Callable[[], AbstractContextManager[object]] = no_grad
) -> None:
    with mode():
        side.note_mean("evaluated", mean_square(side, module, 99).clone())


def swap_and_evaluate(side: Side, net: Net) -> None:
    with torch.no_grad():
        kept = [parameter.clone() for parameter in net.parameters()]
        for parameter in net.parameters():
            parameter.mul_(0.5)
        evaluate(side, net)
        for parameter, value in zip(net.parameters(), kept, strict=True):
            parameter.copy_(value)
    evaluate(side, net)


def write_whole_weights(side: Side, net: Net) -> None:
    with unsharded(net) if side.sharded else no_grad(), torch.no_grad():
        net.widen.weight[0].mul_(1.01)
        net.scale.add_(0.01)
        net.head.bias.zero_()
    evaluate(side, net)


def load_weights(side: Side, net: Net) -> None:
    net.load_state_dict({name: value * 0.9 for name, value in net.state_dict().items()})
    evaluate(side, net)


def write_rows(side: Side, net: Net) -> None:
    for parameter in net.parameters():
        rows = parameter.to_local() if side.sharded else parameter  # type: ignore[operator]
        rows.detach().mul_(0.99)
    evaluate(side, net, inference)


def evaluate_a_child(side: Side, net: Net) -> None:
    evaluate(side, nn.Sequential(net.widen, net.narrow), inference)


BETWEEN: dict[str, Callable[[Side, Net], None]] = {
    "no_grad": evaluate,
    "inference_mode": partial(evaluate, mode=inference),
    "swap": swap_and_evaluate,
    "unsharded": write_whole_weights,
    "load": load_weights,
    "rows": write_rows,
    "a child alone": evaluate_a_child,
}


def train_between(side: Side, what: str, before_step: bool, scoped: bool) -> None:
    net = make_net(side, reshard_after_forward=not scoped)
    if what == "inference_mode":
        BETWEEN[what](side, net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for step in range(4 if scoped else 10):
        for micro in range(2 if scoped else 1):
            if scoped:
                with side.microbatch(net, micro == 1):
                    loss = mean_square(side, net, 2 * step + micro)
            else:
                loss = mean_square(side, net, step)
            loss.backward()
        if before_step:
            BETWEEN[what](side, net)
        if step % 3 == 0:
            note_grads(side, net)
        optimizer.step()
        if not before_step:
            BETWEEN[what](side, net)
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    evaluate(side, net)


@pytest.mark.behaviour(4, 6)
@over_strategies
@pytest.mark.parametrize(("before_step", "scoped"), [(True, False), (False, True)])
@pytest.mark.parametrize("what", BETWEEN)
def test_what_happens_between_passes(
    what: str, before_step: bool, scoped: bool, strategy: str
) -> None:
    """Evaluations, exchanged, loaded and written weights between a backward, its step and the next
    forward: over up to ten AdamW steps every forward uses the weights as they are."""
    compare(partial(train_between, what=what, before_step=before_step, scoped=scoped), strategy)
