"""Ranks that ask for different things, or of which some object, all hear of it at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from behaving import Side
from refusing import Refusal, Request, hooked_linear, on, refuse
from torch import nn
from training import Training, make_mesh, make_model, shard, train_plain, train_sharded

from polyshard import (
    BackendError,
    MixedPrecisionPolicy,
    Placements,
    SchedulePolicy,
    full_state_dict,
)
from polyshard.testing import run_ranks
from polyshard_gloo import GlooBackend


def differing(rank: int, what: str) -> Request:
    """The last rank asks for something else."""
    other = rank == dist.get_world_size() - 1
    if what == "class":
        return on(nn.Bilinear(3, 3, 2) if other else hooked_linear())
    if what == "shape":
        return on(hooked_linear(3, 4 if other else 2))
    if what == "dtype":
        return on(hooked_linear().to(torch.bfloat16 if other else torch.float32))
    if what == "meta":
        return on(nn.Linear(3, 2, device="meta" if other else "cpu"))
    if what == "extra parameter":
        return on(hooked_linear(bias=other))
    module = hooked_linear()
    if what == "name" and other:
        module.register_parameter("offset", module._parameters.pop("bias"))
    if what == "requires_grad" and other:
        module.bias.requires_grad_(False)
    options: dict[str, Any] = {}
    if other:
        options = {
            "placements": {"placements": Placements.ddp("dp")},
            "precision": {"mixed_precision_policy": MixedPrecisionPolicy(None, torch.float64)},
            "schedule": {"schedule_policy": SchedulePolicy(forward_units=2)},
            "ignored": {"ignored_params": list(module.parameters())[1:]},
            "divisor": {"grad_divisor": 2.0},
            "reshard": {"reshard_after_forward": False},
            "backend": {"backend": DifferentGloo()},
        }.get(what, {})
    return on(module, **options)


class DifferentGloo(GlooBackend):
    """Another backend, as far as anyone can tell."""

    name = "different"


DIFFERENCES = {
    "class": ("module class Linear", "module class Bilinear"),
    "shape": ("'weight' of shape (2, 3)", "'weight' of shape (4, 3)"),
    "dtype": (
        "'weight' of shape (2, 3), torch.float32",
        "'weight' of shape (2, 3), torch.bfloat16",
    ),
    "meta": ("requires_grad=True", "requires_grad=True, on meta"),
    "extra parameter": ("has parameter 'bias' of shape (2,)", "does not"),
    "name": ("parameter 'bias'", "parameter 'offset'"),
    "requires_grad": ("requires_grad=True", "requires_grad=False"),
    "placements": ("parameter=(Flat(),)", "parameter=(Replicate(),)"),
    "precision": ("main_grads_dtype=None", "main_grads_dtype=torch.float64"),
    "schedule": ("forward_units=1", "forward_units=2"),
    "ignored": ("has parameter 'bias'", "does not"),
    "divisor": ("grad_divisor=1.0", "grad_divisor=2.0"),
    "reshard": ("reshard_after_forward=True", "reshard_after_forward=False"),
    "backend": ("'gloo'", "'different'"),
}


def refuse_difference(rank: int, what: str) -> Refusal:
    return refuse(rank, lambda rank: differing(rank, what))


@pytest.mark.parametrize(
    ("ranks", "what"),
    [(2, what) for what in DIFFERENCES] + [(4, "shape"), (4, "extra parameter")],
)
def test_models_that_differ_are_refused(ranks: int, what: str) -> None:
    """Every rank is told the first difference and two ranks between which it lies."""
    refusals = run_ranks(ranks, refuse_difference, what)
    assert {refusal.kind for refusal in refusals} == {"PlacementError"}
    # The module's class comes first, each rank's own.
    (difference,) = {refusal.message.partition("): ")[2] for refusal in refusals}
    for fragment in ("rank 0", f"rank {ranks - 1}", *DIFFERENCES[what]):
        assert fragment in difference


def object_alone(rank: int, what: str) -> Refusal:
    """The last rank's request is a bad one."""
    alone = rank == dist.get_world_size() - 1

    def make(rank: int) -> Request:
        if what == "lazy":
            return on(nn.LazyLinear(2) if alone else nn.Linear(3, 2))
        if what == "backend":
            return on(hooked_linear(), backend="glue" if alone else None)
        if what == "argument":
            return on(hooked_linear(), schedule_policy=3 if alone else None)
        assert what == "crash"
        return on(hooked_linear(), backend=UnaskableGloo() if alone else None)

    return refuse(rank, make)


