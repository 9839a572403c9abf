"""A model on meta gets memory shard by shard, and values from its modules or from a load."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from behaving import Side, compare, over_strategies, train, whole
from torch import Tensor, nn

from polyshard import FsdpModule, UnsupportedError, full_state_dict, load_full_state_dict, unsharded
from polyshard.testing import run_ranks


class Head(nn.Module):
    """A parameter of its own, a 0-D one, and one that it shares with the embedding."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.shift = nn.Parameter(torch.empty(9))
        self.scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.shift)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.linear(x, self.weight) + self.shift) * self.scale


class Model(nn.Module):
    """Layers of many kinds, a buffer among them and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.embedding.weight.tag = "first"  # type: ignore[attr-defined]
        self.block = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
        # A bias of keys has no gradient but noise, which AdamW would blow up.
        self.attention = nn.MultiheadAttention(6, 2, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(6)
        self.head = Head(self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.embedding(tokens))[None]
        x = self.norm(x + self.attention(x, x, x)[0])
        return self.head(x[0])


def initialise(model: nn.Module) -> None:
    """As many training scripts do: every module that can initialises itself."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()


def make(side: Side) -> Model:
    """On meta and sharded there; the plain one has memory."""
    with torch.device("meta" if side.sharded else side.device):
        model = Model()
    side.shard(model.block, model)
    if side.sharded:
        model.to_empty(device=side.device)
    return model


def by_modules(side: Side, model: Model) -> None:
    torch.manual_seed(5)
    initialise(model)


def while_whole(side: Side, model: Model) -> None:
    """Unit after unit; each module once, those of nested units left out."""
    torch.manual_seed(5)
    if not side.sharded:
        for part in (model.block, *(m for n, m in model.named_children() if n != "block")):
            initialise(part)
        return
    with unsharded(model.block, recurse=False):
        initialise(model.block)
    with unsharded(model, recurse=False):
        for name, part in model.named_children():
            if name != "block":
                initialise(part)


def through_data(side: Side, model: Model) -> None:
    """Writes that no version counts, zeros among them."""
    scope = unsharded(model) if side.sharded else torch.no_grad()
    with scope:
        for index, parameter in enumerate(model.parameters()):
            parameter.data.fill_(index % 3 / 4)
    model.block[1].reset_running_stats()


def from_whole(side: Side, model: Model) -> None:
    torch.manual_seed(5)
    source = Model()
    if side.sharded:
        load_full_state_dict(model, source.state_dict())
    else:
        model.load_state_dict(source.state_dict())


def by_load_state_dict(side: Side, model: Model) -> None:
    torch.manual_seed(5)
    model.load_state_dict(Model().state_dict())


def by_writes(side: Side, model: Model) -> None:
    """In place, on the parameters at rest."""
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
        torch._foreach_add_(list(model.parameters()), 0.25)
    model.block[1].reset_running_stats()


WAYS = [by_modules, while_whole, through_data, from_whole, by_load_state_dict, by_writes]


def materialise(side: Side, give_values: Callable[[Side, Model], None]) -> None:
    model = make(side)
    give_values(side, model)
    side.note("tag", model.embedding.weight.tag)
    side.note("tied", model.head.weight is model.embedding.weight)
    side.note_model(model)
    model.block[1].eval()  # statistics of a rank's part of the batch would not be those of all
    tokens = torch.randint(9, (3, side.world, 7), generator=torch.Generator().manual_seed(1))
    train(side, model, lambda step, rank: model(tokens[step, rank]).square().mean(), 3)


@pytest.mark.behaviour(13, 26)
@over_strategies
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_values_come_from_modules_or_loads(strategy: str, way: Callable[..., None]) -> None:
    """Whichever way a model on meta gets its values, it has those of a plain process that got them
    the same way, keeps attributes and ties, and trains alike."""
    compare(functools.partial(materialise, give_values=way), strategy)


