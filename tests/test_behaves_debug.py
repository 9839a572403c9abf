"""POLYSHARD_DEBUG=1: ranks compare what they are about to do, whatever the backend does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from behaving import Side
from torch import Tensor, nn

from polyshard import BackendError, PlacementError
from polyshard.testing import run_ranks
from polyshard_gloo import GlooBackend


class Branching(nn.Module):
    """Blocks of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, skipped: int | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != skipped:
                x = block(x)
        return x


def make(rank: int, monkey: pytest.MonkeyPatch) -> Branching:
    monkey.setenv("POLYSHARD_DEBUG", "1")
    monkey.setenv("POLYSHARD_DEBUG_TIMEOUT", "3")
    model = Branching()
    # A backend of its own, which the failure to come is to break.
    Side(2, rank, "zero3").shard(*model.blocks, model, backend=GlooBackend())
    return model


def take_a_branch(rank: int) -> str:
    with pytest.MonkeyPatch.context() as monkey:
        model = make(rank, monkey)
        model(torch.ones(2, 4)).sum().backward()

        def train() -> None:
            for _ in range(2):
                model(torch.ones(2, 4), 1 if rank else None).sum().backward()

        with pytest.raises(BackendError) as raised:
            train()
        return str(raised.value)


@pytest.mark.behaviour(11)
def test_another_collective_is_named() -> None:
    """A unit that only some ranks enter is an error on all, with what each rank is at."""
    for rank, said in enumerate(run_ranks(2, take_a_branch)):
        assert f"rank {rank} is at" in said
        assert f"rank {1 - rank} is at" in said
        assert "'blocks.1 (float32): " in said
        assert "the data, and for models that differ." in said  # polyshard's words, not gloo's


def drop_after_a_branch(rank: int) -> bool:
    with pytest.MonkeyPatch.context() as monkey:
        model = make(rank, monkey)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(BackendError):  # noqa: PT012 - where it is raised depends on the rank
            for _ in range(2):
                model(torch.ones(2, 4), 1 if rank else None).sum().backward()
        watched = weakref.ref(model.blocks[0].weight)
        del model
    gc.collect()
    return watched() is None


@pytest.mark.behaviour(19)
def test_a_model_dropped_after_ranks_diverged() -> None:
    """A model in which ranks diverged is freed with the next garbage collection once it is deleted,
    without another pass of any model."""
    assert run_ranks(2, drop_after_a_branch) == [True, True]


def stay_away(rank: int) -> str:
    with pytest.MonkeyPatch.context() as monkey:
        model = make(rank, monkey)
        if rank:
            return ""
        with pytest.raises(BackendError) as raised:
            model(torch.ones(2, 4)).sum().backward()
        return str(raised.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    """A rank that is missing is an error on the one that waits, once the time is up."""
    said = run_ranks(2, stay_away)[0]
    assert "gather for forward" in said
    assert "did not come there" in said
    assert "Ranks 1 failed" in said


def other_values(rank: int, strategy: str) -> str:
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("POLYSHARD_DEBUG", "1")
        model = nn.Linear(4, 4)
        try:
            Side(2, rank, strategy).shard(model)
        except PlacementError as error:
            assert type(model) is nn.Linear
            return str(error)
        return ""


@pytest.mark.behaviour(27)
def test_other_first_values_are_named() -> None:
    """Where each rank keeps its own rows, ranks that start from other values are told; where the
    first rank's are taken, they may."""
    for said in run_ranks(2, other_values, "zero3"):
        assert "rank 0 has parameter 'weight' with values of checksum" in said
    assert run_ranks(2, other_values, "ddp") == ["", ""]
