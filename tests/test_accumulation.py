"""Gradients of several backwards add up, in scopes and without, and are cleared when told to.

Every rank has its own data; the yardstick is one process on all of it.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from strategies import STRATEGIES, mesh_for
from torch import Tensor, nn
from torch.distributed.tensor import Partial as TorchPartial
from training import bf16_policy, loss_of, make_batches, make_mesh, make_model, shard

from polyshard import Partial, Placements, Replicate, microbatch
from polyshard.testing import run_ranks

RANKS = 2
NAMES = ["zero3", "ddp", "zero1", "hfsdp"]
BATCHES = 8

Grads = dict[str, Tensor | None]

make_small_model = partial(make_model, blocks=1)


@dataclass(frozen=True)
class Do:
    """One backward on the next batch.

    ``scopes`` are the flags of the `microbatch` scopes around its forward, the outermost first.
    """

    scopes: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Clear:
    """zero_grad, of the model or of one parameter."""

    set_to_none: bool = True
    only: str | None = None


Plan = list[Do | Clear]
FIRST, LAST, ALONE = Do((False,)), Do((True,)), Do()


def clear(model: nn.Module, what: Clear) -> None:
    if what.only is not None:
        model.get_parameter(what.only).grad = None
    else:
        model.zero_grad(set_to_none=what.set_to_none)


# -- one process --------------------------------------------------------------------------------


def plain(plan: Plan, *, bf16: bool, factor: float = 1.0) -> list[Grads]:
    """The gradients after each entry of the plan: means over ranks, times ``factor``.

    In bf16, each rank's gradients are bf16 numbers, which are added up in fp32.
    """
    model = make_small_model().bfloat16().float() if bf16 else make_small_model()
    tokens, targets = make_batches(BATCHES, 1, RANKS)
    seen: list[Grads] = []
    batch = 0
    for entry in plan:
        if isinstance(entry, Clear):
            clear(model, entry)
        else:
            for rank in range(RANKS):
                part = copy.deepcopy(model).to(torch.bfloat16 if bf16 else torch.float32)
                part.zero_grad()
                loss_of(part, tokens[batch, 0, rank], targets[batch, 0, rank]).backward()
                for ours, theirs in zip(model.parameters(), part.parameters(), strict=True):
                    if theirs.grad is not None:
                        contribution = theirs.grad.float() * (factor / RANKS)
                        ours.grad = contribution if ours.grad is None else ours.grad + contribution
            batch += 1
        seen.append(
            {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
        )
    return seen


# -- ranks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """All gradients at one moment: whole, and how they lie."""

    grads: Grads
    kinds: set[str]
    dtypes: set[torch.dtype]
    is_own: bool  # what is Partial is this rank's own contribution


def accumulate(
    rank: int, placements: Placements, plan: Plan, bf16: bool, divisor: float
) -> list[State]:
    model = make_small_model(torch.bfloat16 if bf16 else torch.float32)
    mesh = mesh_for(placements)
    policy = bf16_policy() if bf16 else None
    shard(model, mesh, placements, mixed_precision_policy=policy, grad_divisor=divisor)
    tokens, targets = make_batches(BATCHES, 1, mesh.size())
    states: list[State] = []
    batch = 0
    for entry in plan:
        if isinstance(entry, Clear):
            clear(model, entry)
        else:
            with ExitStack() as scopes:
                for is_last in entry.scopes:
                    scopes.enter_context(microbatch(model, is_last=is_last))
                loss = loss_of(model, tokens[batch, 0, rank], targets[batch, 0, rank])
            loss.backward()
            batch += 1
        states.append(look(model))
    return states


def look(model: nn.Module) -> State:
    grads: Grads = {}
    kinds: set[str] = set()
    dtypes: set[torch.dtype] = set()
    is_own = True
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grads[name] = None if grad is None else grad.full_tensor()
        if grad is not None:
            kinds.add(type(grad.placements[0]).__name__)
            dtypes.add(grad.dtype)
            if isinstance(grad.placements[0], TorchPartial):
                same = torch.equal(grad.to_local(), grad.full_tensor())
                is_own = is_own and (not same or not grad.to_local().any())
    return State(grads, kinds, dtypes, is_own)


def check(
    placements: Placements,
    plan: Plan,
    *,
    bf16: bool = False,
    factor: float = 1.0,
    divisor: float = 1.0,
) -> list[list[State]]:
    """The states of every rank after each entry, whose gradients are those of one process."""
    expected = plain(plan, bf16=bf16, factor=factor / divisor)
    results = run_ranks(RANKS, accumulate, placements, plan, bf16, divisor)
    for states in results:
        for position, (state, grads) in enumerate(zip(states, expected, strict=True)):
            for name, value in grads.items():
                found = state.grads[name]
                if value is None:
                    assert found is None, (position, name)
                else:
                    assert found is not None, (position, name)
                    torch.testing.assert_close(found, value, msg=f"{name} after {position}")
    return results


PLANS: dict[str, Plan] = {
    "scoped": [FIRST, FIRST, LAST],
    "unscoped": [ALONE, ALONE, ALONE],
    "nested": [Do((True, False)), Do((False, False)), Do((False, True))],
    "scoped-then-unscoped": [FIRST, LAST, ALONE],
    "unscoped-then-scoped": [ALONE, FIRST, LAST],
    "finished-by-unscoped": [FIRST, FIRST, ALONE],
    "two-steps": [FIRST, LAST, Clear(), FIRST, LAST],
    "two-steps-zeroed": [FIRST, LAST, Clear(set_to_none=False), FIRST, LAST],
    "cleared-in-between": [FIRST, Clear(), FIRST, LAST],
    "zeroed-in-between": [FIRST, Clear(set_to_none=False), FIRST, LAST],
    "unscoped-zeroed": [ALONE, ALONE, Clear(set_to_none=False), ALONE],
    "one-cleared-in-between": [FIRST, Clear(only="blocks.0.scale"), LAST],
    "one-cleared-when-final": [ALONE, Clear(only="blocks.0.widen.weight"), ALONE],
}


BF16_PLANS = ("scoped", "unscoped", "unscoped-then-scoped", "two-steps-zeroed")


@pytest.mark.behaviour(2, 3, 5)
@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize(
    ("plan", "bf16"), [*((plan, False) for plan in PLANS), *((plan, True) for plan in BF16_PLANS)]
)
def test_backwards_add_up(plan: str, bf16: bool, strategy: str) -> None:
    """After every backward, and after clearing, gradients are what one process has added up; with
    bf16 weights they are fp32, and no sum is rounded."""
    for states in check(STRATEGIES[strategy].placements, PLANS[plan], bf16=bf16):
        for state in states:
            assert state.dtypes <= {torch.float32}


def test_ddp_shows_contributions_until_the_last_microbatch() -> None:
    """Between microbatches .grad is Partial over this rank's own contributions, then replicated;
    with zero3 it is reduced after each backward."""
    plan = PLANS["scoped"]
    for states in check(Placements.ddp("dp"), plan):
        assert [state.kinds for state in states] == [{"Partial"}, {"Partial"}, {"Replicate"}]
        assert all(state.is_own for state in states)
    for states in check(Placements.zero3("dp"), plan):
        assert [state.kinds for state in states] == [{"RowSplit"}] * 3


@pytest.mark.behaviour(1, 2)
@pytest.mark.parametrize("plan", ["scoped", "unscoped", "unscoped-then-scoped", "two-steps-zeroed"])
def test_sums_and_divisors_apply_once(plan: str) -> None:
    """A gradient that is Partial("sum") adds up over ranks; grad_divisor divides it once, however
    many backwards there were."""
    placements = Placements(("dp",), (Replicate(),), (Partial("sum"),), (Replicate(),))
    check(placements, PLANS[plan], factor=RANKS, divisor=4.0)
    check(Placements.zero3("dp"), PLANS[plan], divisor=4.0)


@pytest.mark.behaviour(1)
def test_four_ranks_average() -> None:
    """With more ranks than some parameters have rows, means are over all of them."""
    weights = run_ranks(4, mean_gradients)
    for name, value in plain_mean_gradients(4).items():
        for found in weights:
            torch.testing.assert_close(found[name], value, msg=name)


def mean_gradients(rank: int) -> dict[str, Tensor]:
    mesh, model = make_mesh(), make_small_model()
    shard(model, mesh, Placements.zero3("dp"))
    tokens, targets = make_batches(2, 1, mesh.size())
    for batch in range(2):
        loss_of(model, tokens[batch, 0, rank], targets[batch, 0, rank]).backward()
    return {name: grad for name, grad in look(model).grads.items() if grad is not None}


def plain_mean_gradients(ranks: int) -> dict[str, Tensor]:
    model = make_small_model()
    tokens, targets = make_batches(2, 1, ranks)
    for batch in range(2):
        for rank in range(ranks):
            (loss_of(model, tokens[batch, 0, rank], targets[batch, 0, rank]) / ranks).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
