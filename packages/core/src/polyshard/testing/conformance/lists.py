"""Tests of how tensors are given: lists, views, axes, memory used again (5.7, 5.10, 4.1)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...spi import Communicator, Op
from .bench import Bench, mesh_shape
from .clauses import clause
from .data import bits, combined, require, require_bits, require_combined, values


@clause("5.7", since=(1, 0))
def empty_calls_do_nothing(bench: Bench) -> None:
    """A call with an empty list, or with tensors of no elements only, does nothing and returns."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for count in (0, 1, 3):
        nothing = [torch.zeros(0, device=bench.device) for _ in range(count)]
        bench.all_gather(gather, nothing, [tensor.clone() for tensor in nothing])
        bench.broadcast(gather, nothing, bench.size - 1)
        for op in Op:
            bench.reduce_scatter(reduce, nothing, [tensor.clone() for tensor in nothing], op)
            bench.all_reduce(reduce, nothing, op)
    # And whatever comes next is in step.
    total = torch.tensor([float(bench.rank)], device=bench.device)
    bench.all_reduce(reduce, [total], Op.SUM)
    require(total.item() == sum(range(bench.size)), f"a sum after empty calls is {total.item()}")


@clause("5.7", since=(1, 0))
def a_list_is_its_tensors(bench: Bench) -> None:
    """A list gives what its tensors give one by one, in order, equal ones and long ones too; a
    list of one is the plain collective."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for lengths in ([4, 4], [1, 1, 1], [5], [60_001, 60_001], [30_000, 1, 50_000]):
        shards = [bits(rank, lengths, torch.float32) for rank in range(bench.size)]
        outputs = [torch.ones(bench.size * n, device=bench.device) for n in lengths]
        bench.all_gather(gather, outputs, [t.to(bench.device) for t in shards[bench.rank]])
        copies = [tensor.to(bench.device, copy=True) for tensor in shards[bench.rank]]
        bench.broadcast(gather, copies, bench.size - 1)
        whole = [n * bench.size for n in lengths]
        given = [values(rank, whole, torch.float32) for rank in range(bench.size)]
        scattered = [torch.ones(n, device=bench.device) for n in lengths]
        reduced = [tensor.to(bench.device, copy=True) for tensor in given[bench.rank]]
        bench.reduce_scatter(reduce, scattered, [t.clone() for t in reduced], Op.AVG)
        bench.all_reduce(reduce, reduced, Op.AVG)
        for index, numel in enumerate(lengths):
            where = f"tensor {index} of a list of {lengths}"
            expected = torch.cat([shard[index] for shard in shards])
            require_bits(outputs[index], expected, f"all_gather: {where}")
            require_bits(copies[index], shards[-1][index], f"broadcast: {where}")
            parts = [tensors[index] for tensors in given]
            own = slice(bench.rank * numel, (bench.rank + 1) * numel)
            slots = [part[own] for part in parts]
            require_combined(
                scattered[index], slots, Op.AVG, f"reduce_scatter: {where}", in_fp32=True
            )
            require_combined(reduced[index], parts, Op.AVG, f"all_reduce: {where}", in_fp32=True)


@clause("5.10", since=(1, 0))
def views_at_any_offset(bench: Bench) -> None:
    """Tensors may be views at any offset of a larger storage, aligned to their elements only;
    what lies around them, and inputs of a gather, is not written."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        for numel in (1, 5, 1021, 60_001):
            _views(bench, gather, reduce, numel, dtype)


