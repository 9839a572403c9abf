"""What goes into and comes out of a unit's forward: containers, views, intermediates, in-place."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import (
    OneRank,
    assert_same_grads,
    assert_same_weights,
    batch,
    gathered_bytes,
    train,
    twins,
)
from torch import Tensor, nn

from polyshard.errors import UnsupportedError

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Record:
    main: Tensor
    rest: list[Tensor]
    note: str = ""


@dataclasses.dataclass
class Output(OrderedDict):
    """A dict that is a dataclass, too, as model libraries have them."""

    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Plain:
    """An object of no special kind."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = [inner]


class Slotted:
    """An object without a dict."""

    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


#: How to put a tensor into a container, and how to get it out.
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"a": x}, lambda out: out["a"]),
    "tuple in list": (lambda x: [1, (x, None)], lambda out: out[1][0]),
    "dict of dicts": (lambda x: {"a": {"b": (x,)}}, lambda out: out["a"]["b"][0]),
    "named tuple": (lambda x: Point(1, x), lambda out: out.y),
    "dataclass": (lambda x: Record(x.detach(), [x]), lambda out: out.rest[0]),
    "dict and dataclass": (lambda x: Output(x), lambda out: out.logits),
    "object": (lambda x: Plain(x), lambda out: out.inner[0]),
    "object without dict": (lambda x: Slotted(x), lambda out: out.inner),
    "object in a dict": (lambda x: {"a": Plain(x)}, lambda out: out["a"].inner[0]),
    "user dict": (lambda x: UserDict(a=x), lambda out: out["a"]),
    "generator": (lambda x: (part for part in [x]), lambda out: next(out)),
}


class Wrapping(nn.Module):
    """Returns its output in a container, and takes it by keyword only."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        self.wrap = CONTAINERS[container][0]

    def forward(self, *, x: Tensor) -> Any:
        return self.wrap(self.layers(x))


@pytest.mark.behaviour(17)
class TestContainers:
    @pytest.mark.parametrize("nested", [True, False])
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_outputs(self, world: OneRank, container: str, nested: bool) -> None:
        """Backward through an output finds its unit, whatever it was wrapped in."""
        torch.manual_seed(0)
        model, reference = twins(Wrapping(container))
        world.shard(*([model.layers] if nested else []), model)
        unwrap = CONTAINERS[container][1]
        for seed in range(3):
            for module in (model, reference):
                unwrap(module(x=batch(seed))).square().sum().backward()
            assert gathered_bytes(model) == 0
        assert_same_grads(model, reference)

    def test_the_container_itself_comes_back(self, world: OneRank) -> None:
        """An output is handed on as the object that forward returned."""
        kept: list[Any] = []

        class Keeping(nn.Linear):
            def forward(self, x: Tensor) -> Any:
                kept.append({"a": super().forward(x)})
                return kept[-1]

        model = Keeping(4, 3)
        world.shard(model)
        assert model(batch()) is kept[0]

    def test_no_tensor_at_all(self, world: OneRank) -> None:
        """A forward without tensors among inputs and outputs runs and releases."""

        class Summing(nn.Linear):
            def forward(self) -> float:
                return self.weight.detach().sum().item()

        model, reference = twins(Summing(4, 3))
        world.shard(model)
        assert model() == pytest.approx(reference())
        assert gathered_bytes(model) == 0

    def test_no_tensor_among_the_inputs(self, world: OneRank) -> None:
        """A unit that makes its own input trains."""

        class Making(nn.Linear):
            def forward(self, rows: int = 3) -> Tensor:
                return super().forward(torch.ones(rows, 4))

        torch.manual_seed(0)
        model, reference = twins(Making(4, 3))
        world.shard(model)
        for module in (model, reference):
            module(rows=5).square().sum().backward()
        assert_same_grads(model, reference)

    def test_none_after_a_write(self, world: OneRank) -> None:
        """A forward that returns None and wrote its own weight is refused like any other."""

        class Writing(nn.Linear):
            def forward(self, x: Tensor) -> None:
                with torch.no_grad():
                    self.weight.mul_(2)

        model = Writing(4, 3)
        world.shard(model)
        with pytest.raises(UnsupportedError, match="wrote to its own parameter 'weight'"):
            model(batch())
        assert gathered_bytes(model) == 0

    def test_none(self, world: OneRank) -> None:
        """A forward that returns None leaves its unit at rest."""

        class Silent(nn.Linear):
            def forward(self, x: Tensor) -> None:
                self.seen = super().forward(x)

        torch.manual_seed(0)
        model, reference = twins(Silent(4, 3))
        world.shard(model)
        for module in (model, reference):
            assert module(batch()) is None
        assert gathered_bytes(model) == 0


class Residual(nn.Module):
    """Adds in place to what a linear layer returned for a 3-D input: a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.behaviour(18, 34)
