"""The two faces of a unit's parameters: what users see at rest, and what modules see in forward."""

from __future__ import annotations

import copy
import functools
import pickle
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from one_rank import (
    OneRank,
    Stack,
    assert_same_weights,
    batch,
    make_stack,
    train,
    twins,
    unit,
    units_in,
)
from torch import Tensor, nn

from polyshard import FsdpModule, UnsupportedError, unsharded
from polyshard.context import unit_of
from polyshard.sharded_tensor import ShardedTensor


class Watched(nn.Module):
    """Remembers the parameters that its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(3))
        self.seen: list[Tensor] = []
        self.types: list[type] = []
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.weight, self.bias]
        self.types = [type(seen) for seen in self.seen]
        self.values = [seen.detach().clone() for seen in self.seen]
        return nn.functional.linear(x, self.weight, self.bias)


class TestTheModule:
    def test_stays_the_same_object(self, world: OneRank) -> None:
        """Parents, children and class survive; fully_shard returns None."""
        model = make_stack()
        blocks = list(model.blocks)
        original = {module: type(module) for module in model.modules()}
        modules = list(model.modules())
        world.shard(*units_in(model))
        assert list(model.modules()) == modules
        assert list(model.blocks) == blocks
        for module, kind in original.items():
            assert isinstance(module, kind)
        assert all(isinstance(module, FsdpModule) for module in [model, *blocks])
        assert not isinstance(model.blocks, FsdpModule)

    def test_keeps_the_name_of_its_class(self, world: OneRank) -> None:
        """Name, module and docstring of the class are the original's."""
        model = make_stack()
        before = repr(model)
        world.shard(*units_in(model))
        kind = type(model)
        assert (kind.__name__, kind.__qualname__) == ("Stack", "Stack")
        assert (kind.__module__, kind.__doc__) == (Stack.__module__, Stack.__doc__)
        assert repr(model) == before

    def test_keeps_its_state_dict_keys(self, world: OneRank) -> None:
        """Names and their order stay, whether asked of the model or of a unit."""
        model = make_stack()
        keys = [list(module.state_dict()) for module in model.modules()]
        names = [name for name, _ in model.named_parameters()]
        world.shard(*units_in(model))
        assert [list(module.state_dict()) for module in model.modules()] == keys
        assert [name for name, _ in model.named_parameters()] == names

    def test_two_of_one_class_get_one_class(self, world: OneRank) -> None:
        """Units of one class stay of one class."""
        model = make_stack()
        world.shard(*model.blocks)
        assert len({type(block) for block in model.blocks}) == 1

    def test_survives_training_and_eval(self, world: OneRank) -> None:
        """train() and eval() reach submodules as before, and custom methods keep working."""
        model = make_stack()
        world.shard(*units_in(model))
        model.eval()
        assert not any(module.training for module in model.modules())
        model.train()
        assert all(module.training for module in model.modules())

    def test_shares_a_context(self, world: OneRank) -> None:
        """Units find each other when their root first runs."""
        model = make_stack()
        world.shard(*units_in(model))
        assert model.fsdp_context is not model.blocks[0].fsdp_context
        model(batch())
        assert all(block.fsdp_context is model.fsdp_context for block in model.blocks)
        assert [found.name for found in model.fsdp_context.units] == [
            "Stack",
            "blocks.0",
            "blocks.1",
            "blocks.2",
        ]


class Slotted(nn.Module):
    """A class with slots of its own."""

    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = 3.0
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.extra


class Checking(ABCMeta):
    """A metaclass that counts the instances made by calling its classes."""

    made = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        Checking.made += 1
        return super().__call__(*args, **kwargs)


class WithMetaclass(nn.Module, metaclass=Checking):
    """A class with a metaclass and a demanding constructor."""

    def __init__(self, *, width: int) -> None:
        super().__init__()
        if width <= 0:
            raise ValueError("width")
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Registering(nn.Linear):
    """A class that keeps a register of its subclasses, which must give a name."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, title: str) -> None:
        cls.known[title] = cls


class Sealed(type):
    """Makes classes that forbid subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: Any) -> type:
        if any(isinstance(base, cls) for base in bases):
            raise TypeError(f"{name} cannot be extended")
        return super().__new__(cls, name, bases, namespace)


class Final(nn.Linear, metaclass=Sealed):
    """A class that forbids subclasses."""


