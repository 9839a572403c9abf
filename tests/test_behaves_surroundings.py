"""Sharded models among what else people use: other methods, copies, compilers, autocast."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaving import Side, compare, over_strategies, train
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from polyshard import register_forward_method
from polyshard.testing import run_ranks


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.widen(x)))


class Model(nn.Module):
    """Blocks between layers of the root's own; other ways into it than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def generate(self, x: Tensor, *, steps: int) -> Tensor:
        """Calls the module itself, again and again, and uses a weight on its own."""
        for _ in range(steps):
            x = torch.tanh(self(x))
        return x @ self.first.weight.t()

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Calls one unit and no forward."""
        return {"code": self.blocks[0](self.first(x))}


def make(side: Side) -> Model:
    model = Model()
    side.shard(*model.blocks, model)
    return model


# -- other methods ----------------------------------------------------------------------------


def by_method(side: Side, name: str) -> None:
    model = make(side)
    if side.sharded:
        register_forward_method(model, name)
        register_forward_method(model, name)
    data = side.data(1, 5, 4)

    def loss_of(step: int, rank: int) -> Tensor:
        if name == "encode":
            return model.encode(data[rank])["code"].square().mean()
        return model.generate(data[rank], steps=1 + step % 2).square().mean()

    train(side, model, loss_of, 4)
    with torch.no_grad():
        side.note_mean("after", side.mean(functools.partial(loss_of, 0)))
    train(side, model, lambda step, rank: model(data[rank]).square().mean(), 2)


@pytest.mark.behaviour(21)
@over_strategies
@pytest.mark.parametrize("name", ["generate", "encode"])
def test_a_registered_method_is_a_forward(strategy: str, name: str) -> None:
    """It gathers what it uses, calls the module and other units inside, and has a backward; the
    forward goes on working beside it."""
    compare(functools.partial(by_method, name=name), strategy)


def method_that_fails(side: Side) -> None:
    model = make(side)
    if side.sharded:
        register_forward_method(model, "generate")
    data = side.data(1, 5, 4)
    with side.note_error(TypeError):
        model.generate(None, steps=1)
    with side.note_error():
        model.generate(torch.ones(2, 9), steps=1)
    train(side, model, lambda step, rank: model.generate(data[rank], steps=2).square().mean(), 2)


@pytest.mark.behaviour(19, 21)
@over_strategies
def test_a_registered_method_may_raise(strategy: str) -> None:
    """After an exception inside it, training is as if it had not been called."""
    compare(method_that_fails, strategy)


# -- copies -----------------------------------------------------------------------------------


def averaged(side: Side) -> None:
    model = make(side)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    data = side.data(1, 5, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(4):
        side.mean(lambda rank: model(data[rank]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            side.note_mean("average", side.mean(lambda rank: average(data[rank]).square().mean()))
    side.note_model(model)
    side.note_model(average.module)


@pytest.mark.behaviour(23)
@over_strategies
def test_an_average_of_the_weights(strategy: str) -> None:
    """An exponential moving average kept by copy.deepcopy is that of a plain process."""
    compare(averaged, strategy)


def trained_apart(side: Side) -> None:
    data = side.data(1, 5, 4)

    def steps(model: nn.Module, number: int) -> None:
        train(side, model, lambda step, rank: model(data[rank]).square().mean(), number)

    def copy_of_a_trained_one() -> nn.Module:
        model = make(side)
        steps(model, 2)
        copied = copy.deepcopy(model)
        steps(copied, 2)
        side.note_model(model)
        train(side, model, lambda step, rank: (model(data[rank]) - copied(data[rank])).mean(), 1)
        return copied

    steps(copy_of_a_trained_one(), 2)


@pytest.mark.behaviour(23)
@over_strategies
def test_a_copy_is_independent(strategy: str) -> None:
    """It trains on its own and together with the original, and outlives it."""
    compare(trained_apart, strategy)


# -- compilers --------------------------------------------------------------------------------


def compiled(side: Side, how: str) -> None:
    torch.compiler.reset()
    model = Model()
    if how == "units, before":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    side.shard(*model.blocks, model)
    call: Callable[[Tensor], Tensor] = model
    if how == "units, after":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    elif how == "whole, in place":
        model.compile(backend="aot_eager")
    elif how == "whole":
        call = torch.compile(model, backend="aot_eager")
    data = [side.data(step, 5, 4) for step in range(3)]
    train(side, model, lambda step, rank: call(data[step][rank]).square().mean(), 3)
    model.eval()
    with torch.no_grad():
        side.note_mean("evaluated", side.mean(lambda rank: call(data[0][rank]).mean()))


@pytest.mark.behaviour(25)
@over_strategies
@pytest.mark.parametrize("how", ["units, before", "units, after", "whole, in place", "whole"])
def test_torch_compile(strategy: str, how: str) -> None:
    """Units, or the whole model, may be compiled before or after they are sharded."""
    compare(functools.partial(compiled, how=how), strategy)


def graphs(rank: int) -> tuple[int, int]:
    """Into how many graphs a unit's forward was cut, plain and sharded."""
    found = []
    for side in (Side(1), Side(1, rank, "zero3")):
        torch.compiler.reset()
        seen: list[object] = []

        def count(graph: Any, _: Any, seen: list[object] = seen) -> Any:
            seen.append(graph)
            return graph.forward

        block = Block()
        side.shard(block)
        block.compile(backend=count)
        block(torch.ones(2, 6)).sum().backward()
        found.append(len(seen))
    return found[0], found[1]


