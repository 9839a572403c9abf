"""On several ranks, every forward uses the weights as they are, however they got there.

Ranks see the same data here, so that one plain process can do what they do, line by line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from strategies import STRATEGIES
from torch import Tensor, nn
from training import bf16_policy, loss_of, make_batches, make_model, shard

from polyshard import (
    MixedPrecisionPolicy,
    full_state_dict,
    fully_shard,
    microbatch,
    unsharded,
)
from polyshard.testing import run_ranks

NAMES = ["zero3", "ddp", "zero1", "hfsdp"]
make_small_model = partial(make_model, blocks=1)
TOKENS, TARGETS = (each[0, :, 0] for each in make_batches(1, 4, 1))  # four batches

#: Something done to a model; the logits that it computed on the way.
Scenario = Callable[[nn.Module], list[Tensor]]


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int = 0) -> None:
    loss_of(model, TOKENS[batch], TARGETS[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model: nn.Module, batch: int = 1) -> Tensor:
    with torch.no_grad():
        return model(TOKENS[batch])


def step_after_an_evaluation(model: nn.Module) -> list[Tensor]:
    """Backward, a no-grad forward, a step, a forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for batch in range(3):
        loss_of(model, TOKENS[batch], TARGETS[batch]).backward()
        seen.append(evaluate(model))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model(TOKENS[1]).detach())
    return seen


def swap_for_an_evaluation(model: nn.Module) -> list[Tensor]:
    """The weights are exchanged in place for others, evaluated, and exchanged back."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    seen = []
    for batch in range(3):
        train_step(model, optimizer, batch)
        parameters = list(model.parameters())
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 0.5)
            kept = [parameter.clone() for parameter in parameters]
            seen.append(evaluate(model))
            for parameter, value in zip(parameters, average, strict=True):
                parameter.copy_(value)
            seen.append(evaluate(model))
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.data.copy_(value)
        seen.append(evaluate(model))
    return seen


def write_in_many_ways(model: nn.Module) -> list[Tensor]:
    """In place, through aliases, foreach and fused; powers of two, so that nothing is rounded."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.0, weight_decay=0.0, fused=True)
    seen = [evaluate(model)]
    with torch.no_grad():
        for write in (
            lambda: [parameter.mul_(0.5) for parameter in parameters],
            lambda: [parameter.data.neg_() for parameter in parameters],
            lambda: [parameter.detach().mul_(2) for parameter in parameters],
            lambda: torch._foreach_mul_(parameters, 0.5),
            lambda: torch._foreach_neg_([parameter.data for parameter in parameters]),
            optimizer.step,
            lambda: nn.init.zeros_(parameters[0]),
        ):
            write()
            seen.append(evaluate(model))
            seen.append(evaluate(model))
    return seen


def load(model: nn.Module) -> list[Tensor]:
    """A state dict of the model's own kind, and one of whole plain tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    seen = [evaluate(model)]
    train_step(model, optimizer)
    seen.append(evaluate(model))
    model.load_state_dict(start)
    seen.append(evaluate(model))
    model.load_state_dict(make_small_model(seed=5).state_dict())
    seen.append(evaluate(model))
    with torch.no_grad():
        for parameter, value in zip(
            model.parameters(), make_small_model(seed=6).parameters(), strict=True
        ):
            parameter.copy_(value)
    seen.append(evaluate(model))
    train_step(model, optimizer)
    seen.append(model(TOKENS[2]).detach())
    return seen


def infer_before_training(model: nn.Module) -> list[Tensor]:
    """Forwards in inference mode, before any other and between steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    seen = []
    for batch in range(3):
        with torch.inference_mode():
            seen.append(model(TOKENS[batch]).clone())
        train_step(model, optimizer, batch)
    with torch.inference_mode():
        seen.append(model(TOKENS[3]).clone())
    return seen


