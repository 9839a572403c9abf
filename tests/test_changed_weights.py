"""Weights that change between a forward and its backward: an error exactly where one plain process
gets one, and the same gradients everywhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from behaving import Side, compare
from strategies import STRATEGIES
from torch import Tensor, nn

from polyshard import fully_shard
from polyshard.testing import run_ranks

WIDTH, VOCABULARY = 3, 7


class TwoHeads(nn.Module):
    """An embedding, a trunk of two layers, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head_a = nn.Linear(WIDTH, 2)
        self.head_b = nn.Linear(WIDTH, 2)

    def forward(self, tokens: Tensor, *, detached: bool = False) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        x = x.detach() if detached else x
        x = self.second(torch.tanh(self.first(x)))
        return self.head_a(x), self.head_b(x)


def write(*modules: nn.Module) -> None:
    """An optimizer step on some modules' weights, without momentum."""
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters(recurse=False):
                parameter.add_(0.5)


TOKENS = torch.arange(VOCABULARY)
Case = Callable[[TwoHeads], None]


def before_its_backward(model: TwoHeads) -> None:
    """The second layer's weight is needed for the first layer's gradient."""
    loss = sum(out.sum() for out in model(TOKENS))
    write(model.second)
    loss.backward()


def every_weight(model: TwoHeads) -> None:
    loss = sum(out.sum() for out in model(TOKENS))
    write(*model.children())
    loss.backward()


def embedding_only(model: TwoHeads) -> None:
    """An embedding's weight is not needed for its gradient."""
    loss = sum(out.sum() for out in model(TOKENS))
    write(model.embedding)
    loss.backward()


def first_layer_without_input_gradient(model: TwoHeads) -> None:
    """Nothing needs the gradient of the first layer's input, so its weight was not saved."""
    loss = sum(out.sum() for out in model(TOKENS, detached=True))
    write(model.first)
    loss.backward()


def first_layer_with_input_gradient(model: TwoHeads) -> None:
    loss = sum(out.sum() for out in model(TOKENS))
    write(model.first)
    loss.backward()


def frozen_layer(model: TwoHeads) -> None:
    """A frozen weight is needed all the same."""
    model.second.requires_grad_(False)
    loss = sum(out.sum() for out in model(TOKENS))
    write(model.second)
    loss.backward()


def other_head(model: TwoHeads) -> None:
    """Each head has its own step right after its own backward."""
    loss_a, loss_b = (out.sum() for out in model(TOKENS))
    loss_a.backward(retain_graph=True)
    write(model.head_a)
    loss_b.backward()
    write(model.head_b)


def between_two_backwards(model: TwoHeads) -> None:
    """The trunk is stepped after one head's backward and before the other's."""
    loss_a, loss_b = (out.sum() for out in model(TOKENS))
    loss_a.backward(retain_graph=True)
    write(model.head_a, model.second)
    loss_b.backward()


def of_an_older_forward(model: TwoHeads) -> None:
    """Two forwards, a write, a third one; the backwards of the first and the third."""
    old = sum(out.sum() for out in model(TOKENS))
    write(model.embedding)
    new = sum(out.sum() for out in model(TOKENS))
    new.backward()
    old.backward()


def evaluated_in_between(model: TwoHeads) -> None:
    """A no-grad forward gathers and releases in between, without any change."""
    loss = sum(out.sum() for out in model(TOKENS))
    with torch.no_grad():
        model(TOKENS)
    loss.backward()


CASES: list[Case] = [
    before_its_backward,
    every_weight,
    embedding_only,
    first_layer_without_input_gradient,
    first_layer_with_input_gradient,
    frozen_layer,
    other_head,
    between_two_backwards,
    of_an_older_forward,
    evaluated_in_between,
]


def outcome(model: TwoHeads, case: Case) -> tuple[bool, dict[str, Tensor]]:
    """Whether it raised; the gradients, or, where it did, those of an undisturbed step after it."""
    raised = False
    try:
        case(model)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raised = True
        model.zero_grad()
        sum(out.sum() for out in model(TOKENS)).backward()
    return raised, {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def make_two_heads() -> TwoHeads:
    torch.manual_seed(2)
    return TwoHeads()


def sharded_outcome(
    rank: int, case: Case, strategy: str, reshard: bool
) -> tuple[bool, dict[str, Tensor]]:
    mesh, model = STRATEGIES[strategy].mesh(), make_two_heads()
    placements = STRATEGIES[strategy].placements
    for module in (*model.children(), model):
        fully_shard(module, mesh, placements, reshard_after_forward=reshard)
    return outcome(model, case)


@pytest.mark.behaviour(30)
@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [("zero3", True), ("zero3", False), ("ddp", True)],
    ids=["zero3", "zero3-kept-gathered", "ddp"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_raises_where_one_process_does(case: Case, strategy: str, reshard: bool) -> None:
    """All ranks raise if one plain process raises, and only then; gradients agree with its, and
    after the error the next step is as good as any."""
    must_raise, expected = outcome(make_two_heads(), case)
    for raised, grads in run_ranks(2, sharded_outcome, case, strategy, reshard):
        assert raised == must_raise
        torch.testing.assert_close(grads, expected)


def test_the_cases_differ() -> None:
    """Some of the cases raise in one plain process, and some do not."""
    raising = [case for case in CASES if outcome(make_two_heads(), case)[0]]
    assert raising == [
        before_its_backward,
        every_weight,
        first_layer_with_input_gradient,
        frozen_layer,
        between_two_backwards,
    ]


# -- reached through no hook of its unit --------------------------------------------------------


class Chain(nn.Module):
    """Linear, so that a backward through its derivative reaches no output of a layer again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(4))
        self.kept = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.kept = (x * self.scale).square().sum()
        return x


def recorded(model: Chain, x: Tensor) -> Tensor:
    """A derivative by the input."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return grad.square().sum()


def kept(model: Chain, x: Tensor) -> Tensor:
    """What no output of a module depends on. Its weight stays where it is."""
    model(x)
    return model.kept


LOSSES = {"recorded": recorded, "kept": kept}


def written_before_backward(side: Side, loss: str, written: int | None) -> None:
    torch.manual_seed(1)
    model = Chain()
    side.shard(*model.layers, model, reshard_after_forward=False)
    inputs = side.data(0, 5, 4)
    value = side.mean(lambda rank: LOSSES[loss](model, inputs[rank]))
    if written is not None:
        with torch.no_grad():
            (*model.layers.parameters(), model.scale)[written].mul_(2.0)
    with side.note_error():
        value.backward()
    model.zero_grad()
    side.mean(lambda rank: LOSSES[loss](model, inputs[rank])).backward()
    side.note_model(model)


@pytest.mark.behaviour(30)
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hfsdp", "ddp"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("written", [None, 0, 1, 2, 3])
def test_written_weights_that_no_hook_comes_by(
    written: int | None, loss: str, strategy: str
) -> None:
    """Where a backward reaches weights through a recorded backward, or through what was kept inside
    a forward, a write in between is an error exactly where it is one in a plain process."""
    scenario = functools.partial(written_before_backward, loss=loss, written=written)
    compare(scenario, strategy)
