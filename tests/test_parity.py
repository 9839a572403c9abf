"""Sharded training follows one plain process on the global batch, whatever the strategy."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from strategies import STRATEGIES, Strategy
from torch import Tensor
from training import Training, bf16_policy, make_model, shard, train_plain, train_sharded

from polyshard import full_state_dict
from polyshard.testing import run_ranks

# microbatches, whether they are scoped, and how zero_grad clears
EVERY_WAY = [
    (microbatches, scoped, set_to_none)
    for microbatches, scoped in ((1, False), (3, True), (3, False))
    for set_to_none in (True, False)
]
SOME_WAYS = [(1, False, True), (3, True, False), (3, False, True)]

CASES = [
    pytest.param(
        strategy, shape, Training(10, *way, bf16=bf16, blocks=2), id=f"{strategy}-{shape}-{way}"
    )
    for strategy, shapes in {
        **dict.fromkeys(("ddp", "zero1", "zero2", "zero3"), ((1,), (2,), (4,))),
        **dict.fromkeys(("hsdp", "hfsdp", "early", "once", "sliced"), ((2, 1), (1, 2), (2, 2))),
        "three-axes": ((2, 2, 2),),
    }.items()
    for shape in shapes
    for way in (EVERY_WAY if shape in ((4,), (2, 2)) else SOME_WAYS)
    for bf16 in (False, True)
    if len(shape) < 3 or way[0] == 3
]


def _train(
    rank: int, strategy: Strategy, shape: tuple[int, ...], how: Training
) -> tuple[list[float], dict[str, Tensor]]:
    mesh = strategy.mesh(shape)
    model = make_model(torch.bfloat16 if how.bf16 else torch.float32, blocks=how.blocks)
    policy = bf16_policy() if how.bf16 else None
    shard(model, mesh, strategy.placements, mixed_precision_policy=policy)
    losses = train_sharded(model, how, rank, mesh.size())
    return losses, full_state_dict(model)


_train_plain = lru_cache(train_plain)


@pytest.mark.behaviour(2, 3, 6)
@pytest.mark.parametrize(("strategy", "shape", "how"), CASES)
def test_ten_steps_follow_a_plain_process(
    strategy: str, shape: tuple[int, ...], how: Training
) -> None:
    """Ten AdamW steps, each rank on its own data: losses within 1e-5, weights within 1e-4."""
    ranks = torch.Size(shape).numel()
    expected_losses, expected = _train_plain(how, ranks)
    for losses, weights in run_ranks(ranks, _train, STRATEGIES[strategy], shape, how):
        # In bf16 the loss itself is of rounded logits; the weights are what must agree.
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(expected_losses), atol=1e-5, rtol=0
        )
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=0, msg=name)
