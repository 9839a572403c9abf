"""The race checker between ranks: their orders, and what becomes of a rank that fails."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from race_bench import CPU
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from polyshard import BackendError, Placements, fully_shard
from polyshard.spi import LaneRole, Op
from polyshard.testing import run_ranks
from polyshard.testing.race import Policy, RaceBackend

POLICIES = list(Policy)


def differ(rank: int, policy: Policy) -> str:
    """The ranks gather and reduce in an order of their own."""
    backend = RaceBackend(policy, timeout=10.0)
    group = dist.group.WORLD
    assert group is not None
    lane, compute = backend.lane("reduce", CPU), backend.compute_lane(CPU)
    communicator = backend.communicator(group, CPU, purpose="reduce")
    try:
        with backend.checking():
            values = [torch.ones(3), torch.ones(3)]
            lane.wait(compute.mark())
            for index in (0, 1) if rank == 0 else (1, 0):
                label = f"block {index}: reduce"
                value = values[index]
                lane.submit(
                    lambda value=value, label=label: communicator.all_reduce(
                        [value], Op.SUM, label=label
                    ),
                    label=label,
                )
            compute.wait(lane.mark())
    except BackendError as error:
        return str(error)
    return "no error"


def independent(rank: int, policy: Policy) -> list[float]:
    """The ranks wait for two lanes in an order of their own; each lane's own order is the same."""
    backend = RaceBackend(policy, timeout=10.0)
    group = dist.group.WORLD
    assert group is not None
    compute, values = backend.compute_lane(CPU), [torch.ones(3), torch.ones(3)]
    roles: list[LaneRole] = ["gather", "reduce"]
    communicators = [backend.communicator(group, CPU, purpose=role) for role in roles]
    with backend.checking():
        for index in (0, 1) if rank == 0 else (1, 0):
            lane = backend.lane(roles[index], CPU)
            lane.wait(compute.mark())
            lane.submit(
                lambda index=index: communicators[index].all_reduce(
                    [values[index]], Op.SUM, label="block"
                ),
                label="block",
            )
        for index in (0, 1) if rank == 0 else (1, 0):
            lane = backend.lane(roles[index], CPU)
            lane.submit(communicators[index].settle, label="settle")
            compute.wait(lane.mark())
        return [value.sum().item() for value in values]


def one_fails(rank: int) -> str:
    backend = RaceBackend(Policy.EARLY, timeout=30.0)
    group = dist.group.WORLD
    assert group is not None
    lane, compute = backend.lane("reduce", CPU), backend.compute_lane(CPU)
    communicator = backend.communicator(group, CPU, purpose="reduce")

    def work() -> None:
        if rank == 1:
            raise ValueError("no more")
        communicator.all_reduce([torch.ones(1)], Op.SUM, label="block: reduce")

    lane.submit(work, label="block: reduce")
    try:
        compute.wait(lane.mark())
    except BackendError as error:
        return str(error)
    return "no error"


def reduce_what_was_never_written(rank: int, policy: Policy) -> list[bool]:
    """Of what is reduced of a unit with room between its gradients, and with unused weights:
    whether there is such room, and whether all of it is finite. Memory is NaN at first."""
    backend = RaceBackend(policy, timeout=10.0)
    with backend.checking():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        model.unused = nn.Parameter(torch.ones(3, 5))
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model, mesh, Placements.zero3("dp"), backend=backend)
        with backend.root_pass():
            loss = model(torch.ones(2, 3)).sum()
        with backend.root_pass():
            loss.backward()
        reduced = model[0].weight.grad._owner.flat
        held = sum(weight.to_local().numel() for weight in model.parameters())
        found = [reduced.numel() > held, bool(reduced.isfinite().all())]
        del loss, reduced, model
    return found


class TestRanks:
    @pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
    def test_orders_that_differ(self, policy: Policy) -> None:
        """Where the order of collectives differs, every rank says what it and the other are at."""
        for message in run_ranks(2, differ, policy):
            assert "order of collectives differs between ranks" in message
            assert "block 0: reduce" in message
            assert "block 1: reduce" in message

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
    def test_lanes_that_do_not_wait_for_each_other(self, policy: Policy) -> None:
        """The order between lanes may differ: none holds up another."""
        assert run_ranks(2, independent, policy) == [[6.0, 6.0]] * 2

    def test_a_rank_that_fails(self) -> None:
        """The others are told at once."""
        assert all("no more" in message for message in run_ranks(2, one_fails))

    @pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
    def test_memory_that_was_never_written(self, policy: Policy) -> None:
        """No uninitialised byte travels: what lies between gradients is reduced as zero."""
        rooms, finite = zip(*run_ranks(2, reduce_what_was_never_written, policy), strict=True)
        assert any(rooms)
        assert all(finite)