class Calling(nn.Linear):
    """A class whose forward calls its parent's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class TestOddClasses:
    @pytest.mark.parametrize(
        "make",
        [
            Slotted,
            lambda: WithMetaclass(width=4),
            lambda: Calling(4, 4),
            lambda: Registering(4, 4),
        ],
    )
    @pytest.mark.behaviour(12)
    def test_trains_like_plain(self, world: OneRank, make: Any) -> None:
        """Slots, metaclasses, demanding constructors, registers and super() do not matter."""
        models = []
        for _ in range(2):  # nn.Module does not copy slots
            torch.manual_seed(0)
            models.append(make())
        model, reference = models
        made = Checking.made
        kind = type(model)
        world.shard(model)
        assert Checking.made == made
        assert not Registering.known
        assert isinstance(model, kind)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)

    def test_a_class_that_cannot_be_extended(self, world: OneRank) -> None:
        """A class that forbids subclasses is refused, and its instance left as it was."""
        model, reference = twins(Final(4, 3))
        with pytest.raises(
            UnsupportedError, match=r"Final cannot be subclassed.*cannot be extended"
        ):
            world.shard(model)
        assert type(model) is Final
        assert type(model.weight) is nn.Parameter
        assert train(model) == train(reference)


class TestParameters:
    def test_at_rest(self, world: OneRank) -> None:
        """Parameters are sharded tensors over the main weights, with the values they had."""
        model, reference = twins(make_stack())
        world.shard(*units_in(model))
        for (name, ours), theirs in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert isinstance(ours, ShardedTensor), name
            assert isinstance(ours, nn.Parameter), name
            assert ours.requires_grad
            assert ours.is_leaf
            assert torch.equal(ours.full_tensor(), theirs)
            assert ours.grad is None

    def test_in_forward(self, world: OneRank) -> None:
        """A forward sees the user's own Parameter objects, plain and whole, with their values."""
        model = Watched()
        mine = [model.weight, model.bias]
        values = [parameter.detach().clone() for parameter in mine]
        world.shard(model)
        at_rest = [model.weight, model.bias]
        model(batch())
        assert all(seen is own for seen, own in zip(model.seen, mine, strict=True))
        assert model.types == [nn.Parameter, nn.Parameter]
        assert all(torch.equal(a, b) for a, b in zip(model.values, values, strict=True))
        assert model.weight is at_rest[0]
        assert model.bias is at_rest[1]

    def test_are_views_of_one_buffer(self, world: OneRank) -> None:
        """All parameters of a group lie in one storage."""
        model = make_stack()
        full = list(model.parameters())
        world.shard(model)
        assert len({parameter.untyped_storage()._cdata for parameter in full}) == 1
        starts = [parameter.storage_offset() for parameter in full]
        assert len(set(starts)) == len(full)

    def test_keep_custom_attributes(self, world: OneRank) -> None:
        """Attributes of a parameter are found at rest and in forward."""
        model = Watched()
        model.weight.is_expert = True  # type: ignore[attr-defined]
        model.weight.tags = ["a"]  # type: ignore[attr-defined]
        world.shard(model)
        assert model.weight.is_expert is True
        assert model.weight.tags == ["a"]
        model(batch())
        assert model.seen[0].is_expert is True
        assert model.seen[0].tags == ["a"]
        assert not hasattr(model.bias, "is_expert")

    def test_hooks_fire_on_the_full_gradient(self, world: OneRank) -> None:
        """A hook registered at rest sees the full gradient, may replace it, and can be removed."""
        torch.manual_seed(0)
        model, reference = twins(Watched())
        world.shard(model)
        seen: list[Tensor] = []

        def double(grad: Tensor) -> Tensor:
            seen.append(grad)
            return grad * 2

        handles = [model.weight.register_hook(double), reference.weight.register_hook(double)]
        for module in (model, reference):
            module(batch()).square().sum().backward()
        assert [type(grad) for grad in seen] == [Tensor, Tensor]
        assert torch.equal(seen[0], seen[1])
        torch.testing.assert_close(model.weight.grad.full_tensor(), reference.weight.grad)
        for handle in handles:
            handle.remove()
        model(batch()).square().sum().backward()
        assert len(seen) == 2

    def test_hooks_registered_before_still_fire(self, world: OneRank) -> None:
        """A hook on the user's Parameter goes on seeing its gradients."""
        model = Watched()
        seen: list[Tensor] = []
        model.weight.register_hook(lambda grad: seen.append(grad))
        world.shard(model)
        model(batch()).sum().backward()
        assert [tuple(grad.shape) for grad in seen] == [(3, 4)]

    def test_gradients_at_rest(self, world: OneRank) -> None:
        """A gradient is a sharded tensor that lies like its parameter."""
        model = make_stack()
        world.shard(*units_in(model))
        model(batch()).sum().backward()
        for parameter in model.parameters():
            assert isinstance(parameter.grad, ShardedTensor)
            assert parameter.grad.placements == parameter.placements
            assert parameter.grad.shape == parameter.shape

    def test_a_replaced_parameter_is_refused(self, world: OneRank) -> None:
        """A parameter put in another's place is named at the next forward."""
        model = Watched()
        world.shard(model)
        model.weight = nn.Parameter(torch.zeros(3, 4))
        with pytest.raises(UnsupportedError, match="parameter 'weight' of unit 'Watched' was repl"):
            model(batch())

    def test_a_removed_parameter_is_refused(self, world: OneRank) -> None:
        """A parameter that was deleted is named at the next forward."""
        model = Watched()
        world.shard(model)
        del model.bias
        with pytest.raises(UnsupportedError, match="parameter 'bias' of unit 'Watched'"):
            model(batch())


