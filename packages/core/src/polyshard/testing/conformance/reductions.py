"""Tests of what is combined: reduce_scatter and all_reduce (clauses 5.2, 5.3, 5.5, 5.6, 5.9)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor
from torch.distributed import new_group

from ...errors import UnsupportedError
from ...spi import Communicator, Op
from .bench import Bench
from .clauses import clause
from .data import (
    MOVED_DTYPES,
    Violation,
    long_lists,
    require,
    require_bits,
    require_combined,
    short_lists,
    shown,
    values,
)

_HALF_PRECISION = (torch.bfloat16, torch.float16)


@clause("5.2", "5.8", since=(1, 0))
def reduce_scatters_combine(bench: Bench) -> None:
    """reduce_scatter gives this rank's slot of the combined inputs, of every claimed dtype and
    any length, as sum and as average; an output may be its slot in the input."""
    reduce = bench.communicator("reduce")
    for dtype in _claimed(bench):
        for op in _operations(dtype):
            for lengths in short_lists(dtype):
                _reduce_scatter(bench, reduce, lengths, dtype, op)


@clause("5.2", "5.7", since=(1, 0))
def long_reduce_scatters_combine(bench: Bench) -> None:
    """reduce_scatter combines inputs of any length, odd ones and ones of many pieces too, alone
    and in lists."""
    reduce = bench.communicator("reduce")
    lists = long_lists(bench.subject.largest_numel // bench.size)
    for dtype, op in _long_reductions(bench):
        for lengths in lists:
            _reduce_scatter(bench, reduce, lengths, dtype, op)


@clause("5.3", "5.8", since=(1, 0))
def all_reduces_combine(bench: Bench) -> None:
    """all_reduce combines in place, of every claimed dtype and any length, as sum and as
    average."""
    reduce = bench.communicator("reduce")
    for dtype in _claimed(bench):
        for op in _operations(dtype):
            for lengths in short_lists(dtype):
                _all_reduce(bench, reduce, lengths, dtype, op)


@clause("5.3", "5.7", since=(1, 0))
def long_all_reduces_combine(bench: Bench) -> None:
    """all_reduce combines buffers of any length, odd ones and ones of many pieces too, alone and
    in lists."""
    reduce = bench.communicator("reduce")
    for dtype, op in _long_reductions(bench):
        for lengths in long_lists(bench.subject.largest_numel):
            _all_reduce(bench, reduce, lengths, dtype, op)


@clause("5.3", since=(1, 0))
def all_reduce_gives_every_rank_the_same_bits(bench: Bench) -> None:
    """After an all_reduce every rank has the same bits, whatever the sum's rounding."""
    reduce = bench.communicator("reduce")
    for dtype in _claimed(bench):
        for op in _operations(dtype):
            for numel in (100, 70_001):
                (buffer,) = values(bench.rank, [numel], dtype, device=bench.device)
                bench.all_reduce(reduce, [buffer], op)
                prints = bench.everyones(_fingerprint(buffer))
                require(
                    len(set(prints)) == 1,
                    f"all_reduce {op.value} of {dtype}, {numel} elements: ranks "
                    f"{[r for r, p in enumerate(prints) if p != prints[0]]} have other bits than "
                    "rank 0",
                )


@clause("5.5", since=(1, 0))
def averages_divide_by_the_ranks(bench: Bench) -> None:
    """AVG divides the sum by the number of ranks, in every list and dtype, and SUM does not."""
    reduce = bench.communicator("reduce")
    count = bench.size
    for dtype in _claimed(bench):
        for op in _operations(dtype):
            for lengths in ([3], [2, 5, 0]):
                # Ranks contribute 2, 4, ... so that sums and averages are exact and differ.
                total = count * (count + 1)
                expected = total / count if op is Op.AVG else total
                whole = [
                    torch.full((n * count,), 2 * (bench.rank + 1)).to(bench.device, dtype)
                    for n in lengths
                ]
                outputs = [torch.zeros(n, dtype=dtype, device=bench.device) for n in lengths]
                buffers = [tensor.clone() for tensor in whole]
                bench.reduce_scatter(reduce, outputs, whole, op)
                bench.all_reduce(reduce, buffers, op)
                for name, results in (("reduce_scatter", outputs), ("all_reduce", buffers)):
                    for index, result in enumerate(results):
                        reference = torch.full((result.numel(),), expected).to(dtype)
                        require_bits(
                            result,
                            reference,
                            f"{name} {op.value} of {dtype}, {count} ranks, tensor {index}",
                        )


