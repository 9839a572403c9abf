"""Which parameters a unit may own: odd ones, frozen ones, tied ones, unused ones."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from behaving import Side, compare, over_strategies, train
from odd_net import make_net, mean_square, note_grads
from odd_parameters import MAKE, Tied
from torch import Tensor, nn

from polyshard import unsharded
from polyshard.testing import run_ranks

# -- shapes and dtypes ---------------------------------------------------------------------------


def train_odd(side: Side, name: str, steps: int, reshard: bool) -> None:
    torch.manual_seed(0)
    model = MAKE[name]()
    side.shard(model, reshard_after_forward=reshard)
    for path, parameter in model.named_parameters():
        side.note(f"{path} is", (parameter.dtype, parameter.shape, parameter.requires_grad))
    data = [side.data(step, 4, 3) for step in range(steps)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for step in range(steps):
        loss = side.mean(lambda rank, at=step: model(data[at][rank]))  # type: ignore[misc]
        loss.backward()
        side.note_mean(f"loss of step {step}", loss)
        if step % 3 == 0:
            side.note_model(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    side.note_model(model)


@pytest.mark.behaviour(10, 6, 33)
@over_strategies
@pytest.mark.parametrize(("ranks", "steps"), [(2, 10), (4, 3)])
@pytest.mark.parametrize("name", MAKE)
def test_odd_parameters_train(name: str, ranks: int, steps: int, strategy: str) -> None:
    """0-D, empty, strided, complex, integer and boolean parameters, several dtypes in one unit,
    fewer rows than ranks, lists and recurrent layers: AdamW steps as in one process."""
    how = {"name": name, "steps": steps, "reshard": ranks == 2}
    compare(partial(train_odd, **how), strategy, ranks=ranks)


# -- frozen ones ---------------------------------------------------------------------------------

#: Whether the chosen parameters are trained, by step; None: as they were before.
WHEN = {
    "from the start": [False] + [None] * 7,
    "for a while": [None, None, False, None, None, True, None, None],
    "every other step": [True, False] * 4,
}


def freeze(side: Side, names: tuple[str, ...], when: str, scoped: bool) -> None:
    net = make_net(side, reshard_after_forward=not scoped)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step, trained in enumerate(WHEN[when]):
        if trained is not None:
            for name, parameter in net.named_parameters():
                if name.startswith(names):
                    parameter.requires_grad_(trained)
        is_last = not scoped or step % 2 == 1
        with side.microbatch(net, is_last):
            loss = mean_square(side, net, step)
        loss.backward()
        if is_last:
            note_grads(side, net)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 4 < 2)
    side.note_model(net)


@pytest.mark.behaviour(8)
@over_strategies
@pytest.mark.parametrize("scoped", [False, True], ids=["alone", "microbatches"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("names", [("widen.bias", "head"), ("widen", "narrow")])
def test_freezing(names: tuple[str, ...], when: str, scoped: bool, strategy: str) -> None:
    """Whole units, parts of all and all but one, frozen and trained again between forwards: from
    the next forward on, and what was accumulated before is finished all the same."""
    compare(partial(freeze, names=names, when=when, scoped=scoped), strategy)


def freeze_while_whole(side: Side) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    side.shard(model)
    data = side.data(0, 4, 3)
    for bias_is_trained, weight_is_trained in [(True, False), (False, True), (True, True)]:
        with unsharded(model) if side.sharded else nullcontext():
            model[0].weight.requires_grad_(weight_is_trained)
            model[2].bias.requires_grad_(bias_is_trained)
        side.mean(lambda rank: model(data[rank]).square().mean()).backward()
        side.note_model(model)
        model.zero_grad()
    side.note("trained", [parameter.requires_grad for parameter in model.parameters()])


@pytest.mark.behaviour(8)
@over_strategies
def test_freezing_while_weights_are_whole(strategy: str) -> None:
    """What is frozen or unfrozen inside `unsharded` is so afterwards."""
    compare(freeze_while_whole, strategy)


def add_adapters(side: Side) -> None:
    torch.manual_seed(0)
    base = nn.Linear(5, 5).requires_grad_(False)
    down, up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down, self.up = base, down, up

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(5, 5).requires_grad_(False))
    side.shard(base, model[0], model)
    train(side, model, lambda step, rank: model(side.data(step, 4, 5)[rank]).square().mean(), 4)


@pytest.mark.behaviour(8)
@over_strategies
def test_adapters_on_a_frozen_model(strategy: str) -> None:
    """Trained adapters beside frozen units and before frozen layers."""
    compare(add_adapters, strategy)


# -- tied ones -----------------------------------------------------------------------------------


def train_tied(side: Side, units: tuple[str, ...], frozen: bool) -> None:
    torch.manual_seed(0)
    model = Tied()
    if frozen:
        model.embedding.weight.requires_grad_(False)
    side.shard(*(model.get_submodule(name) for name in units), model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(7, (10, side.world, 6), generator=generator)
    for _ in range(2):
        side.note("tied", model.head.weight is model.embedding.weight)
        side.note("mixing", model.mixing is model.bodies[1].weight)
        side.note("entries", len(list(model.parameters())))
        side.note("names", list(model.state_dict()))
        side.note("all", [name for name, _ in model.named_parameters(remove_duplicate=False)])
        train(side, model, lambda step, rank: model(tokens[step, rank]), 5)
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        side.note_model(model)


@pytest.mark.behaviour(9)
@over_strategies
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("units", [(), ("body",)], ids=["one unit", "a unit used twice"])
def test_tied_parameters_train(units: tuple[str, ...], frozen: bool, strategy: str) -> None:
    """Weights and modules under several names, used several times in one unit or through a nested
    one: one storage, one entry for the optimizer, and every name in the state dict."""
    compare(partial(train_tied, units=units, frozen=frozen), strategy)


class SharedLayer(nn.Module):
    """Two stacks with a layer in common."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(3, 3))
        self.right = nn.Sequential(self.left[0], nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


def tie_wrongly(rank: int, how: str) -> str:
    side = Side(2, rank, "zero3")
    model = SharedLayer() if how == "a module in two units" else Tied()
    tokens = torch.tensor([0, 1])
    try:
        if how == "a module in two units":
            side.shard(model.left, model.right)
        elif how == "a frozen weight":
            model.embedding.weight.requires_grad_(False)
            side.shard(model.head, model)
        else:
            model.head.weight = nn.Parameter(torch.zeros(7, 4))
            side.shard(model.body, model)
            model.head.weight = model.embedding.weight
            model(tokens)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.behaviour(9)
@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("a module in two units", ["'0.weight' of Sequential", "unit 'Sequential'", "ancestor"]),
        ("a frozen weight", ["'embedding.weight' of Tied", "unit 'Linear'", "ancestor"]),
        ("after sharding", ["'head.weight' of unit 'Tied'", "replaced", "unsharded"]),
    ],
)
def test_ties_that_cannot_be_kept(how: str, names: list[str]) -> None:
    """A tie across units, and one that was made after sharding, is an error on every rank that
    names both ends, or the name that changed."""
    first, second = run_ranks(2, tie_wrongly, how)
    assert first == second
    for name in names:
        assert name in first


