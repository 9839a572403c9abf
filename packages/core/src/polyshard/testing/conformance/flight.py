"""Tests of operations in flight: tickets, inputs and settle (clauses 3.2, 3.3, 6.1, 6.2)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...spi import Buffer, Communicator, Op, Role
from .bench import ROLES, Bench
from .clauses import clause
from .data import bits, require, require_bits, require_combined, values

#: Seconds by which a rank comes late, where late ranks are what a test is about.
_LATE = 0.05


@clause("6.1", since=(1, 0))
def a_ticket_covers_outputs(bench: Bench) -> None:
    """Once a ticket after a collective was waited for, its outputs may be read: they are there."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for seed in range(4):
        for numel in (5, bench.subject.largest_numel // 20):
            shards = [
                values(rank, [numel], torch.float32, seed=seed)[0] for rank in range(bench.size)
            ]
            mine = shards[bench.rank].to(bench.device)
            output = torch.zeros(bench.size * numel, device=bench.device)
            _come_late(bench, seed)
            bench.all_gather(gather, [output], [mine])
            snapshot = output.clone()
            total, sent = mine.clone(), mine.clone()
            bench.all_reduce(reduce, [total], Op.SUM)
            sum_snapshot = total.clone()
            bench.broadcast(gather, [sent], seed % bench.size)
            sent_snapshot = sent.clone()
            scattered = torch.zeros(numel, device=bench.device)
            bench.reduce_scatter(reduce, [scattered], [output.clone()], Op.SUM)
            scattered_snapshot = scattered.clone()
            where = f"{numel} elements, read after its ticket"
            require_bits(snapshot, torch.cat(shards), f"all_gather of {where}")
            require_bits(sent_snapshot, shards[seed % bench.size], f"broadcast of {where}")
            require_combined(sum_snapshot, shards, Op.SUM, f"all_reduce of {where}", in_fp32=True)
            require_combined(
                scattered_snapshot,
                [shards[bench.rank]] * bench.size,
                Op.SUM,
                f"reduce_scatter of {where}",
                in_fp32=True,
            )


@clause("6.1", since=(1, 0))
def many_are_in_flight_on_two_lanes(bench: Bench) -> None:
    """Any number of collectives may be submitted to two lanes before the first one is waited
    for; none takes the memory or the data of another."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    lengths = [3, 5000, 0, 700, bench.subject.largest_numel // 60, 1]
    rounds = []
    for seed in range(24):
        numel = lengths[seed % len(lengths)]
        (shard,) = bits(bench.rank, [numel], torch.int32, seed=seed, device=bench.device)
        (whole,) = values(
            bench.rank, [numel * bench.size], torch.bfloat16, seed=seed, device=bench.device
        )
        output = torch.zeros(bench.size * numel, dtype=torch.int32, device=bench.device)
        scattered = torch.zeros(numel, dtype=torch.bfloat16, device=bench.device)
        label = f"unit {seed}"
        tickets = [
            bench.submit(
                gather,
                partial(gather.all_gather, [output], [shard], label=label),
                label=label,
            ),
            bench.submit(
                reduce,
                partial(reduce.reduce_scatter, [scattered], [whole], Op.AVG, label=label),
                label=label,
            ),
        ]
        rounds.append((seed, numel, output, scattered, tickets))
    in_fp32 = bench.backend.capabilities.fp32_accumulation
    for seed, numel, output, scattered, tickets in reversed(rounds):
        for ticket in tickets:
            bench.compute.wait(ticket)
        where = f"number {seed} of many in flight, {numel} elements"
        expected = [bits(r, [numel], torch.int32, seed=seed)[0] for r in range(bench.size)]
        require_bits(output, torch.cat(expected), f"all_gather, {where}")
        given = [
            values(rank, [numel * bench.size], torch.bfloat16, seed=seed)[0]
            for rank in range(bench.size)
        ]
        slots = [tensor.tensor_split(bench.size)[bench.rank] for tensor in given]
        require_combined(scattered, slots, Op.AVG, f"reduce_scatter, {where}", in_fp32=in_fp32)


@clause("3.2", "1.3", since=(1, 0))
def lanes_may_differ_in_order(bench: Bench) -> None:
    """Ranks may order the collectives of different purposes differently, and wait for them in
    another order still: none waits for one of another purpose."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    outer = bench.communicator("outer")
    results: list[tuple[int, Tensor, Tensor, Tensor]] = []
    for step in range(16):
        numel = (10, 5000)[step % 2]
        full = torch.zeros(bench.size * numel, device=bench.device)
        shard = torch.full((numel,), float(bench.rank + step), device=bench.device)
        totals = [
            torch.full((numel,), float(bench.rank * step), device=bench.device) for _ in range(2)
        ]
        results.append((step, full, totals[0], totals[1]))
        works: list[tuple[Communicator, Callable[[], None]]] = [
            (
                gather,
                partial(gather.all_gather, [full], [shard], label=f"gather {step}"),
            ),
            (
                reduce,
                partial(reduce.all_reduce, [totals[0]], Op.SUM, label=f"reduce {step}"),
            ),
            (
                outer,
                partial(outer.all_reduce, [totals[1]], Op.SUM, label=f"outer {step}"),
            ),
        ]
        turn = bench.rank % 3
        for communicator, work in works[turn:] + works[:turn]:
            bench.submit(communicator, work, label=f"unit {step}")
    roles = ROLES[bench.rank % 3 :] + ROLES[: bench.rank % 3]
    for role in reversed(roles):
        bench.compute.wait(bench.lane(role).mark())
    for step, full, *sums in results:
        means = full.view(bench.size, -1).mean(1).tolist()
        expected = [float(other + step) for other in range(bench.size)]
        require(means == expected, f"gather {step} in another order: {means}, expected {expected}")
        total = float(sum(rank * step for rank in range(bench.size)))
        for reduced in sums:
            found = reduced.unique().tolist()
            require(found == [total], f"sum {step} in another order: {found}, expected {total}")


@clause("3.3", "1.3", since=(1, 0))
def three_lanes_unless_asked_otherwise(bench: Bench) -> None:
    """One lane for everything is an option: whoever did not ask for it gets three."""
    lanes = [bench.lane(role) for role in ROLES]
    distinct = len({id(lane) for lane in lanes})
    require(distinct == 3, f"lane() gives {distinct} different lanes for the roles {ROLES}")


@clause("6.2", since=(1, 0))
def inputs_are_free_after_settle(bench: Bench) -> None:
    """After a settle() that was submitted after a collective, its inputs may be overwritten:
    peers that come late, or read late, have what was there."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    numel = bench.subject.largest_numel // 20
    sent = torch.zeros(numel, device=bench.device)
    shard = torch.zeros(numel, device=bench.device)
    whole = torch.zeros(bench.size * numel, device=bench.device)
    for step in range(2 * bench.size):
        mine = [values(r, [numel], torch.float32, seed=step)[0] for r in range(bench.size)]
        # The source of a broadcast needs nobody, so it is done, and overwrites, the soonest.
        source = step % bench.size
        sent.copy_(mine[bench.rank])
        if bench.rank != source:
            time.sleep(_LATE)
        bench.broadcast(gather, [sent], source)
        bench.settle_on(gather)
        received = sent.clone()
        sent.fill_(-1.0)
        bench.meet()
        where = f"broadcast whose source overwrote its buffer after settle, round {step}"
        require_bits(received, mine[source], where)
        shard.copy_(mine[bench.rank])
        output = torch.zeros(bench.size * numel, device=bench.device)
        _come_late(bench, step)
        bench.all_gather(gather, [output], [shard])
        bench.settle_on(gather)
        shard.fill_(-1.0)
        bench.meet()
        where = f"all_gather whose shards were overwritten after settle, round {step}"
        require_bits(output, torch.cat(mine), where)
        for rank, slot in enumerate(whole.tensor_split(bench.size)):
            slot.copy_(mine[(bench.rank + rank) % bench.size])
        scattered = torch.zeros(numel, device=bench.device)
        _come_late(bench, step + 1)
        bench.reduce_scatter(reduce, [scattered], [whole], Op.SUM)
        bench.settle_on(reduce)
        whole.fill_(-1.0)
        bench.meet()
        parts = [mine[(other + bench.rank) % bench.size] for other in range(bench.size)]
        where = f"reduce_scatter whose inputs were overwritten after settle, round {step}"
        require_combined(scattered, parts, Op.SUM, where, in_fp32=True)


@clause("6.2", "4.3", since=(1, 0))
def inputs_may_be_released_after_settle(bench: Bench) -> None:
    """After settle() inputs may be released and freed, and the memory may hold something else."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    numel = bench.subject.largest_numel // 60
    for step in range(4):
        mine = [values(r, [numel], torch.float32, seed=step)[0] for r in range(bench.size)]
        shard = bench.buffer(gather, Role.GATHER_INPUT, numel)
        full = bench.buffer(gather, Role.GATHER_OUTPUT, bench.size * numel)
        staged = bench.buffer(reduce, Role.REDUCE_INPUT, bench.size * numel)

        def gathering(shard: Buffer = shard, full: Buffer = full, step: int = step) -> None:
            gather.all_gather([full.tensor], [shard.tensor], label=f"unit {step}")
            gather.settle()
            shard.release()

        shard.acquire()
        full.acquire()
        shard.tensor.copy_(mine[bench.rank])
        bench.perform(gather, gathering, label=f"unit {step}")
        taken = torch.full((numel,), -1.0, device=bench.device)
        require_bits(full.tensor, torch.cat(mine), f"all_gather, input released, round {step}")
        scattered = torch.zeros(numel, device=bench.device)
        staged.acquire()
        staged.tensor.copy_(full.tensor)

        def reducing(staged: Buffer = staged, out: Tensor = scattered, step: int = step) -> None:
            reduce.reduce_scatter([out], [staged.tensor], Op.AVG, label=f"unit {step}")
            reduce.settle()
            staged.release()

        bench.perform(reduce, reducing, label=f"unit {step}")
        again = torch.full((bench.size * numel,), -1.0, device=bench.device)
        copies = [mine[bench.rank]] * bench.size
        where = f"reduce_scatter, input released, round {step}"
        require_combined(scattered, copies, Op.AVG, where, in_fp32=True)
        del shard, full, staged, taken, again


def _come_late(bench: Bench, step: int) -> None:
    """One rank in turn comes later than the others."""
    if bench.rank == step % bench.size and bench.size > 1:
        time.sleep(_LATE)
