"""What the random-model tester found, each reduced to the few lines that show it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from behaving import Side, compare, over_strategies
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import polyshard.api
from polyshard import Placements, fully_shard
from polyshard.testing import run_ranks

WIDTH = 3


class Shift(nn.Module):
    """Adds a parameter, on some ranks only if told; else hands its input on, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, used: bool = True, viewed: bool = False) -> Tensor:
        if used:
            x = x + torch.sin(self.shift)
        return x[:] if viewed else x


class Model(nn.Module):
    """Two units and a layer of the root's own; what it does with them is up to the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = Shift(), Shift()

    def forward(self, x: Tensor, way: Callable[[Model, Tensor, int], Tensor], rank: int) -> Tensor:
        return way(self, x, rank)


def repeated(model: Model, x: Tensor, rank: int) -> Tensor:
    """Between two calls of a unit one rank alone uses a layer of the root."""
    x = model.one(model.layer(x))
    if rank == 0:
        x = torch.tanh(model.layer(x))
    return model.one(model.other(x))


def repeated_at_once(model: Model, x: Tensor, rank: int) -> Tensor:
    x = model.one(model.layer(x))
    if rank == 0:
        x = torch.tanh(model.layer(x))
    return model.one(x)


def recomputed(model: Model, x: Tensor, rank: int) -> Tensor:
    """After a unit in a reentrant checkpoint one rank alone uses a layer of the root."""
    x = checkpoint(model.one, model.layer(x), use_reentrant=True)
    if rank == 0:
        x = x + torch.tanh(model.layer(x))
    return model.other(x)


def recomputed_and_handed_on(model: Model, x: Tensor, rank: int) -> Tensor:
    """A unit in a reentrant checkpoint returns what it was given, on one rank."""
    x = model.other(model.layer(x))
    return checkpoint(model.one, x, rank == 0, use_reentrant=True)


def handed_on(model: Model, x: Tensor, rank: int) -> Tensor:
    """A unit returns another's output, on one rank."""
    return model.one(model.other(model.layer(x)), rank == 0)


def viewed_and_handed_on(model: Model, x: Tensor, rank: int) -> Tensor:
    """A unit returns a view that another made, on one rank."""
    return model.one(model.other(model.layer(x), used=False, viewed=True), rank == 0)


WAYS = [
    repeated,
    repeated_at_once,
    recomputed,
    recomputed_and_handed_on,
    handed_on,
    viewed_and_handed_on,
]


def take(side: Side, way: Callable[[Model, Tensor, int], Tensor]) -> None:
    model = Model()
    side.shard(model.one, model.other, model)
    for step in range(3):
        data = side.data(step, 4, WIDTH)
        for tensor in data:
            tensor.requires_grad_()
        loss = side.mean(lambda rank, data=data: model(data[rank], way, rank).square().mean())
        if step == 2:
            loss.backward(retain_graph=True)  # and the same once more
            side.note_model(model)
        loss.backward()
        side.note_model(model)


@pytest.mark.behaviour(11, 28)
@over_strategies
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_one_rank_uses_between_units(
    strategy: str, way: Callable[[Model, Tensor, int], Tensor]
) -> None:
    """What a rank does in between moves no collective: units are gathered, released and reduced
    at the points that all ranks share."""
    compare(functools.partial(take, way=way), strategy)


def skipped_on_a_rank(side: Side) -> None:
    """A unit that is never gathered, skipped by a rank, in two forwards with one backward."""
    model = Model()
    side.shard(model.one, model.other, model)
    data = side.data(1, 4, WIDTH)

    def way(model: Model, x: Tensor, rank: int) -> Tensor:
        x = model.layer(x)
        return model.one(x) if rank == 0 else x

    def loss() -> Tensor:
        return side.mean(lambda rank: model(data[rank], way, rank).square().mean())

    waiting = loss()
    loss().backward()
    (loss() + loss()).backward()
    waiting.backward()
    side.note_model(model)


@pytest.mark.behaviour(11)
def test_a_unit_of_ddp_that_a_rank_skips() -> None:
    """It is reduced as often on the ranks that skip it."""
    compare(skipped_on_a_rank, "ddp")


