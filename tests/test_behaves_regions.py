"""Checkpointed regions around several units, in which ranks compute different things."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from behaving import Side, compare, over_strategies
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from polyshard import Placements, fully_shard, register_forward_method
from polyshard.testing import run_ranks

WIDTH = 3


class Shift(nn.Module):
    """Adds something computed from a parameter, or hands its input on, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, used: bool = True, viewed: bool = False) -> Tensor:
        x = x + torch.sin(self.shift) if used else x
        return x[:] if viewed else x


class Model(nn.Module):
    """Two units and a layer of the root's own, all in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.one, self.other = Shift(), Shift()

    def forward(self, x: Tensor, inside: Inside, rank: int, used: bool) -> Tensor:
        x = self.layer(x)
        return checkpoint(inside, self, x, rank, used, use_reentrant=False)


Inside = Callable[[Model, Tensor, int, bool], Tensor]


def after(model: Model, x: Tensor, rank: int, used: bool) -> Tensor:
    """One rank alone computes something after the units."""
    x = model.other(model.one(torch.tanh(model.layer(x)), used), used)
    return torch.tanh(model.layer(x)) if rank == 0 else x


def between(model: Model, x: Tensor, rank: int, used: bool) -> Tensor:
    x = model.one(torch.tanh(model.layer(x)), used)
    return model.other(torch.tanh(model.layer(x)) if rank == 0 else x, used)


def before(model: Model, x: Tensor, rank: int, used: bool) -> Tensor:
    x = torch.tanh(model.layer(x)) if rank == 0 else x
    return model.other(model.one(x, used), used)


def nested(model: Model, x: Tensor, rank: int, used: bool) -> Tensor:
    """A region in the region, and after each of them something on one rank."""
    x = checkpoint(after, model, x, rank, used, use_reentrant=False)
    x = model.one(x, used)
    return x.sin() if rank == 1 else x


def nothing_saved(model: Model, x: Tensor, rank: int, used: bool) -> Tensor:
    """One rank saves nothing in the region but what the units do."""
    x = model.other(model.one(x, used), used)
    return x.sin() if rank == 0 else x


INSIDE = [after, between, before, nested, nothing_saved]


def take(side: Side, inside: Inside, used: bool, twice: bool = False) -> None:
    model = Model()
    side.shard(model.one, model.other, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        data = [x.requires_grad_() for x in side.data(step, 4, WIDTH)]
        loss = side.mean(lambda rank: model(data[rank], inside, rank, used).square().mean())  # noqa: B023
        if twice:
            loss.backward(retain_graph=True)
        loss.backward()
        side.note_mean("loss", loss)
        side.note_model(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.behaviour(11, 16)
@over_strategies
@pytest.mark.parametrize("used", [True, False], ids=["computes", "hands_on"])
@pytest.mark.parametrize("inside", INSIDE, ids=lambda inside: inside.__name__)
def test_what_one_rank_computes_in_a_region(strategy: str, inside: Inside, used: bool) -> None:
    """The region is recomputed at a point that all ranks share, and as far."""
    compare(functools.partial(take, inside=inside, used=used), strategy)


@pytest.mark.behaviour(16)
@over_strategies
def test_a_graph_with_a_region_that_is_retained(strategy: str) -> None:
    compare(functools.partial(take, inside=after, used=True, twice=True), strategy)


class Keeping(nn.Module):
    """Keeps aside what a unit in its region handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one = nn.Linear(WIDTH, WIDTH), Shift()

    def forward(self, x: Tensor) -> Tensor:
        def region(x: Tensor) -> Tensor:
            self.kept = self.one(torch.tanh(self.layer(x)), used=False, viewed=True)
            return self.kept

        return checkpoint(region, x, use_reentrant=False)[:]


def kept_alone(side: Side) -> None:
    model = Keeping()
    side.shard(model.one, model)
    data = side.data(0, 4, WIDTH)

    def loss(rank: int) -> Tensor:
        model(data[rank])
        return model.kept.cos().mean()

    side.mean(loss).backward()
    side.note_model(model)


@pytest.mark.behaviour(16, 31)
@over_strategies
def test_what_is_kept_of_a_region(strategy: str) -> None:
    """Backward comes to the unit inside, and not by what the one around it returned."""
    compare(kept_alone, strategy)


class Overwriting(nn.Module):
    """Overwrites what a region returned, and with it the region's input if that was handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one = nn.Linear(WIDTH, WIDTH), Shift()

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.one, self.layer(x), False, use_reentrant=False)
        y.mul_(0.5)
        return y.sin()


def overwritten(side: Side) -> None:
    model = Overwriting()
    side.shard(model.one, model)
    data = side.data(0, 4, WIDTH)
    for _ in range(2):
        side.mean(lambda rank: model(data[rank]).mean()).backward()
        side.note_model(model)


@pytest.mark.behaviour(16, 30)
@over_strategies
def test_what_a_region_handed_on_is_overwritten(strategy: str) -> None:
    """Nothing in it has to be recomputed, so that its input is not needed any more."""
    compare(overwritten, strategy)


class Recursive(nn.Module):
    """A forward method of the root recomputes the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.one = nn.Linear(WIDTH, WIDTH), Shift()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.one(x)))

    def loss(self, x: Tensor) -> Tensor:
        return checkpoint(self, self.layer(x), use_reentrant=False).square().mean()


