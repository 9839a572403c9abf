"""An optimizer step on weights and gradients of different precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from one_rank import OneRank
from torch import nn

from polyshard import MixedPrecisionPolicy, UnsupportedError


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        torch.optim.AdamW,
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
    ],
    ids=["sgd", "adamw", "adamw-foreach", "adamw-fused"],
)
def test_a_step_on_gradients_of_other_precision_is_refused(
    world: OneRank, optimizer: type[torch.optim.Optimizer]
) -> None:
    """The error says which policy makes weights and gradients alike; with it, the step runs."""
    fp32_gradients = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
    for policy, fits in ((None, False), (fp32_gradients, True)):
        model = nn.Linear(4, 3).bfloat16()
        world.shard(model, mixed_precision_policy=policy)
        step = optimizer(model.parameters(), lr=0.1).step
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        before = model.weight.to_local().clone()
        if fits:
            step()
            assert not torch.equal(before, model.weight.to_local())
        else:
            with pytest.raises(UnsupportedError, match=r"main_grads_dtype=torch\.float32"):
                step()
            assert torch.equal(before, model.weight.to_local())
