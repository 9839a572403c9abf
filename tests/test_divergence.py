"""Ranks that take different paths, fail or die: an error on all others, in time, and no hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from polyshard_gloo import GlooBackend
from torch import Tensor, nn
from training import loss_of, make_batches, make_mesh, make_model, shard

from polyshard import BackendError, Placements, SchedulePolicy, fully_shard
from polyshard.testing import RankFailure, run_ranks
from polyshard.testing.rank_failure import RankOutcome

# What a rank waits for others, in seconds. Connecting has to fit in it on a busy machine.
TIMEOUT = 6.0
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
        fully_shard(
            module, mesh, Placements.zero3("dp"), backend=backend, schedule_policy=policy
        )
    return model


def take_a_branch(rank: int, branch: Branch) -> str:
    """The error that this rank gets."""
    model = sharded_branching(branch.prefetch)
    alone = rank == dist.get_world_size() - 1
    with pytest.raises(BackendError) as error, torch.set_grad_enabled(branch.train):
        for step in range(branch.step + 2):
            skip = branch.skipped if alone and step == branch.step else None
            y = model(torch.randn(2, WIDTH), skip)
            if branch.train:
                y.sum().backward()
    dist.barrier()
    return str(error.value)


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
    """A gathered unit in a branch that one rank does not take: every rank is told its name and
    what it did instead."""
    for message in run_ranks(ranks, take_a_branch, branch):
        assert f"blocks.{branch.skipped} (float32): gather for " in message
