"""Sharded training follows one plain process on the global batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training import Training, bf16_policy, make_mesh, make_model, shard, train_plain, train_sharded

from polyshard import Placements, full_state_dict
from polyshard.testing import run_ranks


def _train(rank: int, strategy: str, how: Training) -> tuple[list[float], dict[str, Tensor]]:
    mesh = make_mesh()
    model = make_model(torch.bfloat16 if how.bf16 else torch.float32)
    policy = bf16_policy() if how.bf16 else None
    shard(model, mesh, getattr(Placements, strategy)("dp"), mixed_precision_policy=policy)
    losses = train_sharded(model, how, rank, mesh.size())
    return losses, full_state_dict(model)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16-main-fp32"])
@pytest.mark.parametrize(
    ("microbatches", "scoped"), [(1, False), (3, True), (3, False)], ids=["1", "3-scoped", "3"]
)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ten_steps_follow_a_plain_process(
    ranks: int, strategy: str, microbatches: int, scoped: bool, bf16: bool
) -> None:
    """Ten AdamW steps, each rank on its own data: losses within 1e-5, weights within 1e-4."""
    how = Training(
        microbatches=microbatches, scoped=scoped, set_to_none=microbatches == 1, bf16=bf16
    )
    expected_losses, expected = train_plain(how, ranks)
    for losses, weights in run_ranks(ranks, _train, strategy, how):
        # In bf16 the loss itself is of rounded logits; the weights are what must agree.
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(expected_losses), atol=1e-5, rtol=0
        )
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=0, msg=name)
