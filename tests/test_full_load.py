"""load_full_state_dict puts back what full_state_dict took out, on any split of the rows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from strategies import STRATEGIES, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from training import make_mesh

from polyshard import (
    BackendError,
    MixedPrecisionPolicy,
    PlacementError,
    Placements,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    unsharded,
)
from polyshard.testing import run_ranks


class Stateful(nn.Module):
    """Odd rows, a 0-D parameter, tied weights, buffers, an ignored parameter and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.ignored = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)) * self.scale) * self.ignored.sum()


def make_stateful(seed: int, dtype: torch.dtype = torch.float32) -> Stateful:
    """A model whose buffers and extra state differ by seed, too."""
    torch.manual_seed(seed)
    model = Stateful().to(dtype)
    model.note = f"seed {seed}"
    model.block[1].running_mean.add_(seed)
    model.mask.fill_(bool(seed % 2))
    return model


def make_sharded(seed: int, strategy: Strategy, shape: tuple[int, ...], **options: Any) -> Stateful:
    model = make_stateful(seed, **options)
    mesh = strategy.mesh(shape)
    for module in (model.block, model):
        fully_shard(module, mesh, strategy.placements, ignored_params=[model.ignored])
    return model


def tokens() -> Tensor:
    return torch.arange(6) % 7


def assert_loaded(model: nn.Module, expected: dict[str, Any], source: nn.Module) -> None:
    found = full_state_dict(model)
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value
    twin = copy.deepcopy(source)
    torch.testing.assert_close(model(tokens()), twin(tokens()), rtol=1e-5, atol=1e-6)


def _load(rank: int, strategy: Strategy, shape: tuple[int, ...]) -> None:
    source = make_stateful(1)
    given = copy.deepcopy(source.state_dict())
    for rank0_only in (False, True):
        model = make_sharded(2, strategy, shape)
        model(tokens()).sum().backward()  # gathered copies of the old weights exist, or did
        parameters = list(model.parameters())
        epochs = [p.epoch for p in parameters if hasattr(p, "epoch")]
        mine = given if not rank0_only or rank == 0 else ({} if shape == (2,) else None)
        missing, unexpected = load_full_state_dict(model, mine, rank0_only=rank0_only)
        assert missing == unexpected == []
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        after = [p.epoch for p in parameters if hasattr(p, "epoch")]
        assert len(after) == 6
        assert all(new > old for new, old in zip(after, epochs, strict=True))
        assert_loaded(model, given, source)
        # A round trip: what was taken out goes back in, also after training moved on.
        taken = full_state_dict(model)
        with unsharded(model):
            for parameter in model.parameters():
                parameter.data.zero_()
        load_full_state_dict(model, taken)
        for name, value in full_state_dict(model).items():
            assert not isinstance(value, Tensor) or torch.equal(value, taken[name]), name


@pytest.mark.parametrize(
    ("name", "shape"),
    [("zero3", (2,)), ("zero1", (2,)), ("ddp", (2,)), ("hsdp", (2, 1)), ("hfsdp", (2, 2))],
)
def test_what_is_loaded(name: str, shape: tuple[int, ...]) -> None:
    """Weights, tied names, buffers, ignored parameters and extra state; the next forward sees it.

    From every rank's own dict, and from the first rank's alone."""
    run_ranks(math.prod(shape), _load, STRATEGIES[name], shape)


def _cast(rank: int) -> None:
    exact = {name: value.double() for name, value in nn.Linear(5, 3).state_dict().items()}
    for rank0_only in (False, True):
        model = nn.Linear(5, 3).bfloat16()
        fully_shard(model, make_mesh(), Placements.zero3("dp"), MixedPrecisionPolicy())
        load_full_state_dict(model, exact, rank0_only=rank0_only)
        for name, value in full_state_dict(model).items():
            assert value.dtype == torch.float32
            assert torch.equal(value, exact[name].float()), name


def test_values_are_cast() -> None:
    """fp64 values arrive in fp32 main weights of a bf16 model without passing through bf16."""
    run_ranks(2, _cast)


def _other_parallelism(rank: int) -> None:
    value = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    for placement in (Shard(0), Shard(1), Replicate()):
        model = nn.Linear(3, 5, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(5, 3), make_mesh(), [placement]))
        load_full_state_dict(model, {"weight": value})
        assert torch.equal(model.weight.full_tensor(), value)


