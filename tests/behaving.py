"""What the tests of behaviours share: one scenario, told once, run plainly and on every rank.

A scenario builds a model, makes units of its parts, and does things with it, through a `Side`. On
the plain side that is one process with the data of all ranks; on the other each rank has its own
part. What a scenario notes on the way has to be the same on both.

With POLYSHARD_TEST_DEVICE=cuda both sides are on GPUs, ranks in turn on those that there are.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import STRATEGIES
from torch import Tensor, nn

from polyshard import clip_grad_norm_, fully_shard, microbatch
from polyshard.testing import run_ranks

Scenario = Callable[["Side"], None]

#: Where models and data are.
DEVICE_TYPE = os.environ.get("POLYSHARD_TEST_DEVICE", "cpu")

#: Per strategy and number of ranks, the mesh: hfsdp shards inside pairs where there are four.
SHAPES = {("hfsdp", 2): (2, 1), ("hfsdp", 4): (2, 2), ("hsdp", 4): (2, 2)}

#: Behaviours are tested for these at least.
over_strategies = pytest.mark.parametrize("strategy", ["zero3", "zero1", "hfsdp"])


class Side:
    """One of the two sides of a comparison.

    Args:
        world: the number of ranks whose data there is.
        rank: whose part is this side's; None for the plain side, which has all of it.
        strategy: of :data:`strategies.STRATEGIES`.
    """

    def __init__(self, world: int, rank: int | None = None, strategy: str = "") -> None:
        self.world, self.rank, self.strategy = world, rank, strategy
        self.notes: list[tuple[str, Any]] = []

    @property
    def sharded(self) -> bool:
        """This is the side of polyshard."""
        return self.rank is not None

    @property
    def ranks(self) -> range:
        """Whose data this side takes."""
        return range(self.world) if self.rank is None else range(self.rank, self.rank + 1)

    @functools.cached_property
    def mesh(self) -> Any:
        """Of the sharded side."""
        shape = SHAPES.get((self.strategy, self.world))
        return STRATEGIES[self.strategy].mesh(shape, device_type=DEVICE_TYPE)

    @property
    def device(self) -> torch.device:
        """Where this side computes, and makes its tensors unless told."""
        return torch.get_default_device()

    def shard(self, *modules: nn.Module, **options: Any) -> None:
        """Make units of the modules, in this order; nothing on the plain side."""
        for module in modules if self.sharded else ():
            fully_shard(module, self.mesh, STRATEGIES[self.strategy].placements, **options)

    def microbatch(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """A microbatch scope; nothing on the plain side."""
        return microbatch(model, is_last) if self.sharded else nullcontext()

    def mean(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """The mean of ``loss_of(rank)`` over the ranks whose data this side takes."""
        return torch.stack([loss_of(rank) for rank in self.ranks]).mean()

    def data(self, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """An input for every rank, all different; index it with the rank."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(shape, generator=generator, dtype=dtype, device="cpu").to(self.device)
            for _ in range(self.world)
        ]

    def clip(self, parameters: Any, max_norm: float, **options: Any) -> Tensor:
        """Gradients clipped by polyshard's function, or by PyTorch's on the plain side."""
        clip = clip_grad_norm_ if self.sharded else nn.utils.clip_grad_norm_
        return clip(parameters, max_norm, **options)

    # -- notes ------------------------------------------------------------------------------------

    def note(self, name: str, value: Any) -> None:
        """Compare this as it is; tensors whole."""
        self.notes.append((name, whole(value)))

    def note_mean(self, name: str, value: Tensor) -> None:
        """Compare the mean over the ranks, such as that of a loss."""
        value = whole(value)
        if self.sharded:
            dist.all_reduce(value)
            value /= self.world
        self.notes.append((name, value))

    def note_model(self, model: nn.Module, *, grads: bool = True) -> None:
        """Compare all weights, buffers and, unless told otherwise, gradients, None included."""
        for name, parameter in model.named_parameters():
            self.note(name, parameter.detach())
            if grads:
                self.note(f"{name}.grad", parameter.grad)
        for name, buffer in model.named_buffers():
            self.note(name, buffer)

    @contextmanager
    def note_error(self, kind: type[BaseException] = RuntimeError) -> Iterator[None]:
        """Compare whether the block raises an error of this kind."""
        raised = False
        try:
            yield
        except kind:
            raised = True
        self.notes.append(("raised", raised))


def train(side: Side, model: nn.Module, loss_of: Callable[[int, int], Tensor], steps: int) -> None:
    """AdamW steps on the mean of ``loss_of(step, rank)``, all noted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step in range(steps):
        loss = side.mean(functools.partial(loss_of, step))
        loss.backward()
        side.note_mean(f"loss of step {step}", loss)
        side.note_model(model)
        optimizer.step()
        optimizer.zero_grad()
    side.note_model(model)


def whole(value: Any) -> Any:
    """On the host, a sharded tensor whole, gathered by all its ranks; a copy of any other."""
    if not isinstance(value, Tensor):
        return value
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().to("cpu", copy=True)


def compute_on(rank: int) -> None:
    """Make the device of ``rank`` the one that tensors are made on; a CPU is that anyway."""
    if DEVICE_TYPE != "cpu":
        device = torch.device(DEVICE_TYPE, rank % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
        torch.set_default_device(device)


def run_side(rank: int, scenario: Scenario, strategy: str) -> list[tuple[str, Any]]:
    """The notes of one rank."""
    compute_on(rank)
    side = Side(dist.get_world_size(), rank, strategy)
    scenario(side)
    return side.notes


def compare(
    scenario: Scenario, strategy: str, *, ranks: int = 2, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Run ``scenario``, a function at module level or a partial of one, on both sides."""
    torch.manual_seed(0)  # as the ranks are
    plain = Side(ranks)
    try:
        compute_on(0)
        scenario(plain)
    finally:
        if DEVICE_TYPE != "cpu":
            torch.set_default_device(None)
    assert plain.notes
    for rank, notes in enumerate(run_ranks(ranks, run_side, scenario, strategy)):
        assert [name for name, _ in notes] == [name for name, _ in plain.notes]
        for (name, found), (_, expected) in zip(notes, plain.notes, strict=True):
            if isinstance(expected, Tensor) and isinstance(found, Tensor):
                where = f"rank {rank}, {name}: "
                torch.testing.assert_close(
                    found, expected, rtol=rtol, atol=atol, msg=lambda text, at=where: at + text
                )
            else:
                assert found == expected, f"rank {rank}, {name}: {found} against {expected}"
