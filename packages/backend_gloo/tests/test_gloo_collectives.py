"""Reductions of the gloo backend have the bits of the sum in rank order, on 1 to 4 ranks.

What any backend promises is tested in test_gloo_conformance.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyshard.spi import Communicator, Op
from polyshard.testing import run_ranks
from polyshard.testing.conformance.data import added_in_order, values
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")
RANKS = [1, 2, 3, 4]
REDUCE_DTYPES = sorted(GlooBackend.capabilities.reduce_dtypes, key=str)
# Lengths per rank. Headers carry about 8 kB with them; messages are of 2 MB and more.
LISTS = [
    [],
    [0],
    [1],
    [7],
    [0, 3, 0, 5],
    [1021],
    [4099],
    [1, 4099, 0, 2],
    [300_001],
    [17] * 700,
]
LONG_LISTS = [[2_500_003], [1_300_001, 3, 0, 700_000, 11]]


def assert_bits(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in expected]
    for tensor, reference in zip(got, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8), reference.view(torch.uint8))


def communicator(purpose: str = "gather") -> Communicator:
    return GlooBackend().communicator(dist.group.WORLD, CPU, purpose=purpose)


def check_reductions(rank: int, dtypes: list[torch.dtype], lists: list[list[int]]) -> None:
    """reduce_scatter and all_reduce of every list, dtype and op, out of place and in place."""
    reduced = communicator("reduce")
    ranks = range(reduced.size)
    for dtype in dtypes:
        for op in Op if dtype.is_floating_point or dtype.is_complex else (Op.SUM,):
            for lengths in lists:
                whole = [n * reduced.size for n in lengths]
                inputs = [values(other, whole, dtype) for other in ranks]
                sums = [
                    added_in_order([inputs[other][i] for other in ranks], op)
                    for i in range(len(whole))
                ]
                slots = [tensor.tensor_split(reduced.size)[rank] for tensor in sums]
                outputs = [torch.ones(n).to(dtype) for n in lengths]
                given = values(rank, whole, dtype)
                reduced.reduce_scatter(outputs, given, op, label="scatter")
                assert_bits(outputs, slots)
                assert_bits(given, inputs[rank])
                aliased = [tensor.tensor_split(reduced.size)[rank] for tensor in given]
                reduced.reduce_scatter(aliased, given, op, label="scatter in place")
                assert_bits(aliased, slots)
                # Not a multiple of the ranks, where it can be otherwise.
                uneven = [max(0, n - 1) for n in whole]
                buffers = [
                    tensor[:n].clone() for tensor, n in zip(inputs[rank], uneven, strict=True)
                ]
                reduced.all_reduce(buffers, op, label="all reduce")
                assert_bits(buffers, [tensor[:n] for tensor, n in zip(sums, uneven, strict=True)])
    reduced.close()


@pytest.mark.parametrize("world_size", RANKS)
class TestAgainstOneProcess:
    def test_reductions(self, world_size: int) -> None:
        """Sums and averages of any supported dtype, list and length have the bits of the sum in
        rank order, with half precision in fp32."""
        run_ranks(world_size, check_reductions, REDUCE_DTYPES, LISTS[:8], timeout=240)

    def test_long_reductions(self, world_size: int) -> None:
        """Sums and averages of many messages have the bits of the sum in rank order."""
        dtypes = [torch.float32, torch.bfloat16, torch.int8]
        run_ranks(world_size, check_reductions, dtypes, LISTS[8:] + LONG_LISTS, timeout=240)