def clear_gradients(model: nn.Module) -> list[Tensor]:
    """Accumulated gradients are dropped, or zeroed, and do not come back in the next step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    seen = []
    for set_to_none in (True, False, False, True, True):
        loss_of(model, TOKENS[0], TARGETS[0]).backward()
        loss_of(model, TOKENS[1], TARGETS[1]).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, TOKENS[2], TARGETS[2]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        seen.append(evaluate(model))
    return seen


SCENARIOS: list[Scenario] = [
    step_after_an_evaluation,
    swap_for_an_evaluation,
    write_in_many_ways,
    load,
    infer_before_training,
    clear_gradients,
]


def run_sharded(rank: int, scenario: Scenario, strategy: str, reshard: bool) -> list[Tensor]:
    model = make_small_model()
    placements = STRATEGIES[strategy].placements
    shard(model, STRATEGIES[strategy].mesh(), placements, reshard_after_forward=reshard)
    return scenario(model)


@pytest.mark.behaviour(4, 5)
@pytest.mark.parametrize(
    ("strategy", "reshard"),
    [("zero3", True), ("zero3", False), ("ddp", True), ("zero1", True), ("hfsdp", True)],
    ids=["zero3", "zero3-kept-gathered", "ddp", "zero1", "hfsdp"],
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_forwards_see_what_one_process_sees(
    scenario: Scenario, strategy: str, reshard: bool
) -> None:
    """Whatever happened to the weights and gradients, logits are those of one plain process."""
    expected = scenario(make_small_model())
    assert not torch.equal(expected[0], expected[1])
    for seen in run_ranks(2, run_sharded, scenario, strategy, reshard):
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-4)


def write_between_microbatches(rank: int, strategy: str) -> list[tuple[Tensor, Tensor]]:
    """bf16 copies of fp32 weights, inside one window and after writes; and what a model sharded
    afresh with these weights computes."""
    placements = STRATEGIES[strategy].placements
    precision = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    mesh, model = STRATEGIES[strategy].mesh(), make_small_model()
    shard(model, mesh, placements, mixed_precision_policy=precision)
    seen = []
    for batch, is_last in enumerate((False, False, True)):
        with microbatch(model, is_last=is_last):
            loss_of(model, TOKENS[batch], TARGETS[batch]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.25)
            logits = model(TOKENS[batch])
        fresh = make_small_model()
        fresh.load_state_dict(full_state_dict(model))
        shard(fresh, mesh, placements, mixed_precision_policy=precision)
        seen.append((logits.detach(), fresh(TOKENS[batch]).detach()))
    return seen


@pytest.mark.behaviour(4)
@pytest.mark.parametrize("strategy", NAMES)
def test_copies_in_another_dtype_are_renewed_inside_a_window(strategy: str) -> None:
    """Weights that change between microbatches are cast and gathered anew."""
    for seen in run_ranks(2, write_between_microbatches, strategy):
        for logits, expected in seen:
            assert torch.equal(logits, expected)
        assert not torch.equal(seen[0][0], seen[1][0])


# -- the first values ---------------------------------------------------------------------------


def first_values(rank: int, strategy: str, bf16: bool) -> dict[str, Tensor]:
    """The weights after sharding models that were different on each rank."""
    model = make_small_model(torch.bfloat16 if bf16 else torch.float32, seed=rank)
    policy = bf16_policy() if bf16 else None
    placements = STRATEGIES[strategy].placements
    shard(model, STRATEGIES[strategy].mesh(), placements, mixed_precision_policy=policy)
    logits = evaluate(model)
    assert torch.equal(logits, evaluate(model))
    return {**full_state_dict(model), "logits": logits}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_replicated_axes_take_the_first_ranks_values(bf16: bool) -> None:
    """With ddp all ranks have rank 0's weights after fully_shard, frozen ones included."""
    expected = make_small_model(torch.bfloat16 if bf16 else torch.float32, seed=0)
    for weights in run_ranks(4, first_values, "ddp", bf16):
        torch.testing.assert_close(weights.pop("logits"), evaluate(expected))
        for name, value in expected.state_dict().items():
            assert torch.equal(weights[name], value.float()), name


def test_sharded_axes_keep_each_ranks_own_rows() -> None:
    """With zero3 every rank's rows are those that it had; all ranks see the same whole."""
    models = [make_small_model(seed=seed).state_dict() for seed in range(2)]
    first, second = run_ranks(2, first_values, "zero3", False)
    for name, value in first.items():
        assert torch.equal(value, second[name])
    own_rows = torch.zeros(2, dtype=torch.int64)
    for name in models[0]:
        pairs = zip(*(torch.atleast_1d(model[name]) for model in models), strict=True)
        for row, (ours, theirs) in zip(torch.atleast_1d(first[name]), pairs, strict=True):
            kept = torch.tensor([torch.equal(row, ours), torch.equal(row, theirs)])
            assert kept.any(), name
            own_rows += kept
    assert (own_rows > 30).all()


# -- whole weights ------------------------------------------------------------------------------


def write_whole_weights(rank: int, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """fp32 main weights before and after some of the bf16 weights were written while whole."""
    model = make_small_model(torch.bfloat16)
    placements = STRATEGIES[strategy].placements
    shard(model, STRATEGIES[strategy].mesh(), placements, mixed_precision_policy=bf16_policy())
    train_step(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = full_state_dict(model)
    with unsharded(model), torch.no_grad():
        model.head.weight[3:5] = 7.0
        model.blocks[0].scale.fill_(-2.0)
    return before, full_state_dict(model)


@pytest.mark.parametrize("strategy", NAMES)
def test_what_is_written_while_whole_is_kept(strategy: str) -> None:
    """Rows written inside `unsharded` reach the main weights of the ranks that hold them; all
    others keep what they had, to the last bit of their precision."""
    for before, after in run_ranks(2, write_whole_weights, strategy):
        assert any((value.bfloat16() != value).any() for value in before.values())
        expected = {name: value.clone() for name, value in before.items()}
        for name in ("head.weight", "embedding.weight"):
            expected[name][3:5] = 7.0
        expected["blocks.0.scale"].fill_(-2.0)
        for name, value in expected.items():
            assert torch.equal(after[name], value), name


def written_by_one_rank(rank: int, strategy: str) -> Tensor:
    """The outputs after one rank alone wrote a row that it holds, between two forwards of a step
    that stay gathered."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    placements = STRATEGIES[strategy].placements
    fully_shard(model, STRATEGIES[strategy].mesh(), placements, reshard_after_forward=False)
    model(torch.ones(2, 4)).sum()
    with unsharded(model), torch.no_grad():
        if rank == 0:
            model.weight[0] = 3.0
    return model(torch.ones(2, 4)).detach()


@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_what_one_rank_wrote_is_gathered_by_all(strategy: str) -> None:
    """Whether weights are gathered anew after `unsharded` is decided by all ranks together."""
    first, second = run_ranks(2, written_by_one_rank, strategy)
    assert first[:, 0].tolist() == [12.0, 12.0]
    assert torch.equal(first, second)
