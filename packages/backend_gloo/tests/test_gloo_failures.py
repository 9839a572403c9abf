"""What ranks of the gloo backend see when they diverge, are late, fail or die: never a hang."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from polyshard import BackendError
from polyshard.spi import Communicator, Op
from polyshard.testing import RankFailure, run_ranks
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")


def f32(numel: int) -> torch.Tensor:
    return torch.ones(numel)


Collective = Callable[[Communicator], None]

# What one rank calls, what the others call, and what both must read about the other side.
DIVERGED: dict[str, tuple[Collective, Collective, str, str]] = {
    "label": (
        lambda c: c.all_reduce([f32(4)], Op.SUM, label="blocks.0 reduce"),
        lambda c: c.all_reduce([f32(4)], Op.SUM, label="blocks.1 reduce"),
        "'blocks.0 reduce'",
        "'blocks.1 reduce'",
    ),
    "kind": (
        lambda c: c.all_gather([f32(4 * c.size)], [f32(4)], label="unit"),
        lambda c: c.all_reduce([f32(4)], Op.SUM, label="unit"),
        "all_gather",
        "all_reduce",
    ),
    "dtype": (
        lambda c: c.broadcast([f32(4)], 0, label="unit"),
        lambda c: c.broadcast([f32(4).int()], 0, label="unit"),
        "torch.float32",
        "torch.int32",
    ),
    "length": (
        lambda c: c.broadcast([f32(40_000)], 0, label="unit"),
        lambda c: c.broadcast([f32(40_001)], 0, label="unit"),
        "40000",
        "40001",
    ),
    "small and large": (
        lambda c: c.all_gather([f32(4 * c.size)], [f32(4)], label="unit"),
        lambda c: c.all_gather([f32(90_000 * c.size)], [f32(90_000)], label="unit"),
        "[4]",
        "[90000]",
    ),
    "empty and not": (
        lambda c: c.all_reduce([], Op.SUM, label="unit"),
        lambda c: c.all_reduce([f32(1)], Op.SUM, label="unit"),
        "0 tensors",
        "1 tensors",
    ),
    "division of a list": (
        lambda c: c.all_reduce([f32(1), f32(3)], Op.SUM, label="unit"),
        lambda c: c.all_reduce([f32(2), f32(2)], Op.SUM, label="unit"),
        "[1, 3]",
        "[2, 2]",
    ),
    "op": (
        lambda c: c.all_reduce([f32(4)], Op.SUM, label="unit"),
        lambda c: c.all_reduce([f32(4)], Op.AVG, label="unit"),
        "all_reduce sum",
        "all_reduce avg",
    ),
    "source": (
        lambda c: c.broadcast([f32(4)], 0, label="unit"),
        lambda c: c.broadcast([f32(4)], 1, label="unit"),
        "from rank 0",
        "from rank 1",
    ),
}


def communicator(backend: GlooBackend | None = None, **options: object) -> Communicator:
    return (backend or GlooBackend()).communicator(
        dist.group.WORLD, CPU, purpose="gather", options=options
    )


def diverge(rank: int, name: str, odd_rank: int) -> str:
    """Agree twice, then let ``odd_rank`` call something else; the message."""
    apart = communicator()
    for _ in range(2):
        apart.all_reduce([f32(3)], Op.SUM, label="together")
    one, others, _, _ = DIVERGED[name]
    with pytest.raises(BackendError) as raised:
        (one if rank == odd_rank else others)(apart)
    with pytest.raises(BackendError, match="cannot be used"):
        one(apart)
    return str(raised.value)


@pytest.mark.parametrize("name", DIVERGED)
def test_diverged_ranks_name_both_sides(name: str) -> None:
    """Ranks that do not issue the same collective all raise, naming themselves, another rank and
    what each was at."""
    _, _, one, others = DIVERGED[name]
    messages = run_ranks(3, diverge, name, 1)
    for rank, message in enumerate(messages):
        mine, theirs = (one, others) if rank == 1 else (others, one)
        here, there = message.split(", but ")
        assert f"rank {rank} is at #2" in here
        assert mine in here
        assert "is at #2" in there
        assert theirs in there
        assert (f"rank {1}" if rank != 1 else "rank 0") in there
        assert "Every rank must issue the same collectives" in there


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(BackendError) as raised:
        call()
    return str(raised.value)


def long_label(rank: int) -> str:
    apart = communicator()
    return refused(lambda: apart.all_reduce([f32(1)], Op.SUM, label=f"{'x' * 3000} {rank}"))


def test_long_labels_differ_too() -> None:
    """Labels that differ beyond what is exchanged are told apart all the same."""
    for rank, message in enumerate(run_ranks(2, long_label)):
        assert f"rank {rank} is at #0" in message
        assert f"rank {1 - rank} is at #0" in message


def invalid_on_one(rank: int) -> str:
    """A mistake on one rank, found before anything is sent, with the collective on a lane."""
    backend = GlooBackend()
    gather, other = communicator(backend), communicator(backend)
    lane, compute = backend.lane("gather", CPU), backend.compute_lane(CPU)
    shard = f32(5 if rank == 0 else 4)
    lane.submit(lambda: gather.all_gather([f32(8)], [shard], label="unit"), label="unit")
    message = refused(lambda: compute.wait(lane.mark()))
    # All communicators of a backend that failed are of no use any more.
    return message + " | " + refused(lambda: other.all_reduce([f32(1)], Op.SUM, label="other"))


def test_a_mistake_on_one_rank_ends_the_others() -> None:
    """Peers of a rank whose work failed get an error that names it, not a wait for a timeout."""
    first, second = run_ranks(2, invalid_on_one)
    assert "8 elements is not 2 times 5" in first
    assert "other: this communicator cannot be used" in first
    assert "unit: rank 1 lost its connection to rank 0" in second
    assert "other: " in second


def failure_frees_other_lanes(rank: int) -> str:
    """A lane is blocked in a collective that never completes when another lane fails."""
    backend = GlooBackend()
    gather, reduce = communicator(backend), communicator(backend)
    gather_lane, reduce_lane = backend.lane("gather", CPU), backend.lane("reduce", CPU)
    total = f32(3)
    if rank == 0:
        reduce_lane.submit(
            lambda: reduce.all_reduce([total], Op.SUM, label="reduce"), label="reduce"
        )
    gather_lane.submit(
        lambda: gather.all_reduce([total], Op.SUM, label=f"gather {rank}"), label="gather"
    )
    return refused(
        lambda: backend.compute_lane(CPU).wait((reduce_lane if rank == 0 else gather_lane).mark())
    )


def test_a_failure_frees_all_lanes() -> None:
    """Whoever waits for another lane than the one that failed is told, though that lane is in a
    collective which no peer will join."""
    messages = run_ranks(2, failure_frees_other_lanes)
    for rank, message in enumerate(messages):
        assert message.startswith(f"gather {rank}: rank {rank} is at #0")


def leave(rank: int, numel: int) -> str | None:
    ended = communicator()
    ended.all_reduce([f32(3)], Op.SUM, label="together")
    if rank == 1:
        ended.close()
        return None
    return refused(lambda: ended.all_reduce([f32(numel)], Op.SUM, label="blocks.2 reduce"))


@pytest.mark.parametrize("numel", [3, 100_000])
def test_a_rank_that_left_is_named(numel: int) -> None:
    """When a rank gave up its connections, the others raise, naming it and the collective."""
    messages = run_ranks(3, leave, numel)
    for rank in (0, 2):
        assert f"blocks.2 reduce: rank {rank} lost its connection to rank" in messages[rank]
    # The one that found out first gives up as well, so the other may name either.
    assert any("to rank 1," in message for message in (messages[0], messages[2]))


def come_late(rank: int) -> str | None:
    late = communicator(timeout=timedelta(seconds=4))
    late.all_reduce([f32(3)], Op.SUM, label="together")
    dist.barrier()
    message = None
    if rank != 2:
        message = refused(lambda: late.all_gather([f32(12)], [f32(4)], label="blocks.5 gather"))
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named() -> None:
    """When a rank is not at the collective within the timeout, the others raise, naming it, the
    collective and how to wait for longer."""
    messages = run_ranks(3, come_late)
    assert messages[2] is None
    for rank in (0, 1):
        assert (
            f"blocks.5 gather: rank {rank} waited 4 s for rank 2, which did not" in messages[rank]
        )
        assert "POLYSHARD_GLOO_TIMEOUT" in messages[rank]


def all_late(rank: int) -> str | None:
    late = communicator(timeout=timedelta(seconds=3))
    dist.barrier()
    message = None
    if rank == 0:
        message = refused(lambda: late.all_gather([f32(12)], [f32(4)], label="gather"))
    dist.barrier()
    return message


def test_all_late_ranks_are_named() -> None:
    """Of several ranks that do not come, the message names every one."""
    assert "for rank 1, rank 2, which did not come" in str(run_ranks(3, all_late)[0])


def die(rank: int) -> None:
    doomed = communicator()
    doomed.all_reduce([f32(3)], Op.SUM, label="together")
    if rank == 1:
        os._exit(17)
    doomed.all_gather([f32(400_000 * 3)], [f32(400_000)], label="blocks.7 gather")


def test_a_rank_that_dies_is_named() -> None:
    """When a process ends in the middle, the others raise at once, naming the collective."""
    with pytest.raises(RankFailure) as raised:
        run_ranks(3, die)
    summaries = {report.rank: report.summary for report in raised.value.reports}
    assert "17" in summaries[1]
    for rank in (0, 2):
        assert "BackendError" in summaries[rank]
        assert f"blocks.7 gather: rank {rank} lost its connection to rank" in summaries[rank]


def join_partly(rank: int) -> str | None:
    backend = GlooBackend()
    message = None
    if rank != 1:
        message = refused(
            lambda: backend.communicator(
                dist.group.WORLD,
                CPU,
                purpose="gather",
                options={"timeout": timedelta(seconds=2)},
            )
        )
    else:
        dist.group.WORLD.get_group_store().add(f"polyshard_gloo/{rank}", 1)
    dist.barrier()
    # The group can still be used.
    again = backend.communicator(dist.group.WORLD, CPU, purpose="gather")
    again.all_reduce([f32(1)], Op.SUM, label="again")
    return message


def test_a_rank_that_does_not_make_the_communicator_is_named() -> None:
    """A communicator that a rank does not join is an error that names the rank."""
    messages = run_ranks(3, join_partly)
    for rank in (0, 2):
        assert "rank 1 did not connect for 'gather' within 2 s" in str(messages[rank])


def swap_purposes(rank: int) -> str:
    backend = GlooBackend()
    purpose = ("gather", "reduce")[rank]
    return refused(lambda: backend.communicator(dist.group.WORLD, CPU, purpose=purpose))


def test_communicators_made_in_another_order() -> None:
    """Ranks that make communicators for different purposes at the same time all raise."""
    first, second = run_ranks(2, swap_purposes)
    assert "rank 0 connects for 'gather', rank 1 for 'reduce'" in first
    assert "rank 1 connects for 'reduce', rank 0 for 'gather'" in second


RANK_PROGRAM = """
import sys, torch, torch.distributed as dist
from polyshard_gloo import GlooBackend
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
cpu, backend = torch.device("cpu"), GlooBackend()
gather = backend.communicator(dist.group.WORLD, cpu, purpose="gather")
lane = backend.lane("gather", cpu)
full, shard = torch.zeros(2000000), torch.ones(1000000)
work = lambda: gather.all_gather([full], [shard], label="blocks.0 gather")
"""
# Rank 0 ends while its lane is in a collective that rank 1 joins only after that.
ENDS_EARLY = """
if rank == 0:
    lane.submit(work, label="blocks.0 gather")
    raise SystemExit(5)
