"""DBuffer: views, gaps, shards, and redistribution checked element by element on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_ranks import CPU, Coordinates, SimulatedRank, simulate
from torch import Tensor

from polyshard import DBuffer, Flat, Partial, Replicate
from polyshard.buffer import ShardGrid, Step, StepKind, narrow, plan_steps
from polyshard.layout import GlobalLayout
from polyshard.placements import Placement
from polyshard.spi import Lifetime, Op
from polyshard.spi.buffers import StorageBuffer

F, R = Flat(), Replicate()
AVERAGE, SUM = Partial("avg"), Partial("sum")
Placed = tuple[Placement, ...]
#: Divisible by every product of axis sizes below, so that averages are exact in float16.
UNIT = 72


@dataclass(frozen=True)
class Move:
    """A redistribution on a grid of ranks."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    source: Placed
    target: Placed


@st.composite
def moves(draw: st.DrawFn) -> Move:
    """Any move between placements that are Flat on prefixes of one order of some of the axes."""
    sizes = draw(
        st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: prod(sizes) <= 12)
    )
    axes = draw(st.permutations(range(len(sizes))))
    order = tuple(axes[: draw(st.integers(0, len(axes)))])
    before = order[: draw(st.integers(0, len(order)))]
    after = order[: draw(st.integers(0, len(order)))]
    source: list[Placement] = []
    target: list[Placement] = []
    for axis in range(len(sizes)):
        start = F if axis in before else draw(st.sampled_from([R, AVERAGE, SUM]))
        source.append(start)
        stays = isinstance(start, Partial) and axis not in after and draw(st.booleans())
        target.append(F if axis in after else start if stays else R)
    return Move(tuple(sizes), order, tuple(source), tuple(target))


shapes_of_tensors = st.lists(
    st.lists(st.integers(0, 7), max_size=2).map(tuple), min_size=1, max_size=5
)


def make_buffer(
    layout: GlobalLayout, grid: ShardGrid, placements: Placed, dtype: torch.dtype = torch.float32
) -> DBuffer:
    """Not-a-number everywhere: what was not written shows."""
    count, _ = grid.shard(placements)
    numel = layout.local_numel(num_shards=count)
    buffer = StorageBuffer(numel, dtype, CPU, Lifetime.TRANSIENT)
    buffer.acquire()
    buffer.tensor.fill_(torch.nan)
    return DBuffer(layout, grid, placements, buffer)


class TestPlan:
    @given(moves())
    def test_reaches_the_target(self, move: Move) -> None:
        """Each axis that changes moves once, by the step that turns what it was into what it is."""
        steps = plan_steps(move.source, move.target, move.order)
        state = list(move.source)
        for step in steps:
            before = state[step.axis]
            if step.kind is StepKind.ALL_GATHER:
                assert before == F
            elif step.kind is StepKind.SLICE:
                assert before == R
            else:
                assert isinstance(before, Partial)
                assert step.op is Op(before.reduce_op)
            splits = step.kind in (StepKind.SLICE, StepKind.REDUCE_SCATTER)
            state[step.axis] = F if splits else R
        assert tuple(state) == move.target
        assert len({step.axis for step in steps}) == len(steps)

    @given(moves())
    def test_moves_the_least(self, move: Move) -> None:
        """Splits come first, slowest axis first; gathers come last, fastest axis first."""
        steps = plan_steps(move.source, move.target, move.order)
        phases = [
            {StepKind.ALL_REDUCE: 1, StepKind.ALL_GATHER: 2}.get(step.kind, 0) for step in steps
        ]
        assert phases == sorted(phases)
        splits = [move.order.index(step.axis) for step in steps if step.kind in SPLITS]
        gathers = [
            move.order.index(step.axis) for step in steps if step.kind is StepKind.ALL_GATHER
        ]
        assert splits == sorted(splits)
        assert gathers == sorted(gathers, reverse=True)

    @pytest.mark.parametrize(
        ("source", "target"), [(R, AVERAGE), (F, AVERAGE), (AVERAGE, SUM), (SUM, AVERAGE)]
    )
    def test_nothing_becomes_partial(self, source: Placement, target: Placement) -> None:
        """A value cannot be taken apart into contributions."""
        with pytest.raises(ValueError, match="axis 0: cannot turn"):
            plan_steps((source,), (target,), (0,))

    def test_hfsdp_gradients(self) -> None:
        """hfsdp reduces over the inner axis, then over the outer one, and gathers outer first."""
        unreduced, optimizer, order = (AVERAGE, AVERAGE), (F, F), (1, 0)
        scatter, gather = StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER
        assert plan_steps(unreduced, optimizer, order) == (Step(scatter, 1), Step(scatter, 0))
        assert plan_steps(optimizer, (R, R), order) == (Step(gather, 0), Step(gather, 1))


