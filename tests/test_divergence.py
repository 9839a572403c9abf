"""Ranks that take different paths, fail or die: an error on all others, in time, and no hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training import make_mesh

from polyshard import BackendError, Placements, SchedulePolicy, fully_shard
from polyshard.testing import RankFailure, run_ranks
from polyshard.testing.rank_failure import RankOutcome
from polyshard_gloo import GlooBackend

# What a rank waits for others, in seconds. Connecting has to fit in it on a busy machine.
TIMEOUT = 5.0
WIDTH = 4


class Branching(nn.Module):
    """Blocks of which a forward may leave some out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, skip: int | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index != skip:
                x = x + torch.tanh(block(x))
        return x


@dataclass(frozen=True)
class Branch:
    """Which block the last rank leaves out, in which step, and how it all runs."""

    skipped: int
    step: int
    prefetch: int = 1
    train: bool = True


def sharded_branching(prefetch: int) -> Branching:
    """A model on a backend of its own, which the failure to come is to break."""
    os.environ["POLYSHARD_GLOO_TIMEOUT"] = str(TIMEOUT)
    backend, mesh = GlooBackend(), make_mesh()
    model = Branching()
    policy = SchedulePolicy(forward_units=prefetch, backward_units=prefetch)
    for module in (*model.blocks, model):
        fully_shard(module, mesh, Placements.zero3("dp"), backend=backend, schedule_policy=policy)
    return model


def take_a_branch(rank: int, branch: Branch) -> str:
    """The error that this rank gets."""
    model = sharded_branching(branch.prefetch)
    alone = rank == dist.get_world_size() - 1

    def train() -> None:
        for step in range(branch.step + 2):
            skip = branch.skipped if alone and step == branch.step else None
            y = model(torch.randn(2, WIDTH), skip)
            if branch.train:
                y.sum().backward()

    with pytest.raises(BackendError) as error, torch.set_grad_enabled(branch.train):
        train()
    dist.barrier()
    return str(error.value)


@pytest.mark.behaviour(11)
@pytest.mark.parametrize(
    ("ranks", "branch"),
    [
        (2, Branch(skipped=1, step=0)),
        (2, Branch(skipped=1, step=2)),
        (2, Branch(skipped=1, step=1, prefetch=0)),
        (2, Branch(skipped=2, step=0)),
        (2, Branch(skipped=2, step=1, prefetch=0)),
        (2, Branch(skipped=0, step=1, prefetch=3)),
        (2, Branch(skipped=1, step=1, prefetch=0, train=False)),
        (2, Branch(skipped=2, step=1, prefetch=0, train=False)),
        (4, Branch(skipped=1, step=1)),
    ],
    ids=str,
)
def test_a_unit_entered_by_some_ranks_only_is_an_error(ranks: int, branch: Branch) -> None:
    """A gathered unit in a branch that one rank does not take: an error on every rank, which names
    the unit unless the rank waited elsewhere for those that are in it."""
    messages = run_ranks(ranks, take_a_branch, branch)
    named = [f"blocks.{branch.skipped} (float32): " in message for message in messages]
    assert any(named)
    for message, is_named in zip(messages, named, strict=True):
        assert is_named or f"waited {TIMEOUT:.0f} s for rank" in message


# -- a rank that fails --------------------------------------------------------------------------


class Mishap(Exception):
    """What goes wrong in user code."""


@dataclass
class Fuse:
    """A hook on a module inside a unit that fails when it is lit."""

    lit: str | None = None  # "forward" or "backward"
    blow: Callable[[], None] = lambda: None

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.lit == "forward":
            self.blow()
        if self.lit == "backward":
            output.register_hook(lambda grad: self.blow())


def raise_mishap() -> None:
    raise Mishap("in user code")


def die() -> None:
    os._exit(3)


def fail_alone(rank: int, phase: str) -> str:
    """The last rank raises in its second step and then takes no part; what the others get."""
    model = sharded_branching(prefetch=1)
    alone = rank == dist.get_world_size() - 1
    fuse = Fuse(blow=raise_mishap)
    model.blocks[1].register_forward_hook(fuse)

    def train() -> None:
        for step in range(3):
            fuse.lit = phase if alone and step == 1 else None
            model(torch.randn(2, WIDTH)).sum().backward()

    with pytest.raises(Mishap if alone else BackendError) as error:
        train()
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_raises_is_missed_by_the_others(phase: str) -> None:
    """One rank raises in a pass and does not come back: the other gets an error that names it and
    the collective it is missed in, when the time is up."""
    waiting, failed = run_ranks(2, fail_alone, phase)
    assert failed == "in user code"
    assert "(float32): " in waiting
    assert f"waited {TIMEOUT:.0f} s for rank 1, which did not come to this collective" in waiting


def die_alone(rank: int, phase: str) -> None:
    model = sharded_branching(prefetch=1)
    fuse = Fuse(blow=die)
    model.blocks[1].register_forward_hook(fuse)
    for step in range(3):
        fuse.lit = phase if rank == 1 and step == 1 else None
        model(torch.randn(2, WIDTH)).sum().backward()


@pytest.mark.parametrize(("ranks", "phase"), [(2, "forward"), (2, "backward"), (4, "backward")])
def test_a_rank_that_dies_is_an_error_on_all_others(ranks: int, phase: str) -> None:
    """A process that ends in the middle of a step: every other rank raises at once and says that
    its connection was lost, and in what."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(ranks, die_alone, phase)
    first, *others = failure.value.reports
    assert (first.rank, first.outcome) == (1, RankOutcome.DIED)
    assert len(others) == ranks - 1
    for report in others:
        assert report.outcome is RankOutcome.RAISED
        assert "BackendError" in report.summary
        assert "(float32): " in report.summary
        assert "lost its connection to rank" in report.summary
