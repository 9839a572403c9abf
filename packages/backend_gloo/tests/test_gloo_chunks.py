"""How the gloo backend cuts lists into messages and sums contributions: pure parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyshard.spi import Op
from polyshard_gloo.chunks import Room, Staging, cut
from polyshard_gloo.reduction import REDUCE_DTYPES, combine

LENGTHS = st.lists(st.integers(0, 40), max_size=12).map(tuple)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 30))
def test_every_element_is_in_one_chunk(lengths: tuple[int, ...], limit: int) -> None:
    """Chunks cover a list in order, once, within the limit and without empty ones."""
    covered = []
    for chunk in cut(lengths, limit):
        sizes = [piece.stop - piece.start for piece in chunk.pieces]
        assert min(sizes) > 0
        assert sum(sizes) == chunk.numel <= limit
        for piece in chunk.pieces:
            covered += [(piece.index, element) for element in range(piece.start, piece.stop)]
    assert covered == [(i, element) for i, n in enumerate(lengths) for element in range(n)]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 30))
def test_chunks_are_few(lengths: tuple[int, ...], limit: int) -> None:
    """A chunk of short tensors ends where the next short tensor would not fit, not before."""
    for chunk, after in pairwise(cut(lengths, limit)):
        first = after.pieces[0]
        is_short = [4 * lengths[piece.index] < limit for piece in (*chunk.pieces, first)]
        if all(is_short):
            assert chunk.numel + lengths[first.index] > limit


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 30))
def test_pieces_survive_the_journey(lengths: tuple[int, ...], limit: int) -> None:
    """What is loaded from one list and stored to another is a copy of it."""
    source = [torch.arange(n) + 100 * i for i, n in enumerate(lengths)]
    target = [torch.zeros(n, dtype=torch.int64) for n in lengths]
    staging = Staging(bytes_kept=1 << 20)
    for chunk in cut(lengths, limit):
        room, _ = staging.rooms(2, chunk.numel, torch.int64)
        run = chunk.run(target, room)
        run.copy_(chunk.loaded(source, room))
        chunk.store(target, run)
    assert [t.tolist() for t in target] == [s.tolist() for s in source]


def test_long_tensors_travel_as_they_are() -> None:
    """A tensor of its own chunk is sent from and received into its own memory."""
    tensors = [torch.zeros(25)]
    for chunk in cut((25,), 10):
        run = chunk.loaded(tensors, Room(torch.empty(0, dtype=torch.uint8)))
        assert run.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr()


def test_rooms_do_not_overlap() -> None:
    """What is taken from either room is separate, whatever the dtypes; clear starts over."""
    staging = Staging(bytes_kept=1 << 20)
    rooms = staging.rooms(3, 5, torch.int16)
    taken = [room.take(5, torch.int16) for room in rooms for _ in range(3)]
    for number, tensor in enumerate(taken):
        tensor.fill_(number)
    assert [tensor.tolist() for tensor in taken] == [[number] * 5 for number in range(6)]
    rooms[0].clear()
    assert rooms[0].take(2, torch.float64).data_ptr() == taken[0].data_ptr()


def test_staging_is_bounded_and_given_back() -> None:
    """Memory is kept from call to call up to the bound, and not after clear."""
    staging = Staging(bytes_kept=4096)
    first = staging.rooms(1, 100, torch.float32)[0].take(1, torch.uint8)
    again = staging.rooms(1, 100, torch.float32)[0].take(1, torch.uint8)
    assert first.data_ptr() == again.data_ptr()
    staging.rooms(1, 5000, torch.float32)
    assert staging.bytes_held <= 4096
    staging.clear()
    assert staging.bytes_held == 0


def take(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def contribution(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(257, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 120, (257,), generator=generator).to(dtype)


def in_rank_order(contributions: list[torch.Tensor], op: Op) -> torch.Tensor:
    """The definition: one rank after the other, half precision in fp32, one division."""
    dtype = contributions[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = contributions[0].to(wide)
    for tensor in contributions[1:]:
        total = total + tensor.to(wide)
    return (total / len(contributions) if op is Op.AVG else total).to(dtype)


REDUCTIONS = [
    (dtype, op)
    for dtype in sorted(REDUCE_DTYPES, key=str)
    for op in Op
    if op is Op.SUM or dtype.is_floating_point or dtype.is_complex
]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_combine(dtype: torch.dtype, op: Op, ranks: int, in_place: bool) -> None:
    """The bits are those of the sum in rank order, whichever rank computes it, in place too;
    its own contribution is only read."""
    expected = in_rank_order([contribution(rank, dtype) for rank in range(ranks)], op)
    for own in range(ranks):
        contributions = [contribution(rank, dtype) for rank in range(ranks)]
        out = contributions[own] if in_place else torch.zeros(257, dtype=dtype)
        combine(out, contributions, op, own=own, take=take)
        assert torch.equal(out, expected)
        if not in_place:
            assert torch.equal(contributions[own], contribution(own, dtype))


def test_half_precision_is_not_lost_on_the_way() -> None:
    """Contributions too small for half precision to add one by one count together."""
    small = torch.tensor([2.0**-9], dtype=torch.bfloat16)
    contributions = [torch.ones(1, dtype=torch.bfloat16), *(small.clone() for _ in range(4))]
    out = torch.empty(1, dtype=torch.bfloat16)
    combine(out, contributions, Op.SUM, own=0, take=take)
    assert out.item() == 1.0 + 2.0**-7


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 24), (torch.float32, 24), (torch.float64, 53)]
)
@pytest.mark.parametrize("own", [0, 1, 2])
def test_sums_are_taken_in_the_order_of_ranks(dtype: torch.dtype, bits: int, own: int) -> None:
    """Where the order decides what is lost to rounding, it is that of the ranks."""
    values = [2.0**bits, 1.0, -(2.0**bits)]
    contributions = [torch.tensor([value], dtype=dtype) for value in values]
    out = torch.empty(1, dtype=dtype)
    combine(out, contributions, Op.SUM, own=own, take=take)
    assert out.item() == 0.0
