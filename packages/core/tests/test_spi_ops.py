"""BufferOps in torch: what pack and accumulate define, against sums and products in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polyshard.spi import BufferOps

OPS = BufferOps()
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Not a power of two: scaling by it rounds.
SCALES = [1.0, 0.5, 1 / 3]


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(numel, generator=generator, dtype=wide).to(dtype)
    return torch.randint(-100, 100, (numel,), generator=generator).to(dtype)


def wide(*tensors: Tensor) -> torch.dtype:
    """fp32, or float64 where one of the tensors is."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class TestPack:
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("given", FLOATS)
    @pytest.mark.parametrize("kept", FLOATS)
    def test_scales_in_fp32_and_rounds_once(
        self, kept: torch.dtype, given: torch.dtype, scale: float
    ) -> None:
        """Every pair of float dtypes gives the bits of one product in fp32 (float64 where one of
        them is), rounded once."""
        piece = values(4099, given)
        out = torch.full((4101,), 9.0).to(kept)
        OPS.pack(out, [(1, piece)], scale)
        expected = (piece.to(wide(out, piece)) * scale).to(kept)
        assert torch.equal(out[1:-1], expected)
        assert out[[0, -1]].tolist() == [9.0, 9.0]

    def test_halves_of_different_kinds(self) -> None:
        """bfloat16 beyond float16's range is scaled before it is narrowed, not after."""
        out = torch.empty(1, dtype=torch.float16)
        OPS.pack(out, [(0, torch.tensor([2.0**17], dtype=torch.bfloat16))], 0.25)
        assert out.item() == 2.0**15

    @pytest.mark.parametrize("scale", [1.0, 0.5])
    def test_many_pieces_of_any_shape(self, scale: float) -> None:
        """Pieces that are transposed, strided, expanded, 0-D and empty land in row order."""
        base = values(24, torch.float32).view(4, 6)
        pieces = [
            base.t(),
            base[:, ::2],
            base[0, 0].expand(3),
            base[1, 1],
            base[:0],
        ]
        out = torch.zeros(60)
        placed, position = [], 1
        for piece in pieces:
            placed.append((position, piece))
            position += piece.numel() + 1
        OPS.pack(out, placed, scale)
        for start, piece in placed:
            run = out[start : start + piece.numel()]
            assert torch.equal(run, (piece * scale).reshape(-1))
            assert out[start + piece.numel()] == 0.0

    def test_nothing(self) -> None:
        """No pieces, and pieces for an empty buffer, are legal."""
        out = torch.empty(0)
        OPS.pack(out, [], 0.5)
        OPS.pack(out, [(0, torch.empty(0, 3))], 0.5)
        assert out.numel() == 0

    @pytest.mark.parametrize("kept", [torch.int64, torch.int32, torch.uint8])
    def test_integers(self, kept: torch.dtype) -> None:
        """Integers copy exactly, and scaled ones lose their fraction."""
        piece = torch.tensor([7, 8, 1, 0], dtype=torch.int64)
        out = torch.zeros(4, dtype=kept)
        OPS.pack(out, [(0, piece)], 1.0)
        assert out.tolist() == [7, 8, 1, 0]
        OPS.pack(out, [(0, piece)], 0.5)
        assert out.tolist() == [3, 4, 0, 0]

    def test_large_integers_are_exact(self) -> None:
        """A copy of int64 does not pass through floating point."""
        piece = torch.tensor([2**62 + 1])
        out = torch.zeros(1, dtype=torch.int64)
        OPS.pack(out, [(0, piece)], 1.0)
        assert out.item() == 2**62 + 1

    @pytest.mark.parametrize("kept", [torch.complex64, torch.complex128])
    @pytest.mark.parametrize("given", [torch.complex64, torch.float32, torch.bfloat16])
    def test_complex(self, kept: torch.dtype, given: torch.dtype) -> None:
        """Complex buffers take complex and real pieces, scaled in their own precision."""
        piece = values(33, given)
        out = torch.zeros(33, dtype=kept)
        OPS.pack(out, [(0, piece)], 1 / 3)
        assert torch.equal(out, piece.to(kept) * (1 / 3))

    def test_float8(self) -> None:
        """Float8 pieces and buffers are scaled in fp32."""
        piece = torch.tensor([1.0, 2.0, 3.0]).to(torch.float8_e4m3fn)
        out = torch.empty(3, dtype=torch.bfloat16)
        OPS.pack(out, [(0, piece)], 0.5)
        assert out.tolist() == [0.5, 1.0, 1.5]
        narrow = torch.empty(3, dtype=torch.float8_e4m3fn)
        OPS.pack(narrow, [(0, piece)], 0.5)
        assert narrow.float().tolist() == [0.5, 1.0, 1.5]