def added_to_finished(side: Side) -> None:
    """Onto finished gradients, a backward of a last microbatch and of another, made in this order
    and therefore come to in the other; ranks use a unit in one of them each."""
    model = Model()
    side.shard(model.one, model.other, model)
    data = side.data(1, 4, WIDTH)

    def loss(user: int) -> Tensor:
        def way(model: Model, x: Tensor, rank: int) -> Tensor:
            return model.other(model.one(model.layer(x), rank == user))

        return side.mean(lambda rank: model(data[rank], way, rank).square().mean())

    loss(0).backward()
    last = loss(1)
    with side.microbatch(model, is_last=False):
        other = loss(0)
    (last + other).backward()
    side.note_model(model)


@pytest.mark.behaviour(11, 28)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"])
def test_two_kinds_of_microbatches_in_one_backward(strategy: str) -> None:
    """Finished gradients are added to alike on every rank, whichever uses a unit when."""
    compare(added_to_finished, strategy)


def prefetched(side: Side, fails: bool) -> None:
    """A unit is gathered ahead and not used, then written, then used."""
    model = Model()
    side.shard(model.one, model.other, model, reshard_after_forward=False)
    data = side.data(1, 4, WIDTH)

    def both(model: Model, x: Tensor, rank: int) -> Tensor:
        return model.other(model.one(model.layer(x)))

    def one(model: Model, x: Tensor, rank: int) -> Tensor:
        x = model.one(model.layer(x))
        if fails:
            raise ArithmeticError
        return x

    def loss(way: Callable[[Model, Tensor, int], Tensor]) -> Tensor:
        return side.mean(lambda rank: model(data[rank], way, rank).square().mean())

    loss(both).backward()
    with side.note_error(ArithmeticError):
        loss(one)
    with torch.no_grad():
        model.other.shift.mul_(3)
    side.note_mean("after", loss(both))


@pytest.mark.behaviour(4, 15)
@over_strategies
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_gathered_ahead_is_not_trusted(strategy: str, fails: bool) -> None:
    """A unit that stays gathered because a forward did not come to it sees later writes."""
    compare(functools.partial(prefetched, fails=fails), strategy)


def garbage(rank: int, when: str) -> int:
    """Models, one after the other; one rank frees each before the next, or while the next is made,
    and the other does not yet."""
    agree = polyshard.api.agree

    def interrupted(*args: object, **kwargs: object) -> frozenset[int]:
        votes = agree(*args, **kwargs)
        if rank == 0:
            gc.collect()
        return votes

    gc.disable()
    if when == "while":
        polyshard.api.agree = interrupted
    try:
        for _ in range(3):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            model = nn.Linear(3, 3)
            model.itself = [model]  # a cycle, as in many models: freed by the collector only
            fully_shard(model, mesh, Placements.zero3("dp"))
            model(torch.ones(2, 3)).sum().backward()
            del model, mesh
            if rank == 0 and when == "before":
                gc.collect()
    finally:
        gc.enable()
        polyshard.api.agree = agree
    return rank


@pytest.mark.behaviour(23)
@pytest.mark.parametrize("when", ["before", "while"])
def test_garbage_that_ranks_collect_at_different_times(when: str) -> None:
    """Whether ranks go on with the connections of a model before is decided by all of them."""
    assert run_ranks(2, garbage, when) == [0, 1]


class Kept(nn.Module):
    """Recomputed in backward while weights may have changed since."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Shift()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.one, x, use_reentrant=False).sin()


def changed_before_recomputing(side: Side, reshard: bool) -> None:
    model = Kept()
    side.shard(model.one, model, reshard_after_forward=reshard)
    data = side.data(1, 4, WIDTH)
    loss = side.mean(lambda rank: model(data[rank].requires_grad_()).square().mean())
    with torch.no_grad():
        model.one.shift.mul_(2)
    loss.backward()
    side.note_model(model)


@pytest.mark.behaviour(30)
@over_strategies
@pytest.mark.parametrize("reshard", [True, False])
def test_a_recomputation_sees_the_newest_weights(strategy: str, reshard: bool) -> None:
    """As a plain process recomputes with what the weights are by then."""
    compare(functools.partial(changed_before_recomputing, reshard=reshard), strategy)