SPLITS = (StepKind.SLICE, StepKind.REDUCE_SCATTER)


class Values:
    """Whole tensors, a contribution of their own for every place along the Partial axes."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], move: Move, seed: int) -> None:
        self.shapes, self.move = shapes, move
        generator = torch.Generator().manual_seed(seed)
        self.contributions: dict[Coordinates, list[Tensor]] = {}
        self.counts: dict[Coordinates, Tensor] = {}
        for coordinates in product(*(range(size) for size in move.sizes)):
            self.contributions[coordinates] = [
                torch.randint(-3, 4, shape, generator=generator).double() * UNIT for shape in shapes
            ]
            self.counts[coordinates] = (
                torch.randint(0, 2, (len(shapes),), generator=generator).double() * UNIT
            )

    def before(self, coordinates: Coordinates) -> list[Tensor]:
        """The same on all places along the axes that are not Partial."""
        partial = [isinstance(placement, Partial) for placement in self.move.source]
        return self.contributions[
            tuple(c if p else 0 for c, p in zip(coordinates, partial, strict=True))
        ]

    def after(self, coordinates: Coordinates) -> list[Tensor]:
        """Combined over the axes that were Partial and are no longer."""
        lines = [self.before(other) for other in self._line(coordinates)]
        return [self._combine(parts) for parts in zip(*lines, strict=True)]

    def counts_after(self, coordinates: Coordinates) -> Tensor:
        """Combined likewise, but each rank's own to begin with."""
        return self._combine([self.counts[other] for other in self._line(coordinates)])

    def _reduced(self) -> list[int]:
        pairs = zip(self.move.source, self.move.target, strict=True)
        return [
            axis for axis, (old, new) in enumerate(pairs) if isinstance(old, Partial) and old != new
        ]

    def _line(self, coordinates: Coordinates) -> list[Coordinates]:
        reduced = self._reduced()
        choices = [
            range(size) if axis in reduced else (coordinates[axis],)
            for axis, size in enumerate(self.move.sizes)
        ]
        return list(product(*choices))

    def _combine(self, parts: Sequence[Tensor]) -> Tensor:
        averaged = [axis for axis in self._reduced() if self.move.source[axis] == AVERAGE]
        total = torch.stack(list(parts)).sum(dim=0)
        return total / prod(self.move.sizes[axis] for axis in averaged)


def rows_of(whole: Tensor, buffer: DBuffer, index: int) -> Tensor:
    """The rows of ``whole`` that the buffer should hold; a split 0-D tensor has one."""
    if buffer.num_shards == 1:
        return whole
    start, stop = buffer.rows(index)
    return (whole if whole.dim() else whole.view(1))[start:stop]


dtypes = st.sampled_from([torch.float16, torch.float32, torch.float64])


