"""Reductions over Partial axes go on while backward does, on a lane of their own."""

from __future__ import annotations

import pytest
import torch
from strategies import STRATEGIES
from torch import nn
from training import loss_of, make_batches, make_model, shard
from watched_gloo import WatchedGloo

from polyshard import microbatch
from polyshard.testing import run_ranks


def reductions_seen(rank: int, strategy: str) -> list[tuple[int, int, int]]:
    """How many reductions were submitted to the outer lane when backward reached the first block,
    at its end, and over the inner axis by then; by microbatch."""
    chosen, backend = STRATEGIES[strategy], WatchedGloo()
    mesh, model = chosen.mesh((2, 2)), make_model()
    shard(model, mesh, chosen.placements, backend=backend)
    tokens, targets = make_batches(1, 2, 4)
    on_the_way: list[int] = []

    def outer() -> int:
        return sum("reduce gradients" in label for label in backend.labels["outer"])

    def inner() -> int:
        return sum("reduce gradients" in label for label in backend.labels["reduce"])

    def look(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: on_the_way.append(outer()))

    model.blocks[0].register_forward_hook(look)
    seen = []
    for micro in range(2):
        before = inner()
        with microbatch(model, is_last=micro == 1):
            loss = loss_of(model, tokens[0, micro, rank], targets[0, micro, rank])
        loss.backward()
        seen.append((on_the_way[-1], outer(), inner() - before))
    return seen


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_outer_reductions_overlap_the_rest_of_backward(strategy: str) -> None:
    """No unit is reduced over the outer axis before the last microbatch; then later units are while
    backward goes on to earlier ones, each once, and over the inner axis in every microbatch."""
    for first, last in run_ranks(4, reductions_seen, strategy):
        assert first[:2] == (0, 0)
        on_the_way, at_the_end, over_inner = last
        assert 0 < on_the_way < at_the_end
        assert at_the_end == over_inner == first[2] > 0
