"""Which of NCCL's operations are taken, and that packing in few launches gives the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from polyshard.spi import BufferOps
from polyshard_nccl.ops import REDUCE_DTYPES, ForeachOps, as_bits, as_numbers, averages_natively

WITHOUT_NVLS, WITH_NVLS = (8, 0), (9, 0)


class TestAverages:
    @pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 9)])
    @pytest.mark.parametrize("size", [2, 4, 8, 16, 64, 1024])
    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    )
    def test_native_where_exact(
        self, dtype: torch.dtype, size: int, capability: tuple[int, int]
    ) -> None:
        """Powers of two, in dtypes with a wide exponent, on devices that cannot have NVLS."""
        assert averages_natively(dtype, size, capability)

    @pytest.mark.parametrize("size", [3, 6, 7, 12, 24, 48])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    def test_never_for_other_sizes(self, dtype: torch.dtype, size: int) -> None:
        """1/n, rounded to the dtype, would bias every average."""
        assert not averages_natively(dtype, size, WITHOUT_NVLS)

    @pytest.mark.parametrize("size", [2, 8])
    def test_never_in_float16(self, size: int) -> None:
        """Its small numbers would lose bits before they are added."""
        assert not averages_natively(torch.float16, size, WITHOUT_NVLS)

    @pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_never_with_nvls(self, dtype: torch.dtype, capability: tuple[int, int]) -> None:
        """NCCL adds in the switch only what is a plain sum."""
        assert not averages_natively(dtype, 8, capability)

    @pytest.mark.parametrize("size", [2, 4, 8, 64])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_premultiplying_is_exact_where_it_is_taken(self, dtype: torch.dtype, size: int) -> None:
        """Premultiplied and added in the dtype, hop by hop, is the sum divided, bit by bit."""
        generator = torch.Generator().manual_seed(size)
        values = (torch.randn(size, 4096, generator=generator) * 1e-3).to(dtype)
        total, premultiplied = values[0].clone(), values[0] * (1 / size)
        for value in values[1:]:
            total += value
            premultiplied += value * (1 / size)
        assert torch.equal(premultiplied, total / size)

    def test_premultiplying_in_float16_is_not(self) -> None:
        """The reason why float16 is left out: values that scaled gradients have lose bits."""
        values = torch.full((8, 1), 2.0**-14 + 2.0**-24, dtype=torch.float16)
        assert (values * 0.125).sum() != values.sum() / 8


class TestViews:
    @pytest.mark.parametrize("dtype", sorted(REDUCE_DTYPES, key=str))
    def test_numbers_share_memory(self, dtype: torch.dtype) -> None:
        """What is reduced is the memory itself, in a dtype that NCCL adds up, and writing it
        leaves autograd's version alone."""
        tensor = torch.zeros(6, dtype=dtype)[2:]
        seen = as_numbers(tensor)
        seen.fill_(1)
        assert seen.dim() == 1
        assert seen.is_contiguous()
        assert not seen.dtype.is_complex
        assert seen.numel() == tensor.numel() * (2 if dtype.is_complex else 1)
        assert tensor._version == 0
        assert torch.view_as_real(tensor).eq(1).all() if dtype.is_complex else tensor.eq(1).all()

    @pytest.mark.parametrize(
        "dtype",
        [
            torch.bool,
            torch.int16,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.bfloat16,
            torch.int64,
        ],
    )
    def test_bits_of_any_dtype(self, dtype: torch.dtype) -> None:
        """What is gathered is the memory itself, as bytes where NCCL does not know the dtype."""
        tensor = torch.zeros(6, dtype=dtype)[1:]
        seen = as_bits(tensor)
        assert seen.data_ptr() == tensor.data_ptr()
        assert seen.numel() * seen.element_size() == tensor.numel() * tensor.element_size()
        assert seen.dtype in {torch.uint8, dtype} & (REDUCE_DTYPES | {torch.uint8})
        assert not seen.dtype.is_complex


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.complex64, torch.int32]


def pieces_of(dtypes: list[torch.dtype]) -> list[tuple[int, Tensor]]:
    generator, position, pieces = torch.Generator().manual_seed(0), 1, []
    for number, dtype in enumerate(dtypes):
        base = (100 * torch.randn(7, 5 + number, generator=generator)).to(dtype)
        for piece in (base, base.t(), base[:, 1:3], base[0, 0], base[:0]):
            pieces.append((position, piece))
            position += piece.numel() + 1
    return pieces


class TestPack:
    @pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 3])
    @pytest.mark.parametrize(
        ("kept", "given"),
        [
            pair
            for pair in itertools.product(DTYPES, DTYPES)
            if not (pair[1].is_complex and not pair[0].is_complex)
        ],
    )
    def test_gives_the_bits_of_the_definition(
        self, kept: torch.dtype, given: torch.dtype, scale: float
    ) -> None:
        """Every pair of dtypes, with and without a scale, of any shapes and strides."""
        pieces = pieces_of([given, given])
        numel = pieces[-1][0] + 10
        ours, theirs = torch.full((numel,), 9).to(kept), torch.full((numel,), 9).to(kept)
        ForeachOps().pack(ours, pieces, scale)
        BufferOps().pack(theirs, pieces, scale)
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("scale", [1.0, 1 / 3])
    def test_pieces_of_several_dtypes(self, scale: float) -> None:
        """Lists that are not of one dtype, of one piece and of none are packed as well."""
        for pieces in (pieces_of([torch.float32, torch.bfloat16]), pieces_of([torch.half])[:1], []):
            ours, theirs = torch.zeros(300), torch.zeros(300)
            ForeachOps().pack(ours, pieces, scale)
            BufferOps().pack(theirs, pieces, scale)
            assert torch.equal(ours, theirs)

    def test_many_pieces_are_few_operations(self) -> None:
        """As many as a hundred gradients are one copy, or a copy and a product."""
        pieces = [(10 * i, torch.ones(10)) for i in range(100)]
        for scale, most in ((1.0, 1), (0.5, 2)):
            with torch.profiler.profile() as profile:
                ForeachOps().pack(torch.empty(1000), pieces, scale)
            counts = {event.key: event.count for event in profile.key_averages()}
            foreach = sum(count for key, count in counts.items() if "_foreach_" in key)
            assert foreach == most