class TestRedistribute:
    @settings(max_examples=150)
    @given(
        move=moves(),
        shapes=shapes_of_tensors,
        before=dtypes,
        after=dtypes,
        counted=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def test_every_element_on_every_rank(
        self,
        move: Move,
        shapes: list[tuple[int, ...]],
        before: torch.dtype,
        after: torch.dtype,
        counted: bool,
        seed: int,
    ) -> None:
        """Every rank ends with its rows of the combined tensors, and with the combined counts."""
        values = Values(shapes, move, seed)
        layout = GlobalLayout.build(shapes, prod(move.sizes[axis] for axis in move.order))

        def on_rank(rank: SimulatedRank) -> None:
            grid = ShardGrid(move.sizes, rank.coordinates, move.order)
            source = make_buffer(layout, grid, move.source, before)
            target = make_buffer(layout, grid, move.target, after)
            for index, whole in enumerate(values.before(rank.coordinates)):
                source.view(index).copy_(rows_of(whole, source, index))
            counts = values.counts[rank.coordinates].to(before, copy=True) if counted else None
            source.redistribute(target, rank.communicators, label="move", counts=counts)
            for index, whole in enumerate(values.after(rank.coordinates)):
                expected = rows_of(whole, target, index)
                assert target.view(index).shape == expected.shape
                assert torch.equal(target.view(index).double(), expected)
            if counts is not None:
                assert torch.equal(counts.double(), values.counts_after(rank.coordinates))
            if not any(isinstance(placement, Partial) for placement in move.source):
                for index, whole in enumerate(values.before(rank.coordinates)):
                    kept = source.view(index).double()
                    assert torch.equal(kept, rows_of(whole, source, index))
            check_launches(rank, move, before, after)

        simulate(move.sizes, on_rank)

    @pytest.mark.parametrize("counted", [False, True])
    def test_in_place(self, counted: bool) -> None:
        """What keeps its split and dtype may be reduced where it lies."""
        move = Move((2, 3), (1, 0), (SUM, F), (R, F))
        shapes = [(5, 2), (), (4,)]
        values = Values(shapes, move, seed=1)
        layout = GlobalLayout.build(shapes, 6)

        def on_rank(rank: SimulatedRank) -> None:
            grid = ShardGrid(move.sizes, rank.coordinates, move.order)
            source = make_buffer(layout, grid, move.source)
            target = DBuffer(layout, grid, move.target, source.storage)
            for index, whole in enumerate(values.before(rank.coordinates)):
                source.view(index).copy_(rows_of(whole, source, index))
            counts = values.counts[rank.coordinates].float() if counted else None
            source.redistribute(target, rank.communicators, label="move", counts=counts)
            for index, whole in enumerate(values.after(rank.coordinates)):
                assert torch.equal(target.view(index).double(), rows_of(whole, target, index))

        simulate(move.sizes, on_rank)


def check_launches(
    rank: SimulatedRank, move: Move, before: torch.dtype, after: torch.dtype
) -> None:
    """One launch per step that communicates; reductions before the cast, gathers after it."""
    expected: dict[int, list[tuple[str, torch.dtype]]] = {axis: [] for axis in rank.communicators}
    for step in plan_steps(move.source, move.target, move.order):
        if step.kind is StepKind.ALL_GATHER:
            expected[step.axis].append(("all_gather", after))
        elif step.kind is not StepKind.SLICE:
            expected[step.axis].append((step.kind.value.replace("-", "_"), before))
    assert {axis: c.launches for axis, c in rank.communicators.items()} == expected


class TestShardGrid:
    @given(moves())
    def test_coarse_shards_are_runs_of_finer_ones(self, move: Move) -> None:
        """Every rank's shard lies in its coarser one, and the finest shards are all there."""
        indices = set()
        for coordinates in product(*(range(size) for size in move.sizes)):
            grid = ShardGrid(move.sizes, coordinates, move.order)
            finest = tuple(F if axis in move.order else R for axis in range(len(move.sizes)))
            count, index = grid.shard(finest)
            assert count == grid.num_shards
            indices.add(index)
            for placements in (move.source, move.target):
                fewer, coarse = grid.shard(placements)
                assert coarse == index // (count // fewer)
        assert indices == set(range(count))

    def test_hfsdp(self) -> None:
        """With hfsdp the index is inner * outer_size + outer."""
        for outer, inner in product(range(2), range(3)):
            grid = ShardGrid((2, 3), (outer, inner), (1, 0))
            assert grid.shard((F, F)) == (6, inner * 2 + outer)
            assert grid.shard((R, F)) == (3, inner)
            assert grid.shard((R, R)) == (1, 0)


class TestViews:
    def test_whole_tensors(self) -> None:
        """In an unsplit buffer a view has the tensor's own shape and shares the storage."""
        layout = GlobalLayout.build([(3, 2), (), (0, 4), (5,)], 4)
        buffer = make_buffer(layout, ShardGrid((4,), (1,), (0,)), (R,))
        for index, shape in enumerate(layout.shapes):
            view = buffer.view(index)
            assert view.shape == shape
            assert view.is_contiguous()
            start = layout.offset(index)
            view.fill_(index)
            assert (buffer.flat[start : start + view.numel()] == index).all()

    @given(shapes_of_tensors, st.integers(1, 4))
    def test_shards_together_are_the_tensor(
        self, shapes: list[tuple[int, ...]], ranks: int
    ) -> None:
        """The ranks' views of a tensor are its rows, one after the other, at the same places of
        their storage as in the whole buffer."""
        layout = GlobalLayout.build(shapes, ranks)
        whole = make_buffer(layout, ShardGrid((ranks,), (0,), (0,)), (R,))
        whole.flat.copy_(torch.arange(float(layout.padded_numel)))
        shards = []
        for rank in range(ranks):
            shard = make_buffer(layout, ShardGrid((ranks,), (rank,), (0,)), (F,))
            for mine, piece in zip(shard.pieces, whole.pieces, strict=True):
                mine.copy_(piece.view(ranks, -1)[rank] if piece.numel() else piece)
            shards.append(shard)
        for index, shape in enumerate(shapes):
            rows = [shard.view(index) for shard in shards]
            joined = rows[0] if ranks == 1 else torch.cat(rows)
            assert torch.equal(joined.view(shape), whole.view(index))

    @given(shapes_of_tensors, st.integers(1, 4))
    def test_gaps(self, shapes: list[tuple[int, ...]], ranks: int) -> None:
        """Gaps and tensors together cover the whole buffer, each element once."""
        layout = GlobalLayout.build(shapes, ranks)
        buffer = make_buffer(layout, ShardGrid((ranks,), (0,), (0,)), (R,))
        covered = torch.zeros(layout.padded_numel, dtype=torch.int64)
        for start, stop in buffer.gaps():
            assert start < stop
            covered[start:stop] += 1
        for index, shape in enumerate(shapes):
            start = layout.offset(index)
            covered[start : start + prod(shape)] += 1
        assert (covered == 1).all()

    def test_narrow(self) -> None:
        """A part of every piece, sharing its memory; one of one part is the piece itself."""
        pieces = (torch.arange(6.0), torch.arange(0.0), torch.arange(3.0))
        parts = narrow(pieces, 3, 1)
        assert [part.tolist() for part in parts] == [[2, 3], [], [1]]
        parts[0].zero_()
        assert pieces[0].tolist() == [0, 1, 0, 0, 4, 5]
        assert all(a is b for a, b in zip(narrow(pieces, 1, 0), pieces, strict=True))

    def test_storage_of_another_length_is_our_bug(self) -> None:
        """A storage must have the length that layout and placements say."""
        layout = GlobalLayout.build([(4,)], 2)
        storage = StorageBuffer(4, torch.float32, CPU, Lifetime.PERSISTENT)
        with pytest.raises(AssertionError):
            DBuffer(layout, ShardGrid((2,), (0,), (0,)), (F,), storage)