def _views(
    bench: Bench, gather: Communicator, reduce: Communicator, numel: int, dtype: torch.dtype
) -> None:
    size = bench.size
    # Odd gaps between them: views are not aligned as allocations are.
    lengths = [numel, numel, size * numel, size * numel]
    store = torch.full((sum(lengths) + 3 * (len(lengths) + 1),), 3, device=bench.device).to(dtype)
    views, guards, position = [], [], 0
    for length in lengths:
        guards.append(store[position : position + 3])
        views.append(store[position + 3 : position + 3 + length])
        position += 3 + length
    guards.append(store[position:])

    def require_guards(after: str) -> None:
        for index, guard in enumerate(guards):
            require(
                guard.tolist() == [3, 3, 3],
                f"{after} of {dtype}, {numel} elements, wrote around view {index}: "
                f"{guard.tolist()}, expected [3, 3, 3]",
            )

    shards = [bits(rank, [numel, numel], dtype) for rank in range(size)]
    for view, shard in zip(views[:2], shards[bench.rank], strict=True):
        view.copy_(shard)
    bench.all_gather(gather, views[2:], views[:2])
    require_guards("all_gather")
    for index in (0, 1):
        where = f"all_gather of views of {dtype}, {numel} elements, "
        expected = torch.cat([shard[index] for shard in shards])
        require_bits(views[2 + index], expected, f"{where}output {index}")
        require_bits(views[index], shards[bench.rank][index], f"{where}shard {index} after it")
    bench.broadcast(gather, views[2:], 0)
    require_guards("broadcast")
    if dtype not in bench.backend.capabilities.reduce_dtypes:
        return
    given = [values(rank, [size * numel] * 2, dtype) for rank in range(size)]
    for view, mine in zip(views[2:], given[bench.rank], strict=True):
        view.copy_(mine)
    bench.reduce_scatter(reduce, views[:2], views[2:], Op.SUM)
    require_guards("reduce_scatter")
    in_fp32 = bench.backend.capabilities.fp32_accumulation
    for index in (0, 1):
        slots = [parts[index].tensor_split(size)[bench.rank] for parts in given]
        where = f"reduce_scatter of views of {dtype}, {numel} elements, output {index}"
        require_combined(views[index], slots, Op.SUM, where, in_fp32=in_fp32)
    bench.all_reduce(reduce, views, Op.SUM)
    require_guards("all_reduce")


@clause("4.1", "5.1", since=(1, 0))
def axes_of_a_mesh_are_apart(bench: Bench) -> None:
    """On a mesh of two axes, communicators see the ranks of their own axis only, in their order,
    whether the collectives of the axes take turns or overlap."""
    mesh = bench.mesh()
    outer_size, inner_size = mesh_shape(bench.size)
    row, column = divmod(bench.rank, inner_size)
    outer = bench.communicator("outer", mesh.get_group("outer"))
    inner = bench.communicator("gather", mesh.get_group("inner"))
    inner_reduce = bench.communicator("reduce", mesh.get_group("inner"))
    require(
        (outer.rank, outer.size, inner.rank, inner.size) == (row, outer_size, column, inner_size),
        f"on a {outer_size}x{inner_size} mesh the communicators say ({outer.rank}, {outer.size}, "
        f"{inner.rank}, {inner.size}), expected ({row}, {outer_size}, {column}, {inner_size})",
    )
    in_row = [row * inner_size + other for other in range(inner_size)]
    in_column = [other * inner_size + column for other in range(outer_size)]

    def gathered(communicator: Communicator, numel: int, seed: int) -> tuple[Tensor, Tensor]:
        (shard,) = bits(bench.rank, [numel], torch.float32, seed=seed, device=bench.device)
        return torch.ones(communicator.size * numel, device=bench.device), shard

    for seed, numel in enumerate((1, 777, 70_001)):
        # In turns: what the inner axis gathered, the outer one gathers.
        row_output, shard = gathered(inner, numel, seed)
        bench.all_gather(inner, [row_output], [shard])
        whole = torch.ones(bench.size * numel, device=bench.device)
        bench.all_gather(outer, [whole], [row_output])
        every = [bits(rank, [numel], torch.float32, seed=seed)[0] for rank in range(bench.size)]
        require_bits(whole, torch.cat(every), f"gathered over both axes, {numel} elements")
        # At the same time.
        row_output, shard = gathered(inner, numel, seed)
        column_output, column_shard = gathered(outer, numel, seed)
        (total,) = values(bench.rank, [numel], torch.float32, seed=seed, device=bench.device)
        (column_total,) = values(bench.rank, [numel], torch.float32, seed=seed, device=bench.device)
        tickets = [
            bench.submit(
                inner,
                partial(inner.all_gather, [row_output], [shard], label="inner gather"),
                label="inner gather",
            ),
            bench.submit(
                outer,
                partial(outer.all_gather, [column_output], [column_shard], label="outer gather"),
                label="outer gather",
            ),
            bench.submit(
                inner_reduce,
                partial(inner_reduce.all_reduce, [total], Op.SUM, label="inner reduce"),
                label="inner reduce",
            ),
            bench.submit(
                outer,
                partial(outer.all_reduce, [column_total], Op.SUM, label="outer reduce"),
                label="outer reduce",
            ),
        ]
        for ticket in tickets:
            bench.compute.wait(ticket)
        mine = [values(rank, [numel], torch.float32, seed=seed)[0] for rank in range(bench.size)]
        for axis, ranks, output, reduced in (
            ("inner", in_row, row_output, total),
            ("outer", in_column, column_output, column_total),
        ):
            where = f"{axis} axis of {outer_size}x{inner_size}, both at a time, {numel} elements"
            require_bits(output, torch.cat([every[r] for r in ranks]), f"all_gather, {where}")
            parts = [mine[r] for r in ranks]
            require_combined(reduced, parts, Op.SUM, f"all_reduce, {where}", in_fp32=True)