class TestAccumulate:
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("given", FLOATS)
    @pytest.mark.parametrize("kept", FLOATS)
    def test_adds_in_fp32_and_rounds_once(
        self, kept: torch.dtype, given: torch.dtype, scale: float
    ) -> None:
        """Every pair of float dtypes is within the rounding of one sum in fp32."""
        out, contribution = values(4099, kept, 1), values(4099, given, 2)
        precise = out.double() + contribution.double() * scale
        exponent = torch.finfo(kept).eps * precise.abs().clamp(min=torch.finfo(kept).tiny)
        in_fp32 = 2.0**-23 * (out.double().abs() + (contribution.double() * scale).abs())
        slack = in_fp32 if wide(out, contribution) == torch.float32 else in_fp32 * 2.0**-29
        OPS.accumulate(out, contribution, scale)
        assert ((out.double() - precise).abs() <= exponent / 2 + slack).all()

    @pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
    def test_the_scale_is_not_rounded(self, given: torch.dtype) -> None:
        """Half precision takes neither a rounded scale nor a rounded product."""
        # 3/256 of 1 is half a step above 1 in bfloat16; a third of 9/256 must round up only if
        # nothing before the sum was rounded down.
        out = torch.ones(1, dtype=torch.bfloat16)
        contribution = torch.tensor([9 / 256 * 1.0078125]).to(given)
        OPS.accumulate(out, contribution, 1 / 3)
        expected = (1.0 + contribution.float() * (1 / 3)).to(torch.bfloat16)
        assert torch.equal(out, expected)

    def test_only_the_contribution_is_scaled(self) -> None:
        """What was accumulated before stays as it is."""
        out = torch.tensor([10.0, 20.0])
        OPS.accumulate(out, torch.tensor([4.0, 8.0]), 0.25)
        assert out.tolist() == [11.0, 22.0]

    def test_integers(self) -> None:
        """Integers add exactly; a scaled contribution loses its fraction before it is added."""
        out = torch.tensor([2**60 + 1, -3])
        OPS.accumulate(out, torch.tensor([1, 5], dtype=torch.int32), 1.0)
        assert out.tolist() == [2**60 + 2, 2]
        OPS.accumulate(out, torch.tensor([7, 7], dtype=torch.int32), 0.5)
        assert out.tolist() == [2**60 + 5, 5]

    def test_integers_into_floats(self) -> None:
        """Counts can be added to a float buffer, at any scale."""
        out = torch.tensor([0.5, 1.0])
        OPS.accumulate(out, torch.tensor([1, 3]), 0.5)
        assert out.tolist() == [1.0, 2.5]

    def test_complex(self) -> None:
        """Complex sums keep both parts."""
        out = torch.tensor([1 + 2j])
        OPS.accumulate(out, torch.tensor([2 - 4j]), 0.5)
        assert out.item() == 2 + 0j

    def test_float8(self) -> None:
        """A float8 accumulator is widened for the sum."""
        out = torch.tensor([1.0]).to(torch.float8_e4m3fn)
        OPS.accumulate(out, torch.tensor([1.0]), 0.5)
        assert out.float().item() == 1.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_empty(self, dtype: torch.dtype) -> None:
        """No elements, no error."""
        out = torch.empty(0, dtype=dtype)
        OPS.accumulate(out, torch.empty(0), 0.5)
        assert out.numel() == 0