@clause("5.5", since=(1, 0))
def one_rank_reduces_to_itself(bench: Bench) -> None:
    """In a group of one rank SUM and AVG are the identity, to the bit."""
    alone = None
    for rank in range(bench.size):
        group = new_group([rank])
        if rank == bench.rank:
            alone = bench.communicator("reduce", group)
    assert alone is not None
    require(alone.size == 1 and alone.rank == 0, f"a group of one has rank {alone.rank}")
    for dtype in _claimed(bench):
        for op in _operations(dtype):
            inputs = values(bench.rank, [5, 0, 1021], dtype)
            given = [tensor.to(bench.device) for tensor in inputs]
            outputs = [torch.zeros_like(tensor) for tensor in given]
            bench.reduce_scatter(alone, outputs, given, op)
            bench.all_reduce(alone, given, op)
            for results in (outputs, given):
                for result, reference in zip(results, inputs, strict=True):
                    require_bits(result, reference, f"{op.value} of {dtype} over one rank")


@clause("5.5", since=(1, 0))
def integers_have_no_average(bench: Bench) -> None:
    """AVG of integers raises UnsupportedError that begins with the label; nothing is sent."""
    reduce = bench.communicator("reduce")
    for dtype in _claimed(bench):
        if _operations(dtype) == tuple(Op):
            continue
        whole = torch.ones(2 * bench.size, dtype=dtype, device=bench.device)
        part = torch.ones(2, dtype=dtype, device=bench.device)
        _require_unsupported(
            partial(reduce.reduce_scatter, [part], [whole], Op.AVG, label="unit reduce"),
            f"reduce_scatter avg of {dtype}",
        )
        _require_unsupported(
            partial(reduce.all_reduce, [whole], Op.AVG, label="unit reduce"),
            f"all_reduce avg of {dtype}",
        )


@clause("5.8", since=(1, 0))
def dtypes_that_are_not_claimed_are_refused(bench: Bench) -> None:
    """A reduction of a dtype that capabilities.reduce_dtypes leaves out raises UnsupportedError
    that begins with the label; a claim to reduce nothing is no claim."""
    reduce = bench.communicator("reduce")
    claimed = bench.backend.capabilities.reduce_dtypes
    require(torch.float32 in claimed, "capabilities.reduce_dtypes does not have torch.float32")
    for dtype in MOVED_DTYPES:
        if dtype in claimed:
            continue
        whole = torch.zeros(2 * bench.size, device=bench.device).to(dtype)
        part = torch.zeros(2, device=bench.device).to(dtype)
        for op in Op:
            _require_unsupported(
                partial(reduce.reduce_scatter, [part], [whole], op, label="unit reduce"),
                f"reduce_scatter {op.value} of {dtype}, which is not claimed",
            )
            _require_unsupported(
                partial(reduce.all_reduce, [whole], op, label="unit reduce"),
                f"all_reduce {op.value} of {dtype}, which is not claimed",
            )


@clause("5.6", since=(1, 0))
def half_precision_accumulates_in_fp32(bench: Bench) -> None:
    """Where capabilities.fp32_accumulation says so, sums and averages of float16 and bfloat16
    are rounded once, at the end, and do not overflow on the way. Two ranks show overflows only;
    three and more show every rounding."""
    reduce = bench.communicator("reduce")
    for dtype in _HALF_PRECISION:
        if dtype not in _claimed(bench) or not bench.backend.capabilities.fp32_accumulation:
            continue
        numel = 5000
        for op in Op:
            _reduce_scatter(bench, reduce, (numel,), dtype, op, seed=5)
            _all_reduce(bench, reduce, (numel, 40_000), dtype, op, seed=6)
        # Sums of these overflow float16; their average does not.
        largest = 0.9 * torch.finfo(dtype).max
        exact = torch.full((numel,), largest, dtype=torch.float32).to(dtype)
        if dtype is torch.float16:
            buffer = exact.to(bench.device)
            output = torch.zeros(numel, dtype=dtype, device=bench.device)
            whole = exact.repeat(bench.size).to(bench.device)
            bench.reduce_scatter(reduce, [output], [whole], Op.AVG)
            bench.all_reduce(reduce, [buffer], Op.AVG)
            require_bits(output, exact, "reduce_scatter avg of large float16")
            require_bits(buffer, exact, "all_reduce avg of large float16")


