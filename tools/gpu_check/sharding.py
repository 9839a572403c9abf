"""What checks of one rank share: models made units, and one step of training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import Placements, fully_shard

from .models import units_of
from .site import Site, require

#: Backends by what they run on one rank: copies only, or NCCL itself.
BACKENDS = ("copies", "connected")


def backend_for(site: Site, kind: str) -> Any:
    """What ``fully_shard`` takes for one of ``BACKENDS``."""
    if kind == "copies":
        return site.backend
    site.require_cuda("a connected NCCL backend")
    from .connected import ConnectedNccl

    return ConnectedNccl()


def shard(
    model: nn.Module, mesh: DeviceMesh, backend: Any, strategy: str = "zero3", **options: Any
) -> None:
    """Every block a unit, then the rest."""
    for unit in units_of(model):
        fully_shard(unit, mesh, getattr(Placements, strategy)("dp"), backend=backend, **options)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """Forward, backward, optimizer, gradients dropped; the loss."""
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def require_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 0.0
) -> float:
    """The largest difference; raises CheckFailed where it is above ``tolerance`` or no number."""
    require(found.keys() == expected.keys(), f"there are {sorted(found)}, not {sorted(expected)}")
    worst, where = 0.0, ""
    for name, value in expected.items():
        off = (found[name].double() - value.double()).abs().max().item()
        require(off == off, f"{name} is not a number")
        if off > worst:
            worst, where = off, name
    require(worst <= tolerance, f"{where} is off by {worst:.3g}")
    return worst
