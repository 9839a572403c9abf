"""What takes every rank, called on one: an error that says so, when the group's time is up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import BackendError, Placements, clip_grad_norm_, fully_shard
from polyshard.testing import run_ranks


def norm(model: nn.Module) -> object:
    return model.weight.norm()


def whole(model: nn.Module) -> object:
    return model.weight.full_tensor()


def clip(model: nn.Module) -> object:
    return clip_grad_norm_(model.parameters(), 1.0)


def told(rank: int, read: Callable[[nn.Module], object] | None) -> str:
    """What rank 0 is told, whose group waits for a second; the other rank does nothing."""
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=1))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = nn.Linear(4, 4)
    if read is not None:
        fully_shard(model, mesh, Placements.zero3("dp"))
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    said = ""
    if rank == 0:
        try:
            fully_shard(model, mesh, Placements.zero3("dp")) if read is None else read(model)
        except BackendError as error:
            said = str(error)
    dist.barrier()
    return said


@pytest.mark.parametrize("read", [norm, whole, clip])
def test_reads(read: Callable[[nn.Module], object]) -> None:
    said, _ = run_ranks(2, told, read)
    assert "reading a sharded tensor of shape (4, 4) takes ranks [0, 1] together" in said
    assert "failed on rank 0" in said
    assert "not inside `if rank == 0`" in said


def test_sharding() -> None:
    said, _ = run_ranks(2, told, None)
    assert "fully_shard(Linear) takes all ranks of the mesh together" in said