@pytest.mark.behaviour(26)
@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_four_ranks(strategy: str) -> None:
    """The same on a mesh of two axes."""
    compare(functools.partial(materialise, give_values=by_modules), strategy, ranks=4)


def seeds_differ(rank: int, strategy: str, way: str) -> tuple[dict[str, Tensor], Tensor]:
    side = Side(2, rank, strategy)
    model = make(side)
    torch.manual_seed(rank)
    if way == "whole":
        with unsharded(model):
            initialise(model)
    else:
        initialise(model)
    model.eval()
    return full_state_dict(model), model(torch.arange(7))


@pytest.mark.behaviour(26)
@pytest.mark.parametrize("way", ["whole", "rows"])
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hfsdp", "ddp"])
def test_ranks_that_draw_other_numbers(strategy: str, way: str) -> None:
    """Seeds that differ between ranks give one model all the same: each row has one owner, and on
    replicated axes the first rank's values stand."""
    (first, output), (second, other) = run_ranks(2, seeds_differ, strategy, way)
    for name, value in first.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(second[name], value, rtol=0, atol=0)
    torch.testing.assert_close(output, other)


def use_too_early(rank: int, strategy: str) -> list[str]:
    """What forwards say before and after some of the weights have values."""
    model = make(Side(2, rank, strategy))
    said = []
    for _ in range(2):
        try:
            model(torch.arange(7))
        except UnsupportedError as error:
            said.append(str(error))
        with torch.no_grad():
            if said[-1].startswith("parameter '0.weight'"):
                initialise(model.block)
            else:
                for name, parameter in model.named_parameters():
                    if not name.startswith("block"):
                        parameter.fill_(0.5)
    model.block[1].reset_running_stats()
    assert torch.isfinite(model(torch.arange(7))).all()
    return said


@pytest.mark.behaviour(26)
@over_strategies
def test_a_forward_without_values_is_an_error(strategy: str) -> None:
    """It names the parameter and what to do; once the unit has its values, the next one's is
    named; then it runs."""
    for said in run_ranks(2, use_too_early, strategy):
        assert len(said) == 2
        assert "'embedding.weight' of unit 'Model' was on meta" in said[0]
        assert "reset_parameters" in said[0]
        assert "'0.weight' of unit 'block' was on meta" in said[1]


def load_without_memory(rank: int) -> str:
    side = Side(2, rank, "zero3")
    with torch.device("meta"):
        model = Model()
    side.shard(model)
    with pytest.raises(RuntimeError) as raised:
        load_full_state_dict(model, Model().state_dict())
    return str(raised.value)


@pytest.mark.behaviour(26)
def test_a_load_into_buffers_on_meta_is_an_error() -> None:
    """Buffers that have no memory would stay as they are: each is named, and what to call."""
    for said in run_ranks(2, load_without_memory):
        assert "block.1.running_mean is on meta in the model; call module.to_empty" in said


def shards_only(rank: int) -> tuple[int, int]:
    """Elements of main weights on this rank, and of the model."""
    model = make(Side(2, rank, "zero3"))
    rows = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert isinstance(model, FsdpModule)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    return rows, sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.behaviour(26)
def test_each_rank_gets_its_rows_only() -> None:
    """The ranks' memory together is one model's."""
    (first, total), (second, _) = run_ranks(2, shards_only)
    assert first + second == total
    assert abs(first - second) < total / 4


def half_and_half(side: Side) -> None:
    """Some parameters of a unit are on meta and some are not."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if side.sharded:
        model[1].to("meta")
    side.shard(model)
    model[1].load_state_dict({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
    data = side.data(1, 5, 3)
    train(side, model, lambda step, rank: model(data[rank]).square().mean(), 2)
    side.note("rows", whole(model[1].weight))


@pytest.mark.behaviour(26)
@over_strategies
def test_a_part_of_a_unit_on_meta(strategy: str) -> None:
    """What had values keeps them."""
    compare(half_and_half, strategy)
