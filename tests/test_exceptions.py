"""After an exception on all ranks a model runs on as if it had not happened."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from training import loss_of, make_batches, make_mesh, make_model, shard
from watched_gloo import WatchedGloo

from polyshard import Placements, SchedulePolicy, full_state_dict, microbatch
from polyshard.testing import run_ranks

STEPS, MICROBATCHES = 3, 2


class Mishap(Exception):
    """What goes wrong in user code."""


@dataclass(frozen=True)
class Interruption:
    """Where a pass fails: in which module and phase, of which step and microbatch."""

    module: str
    phase: str
    step: int
    micro: int


@dataclass
class Fuse:
    """A forward hook that fails when it is lit, at once or when backward comes by."""

    phase: str | None = None

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.phase == "forward":
            raise Mishap
        if self.phase == "backward":
            output.register_hook(self._blow)

    def _blow(self, grad: Tensor) -> None:
        raise Mishap


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    weights: dict[str, Tensor]
    gathered_after_failure: int | None
    held_at_the_end: dict[str, int]


def train(
    rank: int, strategy: str, prefetch: int, reshard: bool, interruption: Interruption | None
) -> Outcome:
    """Three steps of two microbatches. A failed forward is repeated; after a failed backward,
    which leaves some gradients behind, the step starts again."""
    backend, mesh = WatchedGloo(), make_mesh()
    model = make_model()
    policy = SchedulePolicy(forward_units=prefetch, backward_units=prefetch)
    shard(
        model,
        mesh,
        getattr(Placements, strategy)("dp"),
        backend=backend,
        schedule_policy=policy,
        reshard_after_forward=reshard,
    )
    fuse, gathered = Fuse(), None
    if interruption is not None:
        model.get_submodule(interruption.module).register_forward_hook(fuse)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, targets = make_batches(STEPS, MICROBATCHES, mesh.size())
    losses: list[float] = []

    def run(step: int, micro: int) -> float:
        with microbatch(model, is_last=micro == MICROBATCHES - 1):
            loss = loss_of(model, tokens[step, micro, rank], targets[step, micro, rank])
        loss.backward()
        return loss.item()

    for step in range(STEPS):
        total = 0.0
        for micro in range(MICROBATCHES):
            if interruption and (step, micro) == (interruption.step, interruption.micro):
                fuse.phase = interruption.phase
                with pytest.raises(Mishap):
                    run(step, micro)
                fuse.phase = None
                if interruption.phase == "forward":
                    gathered = backend.ledger.now["gathered"]
                else:
                    optimizer.zero_grad()
                    total = sum(run(step, earlier) for earlier in range(micro))
            total += run(step, micro)
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    held = dict(+backend.ledger.now)
    return Outcome(losses, full_state_dict(model), gathered, held)


INTERRUPTIONS = [
    Interruption(module, phase, step, micro)
    for module, phase, step, micro in [
        ("embedding", "forward", 0, 0),  # before any nested unit ran for the first time
        ("blocks.1.widen", "forward", 0, 0),
        ("blocks.1.narrow", "forward", 1, 1),
        ("", "forward", 1, 0),  # all units are done, the root is about to be
        ("blocks.2.narrow", "backward", 0, 0),  # before any gradient is complete
        ("blocks.0.narrow", "backward", 1, 1),  # some units are reduced, others are not
        ("embedding", "backward", 2, 1),
    ]
]


@pytest.mark.behaviour(19)
@pytest.mark.parametrize(
    ("strategy", "prefetch", "reshard"),
    [("zero3", 1, True), ("zero3", 3, False), ("ddp", 1, True)],
    ids=["zero3", "zero3-kept-gathered", "ddp"],
)
def test_training_goes_on_after_an_exception(strategy: str, prefetch: int, reshard: bool) -> None:
    """Interrupted anywhere, in forward or in backward, training ends with the bits it would have
    ended with; nothing stays gathered, after the failed forward or at the end."""
    undisturbed = run_ranks(2, train, strategy, prefetch, reshard, None)
    for interruption in INTERRUPTIONS:
        outcomes = run_ranks(2, train, strategy, prefetch, reshard, interruption)
        for expected, outcome in zip(undisturbed, outcomes, strict=True):
            assert outcome.losses == expected.losses, interruption
            assert outcome.weights.keys() == expected.weights.keys()
            for name, value in expected.weights.items():
                assert torch.equal(outcome.weights[name], value), (interruption, name)
            assert (
                outcome.held_at_the_end
                == expected.held_at_the_end
                == {"main": expected.held_at_the_end["main"]}
            )
            if interruption.phase == "forward" and reshard:
                assert outcome.gathered_after_failure == 0, interruption


def backward_after_another_forward_failed(
    rank: int, strategy: str, fails: bool
) -> dict[str, Tensor]:
    model, mesh = make_model(), make_mesh()
    shard(model, mesh, getattr(Placements, strategy)("dp"))
    fuse = Fuse()
    model.blocks[1].narrow.register_forward_hook(fuse)
    tokens, targets = make_batches(1, 2, mesh.size())
    loss = loss_of(model, tokens[0, 0, rank], targets[0, 0, rank])
    if fails:
        fuse.phase = "forward"
        with pytest.raises(Mishap):
            loss_of(model, tokens[0, 1, rank], targets[0, 1, rank])
    loss.backward()
    return {
        name: parameter.grad.full_tensor()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.behaviour(14, 19)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_failed_forward_leaves_an_open_one_alone(strategy: str) -> None:
    """A forward that raises between another forward and its backward changes no gradient."""
    undisturbed = run_ranks(2, backward_after_another_forward_failed, strategy, False)
    for expected, grads in zip(
        undisturbed,
        run_ranks(2, backward_after_another_forward_failed, strategy, True),
        strict=True,
    ):
        assert grads.keys() == expected.keys() != set()
        assert all(torch.equal(grads[name], value) for name, value in expected.items())
