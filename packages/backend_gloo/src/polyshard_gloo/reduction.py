"""Sums and averages over ranks. Knows no connections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyshard.spi import Op

_HALF_PRECISION = frozenset({torch.float16, torch.bfloat16})

#: What can be summed here; half precision is summed in fp32.
REDUCE_DTYPES = _HALF_PRECISION | {
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


def combine(
    out: Tensor,
    contributions: Sequence[Tensor],
    op: Op,
    *,
    own: int,
    take: Callable[[int, torch.dtype], Tensor],
) -> None:
    """``out`` becomes the sum or average of ``contributions``, added in the order of ranks.

    Half precision is added and divided in fp32 and rounded once. All else is added in its own
    dtype, where integers wrap around, and then divided.

    Args:
        out: 1-D; may be the same memory as ``contributions[own]``.
        contributions: one for each rank, two at least, all of the dtype and length of ``out``.
            Those of other ranks are overwritten.
        own: the rank whose contribution is only read.
        take: gives memory of so many elements of a dtype, for sums in fp32.
    """
    count = len(contributions)
    if out.dtype in _HALF_PRECISION:
        total = take(out.numel(), torch.float32).copy_(contributions[0])
        for contribution in contributions[1:]:
            total.add_(contribution)
        out.copy_(total.div_(count) if op is Op.AVG else total)
        return
    # Partial sums go to another rank's memory: `out` may be this rank's contribution, and is
    # written when that was read.
    partial, last = contributions[1 if own == 0 else 0], count - 1
    total = contributions[0]
    for rank in range(1, count):
        target = out if rank == last else partial
        total = torch.add(total, contributions[rank], out=target)
    if op is Op.AVG:
        out.div_(count)
