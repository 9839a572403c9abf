"""Frozen parameters: mixed with trained ones, and frozen or trained again between forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from one_rank import (
    OneRank,
    Pair,
    SpyBackend,
    assert_same_grads,
    assert_same_weights,
    batch,
    gathered_bytes,
    groups,
    make_stack,
    train,
    twins,
    unit,
    units_in,
)
from torch import nn


def freeze(modules: Iterable[nn.Module], frozen: bool, *names: str) -> None:
    """Freeze, or train again, the parameters whose names start with one of ``names``."""
    for module in modules:
        for name, parameter in module.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(not frozen)


def one_backward(modules: Iterable[nn.Module], seed: int) -> None:
    for module in modules:
        module.zero_grad()
        module(batch(seed)).square().mean().backward()


PARTS = {
    "one parameter": ("blocks.1.widen.weight",),
    "a whole unit": ("blocks.1",),
    "the first layers": ("first", "blocks.0"),
    "the last layers": ("last", "blocks.2"),
    "a part of every unit": tuple(f"blocks.{i}.narrow" for i in range(3)),
    "all but one": ("blocks", "first.weight", "last"),
}


@pytest.mark.parametrize("part", PARTS)
class TestFreezing:
    def test_from_the_start(self, world: OneRank, reshard: bool, part: str) -> None:
        """What was frozen at fully_shard stays as it is; the rest trains."""
        model, reference = twins(make_stack())
        freeze((model, reference), True, *PARTS[part])
        world.shard(*units_in(model), reshard_after_forward=reshard)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
        assert_same_weights(model, reference)
        assert gathered_bytes(model) == 0

    def test_later(self, pair: Pair, part: str) -> None:
        """Freezing after some steps is honoured at the next forward."""
        model, reference = pair
        one_backward(pair, 0)
        freeze(pair, True, *PARTS[part])
        for seed in range(1, 3):
            one_backward(pair, seed)
            assert_same_grads(model, reference)
            assert gathered_bytes(model) == 0

    def test_training_again(self, world: OneRank, reshard: bool, part: str) -> None:
        """What was frozen at fully_shard may be trained later, and frozen once more."""
        model, reference = twins(make_stack())
        pair = (model, reference)
        freeze(pair, True, *PARTS[part])
        world.shard(*units_in(model), reshard_after_forward=reshard)
        for seed in range(6):
            one_backward(pair, seed)
            assert_same_grads(model, reference)
            assert gathered_bytes(model) == 0
            freeze(pair, seed % 2 == 1, *PARTS[part])

    def test_between_a_forward_and_its_backward(self, pair: Pair, part: str) -> None:
        """Freezing after a forward is honoured at the next one: the backward of this one still
        gives the gradients that its forward was for."""
        model, reference = pair
        losses = [module(batch()).square().mean() for module in pair]
        freeze([model], True, *PARTS[part])
        for loss in losses:
            loss.backward()
        assert_same_grads(model, reference)
        freeze([reference], True, *PARTS[part])
        one_backward(pair, 1)
        assert_same_grads(model, reference)


@pytest.mark.behaviour(8)
def test_accumulating_across_it(pair: Pair) -> None:
    """A parameter that was frozen between two backwards keeps what it had accumulated."""
    model, reference = pair
    for module in pair:
        module(batch()).square().mean().backward()
    freeze(pair, True, "blocks.0", "last")
    for module in pair:
        module(batch(1)).square().mean().backward()
    assert_same_grads(model, reference)
    freeze(pair, False, "blocks.0", "last")
    for module in pair:
        module(batch(2)).square().mean().backward()
    assert_same_grads(model, reference)


@pytest.mark.behaviour(8)
def test_everything_frozen(pair: Pair) -> None:
    """A model without any trained parameter runs, and gives gradients of its input."""
    model, reference = pair
    freeze(pair, True, "")
    gradients = []
    for module in pair:
        x = batch().requires_grad_()
        module(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert_same_grads(model, reference)
    assert gathered_bytes(model) == 0
    assert not model(batch()).requires_grad


def test_faces_agree(pair: Pair) -> None:
    """Both faces of a parameter say the same about gradients once a forward has run."""
    model, _ = pair
    freeze([model], True, "blocks.1")
    model(batch())
    for group in groups(model):
        for parameter in group.parameters:
            assert parameter.full.requires_grad == parameter.sharded.requires_grad
    assert groups(model.blocks[1])[0].gradients.expected == frozenset()


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_frozen_units_reduce_nothing(zero3: OneRank, strategy: str) -> None:
    """A unit without trained parameters takes no part in reductions."""
    backend = SpyBackend()
    world = OneRank(zero3.mesh, strategy, backend)
    model = make_stack()
    world.shard(*units_in(model))
    freeze([model], True, "blocks.1")
    model(batch()).sum().backward()
    reduced = {label.partition(" (")[0] for label in backend.labels if "reduce gradients" in label}
    assert reduced == {"Stack", "blocks.0", "blocks.2"}


@pytest.mark.parametrize(
    "inputs_need_gradients", [lambda x: x, lambda x: x.requires_grad_()], ids=["plain", "grad"]
)
def test_a_partly_frozen_unit_is_released_in_backward(
    zero3: OneRank, inputs_need_gradients: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """A unit with frozen weights is released once backward has left it, before the end."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inner[0].requires_grad_(False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), inner)
    zero3.shard(inner, model)
    seen: list[int] = []

    def watch(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _grad: seen.append(gathered_bytes(inner)))

    model[0].register_forward_hook(watch)
    model(inputs_need_gradients(batch())).sum().backward()
    assert seen == [0]
    assert gathered_bytes(model) == 0
    assert not unit(inner).not_left


class Adapted(nn.Module):
    """A frozen scale and frozen layers with trained ones between them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4), requires_grad=False)
        self.frozen = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for frozen, adapter in zip(self.frozen, self.adapters, strict=True):
            x = torch.tanh(frozen(x)) + adapter(x)
        return x * self.scale


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *(Adapted() for _ in range(3)))


def test_each_group_is_gathered_once_per_backward(zero3: OneRank) -> None:
    """Frozen weights that outlast the trained ones in backward make nothing be gathered twice."""
    backend = SpyBackend()
    model = adapted()
    OneRank(zero3.mesh, "zero3", backend).shard(*model[1:], model)
    for _ in range(2):
        loss = model(batch()).sum()
        backend.gathers()
        loss.backward()
        assert sorted(backend.gathers()) == ["1", "1", "2", "2", "3", "3", "Sequential"]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_forwards_before_their_backwards(
    world: OneRank, reshard: bool, order: tuple[int, ...]
) -> None:
    """Each backward keeps frozen weights until it has left its own forward."""
    model, reference = twins(adapted())
    world.shard(*model[1:], model, reshard_after_forward=reshard)
    model(batch(9))  # never run backward
    for module in (model, reference):
        losses = [module(batch(seed)).square().sum() for seed in range(3)]
        for index in order:
            losses[index].backward(retain_graph=True)
        losses[0].backward()
    assert_same_grads(model, reference)
    assert gathered_bytes(model) == 0