sys.stdin.read()
lane.submit(work, label="blocks.0 gather")
try:
    backend.compute_lane(cpu).wait(lane.mark())
except RuntimeError as error:
    print(error)
"""
# Both end with everything open, the process group destroyed first.
ENDS_TOGETHER = """
lane.submit(work, label="blocks.0 gather")
backend.compute_lane(cpu).wait(lane.mark())
dist.destroy_process_group()
work()
print(full.sum().item())
"""


def run_programs(text: str, *, first_ends_first: bool) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of both ranks."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-c",
                    RANK_PROGRAM + text,
                    str(rank),
                    f"{directory}/store",
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            if first_ends_first:
                ranks[0].wait(200)
            results = []
            for process in ranks:
                output, errors = process.communicate("", timeout=200)
                results.append((process.returncode, output.strip(), errors.strip()))
            return results
        finally:
            for process in ranks:
                process.kill()


def test_a_process_can_end_in_the_middle_of_a_collective() -> None:
    """A rank that ends while a lane waits for a peer keeps its exit code and dies in silence;
    the peer gets an error that names it."""
    first, second = run_programs(ENDS_EARLY, first_ends_first=True)
    assert first == (5, "", "")
    assert second[0] == 0
    assert "blocks.0 gather: rank 1 lost its connection to rank 0" in second[1]


def test_a_process_can_end_with_everything_open() -> None:
    """Nothing needs to be closed at the end, and communicators outlive torch.distributed's
    process group."""
    for code, output, errors in run_programs(ENDS_TOGETHER, first_ends_first=False):
        assert (code, output, errors) == (0, "2000000.0", "")
