"""Whole training runs for the race checker, drawn from a seed, each compared with a plain twin.

Importable without pytest and without any backend: the mutants of the core run these too.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from polyshard import (
    Flat,
    MixedPrecisionPolicy,
    Partial,
    Placements,
    Replicate,
    SchedulePolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    microbatch,
    unsharded,
)
from polyshard.spi import Role
from polyshard.testing.race import Policy, RaceBackend

AXES = ("outer", "inner")
STRATEGIES = {
    "ddp": Placements.ddp("dp"),
    "zero1": Placements.zero1("dp"),
    "zero2": Placements.zero2("dp"),
    "zero3": Placements.zero3("dp"),
    "hsdp": Placements.hsdp(*AXES),
    "hfsdp": Placements.hfsdp(*AXES),
    "zero3 over two axes": Placements(AXES, (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat())),
    "zero2 over two axes": Placements(
        AXES, (Replicate(), Replicate()), (Flat(), Flat()), (Flat(), Flat())
    ),
    # Gradients are kept whole between microbatches on one axis, and pending on the other.
    "sliced": Placements(
        AXES, (Replicate(), Replicate()), (Partial("sum"), Replicate()), (Flat(), Flat())
    ),
}
#: What a backend may want to be kept for life.
KEPT = (Role.GATHER_INPUT, Role.GATHER_OUTPUT, Role.REDUCE_INPUT)


class Block(nn.Module):
    """A residual layer, recomputed in backward if asked."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            return self._run(x)
        return checkpoint(self._run, x, use_reentrant=self.recompute == "reentrant")

    def _run(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Net(nn.Module):
    """Blocks, of which a forward runs those it is told to, between layers of the root's own."""

    def __init__(self, recompute: str = "", around: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(Block(recompute) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(()))
        self.around = around

    def forward(self, x: Tensor, route: tuple[int, ...]) -> Tensor:
        x = self.first(x)
        for index in route:
            block = self.blocks[index]
            if self.around and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.around == "reentrant")
            else:
                x = block(x)
        return x * self.scale


@dataclass(frozen=True)
class Program:
    """What one training run does."""

    routes: tuple[tuple[tuple[int, ...], ...], ...]  # per step, per microbatch
    recompute: str = ""  # inside units: "", "reentrant" or "plain"
    around: str = ""  # around units
    prefetch: int = 1
    reshard: bool = True
    half: bool = False  # bf16 copies and gradients of fp32 weights
    persistent: bool = False
    scoped: bool = True  # microbatch scopes; else every backward is a last one
    backwards: tuple[str, ...] = ("at once",)  # by step; or after all forwards "apart", "together"
    evaluate: bool = False
    swap: bool = False  # weights are written inside `unsharded` between steps
    inspect: bool = False  # full_state_dict and load_full_state_dict between steps
    clip: bool = False
    keep_zeros: bool = False  # zero_grad(set_to_none=False)
    freeze: bool = False  # a block, from the second step on
    nudge: bool = False  # weights are written between microbatches

    @classmethod
    def drawn(cls, seed: int) -> Program:
        """The program of a seed."""
        draw = random.Random(seed)
        maybe = lambda chance: draw.random() < chance  # noqa: E731
        whole = (0, 1, 2)
        others = [whole, whole, whole, (0, 2), (2, 1, 0), (0, 0, 1, 2), (1,), ()]
        recompute = draw.choice(("", "", "reentrant", "plain"))
        around = draw.choice(("", "", "reentrant", "plain"))
        return cls(
            routes=tuple(
                tuple(draw.choice(others) for _ in range(draw.choice((1, 2)))) for _ in range(2)
            ),
            recompute=recompute,
            around=around,
            prefetch=draw.choice((0, 1, 2)),
            reshard=maybe(0.7),
            half=maybe(0.3),
            persistent=maybe(0.3),
            scoped=maybe(0.7),
            backwards=tuple(draw.choices(("at once", "at once", "apart", "together"), k=2)),
            evaluate=maybe(0.3),
            swap=maybe(0.3),
            inspect=maybe(0.25),
            clip=maybe(0.25),
            keep_zeros=maybe(0.3),
            freeze=maybe(0.2),
            # A forward is not to be recomputed from other weights than it had.
            nudge=maybe(0.4) and not recompute and not around,
        )


def batch(step: int, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(2, 3, generator=generator)


def run(
    program: Program,
    strategy: str,
    policy: Policy | str,
    *,
    mesh: DeviceMesh,
    seed: int = 0,
    timeout: float = 20.0,
) -> RaceBackend:
    """Train under the race checker on this rank, and plainly on the batches of all ranks; raises
    where they differ, and whatever the checker finds."""
    kept = KEPT if program.persistent else ()
    backend = RaceBackend(policy, seed=seed, persistent_roles=kept, timeout=timeout)
    torch.manual_seed(0)
    reference = Net(program.recompute, program.around)
    model = copy.deepcopy(reference)
    summed = strategy == "sliced"  # over the outer axis, not averaged
    scale = mesh.size(0) if summed else 1
    expected = list(_train_plainly(reference, program, mesh.size(), scale))
    with backend.checking(leaves=(Role.REDUCE_OUTPUT, *kept)):
        precision = MixedPrecisionPolicy(
            compute_dtype=torch.bfloat16 if program.half else None,
            grad_comm_dtype=torch.bfloat16 if program.half else None,
        )
        for module in (*model.blocks, model):
            fully_shard(
                module,
                mesh,
                STRATEGIES[strategy],
                precision,
                backend=backend,
                reshard_after_forward=program.reshard,
                schedule_policy=SchedulePolicy(program.prefetch, program.prefetch),
            )
        got = list(_train(model, program, backend))
        state = full_state_dict(model)
        del model
    tolerance = {"rtol": 0.1, "atol": 0.1} if program.half else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.stack(got), torch.stack(expected), **tolerance)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state[name], value, **tolerance)
    return backend


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train_plainly(model: Net, program: Program, size: int, scale: int) -> Iterator[Tensor]:
    _nudge(model)
    optimizer = _optimizer(model)
    ranks = range(size)
    for step, routes in enumerate(program.routes):
        if program.freeze and step:
            model.blocks[1].requires_grad_(False)
        backwards = program.backwards[step % len(program.backwards)]
        losses: list[Tensor] = []
        for number, route in enumerate(routes):
            each = [model(batch(step, number, rank), route).square().mean() for rank in ranks]
            loss = torch.stack(each).mean()
            losses.append(scale * loss)
            if backwards == "at once":
                losses.pop().backward()
            yield loss.detach()
            if program.nudge:
                _nudge(model)
        if backwards == "together":
            torch.stack(losses).sum().backward()
            losses.clear()
        while losses:
            losses.pop(0).backward()
        if program.clip:
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(not program.keep_zeros)
        if program.evaluate:
            with torch.no_grad():
                outputs = [model(batch(7, 7, rank), (0, 1, 2)).square().mean() for rank in ranks]
            yield torch.stack(outputs).mean()
        if program.swap:
            with torch.no_grad():
                model.blocks[0].layer.weight.mul_(0.5)


