"""What NCCL does with which dtype, and operations on flat buffers in few launches.

Pure but for BufferOps. Knows no process groups and no streams.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard.spi import BufferOps

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})

#: What NCCL adds up; complex numbers as pairs of real ones.
REDUCE_DTYPES = _FLOATS | _INTEGERS | _COMPLEX

# Premultiplying these by a power of two only moves the exponent, down to 2**-126 and less.
# float16 is not among them: its smallest normal number is 2**-14, and scaled gradients lie there.
_WIDE_EXPONENT = frozenset({torch.bfloat16, torch.float32, torch.float64})

# In-switch reduction (NVLS) came with this compute capability. It adds half precision in fp32.
_FIRST_WITH_NVLS = (9, 0)


def averages_natively(dtype: torch.dtype, size: int, capability: tuple[int, int]) -> bool:
    """Whether ncclAvg gives what a sum and a division give, and costs nothing better.

    ncclAvg on floats multiplies each input by 1/n, rounded to the dtype, and then adds. That is
    exact for powers of two in dtypes with a wide exponent. NVLS has no such operation, so where
    the device may have NVLS a sum and a division afterwards are taken; docs/notes/nccl.md.

    Args:
        dtype: of the contributions; complex ones count as their real dtype.
        size: number of ranks.
        capability: of the device.
    """
    if dtype in _COMPLEX:
        dtype = dtype.to_real()
    is_power_of_two = size & (size - 1) == 0
    return dtype in _WIDE_EXPONENT and is_power_of_two and capability < _FIRST_WITH_NVLS


def as_numbers(tensor: Tensor) -> Tensor:
    """The same memory as numbers that NCCL adds up, with a version counter of its own: a refill
    must not look like a change of what autograd saved."""
    detached = tensor.data
    return torch.view_as_real(detached).view(-1) if tensor.dtype in _COMPLEX else detached


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that NCCL moves, likewise."""
    detached = tensor.data
    if tensor.dtype in _FLOATS or tensor.dtype in _INTEGERS:
        return detached
    return detached.view(torch.uint8)


class ForeachOps(BufferOps):
    """Packs many gradients in one or two launches instead of one or two for each."""

    def pack(self, out: Tensor, pieces: Sequence[tuple[int, Tensor]], scale: float) -> None:
        dtypes = {piece.dtype for _, piece in pieces}
        # Copied first and then scaled in place: right where the copy does not round, and where
        # torch's product of a list does not round the scale, as it may in half precision.
        exact = (
            scale == 1.0
            or (out.dtype == torch.float64 and dtypes == {torch.float64})
            or (out.dtype == torch.float32 and dtypes <= _FLOATS - {torch.float64})
        )
        if len(pieces) < 2 or len(dtypes) != 1 or not exact:
            super().pack(out, pieces, scale)
            return
        targets = [
            out[offset : offset + piece.numel()].view(piece.shape) for offset, piece in pieces
        ]
        torch._foreach_copy_(targets, [piece for _, piece in pieces])
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)
