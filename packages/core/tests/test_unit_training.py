"""Training a sharded model on one rank gives what plain training gives, whatever is in it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from one_rank import (
    Block,
    OneRank,
    Stack,
    assert_same_grads,
    assert_same_weights,
    batch,
    groups,
    make_stack,
    plain,
    train,
    twins,
    unit,
    units_in,
)
from torch import Tensor, nn

from polyshard import SchedulePolicy


class Tied(nn.Module):
    """One weight under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 4)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)))


class Scalars(nn.Module):
    """0-D and one-element parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift + self.empty.sum()


class OnlyEmpty(nn.Module):
    """No element to train, and nothing to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty.sum()


class Dtypes(nn.Module):
    """Real, double, complex, integer and boolean parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Parameter(torch.randn(4, 4))
        self.precise = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.permutation = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.real)[:, self.permutation] * self.mask
        return ((x * self.phase).abs() + self.precise).float()


class Unused(nn.Module):
    """A parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class PartlyFrozen(nn.Module):
    """A frozen layer between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Attending(nn.Module):
    """Attention, whose weights are used without calling the module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0]


class Shared(nn.Module):
    """One module called three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


class Recurrent(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        return self(torch.tanh(self.layer(x)), depth - 1) if depth else x


def normalised() -> nn.Module:
    """Batch statistics and a random mask from the default generator."""
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def parametrised() -> nn.Module:
    """A weight computed from others at each use."""
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


MODELS = [
    Tied,
    Scalars,
    OnlyEmpty,
    Dtypes,
    Unused,
    PartlyFrozen,
    Attending,
    Shared,
    Recurrent,
    normalised,
    parametrised,
]


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_one_unit(world: OneRank, make: Callable[[], nn.Module], reshard: bool) -> None:
    """A model that is one unit trains like the plain one: losses, weights and gradients."""
    torch.manual_seed(0)
    model, reference = twins(make())
    world.shard(model, reshard_after_forward=reshard)
    assert train(model) == pytest.approx(train(reference), rel=1e-5)
    assert_same_weights(model, reference)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def ends(model: Stack) -> list[nn.Module]:
    return [model.first, model.last]


NESTINGS: dict[str, Callable[[Stack], Sequence[nn.Module]]] = {
    "blocks and root": units_in,
    "blocks alone": lambda model: list(model.blocks),
    "root alone": lambda model: [model],
    "linear layers too": lambda model: [
        *(layer for block in model.blocks for layer in (block.widen, block.narrow)),
        *units_in(model),
    ],
    "a root without parameters": lambda model: [*ends(model), *units_in(model)],
    "one block and an end": lambda model: [model.blocks[1], model.last],
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_nested_units(world: OneRank, nesting: str, reshard: bool) -> None:
    """However units nest, training is plain training."""
    model, reference = twins(make_stack())
    world.shard(*NESTINGS[nesting](model), reshard_after_forward=reshard)
    assert train(model) == pytest.approx(train(reference), rel=1e-5)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("units", [0, 1, 2, 10])
def test_prefetching_changes_nothing(world: OneRank, units: int) -> None:
    """How far ahead units are gathered does not show in the results."""
    model, reference = twins(make_stack())
    policy = SchedulePolicy(forward_units=units, backward_units=units)
    world.shard(*units_in(model), schedule_policy=policy)
    assert train(model) == pytest.approx(train(reference), rel=1e-5)
    assert_same_weights(model, reference)


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    ],
)
def test_optimizers(world: OneRank, make_optimizer: Any) -> None:
    """Optimizers step the sharded weights as they step plain ones."""
    model, reference = twins(make_stack())
    world.shard(*units_in(model))
    for module in (model, reference):
        optimizer = make_optimizer(module.parameters())
        for step in range(4):
            optimizer.zero_grad()
            module(batch(step)).square().mean().backward()
            optimizer.step()
    assert_same_weights(model, reference)


class TestWhatUnitsOwn:
    def test_nested_units_keep_their_parameters(self, world: OneRank) -> None:
        """A unit owns the parameters below it that no nested unit owns."""
        model = make_stack()
        world.shard(*units_in(model))
        assert [p.name for p in unit(model).parameters] == [
            "first.weight",
            "first.bias",
            "last.weight",
        ]
        assert len(unit(model.blocks[0]).parameters) == 4

    def test_a_unit_without_parameters(self, world: OneRank) -> None:
        """A module whose parameters all belong to nested units is a unit of no groups."""
        model = make_stack()
        world.shard(*ends(model), *units_in(model))
        assert unit(model).groups == ()

    def test_a_unit_of_nothing(self, world: OneRank) -> None:
        """A module without any parameter may be a unit, and runs."""
        model = nn.Sequential(nn.ReLU(), nn.Flatten())
        world.shard(model)
        x = batch().requires_grad_()
        model(x).sum().backward()
        assert torch.equal(x.grad, (x > 0).float())

    def test_groups_by_dtype_and_gradient(self, world: OneRank) -> None:
        """Parameters of one dtype that are all trained, or all frozen, share a buffer."""
        model = Dtypes()
        world.shard(model)
        names = [[p.name for p in group.parameters] for group in groups(model)]
        assert names == [["real"], ["precise"], ["phase"], ["permutation"], ["mask"]]
        other = PartlyFrozen()
        world.shard(other)
        assert [len(group.parameters) for group in groups(other)] == [4, 2]

    def test_ignored_parameters(self, world: OneRank) -> None:
        """Ignored parameters stay plain, are trained, and belong to nobody."""
        model, reference = twins(make_stack())
        world.shard(*model.blocks)
        ignored = list(model.last.parameters())
        world.shard(model, ignored_params=ignored)
        assert model.last.weight is ignored[0]
        assert type(model.last.weight) is nn.Parameter
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
        assert_same_weights(model, reference)


class TestTied:
    def test_one_parameter_under_all_names(self, world: OneRank) -> None:
        """A tied parameter is one storage, one optimizer entry, and has all its names."""
        model = Tied()
        world.shard(model)
        assert model.into.weight is model.out.weight
        assert [name for name, _ in model.named_parameters()] == ["into.weight", "out.bias"]
        assert list(model.state_dict()) == ["into.weight", "out.weight", "out.bias"]
        assert len(list(model.parameters())) == 2
        assert groups(model)[0].layout.numel == 16 + 4

    def test_gradients_add_up(self, world: OneRank) -> None:
        """Both uses of a tied weight are in its gradient, which all names show."""
        model, reference = twins(Tied())
        world.shard(model)
        for module in (model, reference):
            module(batch()).square().sum().backward()
        assert_same_grads(model, reference)
        assert model.into.weight.grad is model.out.weight.grad


class TestUnused:
    def test_keeps_no_gradient(self, world: OneRank) -> None:
        """A parameter that no forward used keeps grad None and is not decayed."""
        model = Unused()
        world.shard(model)
        before = plain(model.unused.weight).clone()
        train(model)
        assert model.unused.weight.grad is None
        assert model.unused.bias.grad is None
        assert torch.equal(plain(model.unused.weight), before)

    def test_a_unit_that_is_not_entered(self, world: OneRank) -> None:
        """A unit that no forward enters is left alone."""
        model, reference = twins(Unused())
        world.shard(model.used, model.unused, model)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
        assert_same_weights(model, reference)

    def test_used_later(self, world: OneRank) -> None:
        """A parameter that is first used in a later step gets its gradient then."""
        model, reference = twins(Unused())
        world.shard(model)
        for module in (model, reference):
            module(batch()).sum().backward()
            module.used, module.unused = module.unused, module.used
            module(batch(1)).sum().backward()
        assert_same_grads(model, reference)


def test_a_kept_gradient_is_the_same_after_reading(world: OneRank) -> None:
    """Reading a gradient twice gives one object with one value."""
    model = Unused()
    world.shard(model)
    model(batch()).sum().backward()
    assert model.used.weight.grad is model.used.weight.grad


@pytest.mark.parametrize("kept", [True, False])
def test_a_unit_that_is_replaced(world: OneRank, kept: bool) -> None:
    """Training goes on after a module was deleted, or replaced by another unit."""
    model, reference = twins(make_stack())
    world.shard(*units_in(model))
    train(model, 2), train(reference, 2)
    torch.manual_seed(1)
    block = Block()
    for each in (model, reference):
        del each.blocks[1]
        if kept:
            each.blocks.append(copy.deepcopy(block))
    if kept:
        world.shard(model.blocks[-1])
    assert train(model, 3) == pytest.approx(train(reference, 3), rel=1e-5)
    assert_same_weights(model, reference)
