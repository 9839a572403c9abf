"""What goes into a unit's forward and comes out, and what is kept of it."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import make_stack, run_steps, square
from torch import Tensor, nn

from polyshard.testing import run_ranks

# -- containers ---------------------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Record:
    main: Any
    note: str = ""


class ModelOutput(OrderedDict):
    """A dict whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


def cyclic(x: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"x": x}
    found["self"] = found
    return found


#: How to put a tensor into a container, and how to get it out.
CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda x: {"a": x, "count": 1}, lambda out: out["a"]),
    "tuple in list": (lambda x: [(1, x), None], lambda out: out[0][1]),
    "named tuple": (lambda x: Point(0, x), lambda out: out.y),
    "dataclass": (lambda x: Record([x]), lambda out: out.main[0]),
    "model output": (lambda x: ModelOutput(logits=x, loss=None), lambda out: out.logits),
    "slots": (lambda x: Slotted(x), lambda out: out.inner),
    "deque": (lambda x: deque([x]), lambda out: out[0]),
    "cycle": (cyclic, lambda out: out["x"]),
    "distribution": (
        lambda x: torch.distributions.Normal(x, x.detach().exp()),
        lambda out: out.mean,
    ),
}


class Wrapping(nn.Module):
    """Takes its input by keyword only and returns it in a container; its last operation is on a
    parameter of its own."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.weight = nn.Parameter(torch.randn(5, 4))

    def forward(self, *, x: Tensor, mask: object = None) -> Any:
        return CONTAINERS[self.container][0](self.layers(x) @ self.weight)


class TwoWrapping(nn.Module):
    def __init__(self, container: str) -> None:
        super().__init__()
        self.first, self.second = Wrapping(container), Wrapping(container)

    def forward(self, *, inputs: dict[str, Tensor]) -> Any:
        unwrap = CONTAINERS[self.first.container][1]
        return self.second(x=unwrap(self.first(x=inputs["x"], mask=None)))


def in_containers(side: Side, container: str) -> None:
    torch.manual_seed(1)
    model = TwoWrapping(container)
    side.shard(model.first, model.second, model)
    unwrap = CONTAINERS[container][1]

    def body(step: int) -> None:
        inputs = side.data(step, 3, 4)
        side.mean(lambda rank: square(unwrap(model(inputs={"x": inputs[rank]})))).backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(17)
@over_strategies
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers(container: str, strategy: str) -> None:
    """Units whose inputs come by keyword and whose outputs are in containers of any kind train."""
    compare(functools.partial(in_containers, container=container), strategy)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(7, 4)), nn.Linear(4, 4)

    def forward(self, count: int) -> Tensor:
        return self.layer(self.table[:count])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(6, 4), Positions(), nn.Linear(4, 3)

    def forward(self, ids: list[int]) -> Tensor:
        return self.head(self.words(torch.tensor(ids)) + self.positions(len(ids)))


def without_tensors(side: Side) -> None:
    torch.manual_seed(1)
    model = Words()
    side.shard(model.words, model.positions, model)

    def body(step: int) -> None:
        side.mean(lambda rank: square(model([rank, 3, 5 - rank][: 2 + step % 2]))).backward()

    run_steps(side, model, body, 4)


@pytest.mark.behaviour(17)
@over_strategies
def test_no_tensor_among_the_inputs(strategy: str) -> None:
    """Units that take numbers and lists, or integer tensors, train."""
    compare(without_tensors, strategy)


# -- intermediates ------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Keeps what it computes on the way, with submodules and with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.scale, self.matrix = nn.Parameter(torch.ones(5)), nn.Parameter(torch.randn(5, 5))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scaled = hidden * self.scale
        product = torch.tanh(scaled) @ self.matrix
        deep = torch.tanh(self.second(product))
        self.kept = {"hidden": hidden, "scaled": scaled, "product": product, "deep": deep}
        return deep * self.scale


def make_keeping(side: Side, **options: object) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Keeping(), nn.Linear(5, 3))
    side.shard(model[1], model, **options)
    return model


def kept(side: Side, name: str, how: str) -> None:
    model = make_keeping(side, reshard_after_forward=how != "kept gathered")

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        losses = []
        for rank in side.ranks:
            output = square(model(inputs[rank]))
            losses.append((square(model[1].kept[name]), output))
        first, second = (torch.stack(part).mean() for part in zip(*losses, strict=True))
        if how == "with the output":
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
        if how == "then the output":
            second.backward()

    run_steps(side, model, body, 2)


@pytest.mark.behaviour(18, 31)
@over_strategies
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("hidden", "alone"),
        ("deep", "alone"),
        ("hidden", "with the output"),
        ("product", "with the output"),
        ("deep", "then the output"),
        ("scaled", "kept gathered"),
        ("product", "kept gathered"),
    ],
)
def test_kept_intermediates(name: str, how: str, strategy: str) -> None:
    """A loss of a tensor kept from inside a forward has plain gradients, alone, together with the
    output's or before it; wherever a submodule computed it, or the unit stays gathered."""
    compare(functools.partial(kept, name=name, how=how), strategy)


def unseen(rank: int, strategy: str, name: str) -> tuple[str, bool]:
    side = Side(2, rank, strategy)
    model, inputs = make_keeping(side), side.data(0, 6, 4)
    model(inputs[rank])
    try:
        square(model[1].kept[name]).backward()
        answer = "nothing"
    except RuntimeError as error:
        answer = f"{type(error).__name__}: {error}"
    square(model(inputs[rank])).backward()
    return answer, all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.behaviour(31)
@over_strategies
@pytest.mark.parametrize("name", ["scaled", "product"])
def test_intermediates_that_nothing_watches(name: str, strategy: str) -> None:
    """A backward that multiplies by a released weight, reached only through what the unit itself
    computed and kept, is an error that says what to do; the next backward works."""
    for answer, works in run_ranks(2, unseen, strategy, name):
        assert answer.startswith("UnsupportedError: backward needs a weight that was released")
        assert "reshard_after_forward=False" in answer
        assert works


def watched_by_hooks(side: Side) -> None:
    model, features = make_stack(side), []
    for block in model.blocks:
        block.widen.register_forward_hook(lambda module, args, output: features.append(output))

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)

        def loss_of(rank: int) -> Tensor:
            features.clear()
            output = model(inputs[rank])
            loss = torch.stack([square(feature) for feature in features]).sum()
            return loss + square(output) if step % 2 else loss

        side.mean(loss_of).backward()

    run_steps(side, model, body, 4)


@pytest.mark.behaviour(18)
@over_strategies
def test_features_that_hooks_took(strategy: str) -> None:
    """A loss of what forward hooks saw inside the units, with the output's or without."""
    compare(watched_by_hooks, strategy)