class UnaskableGloo(GlooBackend):
    """Fails in a way that nobody foresaw."""

    def unavailable_reason(self, device_type: str) -> str | None:
        raise KeyError("no such thing")


OBJECTIONS = {
    "lazy": ("UnsupportedError", "'weight' of LazyLinear is not initialised"),
    "backend": ("BackendError", "No backend named 'glue'"),
    "argument": ("ValueError", "schedule_policy"),
    "crash": ("BackendError", "no such thing"),
}


@pytest.mark.parametrize(("ranks", "what"), [(2, what) for what in OBJECTIONS] + [(4, "lazy")])
def test_one_rank_objects(ranks: int, what: str) -> None:
    """The rank that objects gets its own error, all others one that names it and repeats why."""
    *others, objector = run_ranks(ranks, object_alone, what)
    kind, reason = OBJECTIONS[what]
    assert objector.kind == kind
    assert reason in objector.message
    assert others == [others[0]] * (ranks - 1)
    assert others[0].kind == "BackendError"
    assert f"rank {ranks - 1} refused: {kind}" in others[0].message
    assert reason in others[0].message


def train_after_refusal(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What was refused is asked for again, right this time."""
    model, mesh = make_model(), make_mesh()
    for child in (model.blocks[1], model):
        refuse(rank, lambda rank, child=child: on(child, backend="glue"))  # type: ignore[misc]
        refuse(rank, lambda rank, child=child: on(child, grad_divisor=1.0 + rank))  # type: ignore[misc]
    shard(model, mesh, Placements.zero3("dp"))
    losses = train_sharded(model, Training(steps=3), rank, mesh.size())
    return losses, full_state_dict(model)


def test_a_refused_model_can_still_be_sharded() -> None:
    """After refusals, by all ranks and of differences, a right call shards and trains."""
    expected_losses, expected = train_plain(Training(steps=3), 2)
    for losses, weights in run_ranks(2, train_after_refusal):
        torch.testing.assert_close(losses, expected_losses, atol=1e-5, rtol=0)
        torch.testing.assert_close(weights, dict(expected), atol=1e-4, rtol=0)


def freeze_alone(rank: int, strategy: str, thaw: bool, debug: bool) -> str:
    """The last rank freezes, or trains again, a part of a unit, after a step."""
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setenv("POLYSHARD_DEBUG", str(int(debug)))
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        parameter = "1.1.bias" if thaw else "1.0.weight"
        model[1].requires_grad_(not thaw)
        side = Side(2, rank, strategy)
        # A backend of its own, which the failure to come is to break.
        side.shard(model[1], model, backend=GlooBackend())
        model(torch.ones(2, 4)).sum().backward()
        if thaw:
            model.get_parameter("1.0.bias").requires_grad_(True)
        if rank:
            model.get_parameter(parameter).requires_grad_(thaw)

        def train() -> None:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()

        with pytest.raises(BackendError) as raised:
            train()
        return str(raised.value)


@pytest.mark.behaviour(8, 27)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hfsdp", "ddp"])
def test_a_part_frozen_on_one_rank(strategy: str, thaw: bool, debug: bool) -> None:
    """Where ranks compare what they do, a parameter that requires gradients on some of them only is
    an error on all, which names it."""
    for said in run_ranks(2, freeze_alone, strategy, thaw, debug):
        if thaw:
            assert "reduce gradients of '0.bias'" in said
            assert "reduce gradients but of '0.weight', '1.weight'" in said
        else:
            assert "1 (float32): reduce gradients but of '0.weight'" in said


def freeze_everywhere(rank: int, strategy: str) -> list[bool]:
    """Between microbatches, of which each rank uses other parameters."""
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
    root = _Choosing(model)
    side = Side(2, rank, strategy)
    side.shard(root)
    for _ in range(3):
        with side.microbatch(root, False):
            root(torch.ones(2, 4), "ab"[rank]).sum().backward()
        root.parts["a"].requires_grad_(False)
        with side.microbatch(root, True):
            root(torch.ones(2, 4), "c").sum().backward()
        root.parts["a"].requires_grad_(True)
    return [parameter.grad is not None for parameter in root.parameters()]


class _Choosing(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self.parts[name](x)


@pytest.mark.behaviour(8, 11)
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "hfsdp", "ddp"])
def test_frozen_everywhere(strategy: str) -> None:
    """Freezing on all ranks is no difference between them, also where only one has gradients of
    the frozen parameter that wait for the last microbatch."""
    assert run_ranks(2, freeze_everywhere, strategy) == [[True] * 6] * 2
