"""Raw buffer operations. The torch versions here are the default and define the results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# What torch multiplies by a number in one pass, in fp32 or wider, with one rounding.
_SCALABLE = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


class BufferOps:
    """Many-tensor copies and sums on flat buffers; a backend may override them with kernels.

    Both run on the compute lane or inside submitted work, under ``no_grad``, and may be given
    tensors of no elements. They compute in fp32, or wider where a dtype is wider (float64 for
    integers), and round once to the dtype of ``out``; what becomes an integer is cut off.
    """

    def pack(self, out: Tensor, pieces: Sequence[tuple[int, Tensor]], scale: float) -> None:
        """Write ``scale * piece`` at each offset of ``out``; the rest of ``out`` stays.

        Args:
            out: 1-D contiguous buffer of any dtype.
            pieces: (first element in ``out``, tensor of any shape, stride and dtype) pairs whose
                runs do not overlap.
            scale: exactly 1.0 copies.
        """
        for offset, piece in pieces:
            target = out[offset : offset + piece.numel()].view(piece.shape)
            if scale == 1.0:
                target.copy_(piece)
                continue
            wide = _wide_dtype(out, piece)
            if piece.dtype == out.dtype and out.dtype in _SCALABLE:
                torch.mul(piece, scale, out=target)
            elif out.dtype == wide:
                target.copy_(piece).mul_(scale)
            else:
                target.copy_(piece.to(wide) * scale)

    def accumulate(self, out: Tensor, contribution: Tensor, scale: float) -> None:
        """Add ``scale * contribution`` to ``out``: 1-D, same length, any two dtypes.

        The contribution is scaled, never what was accumulated before. Integers in ``out`` take
        the scaled contribution without its fraction.
        """
        wide = _wide_dtype(out, contribution)
        if not (out.dtype.is_floating_point or out.dtype.is_complex):
            if scale != 1.0 or contribution.dtype != out.dtype:
                contribution = (contribution.to(wide) * scale).to(out.dtype)
            out.add_(contribution)
        elif out.dtype == wide:
            out.add_(contribution.to(wide), alpha=scale)
        elif scale == 1.0 and out.dtype in _SCALABLE and contribution.dtype in _SCALABLE:
            out.add_(contribution)
        else:
            out.copy_(out.to(wide).add_(contribution.to(wide), alpha=scale))


def _wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The narrowest dtype, from fp32 on, that holds sums and products of ``tensors`` well."""
    wide = torch.float32
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype.is_complex or dtype == torch.float64:
            wide = torch.promote_types(wide, dtype)
        elif not dtype.is_floating_point:
            wide = torch.promote_types(wide, torch.float64)
    return wide