# -- unused ones ---------------------------------------------------------------------------------


class Choosing(nn.Module):
    """Layers that run in the order asked for, and two parameters used by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 2)
        self.p, self.q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, layers: str, chosen: str) -> Tensor:
        for index in layers:
            x = torch.tanh(self.layers[int(index)](x))
        for name in chosen:
            x = x * getattr(self, name)
        return self.head(x)


#: By step, what each rank uses beside the layers that all use.
CHOICES = [
    ("01", ("p", "q")),
    ("01", ("q", "p")),
    ("01", ("", "p")),
    ("01", ("", "")),
    ("23", ("p", "")),
    ("32", ("q", "q")),
    ("0010", ("p", "p")),
    ("3", ("", "pq")),
    ("0123", ("qp", "")),
    ("", ("p", "q")),
]


def choose(side: Side, scoped: bool, set_to_none: bool) -> None:
    torch.manual_seed(0)
    model = Choosing()
    side.shard(*model.layers, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step, (layers, chosen) in enumerate(CHOICES):
        data, is_last = side.data(step, 3, 4), not scoped or step % 2 == 1
        with side.microbatch(model, is_last):
            loss = side.mean(
                lambda rank, x=data, names=layers, own=chosen: (  # type: ignore[misc]
                    model(x[rank], names, own[rank % 2]).square().mean()
                )
            )
        loss.backward()
        if is_last:
            side.note_model(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.behaviour(11, 6)
@over_strategies
@pytest.mark.parametrize(
    ("ranks", "scoped", "set_to_none"),
    [(2, False, True), (2, False, False), (2, True, True), (2, True, False), (4, True, True)],
)
def test_what_each_step_uses_changes(
    ranks: int, scoped: bool, set_to_none: bool, strategy: str
) -> None:
    """Units and parameters used in some steps, in some microbatches and on some ranks only: None
    where nobody used one, zero where others did, and a zeroed gradient stays a zero."""
    compare(partial(choose, scoped=scoped, set_to_none=set_to_none), strategy, ranks=ranks)