class TestInPlace:
    @pytest.mark.parametrize(
        "change",
        [
            lambda out, x: out.add_(x),
            lambda out, x: out.relu_(),
            lambda out, x: out.mul_(x).tanh_(),
            lambda out, x: nn.functional.relu(out, inplace=True),
        ],
    )
    @pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
    def test_changes_of_an_output(
        self, world: OneRank, change: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]
    ) -> None:
        """An output that is changed in place after its unit ran, a view or not, trains."""
        torch.manual_seed(0)
        model, reference = twins(nn.Sequential(Residual(), Residual()))
        world.shard(model[0], model[1])

        def losses(module: nn.Module) -> Tensor:
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            for layer in module:
                x = change(layer(x), x)
            return x.square().sum()

        for _ in range(2):
            for module in (model, reference):
                losses(module).backward()
        assert_same_grads(model, reference)
        assert gathered_bytes(model) == 0

    def test_changes_of_an_input(self, world: OneRank) -> None:
        """A unit may change its input in place."""

        class Changing(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x.mul_(2.0))

        torch.manual_seed(0)
        model, reference = twins(nn.Sequential(nn.Linear(4, 4), Changing(4, 4)))
        world.shard(model[1], model)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)


class Kept(nn.Module):
    """Keeps intermediates of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(4)),
        )
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scaled = hidden * self.scale
        deep = torch.tanh(self.second(scaled))
        self.kept = {"hidden": hidden, "scaled": scaled, "deep": deep}
        return deep * self.scale


@pytest.mark.behaviour(18, 31)
class TestIntermediates:
    @pytest.mark.parametrize("name", ["hidden", "deep"])
    @pytest.mark.parametrize("with_output", [True, False])
    def test_a_loss_from_a_kept_one(self, world: OneRank, name: str, with_output: bool) -> None:
        """A loss of an intermediate of a unit, alone or with its output, has plain gradients."""
        torch.manual_seed(0)
        model, reference = twins(Kept())
        world.shard(model)
        for _ in range(2):
            for module in (model, reference):
                module.zero_grad()
                output = module(batch().requires_grad_())
                loss = module.kept[name].square().sum()
                (loss + output.sum() if with_output else loss).backward()
            assert_same_grads(model, reference)
            assert gathered_bytes(model) == 0

    def test_one_that_no_hook_watches(self, world: OneRank) -> None:
        """A loss of what the unit itself computed from its parameter, which reaches backward
        unseen, has plain gradients where nothing was released, and is an error that says what to do
        where something was; the next step works."""
        torch.manual_seed(0)
        model, reference = twins(Kept())
        world.shard(model)
        for module in (model, reference):
            module(batch().requires_grad_())
        loss = model.kept["scaled"].square().sum()
        if world.strategy == "zero3":
            with pytest.raises(UnsupportedError, match="was released after the forward"):
                loss.backward()
            for module in (model, reference):
                module.zero_grad()
                module(batch()).sum().backward()
        else:
            loss.backward()
            reference.kept["scaled"].square().sum().backward()
        assert_same_grads(model, reference)

    def test_two_backwards_from_one_forward(self, world: OneRank) -> None:
        """An intermediate's loss and the output's, one backward each, add up."""
        torch.manual_seed(0)
        model, reference = twins(Kept())
        world.shard(model)
        for module in (model, reference):
            output = module(batch().requires_grad_())
            module.kept["hidden"].square().sum().backward(retain_graph=True)
            output.square().sum().backward()
        assert_same_grads(model, reference)


class Returning(nn.Module):
    """Returns its input, its parameter, or a view of that."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return {
            "input": lambda: x,
            "view of input": lambda: x[1:],
            "parameter": lambda: self.weight,
            "view": lambda: self.weight[1:3].t(),
            "both": lambda: x @ self.weight,
        }[self.what]()


@pytest.mark.behaviour(34)
class TestWhatIsReturned:
    @pytest.mark.parametrize("what", ["input", "view of input", "both"])
    def test_inputs(self, world: OneRank, what: str) -> None:
        """A unit that returns its input is passed through."""
        torch.manual_seed(0)
        model, reference = twins(Returning(what))
        world.shard(model)
        grads = []
        for module in (model, reference):
            x = batch().requires_grad_()
            module(x).square().sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(grads[0], grads[1])
        assert_same_grads(model, reference)

    @pytest.mark.parametrize("what", ["parameter", "view"])
    def test_parameters(self, world: OneRank, what: str) -> None:
        """A unit that returns its parameter or a view of it stays gathered until its window ends,
        and trains."""
        torch.manual_seed(0)
        model, reference = twins(Returning(what))
        world.shard(model)
        for _ in range(3):
            for module in (model, reference):
                module.zero_grad()
                weight = module(batch())
                assert torch.isfinite(weight).all()
                (weight * weight).sum().backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.sub_(parameter.grad, alpha=0.1)
            assert gathered_bytes(model) == 0
        assert_same_weights(model, reference)

    @pytest.mark.parametrize("what", ["parameter", "view"])
    def test_parameters_without_gradients(self, world: OneRank, what: str) -> None:
        """What a no-grad forward returned of a parameter is valid until the next forward."""
        torch.manual_seed(0)
        model, reference = twins(Returning(what))
        world.shard(model)
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(batch()), reference(batch()))

    def test_nothing_old_is_trusted(self, zero3: OneRank) -> None:
        """A no-grad forward sees what was written past PyTorch, also where what the one before it
        gathered is still held by its output."""
        torch.manual_seed(0)
        model = Returning("parameter")
        zero3.shard(model)
        with torch.no_grad():
            shown = model(batch())
            model.weight.to_local().numpy()[:] = 2.0
            assert bool((model(batch()) == 2.0).all())
        del shown
