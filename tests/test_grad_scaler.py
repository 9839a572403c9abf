"""torch.amp.GradScaler with fp16 compute: all ranks scale, skip and step as one process does."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from strategies import STRATEGIES, Strategy
from torch import Tensor, nn

from polyshard import MixedPrecisionPolicy, full_state_dict, fully_shard
from polyshard.testing import run_ranks

STEPS = 8
#: Too large for fp16 at first, so that the scale has to back off before the first step.
FIRST_SCALE = 2.0**19
FP16 = MixedPrecisionPolicy(compute_dtype=torch.float16, main_grads_dtype=torch.float32)
#: At this step the last rank's input overflows.
OVERFLOW = 6


@dataclass(frozen=True)
class Outcome:
    """The scale after each step, whether it stepped, and the final weights."""

    scales: list[float]
    stepped: list[bool]
    weights: dict[str, Tensor]


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def inputs_of(rank: int, ranks: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 6, generator=generator)
    return x * 1e30 if step == OVERFLOW and rank == ranks - 1 else x


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=2)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def train_plain(ranks: int, options: dict[str, Any]) -> Outcome:
    """fp32 weights; each rank's part of the batch through a copy in fp16, gradients averaged."""
    model, scaler = make_layers(), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    scales, stepped = [], []
    for step in range(STEPS):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        for rank in range(ranks):
            half = copy.deepcopy(model).half()
            half.zero_grad()
            scaler.scale(loss_of(half, inputs_of(rank, ranks, step).half())).backward()
            for ours, theirs in zip(model.parameters(), half.parameters(), strict=True):
                part = theirs.grad.float() / ranks
                ours.grad = part if ours.grad is None else ours.grad + part
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(not torch.equal(before, model[0].weight))
    return Outcome(scales, stepped, model.state_dict())


def make_sharded(strategy: Strategy, shape: tuple[int, ...]) -> nn.Sequential:
    model = make_layers()
    mesh = strategy.mesh(shape)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh, strategy.placements, FP16)
    return model


def _train(rank: int, strategy: Strategy, shape: tuple[int, ...], options: Any) -> Outcome:
    model, scaler = make_sharded(strategy, shape), make_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    scales, stepped = [], []
    for step in range(STEPS):
        before = full_state_dict(model)["0.weight"]
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs_of(rank, math.prod(shape), step))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(not torch.equal(before, full_state_dict(model)["0.weight"]))
    return Outcome(scales, stepped, full_state_dict(model))


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("zero3", (2,), {"momentum": 0.9}),
        # Without momentum: torch leaves its memory as it is where the first fused step is skipped.
        ("zero3", (2,), {"fused": True}),
        ("zero1", (2,), {"momentum": 0.9}),
        ("hsdp", (2, 1), {"momentum": 0.9}),
        ("hfsdp", (2, 2), {"momentum": 0.9}),
    ],
)
def test_training_follows_a_plain_process(
    name: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """The scale backs off and grows, steps are skipped, and weights change as in one process."""
    expected = train_plain(math.prod(shape), options)
    assert not expected.stepped[0]
    assert not expected.stepped[OVERFLOW]
    assert sum(expected.stepped) >= 4
    assert any(after > before for before, after in pairwise(expected.scales))
    for found in run_ranks(math.prod(shape), _train, STRATEGIES[name], shape, options):
        assert found.scales == expected.scales
        assert found.stepped == expected.stepped
        torch.testing.assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-5)


def _one_rank_sees(rank: int, strategy: Strategy, shape: tuple[int, ...], seeing: int) -> None:
    """Every gradient is finite but for one element of the rows that one rank holds."""
    model = make_sharded(strategy, shape)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = full_state_dict(model)
    for unscales_first in (False, True):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs_of(rank, 1, 0))).backward()
        if rank == seeing:
            rows = next(rows for p in model.parameters() if (rows := p.grad.to_local()).numel())
            rows.view(-1)[-1] = math.inf
        if unscales_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    optimizer.zero_grad()
    scaler.scale(loss_of(model, inputs_of(rank, 1, 0))).backward()
    scaler.step(optimizer)
    assert not torch.equal(full_state_dict(model)["0.weight"], before["0.weight"])


@pytest.mark.parametrize(
    ("name", "shape"), [("zero3", (2,)), ("zero1", (2,)), ("hsdp", (2, 1)), ("hfsdp", (2, 2))]
)
@pytest.mark.parametrize("seeing", ["first", "last"])
def test_an_infinity_that_one_rank_sees(name: str, shape: tuple[int, ...], seeing: str) -> None:
    """All ranks skip the step and back off together, whichever rank it is; then they step again."""
    ranks = math.prod(shape)
    run_ranks(ranks, _one_rank_sees, STRATEGIES[name], shape, 0 if seeing == "first" else ranks - 1)
