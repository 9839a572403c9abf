"""The core's waits are real: however late lanes do their work, training ends with the same bits.

The backend delays everything that is submitted by random times, on each rank its own, and fills
with NaN all memory that holds nothing: what was read too early or too late would show.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import OddModel, Training, bf16_policy, make_mesh, shard, train_sharded
from watched_gloo import RestlessGloo

from polyshard import Placements, SchedulePolicy, full_state_dict, unsharded
from polyshard.testing import run_ranks

SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A way to train that has waits of its own."""

    strategy: str = "zero3"
    schedule: SchedulePolicy | None = None
    reshard: bool = True
    scoped: bool = True
    bf16: bool = False
    checkpointed: str = "no"


class Model(OddModel):
    """Blocks that may be recomputed in backward, from outside or inside the units."""

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        self.reentrant: bool | None = None
        if checkpointed == "inside":
            for block in self.blocks:
                block.widen.forward = partial(checkpoint, block.widen.forward, use_reentrant=False)
        elif checkpointed != "no":
            self.reentrant = checkpointed == "reentrant"

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


Result = tuple[list[float], dict[str, Tensor]]


def train(rank: int, how: How, backend: RestlessGloo | None) -> Result:
    torch.manual_seed(0)
    mesh, model = make_mesh(), Model(how.checkpointed)
    if how.bf16:
        model.bfloat16()
    shard(
        model,
        mesh,
        getattr(Placements, how.strategy)("dp"),
        mixed_precision_policy=bf16_policy() if how.bf16 else None,
        reshard_after_forward=how.reshard,
        schedule_policy=how.schedule,
        backend=backend,
    )
    training = Training(steps=2, microbatches=3, scoped=how.scoped)
    losses = train_sharded(model, training, rank, mesh.size())
    with unsharded(model), torch.no_grad():
        nn.init.zeros_(model.blocks[0].scale)
    return losses, full_state_dict(model)


def train_restlessly(rank: int, how: How) -> tuple[Result, list[Result]]:
    """Training on plain gloo, and under each seed's delays."""
    restless = [RestlessGloo(seed=2 * seed + rank) for seed in SEEDS]
    return train(rank, how, None), [train(rank, how, backend) for backend in restless]


@pytest.mark.parametrize(
    "how",
    [
        How(),
        How(scoped=False),
        How(schedule=SchedulePolicy(forward_units=0, backward_units=0), scoped=False),
        How(schedule=SchedulePolicy(forward_units=3, backward_units=3)),
        How(schedule=SchedulePolicy(forward_elements=250, backward_elements=250)),
        How(reshard=False),
        How(bf16=True, scoped=False),
        How(checkpointed="reentrant"),
        How(checkpointed="not reentrant", schedule=SchedulePolicy(3, 3)),
        How(checkpointed="inside", reshard=False),
        How("ddp"),
        How("ddp", scoped=False),
        How("ddp", bf16=True),
        How("ddp", bf16=True, scoped=False, checkpointed="reentrant"),
    ],
    ids=str,
)
def test_training_does_not_depend_on_timing(how: How) -> None:
    """Two steps of three microbatches end with the same losses and weights under any delays."""
    for (losses, weights), restless in run_ranks(2, train_restlessly, how):
        assert all(torch.isfinite(value).all() for value in weights.values())
        for other_losses, other_weights in restless:
            assert other_losses == losses
            assert other_weights.keys() == weights.keys()
            for name, value in weights.items():
                assert torch.equal(other_weights[name], value), name