class TestCopies:
    @pytest.mark.parametrize("part", ["root", "unit", "parent"])
    def test_deepcopy(self, world: OneRank, part: str) -> None:
        """A unit, and what contains one, is copied with units of its own; copies train like plain
        ones, and the original stays as it was."""
        model, reference = twins(make_stack())
        world.shard(*(model.blocks if part == "parent" else units_in(model)))
        train(model), train(reference)
        subjects = [m.blocks[0] if part == "unit" else m for m in (model, reference)]
        copied, expected = map(copy.deepcopy, subjects)
        assert_same_weights(copied, expected)
        width = 6 if part == "unit" else 4
        inputs = functools.partial(batch, width=width)
        assert train(copied, inputs=inputs) == pytest.approx(train(expected, inputs=inputs))
        assert_same_weights(copied, expected)
        model.zero_grad(), reference.zero_grad()
        assert_same_weights(model, reference)
        ours, theirs = (
            {unit_of(module) for module in m.modules()} - {None} for m in (model, copied)
        )
        assert theirs
        assert not ours & theirs

    def test_deepcopy_keeps_what_is_no_weight(self, world: OneRank) -> None:
        """Hooks, attributes, buffers and registered methods come along, each once."""
        model = make_stack()
        calls: list[nn.Module] = []
        model.register_buffer("steps", torch.tensor(3))
        model.first.weight.tag = "mine"
        world.shard(*units_in(model))
        model.register_forward_hook(lambda module, *_: calls.append(module))
        copied = copy.deepcopy(copy.deepcopy(model))
        copied(batch())
        assert calls == [copied]
        assert copied.first.weight.tag == "mine"
        assert copied.first.weight is not model.first.weight
        copied.steps.add_(1)
        assert (model.steps, copied.steps) == (3, 4)

    def test_deepcopy_where_weights_are_whole(self, world: OneRank) -> None:
        """Inside `unsharded` a copy would take whole weights along: refused."""
        model = make_stack()
        world.shard(model)
        with (
            unsharded(model),
            pytest.raises(UnsupportedError, match=r"unit 'Stack' inside `with unsharded"),
        ):
            copy.deepcopy(model)
        copy.deepcopy(model)

    @pytest.mark.parametrize("way", [copy.copy, pickle.dumps])
    def test_other_copies_are_refused(self, world: OneRank, way: Callable[[Any], Any]) -> None:
        """They would hold one rank's rows only; full_state_dict and deepcopy are named instead."""
        model = make_stack()
        world.shard(*units_in(model))
        with pytest.raises(UnsupportedError, match=r"a sharded Stack cannot be pickled.*full_st"):
            way(model)

    def test_unit_is_no_module(self, world: OneRank) -> None:
        """What fully_shard keeps on a module is no submodule, parameter or buffer of it."""
        model = make_stack()
        before = (list(model._modules), list(model._parameters), list(model._buffers))
        world.shard(model)
        assert (list(model._modules), list(model._parameters), list(model._buffers)) == before
        assert unit(model).module() is model