def test_dtensors_of_other_parallelism() -> None:
    """Each rank of such a parameter keeps the chunk that its placements give it."""
    run_ranks(2, _other_parallelism)


# -- errors ------------------------------------------------------------------------------------


def _refused(rank: int, rank0_only: bool) -> None:
    model = make_sharded(2, STRATEGIES["zero3"], (2,))
    before = full_state_dict(model)
    given = copy.deepcopy(make_stateful(1).state_dict())
    without = {name: value for name, value in given.items() if name != "block.0.bias"}
    wide = torch.ones(5, 6)
    sharded = {**given, "scale": model.scale}
    cases = [
        (RuntimeError, r'Missing key\(s\) in state_dict: "block.0.bias"', without),
        (RuntimeError, r'Unexpected key\(s\) in state_dict: "more"', {**given, "more": None}),
        (RuntimeError, "size mismatch for block.0.weight", {**given, "block.0.weight": wide}),
        (RuntimeError, "no tensor for mask", {**given, "mask": "yes"}),
        (ValueError, "'scale' is a ", sharded),
        (ValueError, r"has no values \(meta\)", {**given, "mask": given["mask"].to("meta")}),
        (ValueError, "got a list", list(given.items())),
    ]
    there = not rank0_only or rank == 0
    for kind, pattern, bad in cases:
        if not there and kind is ValueError:  # only the first rank has seen the value
            kind, pattern = BackendError, "rank 0 refused"
        with pytest.raises(kind, match=pattern):
            load_full_state_dict(model, bad if there else None, rank0_only=rank0_only)
        after = full_state_dict(model)
        for name, value in before.items():
            assert not isinstance(value, Tensor) or torch.equal(after[name], value), name
        assert model.note == "seed 2"
    loose = {**without, "more": given["mask"]}
    result = load_full_state_dict(
        model, loose if there else None, strict=False, rank0_only=rank0_only
    )
    assert (result.missing_keys, result.unexpected_keys) == (["block.0.bias"], ["more"])
    for name, value in full_state_dict(model).items():
        expected = before[name] if name == "block.0.bias" else given[name]
        assert not isinstance(value, Tensor) or torch.equal(value, expected), name
    bad = {"scale": torch.ones(2)} if there else None
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_full_state_dict(model, bad, strict=False, rank0_only=rank0_only)


@pytest.mark.parametrize("rank0_only", [False, True])
def test_what_is_refused(rank0_only: bool) -> None:
    """Every mistake is an error on all ranks before anything changed; strict=False tells names."""
    run_ranks(2, _refused, rank0_only)


def _one_without(rank: int) -> None:
    model = make_sharded(2, STRATEGIES["zero3"], (2,))
    before = full_state_dict(model)
    kind, pattern = (ValueError, "got a NoneType") if rank else (BackendError, "rank 1 refused")
    with pytest.raises(kind, match=pattern):
        load_full_state_dict(model, None if rank else make_stateful(1).state_dict())
    for name, value in full_state_dict(model).items():
        assert not isinstance(value, Tensor) or torch.equal(value, before[name]), name


def _other_names(rank: int) -> None:
    model = make_sharded(2, STRATEGIES["zero3"], (2,))
    before = full_state_dict(model)
    given = make_stateful(1).state_dict()
    if rank:
        del given["scale"]
    with pytest.raises(PlacementError, match="scale"):
        load_full_state_dict(model, given, strict=False)
    for name, value in full_state_dict(model).items():
        assert not isinstance(value, Tensor) or torch.equal(value, before[name]), name


def test_ranks_that_pass_different_names() -> None:
    """The first difference is named on every rank, and nothing is loaded."""
    run_ranks(2, _other_names)


def test_a_rank_that_passes_nothing() -> None:
    """Without rank0_only it is an error, there and on the other ranks."""
    run_ranks(2, _one_without)


def test_a_plain_module() -> None:
    """Without units, and without process groups, it loads as the module itself would."""
    source, model = make_stateful(1), make_stateful(2)
    assert load_full_state_dict(model, source.state_dict()) == ([], [])
    assert_loaded(model, source.state_dict(), source)
    with pytest.raises(RuntimeError, match="Missing key"):
        load_full_state_dict(model, {})