@pytest.mark.behaviour(25)
def test_a_unit_is_one_graph() -> None:
    """Nothing of ours runs between the layers of a unit that was compiled before or after."""
    assert run_ranks(1, graphs) == [(1, 1)]


# -- precision --------------------------------------------------------------------------------


def under_autocast(side: Side) -> None:
    model = make(side)
    data = side.data(1, 5, 4)

    def loss_of(step: int, rank: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(data[rank])
        side.note("dtype", output.dtype)
        return output.float().square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for rank in side.ranks:
            # A rank's part at a time: in bf16 a sum depends on what it is a sum of.
            (loss_of(0, rank) / len(side.ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.notes = side.notes[-1:]
    side.note_model(model)


@pytest.mark.behaviour(25)
@over_strategies
def test_autocast(strategy: str) -> None:
    """Forwards under autocast compute in its dtype from weights that stay in theirs."""
    compare(under_autocast, strategy, rtol=1e-2, atol=1e-3)


# -- modules of many kinds --------------------------------------------------------------------


class Odd(nn.Module):
    """Parametrized weights, attention, a recurrent layer, in one unit or several."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "attention":
            self.layer: Any = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        elif kind == "encoder layer":
            self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
            self.layer.self_attn.in_proj_bias.requires_grad_(False)  # of keys it is but noise
        elif kind == "lstm":
            self.layer = nn.LSTM(6, 6, batch_first=True)
        else:
            self.layer = getattr(parametrizations, kind)(nn.Linear(6, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attention":
            x = x + self.layer(x, x, x, need_weights=False)[0]
        elif self.kind == "lstm":
            x = self.layer(x)[0]
        else:
            x = self.layer(x)
        return self.last(x)


KINDS = ["attention", "encoder layer", "lstm", "weight_norm", "orthogonal"]


def odd_layer(side: Side, kind: str) -> None:
    torch.manual_seed(3)
    model = Odd(kind)
    side.shard(model)
    model.to("cpu")
    data = side.data(1, 2, 5, 6)
    train(side, model, lambda step, rank: model(data[rank]).square().mean(), 3)
    model.eval()
    with torch.no_grad():
        side.note_mean("evaluated", side.mean(lambda rank: model(data[rank]).mean()))


@pytest.mark.behaviour(25)
@over_strategies
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_handle_their_weights(strategy: str, kind: str) -> None:
    """Layers that read weights of their children, list them, or compute them from others."""
    compare(functools.partial(odd_layer, kind=kind), strategy, rtol=1e-4, atol=1e-5)


def flat_alike(side: Side) -> None:
    model = make(side)
    side.note("state", sorted(model.state_dict()))
    side.note("elements", sum(parameter.numel() for parameter in model.parameters()))
    side.note("shapes", [tuple(parameter.shape) for parameter in model.parameters()])
    side.note("repr", repr(model))
    side.note("class", type(model).__name__)


@pytest.mark.behaviour(23)
@over_strategies
def test_a_model_looks_as_it_did(strategy: str) -> None:
    """Names, shapes, element counts and repr are the plain model's."""
    compare(flat_alike, strategy)


def converted(side: Side) -> None:
    model = make(side)
    before = dict(model.named_parameters())
    for name, parameter in before.items():
        parameter.tag = name
    for convert in (nn.Module.float, nn.Module.cpu, lambda model: model.to(torch.float32)):
        convert(model)
        side.note_model(model)
    model.to_empty(device=side.device)
    if side.sharded:
        for name, parameter in model.named_parameters():
            assert parameter is before[name]
            assert getattr(parameter, "tag", None) == name, name


@over_strategies
def test_conversions_to_what_it_is(strategy: str) -> None:
    """Conversions that change neither dtype nor device leave parameters as they are, and all that
    was set on them."""
    compare(converted, strategy)