def _train(model: Net, program: Program, backend: RaceBackend) -> Iterator[Tensor]:
    _nudge(model)
    rank = dist.get_rank()
    optimizer = _optimizer(model)
    for step, routes in enumerate(program.routes):
        if program.freeze and step:
            model.blocks[1].requires_grad_(False)
        backwards = program.backwards[step % len(program.backwards)]
        losses: list[Tensor] = []
        for number, route in enumerate(routes):
            with ExitStack() as scopes:
                if program.scoped:
                    is_last = number == len(routes) - 1
                    scopes.enter_context(microbatch(model, is_last=is_last))
                with backend.root_pass():
                    losses.append(model(batch(step, number, rank), route).square().mean())
                if program.reshard:
                    backend.check_released(leaves=set(Role) - {Role.GATHER_OUTPUT})
                shown = _mean(losses[-1])
                if backwards == "at once":
                    with backend.root_pass():
                        losses.pop().backward()
            yield shown
            if program.nudge:
                _nudge(model)
        if backwards == "together":
            with backend.root_pass():
                torch.stack(losses).sum().backward()
            losses.clear()
        while losses:  # the last microbatch last
            with backend.root_pass():
                losses.pop(0).backward()
        if program.clip:
            yield clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(not program.keep_zeros)
        if program.evaluate:
            with torch.no_grad(), backend.root_pass():
                output = model(batch(7, 7, rank), (0, 1, 2)).square().mean()
            backend.check_released(leaves=(Role.REDUCE_OUTPUT,))
            yield _mean(output)
        if program.swap:
            with unsharded(model), torch.no_grad():
                model.blocks[0].layer.weight.mul_(0.5)
        if program.inspect:
            load_full_state_dict(model, full_state_dict(model))


def _nudge(model: Net) -> None:
    with torch.no_grad():
        model.blocks[1].layer.bias.add_(0.125)


def _mean(value: Tensor) -> Tensor:
    """Over the ranks, as the plain twin sees it."""
    value = value.detach().float().clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value
