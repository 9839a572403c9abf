"""What the one-rank tests of units share: a world of one process, small models, a plain twin.

The yardstick is always the same model trained plainly. No backend package is needed.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import Placements, fully_shard
from polyshard.context import unit_of
from polyshard.group import ParameterGroup
from polyshard.spi import Buffer, CollectiveBackend, HostLane, LaneFailure
from polyshard.testing.loopback import LoopbackBackend
from polyshard.unit import Unit

Pair = tuple[nn.Module, nn.Module]
STRATEGIES = {"zero3": Placements.zero3("dp"), "ddp": Placements.ddp("dp")}


@dataclass
class OneRank:
    """One process, a strategy, and a backend of its own: a failed lane stays in its test."""

    mesh: DeviceMesh
    strategy: str
    backend: CollectiveBackend

    @property
    def placements(self) -> Placements:
        return STRATEGIES[self.strategy]

    def shard(self, *modules: nn.Module, **options: Any) -> None:
        """Make units of the modules, in this order."""
        for module in modules:
            fully_shard(module, self.mesh, self.placements, backend=self.backend, **options)


class Block(nn.Module):
    """Two linear layers around an activation, with a residual."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 2 * width + 1)
        self.narrow = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.widen(x)))


class Stack(nn.Module):
    """Blocks between layers that belong to the root."""

    def __init__(self, blocks: int = 3, width: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def units_in(model: nn.Module) -> list[nn.Module]:
    """The blocks of a Stack, then the Stack: bottom-up."""
    return [*model.blocks, model]


def make_stack(blocks: int = 3) -> Stack:
    """The same one at every call."""
    torch.manual_seed(0)
    return Stack(blocks)


def batch(seed: int = 0, rows: int = 5, width: int = 4) -> Tensor:
    """An input, the same for the same seed."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and a plain copy of it, made before anything is sharded."""
    return model, copy.deepcopy(model)


def train(
    model: nn.Module,
    steps: int = 4,
    *,
    inputs: Callable[[int], Any] = batch,
    lr: float = 0.1,
) -> list[float]:
    """Steps of AdamW on the squared output; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(value: Tensor) -> Tensor:
    """A sharded tensor whole, any other as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach()


def assert_same_weights(sharded: nn.Module, reference: nn.Module) -> None:
    """Every parameter and its gradient are those of the plain twin, under the same name."""
    ours, theirs = dict(sharded.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in theirs.items():
        torch.testing.assert_close(plain(ours[name]), parameter.detach(), msg=f"{name}: value")
        assert_same_grad(ours[name], parameter, name)


def assert_same_grads(sharded: nn.Module, reference: nn.Module) -> None:
    """Every gradient is the plain twin's; None where that is None."""
    ours = dict(sharded.named_parameters())
    for name, parameter in reference.named_parameters():
        assert_same_grad(ours[name], parameter, name)


def assert_same_grad(ours: Tensor, theirs: Tensor, name: str = "gradient") -> None:
    """None for None, else the same values."""
    if theirs.grad is None:
        assert ours.grad is None, name
    else:
        assert ours.grad is not None, name
        torch.testing.assert_close(plain(ours.grad), theirs.grad, msg=f"{name}: gradient")


def unit(module: nn.Module) -> Unit:
    """The unit that a module is."""
    found = unit_of(module)
    assert found is not None
    return found


def groups(module: nn.Module) -> list[ParameterGroup]:
    """The groups of all units in a module."""
    return [
        group
        for child in module.modules()
        if (owner := unit_of(child)) is not None
        for group in owner.groups
    ]


def gathered_bytes(model: nn.Module) -> int:
    """Bytes that full parameters hold beside the main weights."""
    return sum(
        buffer.flat.untyped_storage().nbytes()
        for group in groups(model)
        for buffer in {id(b): b for b in (group.model, group.full)}.values()
        if buffer is not group.main
    )


def backward_each(losses: Sequence[Tensor]) -> None:
    """One backward after the other."""
    for loss in losses:
        loss.backward()


class SpyLane(HostLane):
    """Notes the labels of what was submitted."""

    def __init__(self, labels: list[str], failure: LaneFailure) -> None:
        super().__init__(failure)
        self._labels = labels

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        self._labels.append(label)
        super().submit(work, label=label)


class SpyBackend(LoopbackBackend):
    """Notes what lanes are asked to do, and which buffers hold memory."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[str] = []
        self._buffers: list[weakref.ref[Buffer]] = []
        failure = LaneFailure()
        self._compute_lane = HostLane(failure)
        self._lanes = {role: SpyLane(self.labels, failure) for role in self._lanes}

    def allocate(self, *args: Any, **kwargs: Any) -> Buffer:
        buffer = super().allocate(*args, **kwargs)
        self._buffers.append(weakref.ref(buffer))
        return buffer

    @property
    def live_bytes(self) -> int:
        """Bytes that buffers hold now, those that share memory counted once."""
        storages = {
            buffer.tensor.untyped_storage()._cdata: buffer.tensor.untyped_storage().nbytes()
            for reference in self._buffers
            if (buffer := reference()) is not None
        }
        return sum(storages.values())

    def gathers(self) -> list[str]:
        """The units whose gathers were submitted since this was last asked, in order."""
        gathered = [label.partition(" (")[0] for label in self.labels if ": gather for " in label]
        self.labels.clear()
        return gathered
