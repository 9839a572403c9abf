"""What ranks find out about each other before NCCL connects them; real processes and stores."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded_cuda import CPU, RecordedNccl, gloo_group

from polyshard import BackendError
from polyshard.spi import Communicator, Op
from polyshard.testing import run_ranks
from polyshard_nccl.meeting import Place


def refused(
    rank: int,
    differences: dict[int, dict[str, Any]],
    environment: str | None,
    group: dist.ProcessGroup | None = None,
) -> str:
    """The message that this rank gets, where ranks differ so."""
    if environment:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = environment
    own = dict(differences.get(rank, {}))
    options = {"timeout": timedelta(seconds=own.pop("timeout", 30))}
    options |= {"user_buffers": own.pop("user_buffers", False)}
    purpose = own.pop("purpose", "gather")
    backend = RecordedNccl()
    for name, value in own.items():
        setattr(backend.cuda, name, value)
    try:
        backend.communicator(group or dist.group.WORLD, CPU, purpose=purpose, options=options)
    except BackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        (
            {0: {"identity": "H100 uuid-7"}, 1: {"identity": "H100 uuid-7"}},
            ["ranks 0 and 1 are both on one GPU of", "(H100 uuid-7)", "set_device", "LOCAL_RANK"],
        ),
        (
            {1: {"purpose": "reduce"}},
            [
                "rank 0 connects for 'gather', rank 1 for 'reduce'",
                "of ranks [0, 1]); every rank must make",
            ],
        ),
        ({1: {"version": "2.30.7"}}, ["has NCCL 2.28.9, rank 1 on", "has NCCL 2.30.7"]),
        ({1: {"user_buffers": True}}, ["user_buffers=False, rank 1 user_buffers=True"]),
    ],
    ids=["one GPU", "purpose", "NCCL", "user buffers"],
)
def test_ranks_that_do_not_fit(differences: dict[int, dict[str, Any]], said: list[str]) -> None:
    """Every rank gets the same message, which names both sides, and nobody waits for NCCL."""
    messages = run_ranks(2, refused, differences, None)
    assert messages[0] == messages[1]
    for words in said:
        assert words in messages[0]


def test_one_gpu_for_several_ranks_where_nccl_allows_it() -> None:
    """What NCCL is told to allow, from 2.30.7 on, is not refused here."""
    same = {rank: {"identity": "H100 uuid-7"} for rank in range(2)}
    assert run_ranks(2, refused, same, "1") == ["", ""]


def alone(rank: int) -> str:
    # A group of its own: the ranks have met there equally often before.
    group = dist.new_group()
    return "" if rank else refused(rank, {0: {"timeout": 0.5}}, None, group)


def test_a_rank_that_does_not_come() -> None:
    """After the timeout the message names who is missing, and for what."""
    said = run_ranks(2, alone)[0]
    assert said.startswith("rank 1 did not connect for 'gather' within 0.5 s (communicator 1 of")


def sums(rank: int) -> list[float]:
    """Sums over communicators of which ranks made, and closed, different numbers before."""
    backend, results = RecordedNccl(), []
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))

    def use(communicator: Communicator) -> None:
        value = torch.full((3,), float(rank))
        communicator.all_reduce([value], Op.SUM, label="unit")
        results.append(value[0].item())

    def make(name: str) -> Communicator:
        return backend.communicator(mesh.get_group(name), CPU, purpose="gather")

    if rank < 2:
        for _ in range(2):
            closed = make("inner")
            use(closed)
            closed.close()
    use(make("outer"))
    use(make("inner"))
    return results[-2:]


def test_only_the_ranks_of_the_group_meet() -> None:
    """Communicators are made by the ranks of their group alone, whatever else those made before."""
    assert run_ranks(4, sums) == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]


def calls_of_torch(rank: int) -> dict[str, list[float]]:
    """Every call of torch's process group that NCCL gets, over gloo."""
    place = Place(dist.PrefixStore("calls", dist.group.WORLD.get_group_store()), rank, (0, 1), 1)
    group, found = gloo_group(place, timedelta(seconds=30)), {}
    for count in (1, 2):
        shards = [torch.full((2,), 10.0 * i + rank) for i in range(count)]
        wholes = [torch.zeros(4) for _ in range(count)]
        group.all_gather(wholes, shards)
        found[f"all_gather {count}"] = torch.cat(wholes).tolist()
        for average in (False, True):
            inputs, outputs = [whole + rank for whole in wholes], [torch.zeros(2) for _ in wholes]
            group.reduce_scatter(outputs, inputs, average=average)
            found[f"reduce_scatter {count} {average}"] = torch.cat(outputs).tolist()
            buffers = [shard.clone() for shard in shards]
            group.all_reduce(buffers, average=average)
            found[f"all_reduce {count} {average}"] = torch.cat(buffers).tolist()
    last = torch.full((2,), float(rank))
    group.broadcast(last, 1)
    found["broadcast"] = last.tolist()
    return found


def test_calls_of_torch() -> None:
    """The calls that torch gives process groups, by the names of this version, take the arguments
    that they are given and do what is expected of them. A torch that renames one fails here."""
    first, second = run_ranks(2, calls_of_torch)
    assert first["all_gather 1"] == second["all_gather 1"] == [0, 0, 1, 1]
    assert first["all_gather 2"] == second["all_gather 2"] == [0, 0, 1, 1, 10, 10, 11, 11]
    assert first["reduce_scatter 1 False"] == [1, 1]
    assert second["reduce_scatter 1 False"] == [3, 3]
    assert first["reduce_scatter 2 True"] == [0.5, 0.5, 10.5, 10.5]
    assert second["reduce_scatter 2 True"] == [1.5, 1.5, 11.5, 11.5]
    for found in (first, second):
        assert found["all_reduce 1 False"] == [1, 1]
        assert found["all_reduce 2 False"] == [1, 1, 21, 21]
        assert found["all_reduce 1 True"] == [0.5, 0.5]
        assert found["all_reduce 2 True"] == [0.5, 0.5, 10.5, 10.5]
        assert found["broadcast"] == [1, 1]
