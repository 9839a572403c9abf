"""Tests of what is only moved: all_gather and broadcast, bit by bit (clauses 5.1, 5.4, 5.8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...spi import Communicator
from .bench import Bench
from .clauses import clause
from .data import MOVED_DTYPES, bits, long_lists, require_bits, short_lists, shown


@clause("5.1", "5.8", since=(1, 0))
def gathers_move_every_bit(bench: Bench) -> None:
    """all_gather writes the ranks' shards to each output, rank-major, of every dtype and length,
    bit by bit, and leaves the shards alone."""
    gather = bench.communicator()
    for dtype in MOVED_DTYPES:
        for lengths in short_lists(dtype):
            _gather(bench, gather, lengths, dtype)


@clause("5.1", "5.7", since=(1, 0))
def long_gathers_move_every_bit(bench: Bench) -> None:
    """all_gather moves shards of any length, odd ones and ones of many pieces too, alone and in
    lists."""
    gather = bench.communicator()
    for lengths in long_lists(bench.subject.largest_numel // bench.size):
        _gather(bench, gather, lengths, torch.float32)
    _gather(bench, gather, (bench.subject.largest_numel,), torch.uint8)


@clause("5.1", since=(1, 0))
def a_shard_may_be_its_slot(bench: Bench) -> None:
    """A shard given to all_gather may be the very memory of its slot in the output."""
    gather = bench.communicator()
    for seed, numel in enumerate((1, 5, 4099, bench.subject.largest_numel // 8)):
        shards = [bits(rank, [numel, 3], torch.int32, seed=seed) for rank in range(bench.size)]
        outputs = [
            torch.zeros(bench.size * n, dtype=torch.int32, device=bench.device) for n in (numel, 3)
        ]
        slots = [output.tensor_split(bench.size)[bench.rank] for output in outputs]
        for slot, shard in zip(slots, shards[bench.rank], strict=True):
            slot.copy_(shard)
        bench.all_gather(gather, outputs, slots)
        for index, output in enumerate(outputs):
            where = f"all_gather of {numel} elements whose shard is its slot, output {index}"
            require_bits(output, torch.cat([shard[index] for shard in shards]), where)


@clause("5.4", "5.8", since=(1, 0))
def broadcasts_move_every_bit(bench: Bench) -> None:
    """broadcast gives every rank what the source has, whichever rank of the group that is, of
    every dtype and length, bit by bit."""
    gather = bench.communicator()
    for dtype in MOVED_DTYPES:
        for position, lengths in enumerate(short_lists(dtype)):
            # Every source in turn for most dtypes, all of them for one.
            every = dtype is torch.float32
            sources = range(bench.size) if every else [position % bench.size]
            for source in sources:
                _broadcast(bench, gather, lengths, dtype, source)


@clause("5.4", "5.7", since=(1, 0))
def long_broadcasts_move_every_bit(bench: Bench) -> None:
    """broadcast moves tensors of any length, alone and in lists, from every source."""
    gather = bench.communicator()
    for lengths in long_lists(bench.subject.largest_numel):
        for source in (0, bench.size - 1):
            _broadcast(bench, gather, lengths, torch.float32, source)


def _gather(bench: Bench, gather: Communicator, lengths: Sequence[int], dtype: torch.dtype) -> None:
    shards = [bits(rank, lengths, dtype) for rank in range(bench.size)]
    own = [shard.to(bench.device) for shard in shards[bench.rank]]
    outputs = [_filled(bench.size * numel, dtype, bench) for numel in lengths]
    bench.all_gather(gather, outputs, own)
    for index, output in enumerate(outputs):
        where = f"all_gather of {dtype}, lengths {shown(lengths)}, output {index}"
        require_bits(output, torch.cat([shard[index] for shard in shards]), where)
        where = f"all_gather of {dtype}, lengths {shown(lengths)}, shard {index} after it"
        require_bits(own[index], shards[bench.rank][index], where)


def _broadcast(
    bench: Bench, gather: Communicator, lengths: Sequence[int], dtype: torch.dtype, source: int
) -> None:
    buffers = bits(bench.rank, lengths, dtype, device=bench.device)
    bench.broadcast(gather, buffers, source)
    for index, (got, sent) in enumerate(zip(buffers, bits(source, lengths, dtype), strict=True)):
        where = f"broadcast of {dtype} from {source}, lengths {shown(lengths)}, buffer {index}"
        require_bits(got, sent, where)


def _filled(numel: int, dtype: torch.dtype, bench: Bench) -> Tensor:
    """Memory in which nothing looks like a result."""
    octets = torch.full((numel * dtype.itemsize,), 1, dtype=torch.uint8, device=bench.device)
    return octets.view(dtype)
