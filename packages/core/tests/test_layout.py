"""The rules of the flat layout, as properties of any shapes, shard counts and granularities."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_rules import (
    Grain,
    Problem,
    Shape,
    block_numel,
    built,
    check_rules,
    layout_settings,
    problems,
    row_count,
    small_shapes,
)

from polyshard.layout import WHOLE_TENSOR, GlobalLayout, Segment

# -- rules ----------------------------------------------------------------------------------------


@layout_settings
@given(problems())
def test_rules_hold_for_any_shapes(problem: Problem) -> None:
    """Tensors are whole, boundaries cut no block, and padding never exceeds that of dim 0."""
    shapes, num_shards, granularity = problem
    layout = GlobalLayout.build(shapes, num_shards, granularity=granularity)
    check_rules(layout, shapes, num_shards, granularity)


@layout_settings
@given(problems(small_shapes, st.integers(1, 12)))
def test_local_buffers_agree_with_a_simulation_of_every_element(problem: Problem) -> None:
    """Cutting a full buffer of labels into local ones puts every row where the layout says."""
    shapes, finest, granularity = problem
    layout = GlobalLayout.build(shapes, finest, granularity=granularity)
    full: list[tuple[int, int] | None] = [None] * layout.padded_numel
    for i, shape in enumerate(shapes):
        for element in range(math.prod(shape)):
            assert full[layout.offset(i) + element] is None
            full[layout.offset(i) + element] = (i, element)
    for num_shards in (count for count in range(1, finest + 1) if finest % count == 0):
        for rank in range(num_shards):
            local: list[tuple[int, int] | None] = []
            for segment in layout.segments:
                part = segment.numel // num_shards
                start = segment.offset + rank * part
                local += full[start : start + part]
            assert layout.local_numel(num_shards=num_shards) == len(local)
            for i, shape in enumerate(shapes):
                start, stop = layout.local_range(rank, i, num_shards=num_shards)
                row_numel = math.prod(shape[1:])
                elements = range(start * row_numel, stop * row_numel)
                offset = layout.local_offset(rank, i, num_shards=num_shards)
                assert 0 <= offset <= len(local) - len(elements)
                assert local[offset : offset + len(elements)] == [(i, e) for e in elements]
                assert sum(label is not None and label[0] == i for label in local) == len(elements)


@layout_settings
@given(problems(shard_counts=st.sampled_from((1, 2, 3, 7, 12, 64, 96))))
def test_every_row_lies_on_exactly_one_shard(problem: Problem) -> None:
    """From rank to rank the row ranges of a tensor adjoin, from its first row to its last."""
    shapes, num_shards, granularity = problem
    layout = GlobalLayout.build(shapes, num_shards, granularity=granularity)
    for i, (shape, grain) in enumerate(zip(shapes, granularity, strict=True)):
        ranges = [layout.local_range(rank, i) for rank in range(num_shards)]
        assert (ranges[0][0], ranges[-1][1]) == (0, row_count(shape))
        assert all(before[1] == after[0] for before, after in pairwise(ranges))
        assert all(start <= stop for start, stop in ranges)
        if grain is WHOLE_TENSOR:
            assert sum(start < stop for start, stop in ranges) == (row_count(shape) > 0)


@layout_settings
@given(problems(shard_counts=st.sampled_from((1, 4, 6, 12, 64, 96))))
def test_coarser_shards_are_unions_of_finer_ones(problem: Problem) -> None:
    """A split into fewer shards needs no other layout: each takes a run of the finest ones."""
    shapes, finest, granularity = problem
    layout = GlobalLayout.build(shapes, finest, granularity=granularity)
    assert layout.local_numel() == layout.local_numel(num_shards=finest)
    for count in (count for count in range(1, finest + 1) if finest % count == 0):
        assert layout.local_numel(num_shards=count) * count == layout.padded_numel
        finer = finest // count
        for i in range(len(shapes)):
            for rank in range(count):
                first, _ = layout.local_range(rank * finer, i)
                _, last = layout.local_range((rank + 1) * finer - 1, i)
                assert layout.local_range(rank, i, num_shards=count) == (first, last)


@layout_settings
@given(problems(), st.randoms(use_true_random=False))
def test_layout_depends_on_shapes_not_on_their_order(
    problem: Problem, shuffler: random.Random
) -> None:
    """The same arguments give equal layouts; another order of them gives the same segments."""
    shapes, num_shards, granularity = problem
    layout = GlobalLayout.build(shapes, num_shards, granularity=granularity)
    assert GlobalLayout.build(shapes, num_shards, granularity=granularity) == layout
    order = list(range(len(shapes)))
    shuffler.shuffle(order)
    shuffled = GlobalLayout.build(
        [shapes[i] for i in order], num_shards, granularity=[granularity[i] for i in order]
    )

    def contents(layout: GlobalLayout, original: Sequence[int]) -> list[object]:
        """Per segment, its shard length and what lies where, whichever of equals it is."""
        return [
            (
                segment.shard_numel,
                [
                    (numel, block_numel(shapes[i], granularity[i]), layout.offset(place))
                    for place in segment.tensors
                    if (numel := math.prod(shapes[i := original[place]]))
                ],
            )
            for segment in layout.segments
        ]

    assert contents(shuffled, order) == contents(layout, range(len(shapes)))


# -- corners --------------------------------------------------------------------------------------


def test_zero_dimensional_tensors_are_one_row() -> None:
    """A 0-D tensor lies on one shard, as a single row."""
    layout = built([(), ()], 3)
    owners = [[layout.local_range(rank, i) for rank in range(3)] for i in range(2)]
    assert [sum(stop - start for start, stop in ranges) for ranges in owners] == [1, 1]
    assert layout.padded_numel == 3


def test_empty_tensors_take_no_room() -> None:
    """Empty tensors change nothing for the others; their rows, if any, belong to shard 0."""
    layout = built([(0, 3), (4, 2), (5, 0), (0,)], 4)
    assert (layout.padded_numel, layout.numel) == (8, 8)
    assert [layout.local_range(rank, 2) for rank in range(4)] == [(0, 5), (5, 5), (5, 5), (5, 5)]
    assert [layout.local_range(rank, 0) for rank in range(4)] == [(0, 0)] * 4
    assert layout.segments == (Segment(0, 0, 8, 2, (0, 2, 3, 1)),)


def test_nothing_but_empty_tensors() -> None:
    """Without an element there is a segment of length 0; without a tensor there is none."""
    assert built([(0,), (3, 0)], 4).segments == (Segment(0, 0, 0, 0, (0, 1)),)
    assert built([], 4).segments == ()


def test_more_shards_than_rows_leaves_some_empty() -> None:
    """Shards beyond the rows hold none, and an empty view fits into their local buffers."""
    layout = built([(3, 5)], 8)
    ranges = [layout.local_range(rank, 0) for rank in range(8)]
    assert [stop - start for start, stop in ranges] == [1, 1, 1, 0, 0, 0, 0, 0]
    assert layout.local_numel() == 5
    assert all(0 <= layout.local_offset(rank, 0) <= 5 for rank in range(8))


def test_blocks_of_rows_stay_together() -> None:
    """With a granularity of 128 rows every shard starts a tensor at a multiple of 128 rows."""
    layout = GlobalLayout.build([(4000, 96), (300, 64)], 8, granularity=128)
    for i in range(2):
        starts = {layout.local_range(rank, i)[0] for rank in range(8)}
        assert all(start % 128 == 0 or start == layout.shapes[i][0] for start in starts)
    assert len({layout.local_range(rank, 0)[0] for rank in range(8)}) > 4


def test_whole_tensors_are_spread_evenly() -> None:
    """Whole tensors of one size are dealt out, the same number to every shard."""
    layout = GlobalLayout.build([(6, 7)] * 32 + [(50,)], 8, granularity=[WHOLE_TENSOR] * 32 + [1])
    held = [sum(layout.local_range(r, i) == (0, 6) for i in range(32)) for r in range(8)]
    assert held == [4] * 8


def test_layouts_are_values() -> None:
    """Equal layouts are equal and hash alike, survive pickling, and refuse assignment."""
    layout = built([(4, 3), (5,)], 2)
    assert {layout: 1}[pickle.loads(pickle.dumps(layout))] == 1
    assert layout != built([(4, 3), (5,)], 1)
    with pytest.raises(AttributeError):
        layout.num_shards = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("shapes", "num_shards", "granularity", "message"),
    [
        ([(2, -1)], 2, 1, r"shape 0 is \(2, -1\); sizes are 0 or more"),
        ([(2,), 3], 2, 1, "shape 1 is 3; give a sequence of integers"),
        ([(2.0,)], 2, 1, r"shape 0 is \(2.0,\); give a sequence of integers"),
        ([(2,)], 0, 1, "num_shards is 0; it is at least 1"),
        ([(2,)], 1.5, 1, "num_shards is 1.5; give an integer"),
        ([(2,)], 2, 0, "granularity is 0; it is at least 1"),
        ([(2,)], 2, None, "granularity is None; give an integer"),
        ([(2,), (2,)], 2, [1], "granularity has 1 entries for 2 tensors"),
        ([(2,), (2,)], 2, [1, -3], "granularity of tensor 1 is -3; it is at least 1"),
    ],
)
def test_bad_arguments_are_named(
    shapes: list[Shape], num_shards: int, granularity: Grain, message: str
) -> None:
    """What is no shape, count or granularity is refused with its position and value."""
    with pytest.raises(ValueError, match=message):
        GlobalLayout.build(shapes, num_shards, granularity=granularity)


def test_questions_about_what_does_not_exist_are_refused() -> None:
    """Ranks, tensors, segments and splits that the layout lacks are errors, negative ones too."""
    layout = built([(8, 3)], 4)
    with pytest.raises(ValueError, match="rank 4: shards are numbered from 0 to 3"):
        layout.local_range(4, 0)
    with pytest.raises(ValueError, match="rank 2: shards are numbered from 0 to 1"):
        layout.local_offset(2, 0, num_shards=2)
    with pytest.raises(ValueError, match="rank -1"):
        layout.local_range(-1, 0)
    with pytest.raises(ValueError, match="tensor 1: the layout has 1 tensors"):
        layout.offset(1)
    with pytest.raises(ValueError, match="tensor -1"):
        layout.offset(-1)
    with pytest.raises(ValueError, match="num_shards=3: a coarser split"):
        layout.local_numel(num_shards=3)
    with pytest.raises(ValueError, match="num_shards=8: a coarser split"):
        layout.local_range(0, 0, num_shards=8)
