"""A world of one rank for the tests of units; no backend package is needed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import settings
from one_rank import STRATEGIES, OneRank, Pair, make_stack, twins, units_in
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polyshard.testing.loopback import LoopbackBackend

# Ranks must not rely on a variable of the environment for what they print to arrive.
os.environ.pop("PYTHONUNBUFFERED", None)

# How long an example takes says nothing here: machines that run tests are busy.
settings.register_profile("core", deadline=None)
settings.load_profile("core")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One axis of one rank, in process groups of the module's own."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture(params=STRATEGIES)
def world(request: pytest.FixtureRequest, mesh: DeviceMesh) -> OneRank:
    """One rank under each strategy."""
    return OneRank(mesh, request.param, LoopbackBackend())


@pytest.fixture
def zero3(mesh: DeviceMesh) -> OneRank:
    """One rank that gathers what it needs."""
    return OneRank(mesh, "zero3", LoopbackBackend())


@pytest.fixture
def ddp(mesh: DeviceMesh) -> OneRank:
    """One rank that keeps everything."""
    return OneRank(mesh, "ddp", LoopbackBackend())


@pytest.fixture(params=[True, False], ids=["reshard", "keep"])
def reshard(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def pair(world: OneRank, reshard: bool) -> Pair:
    """A sharded model and its plain twin."""
    model, reference = twins(make_stack())
    world.shard(*units_in(model), reshard_after_forward=reshard)
    return model, reference
