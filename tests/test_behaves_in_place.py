"""What is changed in place: outputs by what comes next, inputs and weights by the unit itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import run_steps, square
from torch import Tensor, nn

from polyshard.testing import run_ranks


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


#: What is done to an output in place.
CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "residual": lambda out, x: out.add_(x),
    "activation": lambda out, x: nn.functional.relu(out, inplace=True),
    "silu": lambda out, x: nn.functional.silu(out, inplace=True),
    "a row": lambda out, x: out[0].copy_(x[0]),
    "a view": lambda out, x: out.transpose(-1, -2).mul_(2.0),
    "a slice": lambda out, x: out[..., :2].tanh_(),
    "everything": lambda out, x: out.zero_().add_(x),
}


def changed_in_place(side: Side, change: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(4, 4), Residual(), Residual()])
    side.shard(*model)

    def loss_on(x: Tensor) -> Tensor:
        for layer in model:
            x, before = layer(x), x
            CHANGES[change](x, before)
        return square(x)

    def body(step: int) -> None:
        inputs = side.data(step, *shape)
        side.mean(lambda rank: loss_on(inputs[rank])).backward()

    run_steps(side, model, body, 10 if change == "residual" else 2)


@pytest.mark.behaviour(18, 34)
@over_strategies
@pytest.mark.parametrize("shape", [(6, 4), (3, 2, 4)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("change", CHANGES)
def test_outputs_changed_in_place(change: str, shape: tuple[int, ...], strategy: str) -> None:
    """Outputs, which nn.Linear returns as views where its input is 3-D, are added to, activated,
    written in part or overwritten in place, and train."""
    compare(functools.partial(changed_in_place, change=change, shape=shape), strategy)


def changed_after_use(side: Side) -> None:
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    side.shard(*model)
    inputs = side.data(0, 3, 2, 4)

    def loss_on(x: Tensor, change: bool) -> Tensor:
        hidden = model[0](x)
        output = model[1](hidden)
        if change:
            hidden.add_(1.0)
        return square(output) + square(hidden)

    with side.note_error():
        side.mean(lambda rank: loss_on(inputs[rank], True)).backward()
    model.zero_grad()
    side.mean(lambda rank: loss_on(inputs[rank], False)).backward()
    side.note_model(model)


@pytest.mark.behaviour(34)
@over_strategies
def test_outputs_changed_after_their_use(strategy: str) -> None:
    """An output that was changed in place after the next unit had saved it is autograd's error, as
    in a plain process, and the next backward works."""
    compare(changed_after_use, strategy)


#: What a unit returns.
RETURNED: dict[str, Callable[[Any, Tensor], Any]] = {
    "its input": lambda unit, x: x,
    "a view of its input": lambda unit, x: x.view(-1, 4),
    "its input, changed": lambda unit, x: x.mul_(2.0),
    "its parameter": lambda unit, x: unit.weight,
    "a view of its parameter": lambda unit, x: unit.weight[1:3],
    "an expanded parameter": lambda unit, x: unit.weight.unsqueeze(0).expand(2, 4, 4),
    "a layer's bias": lambda unit, x: unit.layer.bias,
    "both": lambda unit, x: (unit.layer(x), unit.weight),
    "its parameter, detached": lambda unit, x: {"y": unit.layer(x), "w": unit.weight.detach()},
}


class Returning(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return RETURNED[self.what](self, x)


def returned(side: Side, what: str) -> None:
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Linear(4, 4), Returning(what), nn.Linear(4, 4)])
    side.shard(*model)

    def loss_on(x: Tensor) -> Tensor:
        found = model[1](model[0](x))
        found = list(found.values()) if isinstance(found, dict) else found
        parts = found if isinstance(found, list | tuple) else (found,)
        return torch.stack([square(model[2](part)) + square(part) for part in parts]).sum()

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        side.mean(lambda rank: loss_on(inputs[rank])).backward()

    run_steps(side, model, body, 3)


@pytest.mark.behaviour(34)
@over_strategies
@pytest.mark.parametrize("what", RETURNED)
def test_what_a_unit_returns(what: str, strategy: str) -> None:
    """A unit that returns its input, its parameter, or a view of either, trains; so does what
    comes after it."""
    compare(functools.partial(returned, what=what), strategy)


# -- forwards that write ------------------------------------------------------------------------


class FunctionalEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.weight, max_norm=0.5)


def renormalised_by_hand(rank: int, strategy: str, alone: bool) -> list[tuple[str, bool]]:
    side = Side(2, rank, strategy)
    torch.manual_seed(1)
    inner = FunctionalEmbedding()
    model = nn.Sequential(inner, nn.Linear(4, 3))
    side.shard(*([inner] if alone else []), model)
    ids = torch.tensor([[0, 1], [2, 3]]) + 2 * rank
    before, answers = [whole.full_tensor() for whole in model.parameters()], []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            try:
                model(ids)
                answer = "nothing"
            except RuntimeError as error:
                answer = f"{type(error).__name__}: {error}"
        after = [whole.full_tensor() for whole in model.parameters()]
        answers.append((answer, all(map(torch.equal, before, after))))
    return answers


@pytest.mark.behaviour(35)
@over_strategies
@pytest.mark.parametrize("alone", [True, False], ids=["a unit", "in a unit"])
def test_max_norm_by_hand(alone: bool, strategy: str) -> None:
    """A forward that renormalises rows of its weight is refused on every rank, with gradients or
    without, naming the weight and why; no weight has changed."""
    for answers in run_ranks(2, renormalised_by_hand, strategy, alone):
        for answer, unchanged in answers:
            assert answer.startswith("UnsupportedError: the forward of unit ")
            assert "weight'" in answer
            assert "max_norm" in answer
            assert unchanged


RENORMALISING: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(7, 4, max_norm=0.5),
    "bag": lambda: nn.EmbeddingBag(7, 4, max_norm=0.5),
    "frozen": lambda: nn.Embedding(7, 4, max_norm=0.5).requires_grad_(False),
}


def renormalised(rank: int, strategy: str, which: str, alone: bool) -> tuple[str, bool]:
    side = Side(2, rank, strategy)
    torch.manual_seed(1)
    inner = RENORMALISING[which]()
    model = nn.Sequential(nn.Sequential(inner), nn.Linear(4, 3))
    weight, values = inner.weight, inner.weight.detach().clone()
    try:
        side.shard(*([inner] if alone else []), model)
    except RuntimeError as error:
        answer = f"{type(error).__name__}: {error}"
    unchanged = inner.weight is weight and torch.equal(weight, values)
    # It can be left out, or go without.
    side.shard(model, ignored_params=[weight])
    model(torch.tensor([[0, 1]]))
    inner.max_norm = None
    side.shard(inner)
    model(torch.tensor([[0, 1]]))
    return answer, unchanged


@pytest.mark.behaviour(35)
@over_strategies
@pytest.mark.parametrize("alone", [True, False], ids=["a unit", "in a unit"])
@pytest.mark.parametrize("which", RENORMALISING)
def test_max_norm(which: str, alone: bool, strategy: str) -> None:
    """An embedding with max_norm is refused by fully_shard on every rank, naming the weight and
    what to do, and nothing has changed; without max_norm, or left out, it is taken."""
    for answer, unchanged in run_ranks(2, renormalised, strategy, which, alone):
        assert answer.startswith("UnsupportedError: parameter ")
        assert "weight' of " in answer
        assert "max_norm=0.5" in answer
        assert "Set max_norm to None" in answer
        assert unchanged
