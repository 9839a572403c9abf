"""Derivatives that are differentiated again, and derivatives that autograd is asked for by name."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from behaving import Side, compare, over_strategies
from stacked import Stack, make_stack, run_steps, sharded, square
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyshard.testing import run_ranks


def slope(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the model says of ``x``, and its derivative, which can be differentiated."""
    x = x.clone().requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return output, grad


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    output, grad = slope(model, x)
    return square(output) + (grad.norm(dim=1) - 1).square().mean()


def ten_penalised_steps(side: Side, options: dict[str, bool]) -> None:
    model = make_stack(side, **options)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        side.mean(lambda rank: penalised(model, inputs[rank])).backward()

    run_steps(side, model, body, 10)


def only_the_penalty(side: Side) -> None:
    """Linear, so that no forward of the last unit is reached again, only what came of it."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    side.shard(*model)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)

        def loss_of(rank: int) -> Tensor:
            x = inputs[rank].requires_grad_()
            return square(torch.autograd.grad(model(x).sum(), x, create_graph=True)[0])

        side.mean(loss_of).backward()

    run_steps(side, model, body, 3)


def another_forward_in_between(side: Side) -> None:
    model = make_stack(side)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)

        def loss_of(rank: int) -> Tensor:
            _, grad = slope(model, inputs[rank] * 2)
            with torch.no_grad():
                model(inputs[rank])
            return square(model(inputs[rank])) + square(grad)

        side.mean(loss_of).backward()

    run_steps(side, model, body, 3)


def in_microbatches(side: Side) -> None:
    model = make_stack(side)

    def body(step: int) -> None:
        for micro in range(3):
            inputs = side.data(10 * step + micro, 6, 4)
            with side.microbatch(model, micro == 2):
                loss = side.mean(lambda rank, x=inputs: penalised(model, x[rank]))
            loss.backward()

    run_steps(side, model, body, 3)


def three_times(side: Side) -> None:
    model = make_stack(side)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)

        def loss_of(rank: int) -> Tensor:
            x = inputs[rank].requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(square(grad), x, create_graph=True)
            return square(again) + grad.mean()

        side.mean(loss_of).backward()

    run_steps(side, model, body, 3)


def stacked_mean(side: Side, value_of: Callable[[int], Tensor]) -> Tensor:
    """The mean over ranks, element by element."""
    return torch.stack([value_of(rank) for rank in side.ranks]).mean(0)


class Recomputing(Stack):
    def forward(self, x: Tensor, order: object = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


def of_what_is_recomputed(side: Side) -> None:
    torch.manual_seed(1)
    model = sharded(side, Recomputing())

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        side.mean(lambda rank: penalised(model, inputs[rank])).backward()

    run_steps(side, model, body, 3)


def never_used(side: Side) -> None:
    """Derivatives that nobody differentiates, then a step and a forward with its weights."""
    model = make_stack(side)

    def body(step: int) -> None:
        inputs = side.data(step, 6, 4)
        for rank in side.ranks:
            slope(model, inputs[rank])
        with torch.no_grad():
            side.note_mean("output", stacked_mean(side, lambda rank: model(inputs[rank])))
        side.mean(lambda rank: square(model(inputs[rank]))).backward()

    run_steps(side, model, body, 3)


def adversaries(side: Side) -> None:
    """A critic whose slope is penalised, and a generator that learns through it, frozen then."""
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    side.shard(generator[0], generator)
    critic = make_stack(side)
    critics = torch.optim.AdamW(critic.parameters(), lr=0.02)
    generators = torch.optim.AdamW(generator.parameters(), lr=0.02)
    for step in range(4):
        noise, real = side.data(step, 6, 3), side.data(100 + step, 6, 4)

        def critic_loss(
            rank: int, noise: list[Tensor] = noise, real: list[Tensor] = real
        ) -> Tensor:
            fake = generator(noise[rank]).detach()
            _, grad = slope(critic, 0.3 * fake + 0.7 * real[rank])
            return critic(fake).mean() - critic(real[rank]).mean() + 10 * square(grad)

        side.mean(critic_loss).backward()
        side.note_model(critic)
        critics.step()
        critics.zero_grad()
        critic.requires_grad_(False)
        side.mean(lambda rank, z=noise: -critic(generator(z[rank])).mean()).backward()
        side.note_model(generator)
        side.note_model(critic)
        generators.step()
        generators.zero_grad()
        critic.requires_grad_(True)


def jacobians_and_hessians(side: Side) -> None:
    """Of the model, by its inputs; then a plain step."""
    model = make_stack(side)
    inputs = side.data(0, 3, 4)
    whole = torch.autograd.functional

    def curvature(rank: int) -> Tensor:
        return whole.hessian(lambda x: model(x).square().sum(), inputs[rank])

    side.note_mean("jacobian", stacked_mean(side, lambda rank: whole.jacobian(model, inputs[rank])))
    side.note_mean("hessian", stacked_mean(side, curvature))
    side.mean(lambda rank: square(model(inputs[rank]))).backward()
    side.note_model(model)


SCENARIOS: list[Callable[[Side], None]] = [
    only_the_penalty,
    another_forward_in_between,
    in_microbatches,
    three_times,
    of_what_is_recomputed,
    never_used,
    adversaries,
    jacobians_and_hessians,
]


@pytest.mark.behaviour(14)
@over_strategies
@pytest.mark.parametrize("reshard", [True, False], ids=["released", "kept-gathered"])
def test_gradient_penalties(strategy: str, reshard: bool) -> None:
    """Training on derivatives by the inputs (`autograd.grad(create_graph=True)`, then a backward)
    is plain training."""
    options = {"reshard_after_forward": reshard}
    compare(functools.partial(ten_penalised_steps, options=options), strategy)


@pytest.mark.behaviour(14)
@over_strategies
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_derivatives_of_derivatives(scenario: Callable[[Side], None], strategy: str) -> None:
    """Whatever else runs before they are differentiated, and however often, derivatives by the
    inputs are those of a plain process."""
    compare(scenario, strategy)


def gathered_bytes(rank: int) -> list[int]:
    """After a penalised step, and after a forward and backward that followed it."""
    side = Side(2, rank, "zero3")
    model, inputs, held = make_stack(side), side.data(0, 6, 4), []
    units = [module._polyshard_unit for module in (*model.blocks, model)]  # type: ignore[union-attr]
    for loss_of in (penalised, lambda model, x: square(model(x))):
        loss_of(model, inputs[rank]).backward()
        groups = [group for unit in units for group in unit.groups]
        held.append(sum(group.full.flat.untyped_storage().nbytes() for group in groups))
    return held


@pytest.mark.behaviour(14)
def test_nothing_stays_gathered_for_derivatives() -> None:
    """What derivatives of derivatives needed is let go once a backward has given gradients."""
    assert run_ranks(2, gathered_bytes) == [[0, 0], [0, 0]]


def told(call: Callable[[], object]) -> str:
    """The error of a call; whoever catches RuntimeError gets it."""
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def asked_for_weights(rank: int, strategy: str) -> list[str]:
    side = Side(2, rank, strategy)
    model, inputs = make_stack(side), side.data(0, 6, 4)
    loss = square(model(inputs[rank]))
    inner = model.blocks[0].narrow.weight
    grad = torch.autograd.grad
    answers = [
        told(lambda: grad(loss, model.parameters())),
        told(lambda: grad(loss, [inputs[rank], inner], allow_unused=True)),
        told(lambda: grad(outputs=loss, inputs={"weight": inner})),
        told(lambda: loss.backward(inputs=inner)),
        told(lambda: loss.backward(inputs=list(model.parameters()))),
        told(lambda: torch.autograd.backward(loss, inputs=model.blocks[0].parameters())),
    ]
    # None of it has changed anything.
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [*answers, str(all(grad is not None for grad in grads))]


#: The first weight of a unit among what is asked for, in each question.
NAMED = ["first.weight", *["narrow.weight"] * 3, "first.weight", "scale"]


@pytest.mark.behaviour(14)
@over_strategies
def test_derivatives_by_weights(strategy: str) -> None:
    """`autograd.grad` by a weight, and `backward(inputs=)` with one, is an error that names the
    weight, its unit and what to do; on every rank, and the backward after it is as good as any."""
    for *answers, works in run_ranks(2, asked_for_weights, strategy):
        for answer, name in zip(answers, NAMED, strict=True):
            assert answer.startswith("UnsupportedError: torch.autograd.")
            assert f"'{name}' of unit" in answer
            assert "read .grad" in answer
        assert works == "True"


def recorded_backward(rank: int, strategy: str) -> tuple[str, list[bool]]:
    side = Side(2, rank, strategy)
    model, inputs = make_stack(side), side.data(0, 6, 4)
    answer = told(lambda: square(model(inputs[rank])).backward(create_graph=True))
    square(model(inputs[rank])).backward()
    return answer, [parameter.grad is not None for parameter in model.parameters()]


@pytest.mark.behaviour(14)
@over_strategies
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_recorded_backward_to_weights(strategy: str) -> None:
    """`backward(create_graph=True)` would leave `.grad` without a graph: an error that says what
    to call instead; the next backward works."""
    for answer, has_grads in run_ranks(2, recorded_backward, strategy):
        assert answer.startswith("UnsupportedError: backward(create_graph=True) reached 'last.")
        assert "torch.autograd.grad(loss, inputs, create_graph=True)" in answer
        assert all(has_grads)


def through_inputs_only(side: Side) -> None:
    model = make_stack(side)
    inputs = [x.requires_grad_() for x in side.data(0, 6, 4)]
    mine = [inputs[rank] for rank in side.ranks]
    side.mean(lambda rank: square(model(inputs[rank]))).backward(inputs=mine, create_graph=True)
    # Every rank's loss is all of it there, one of several on the plain side.
    share = side.world if not side.sharded else 1
    side.mean(lambda rank: square(inputs[rank].grad * share)).backward()
    side.note_model(model)


@pytest.mark.behaviour(14)
@over_strategies
@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_recorded_backward_to_inputs(strategy: str) -> None:
    """`backward(inputs=[x], create_graph=True)` gives an `x.grad` that can be differentiated."""
    compare(through_inputs_only, strategy)