@clause("5.4", "4.1", since=(1, 0))
def sources_are_ranks_of_the_group(bench: Bench) -> None:
    """The source of a broadcast is counted in the group, and not among all ranks."""
    mesh = bench.mesh()
    _, inner_size = mesh_shape(bench.size)
    for axis in ("outer", "inner"):
        group = bench.communicator("gather", mesh.get_group(axis))
        for source in range(group.size):
            first = bench.rank % inner_size if axis == "outer" else bench.rank - group.rank
            step = inner_size if axis == "outer" else 1
            (buffer,) = bits(bench.rank, [9], torch.int32, device=bench.device)
            bench.broadcast(group, [buffer], source)
            (sent,) = bits(first + source * step, [9], torch.int32)
            require_bits(buffer, sent, f"broadcast from rank {source} of the {axis} axis")


@clause("5.2", "5.3", "5.1", since=(1, 0))
def buffers_are_used_again(bench: Bench) -> None:
    """The same memory serves one collective after the other, of changing kinds and lengths."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    longest = bench.subject.largest_numel // 40
    shard = torch.zeros(longest, device=bench.device)
    full = torch.zeros(bench.size * longest, device=bench.device)
    for seed, numel in enumerate((longest, 3, longest // 2 + 1, 0, 1, longest)):
        mine = [values(rank, [numel], torch.float32, seed=seed)[0] for rank in range(bench.size)]
        shard[:numel].copy_(mine[bench.rank])
        output = full[: bench.size * numel]
        bench.all_gather(gather, [output], [shard[:numel]])
        require_bits(output, torch.cat(mine), f"all_gather into used memory, round {seed}")
        # Everyone has the same now: the sum is a multiple of it.
        bench.reduce_scatter(reduce, [shard[:numel]], [output], Op.SUM)
        bench.settle_on(reduce)
        copies = [mine[bench.rank]] * bench.size
        where = f"reduce_scatter into used memory, round {seed}"
        require_combined(shard[:numel], copies, Op.SUM, where, in_fp32=True)
        bench.all_reduce(reduce, [shard[:numel]], Op.AVG)
        bench.settle_on(reduce)
        sums = [combined([one] * bench.size, Op.SUM).float() for one in mine]
        where = f"all_reduce in used memory, round {seed}"
        require_combined(shard[:numel], sums, Op.AVG, where, in_fp32=True)