@clause("5.9", since=(1, 0))
def the_same_inputs_give_the_same_bits(bench: Bench) -> None:
    """On one communicator, the same inputs give the same bits at every call."""
    reduce = bench.communicator("reduce")
    for dtype in _claimed(bench):
        for numel in (33, 70_001):
            first: list[str] = []
            for call in range(4):
                (whole,) = values(bench.rank, [numel * bench.size], dtype, device=bench.device)
                output = torch.zeros(numel, dtype=dtype, device=bench.device)
                buffer = whole.clone()
                op = _operations(dtype)[-1]
                bench.reduce_scatter(reduce, [output], [whole], op)
                bench.all_reduce(reduce, [buffer], op)
                prints = [_fingerprint(output), _fingerprint(buffer)]
                first = first or prints
                require(
                    prints == first,
                    f"{op.value} of {dtype}, {numel} elements: call {call} gave other bits than "
                    "the first",
                )


def _reduce_scatter(
    bench: Bench,
    reduce: Communicator,
    lengths: Sequence[int],
    dtype: torch.dtype,
    op: Op,
    *,
    seed: int = 0,
) -> None:
    size, rank = bench.size, bench.rank
    whole = [numel * size for numel in lengths]
    given = [values(other, whole, dtype, seed=seed) for other in range(size)]
    slots = [[tensor.tensor_split(size)[rank] for tensor in tensors] for tensors in given]
    for aliased in (False, True):
        inputs = [tensor.to(bench.device, copy=True) for tensor in given[rank]]
        if aliased:
            outputs = [tensor.tensor_split(size)[rank] for tensor in inputs]
        else:
            outputs = [torch.ones(n, device=bench.device).to(dtype) for n in lengths]
        bench.reduce_scatter(reduce, outputs, inputs, op)
        way = ", output is its slot" if aliased else ""
        for index, output in enumerate(outputs):
            _require(
                bench,
                output,
                [slots[other][index] for other in range(size)],
                op,
                f"reduce_scatter {op.value} of {dtype}, lengths {shown(lengths)}{way}, "
                f"output {index}",
            )


def _all_reduce(
    bench: Bench,
    reduce: Communicator,
    lengths: Sequence[int],
    dtype: torch.dtype,
    op: Op,
    *,
    seed: int = 0,
) -> None:
    given = [values(other, lengths, dtype, seed=seed) for other in range(bench.size)]
    buffers = [tensor.to(bench.device, copy=True) for tensor in given[bench.rank]]
    bench.all_reduce(reduce, buffers, op)
    for index, buffer in enumerate(buffers):
        _require(
            bench,
            buffer,
            [tensors[index] for tensors in given],
            op,
            f"all_reduce {op.value} of {dtype}, lengths {shown(lengths)}, buffer {index}",
        )


def _require(
    bench: Bench, got: Tensor, contributions: Sequence[Tensor], op: Op, where: str
) -> None:
    in_fp32 = bench.backend.capabilities.fp32_accumulation
    require_combined(got, contributions, op, where, in_fp32=in_fp32)


def _require_unsupported(call: Callable[[], None], what: str) -> None:
    try:
        call()
    except UnsupportedError as error:
        if not str(error).startswith("unit reduce"):
            raise Violation(f"{what}: the message does not begin with the label: {error}") from None
    except Exception as error:
        raise Violation(f"{what} raised {type(error).__name__}: {error}") from None
    else:
        raise Violation(f"{what} raised nothing, expected UnsupportedError")


def _claimed(bench: Bench) -> list[torch.dtype]:
    return sorted(bench.backend.capabilities.reduce_dtypes, key=str)


def _operations(dtype: torch.dtype) -> tuple[Op, ...]:
    return tuple(Op) if dtype.is_floating_point or dtype.is_complex else (Op.SUM,)


def _long_reductions(bench: Bench) -> list[tuple[torch.dtype, Op]]:
    wanted = [(torch.float32, Op.AVG), (torch.bfloat16, Op.SUM), (torch.int8, Op.SUM)]
    return [(dtype, op) for dtype, op in wanted if dtype in _claimed(bench)]


def _fingerprint(tensor: Tensor) -> str:
    octets = tensor.detach().cpu().contiguous().view(torch.uint8)
    return blake2b(ctypes.string_at(octets.data_ptr(), octets.numel())).hexdigest()