def recomputed_itself(side: Side) -> None:
    model = Recursive()
    side.shard(model.one, model)
    if side.sharded:
        register_forward_method(model, "loss")
    data = side.data(0, 4, WIDTH)
    side.mean(lambda rank: model.loss(data[rank])).backward()
    side.note_model(model)


@pytest.mark.behaviour(16)
@over_strategies
def test_a_unit_that_recomputes_itself(strategy: str) -> None:
    """A recomputation is a forward of its own, though the call was one inside another."""
    compare(recomputed_itself, strategy)


class Skipping(nn.Module):
    """Holds a unit that one rank alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Shift()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.inner(x) if rank == 0 else x


class TwiceSkipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.skipping = nn.Linear(WIDTH, WIDTH), Skipping()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = checkpoint(self.skipping, torch.tanh(self.layer(x)), rank, use_reentrant=True)
        return self.skipping(torch.tanh(self.layer(x)), rank)


def skipped_and_recomputed(side: Side) -> None:
    model = TwiceSkipping()
    side.shard(model.skipping.inner, model)
    data = side.data(0, 4, WIDTH)
    side.mean(lambda rank: model(data[rank], rank).square().mean()).backward()
    side.note_model(model)


@pytest.mark.behaviour(11, 16)
def test_a_skipped_unit_of_ddp_that_is_recomputed_after_a_call() -> None:
    """It is reduced once on every rank, where its recomputation comes after what was counted."""
    compare(skipped_and_recomputed, "ddp")


def between_calls(model: Model, x: Tensor, rank: int) -> Tensor:
    """Before a unit's own call, and after it was called in a reentrant checkpoint."""
    x = checkpoint(model.one, torch.tanh(model.layer(x)), use_reentrant=True)
    if rank == 0:
        x = torch.tanh(model.layer(x))
    return model.one(x)


def between_more_calls(model: Model, x: Tensor, rank: int) -> Tensor:
    for _ in range(2):
        x = checkpoint(model.one, torch.tanh(model.layer(x)), use_reentrant=True)
    return between_calls(model, x, rank)


def in_front_of_another(model: Model, x: Tensor, rank: int) -> Tensor:
    """Inside the recomputed region."""

    def region(x: Tensor) -> Tensor:
        x = model.one(x)
        if rank == 0:
            x = torch.tanh(model.layer(x))
        return model.other(x)

    return checkpoint(region, torch.tanh(model.layer(x)), use_reentrant=True)


AROUND = [between_calls, between_more_calls, in_front_of_another]


class Plainly(Model):
    """With no region of its own."""

    def forward(self, x: Tensor, way: Callable[..., Tensor], rank: int) -> Tensor:  # type: ignore[override]
        return way(self, x, rank)


def take_around(side: Side, way: Callable[..., Tensor]) -> None:
    model = Plainly()
    side.shard(model.one, model.other, model)
    for step in range(2):
        data = side.data(step, 4, WIDTH)

        def loss(data: list[Tensor] = data) -> Tensor:
            return side.mean(lambda rank: model(data[rank], way, rank).square().mean())

        (loss() + loss()).backward()
        side.note_model(model)
        loss().backward()
        side.note_model(model)


@pytest.mark.behaviour(11, 16)
@over_strategies
@pytest.mark.parametrize("way", AROUND, ids=lambda way: way.__name__)
def test_what_one_rank_computes_around_a_recomputed_unit(
    strategy: str, way: Callable[..., Tensor]
) -> None:
    """A unit is reduced as often on every rank, whether it was left before its recomputation."""
    compare(functools.partial(take_around, way=way), strategy)


def regions_held(rank: int) -> list[bool]:
    """Whether the input of a region lives on after backward, with the loss and without."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = Model()
    for unit in (model.one, model.other, model):
        fully_shard(unit, mesh, Placements.zero3("dp"))
    held = []
    for keeps in (True, False):
        inputs: list[weakref.ref[Tensor]] = []

        def inside(
            model: Model, x: Tensor, rank: int, used: bool, seen: list[weakref.ref[Tensor]] = inputs
        ) -> Tensor:
            seen.append(weakref.ref(x))
            return after(model, x, rank, used)

        loss = model(torch.ones(2, WIDTH), inside, rank, True).sum()
        loss.backward()
        if not keeps:
            del loss
        gc.collect()
        held.append(inputs[0]() is not None)
    return held


@pytest.mark.behaviour(16)
def test_a_region_is_held_no_longer_than_its_backward() -> None:
    assert run_ranks(2, regions_held) == [[False, False]] * 2
