"""The rules of the flat layout, as properties of any shapes, shard counts and granularities."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyshard import layout_search
from polyshard.layout import WHOLE_TENSOR, GlobalLayout, Granularity, Segment

Shape = tuple[int, ...]
Grain = int | Granularity
Problem = tuple[list[Shape], int, list[Grain]]

settings.register_profile("layout", deadline=None, max_examples=200)
layout_settings = settings.get_profile("layout")

PRIME_ROWS = (1009, 1013, 1019)

# -- what is drawn --------------------------------------------------------------------------------

sizes = st.integers(1, 40)
shapes = st.one_of(
    st.just(()),
    st.tuples(sizes),
    st.tuples(sizes, sizes),
    st.tuples(sizes, sizes, st.integers(1, 5)),
    st.tuples(st.integers(1, 5000), st.integers(1, 300)),
    st.tuples(st.integers(1, 5000), st.sampled_from(PRIME_ROWS)),
    st.tuples(st.sampled_from((64, 96, 128, 192, 256)), st.sampled_from((1, 9, 64, 128, 576))),
    st.tuples(st.integers(10**6, 10**8), st.integers(1, 3)),
    st.sampled_from(((0,), (0, 7), (5, 0), (3, 0, 2))),
)
small_shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(0, 9), st.integers(0, 4)),
    st.tuples(st.integers(0, 9), st.integers(1, 2), st.integers(1, 3)),
)
shard_counts = st.one_of(
    st.integers(1, 12), st.sampled_from((16, 32, 64, 96, 128, 1024, 4096)), st.integers(1, 4096)
)
grains = st.one_of(
    st.just(1), st.integers(1, 12), st.sampled_from((128, 10**6)), st.just(WHOLE_TENSOR)
)


@st.composite
def problems(
    draw: st.DrawFn,
    shapes: st.SearchStrategy[Shape] = shapes,
    shard_counts: st.SearchStrategy[int] = shard_counts,
) -> Problem:
    """Shapes, a number of shards, and a granularity for each tensor, often the same for all."""
    drawn = draw(st.lists(shapes, max_size=24))
    grain = st.just(draw(grains)) if draw(st.booleans()) else grains
    granularity = draw(st.lists(grain, min_size=len(drawn), max_size=len(drawn)))
    return drawn, draw(shard_counts), granularity


def repeated_until_roomy(shapes: Sequence[Shape], num_shards: int) -> list[Shape]:
    """Copies of `shapes`, so many that no tensor and no 100 rows are longer than a shard."""
    numel = sum(map(math.prod, shapes))
    needed = max(max(math.prod(shape), 100 * math.prod(shape[1:])) for shape in shapes)
    return list(shapes) * ceil_div(needed * num_shards, numel)


# -- the rules, written down a second time --------------------------------------------------------


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def row_count(shape: Shape) -> int:
    return shape[0] if shape else 1


def block_numel(shape: Shape, grain: Grain) -> int:
    """Elements of `shape` that have to stay on one shard."""
    rows = row_count(shape)
    return (rows if isinstance(grain, Granularity) else min(rows, grain)) * math.prod(shape[1:])


def padding_one_by_one(
    shapes: Sequence[Shape], num_shards: int, granularity: Sequence[Grain]
) -> int:
    """Padding if every shard held equally many blocks of each tensor."""
    total = 0
    for shape, grain in zip(shapes, granularity, strict=True):
        numel, block = math.prod(shape), block_numel(shape, grain)
        if numel:
            total += ceil_div(ceil_div(numel, block), num_shards) * num_shards * block - numel
    return total


def roomy(shapes: Sequence[Shape], num_shards: int) -> bool:
    """Whether the average shard is no shorter than any tensor and than 100 times any row."""
    numel = sum(map(math.prod, shapes))
    return all(
        max(math.prod(shape), 100 * math.prod(shape[1:])) * num_shards <= numel for shape in shapes
    )


def one_per_cent_is_promised(shapes: Sequence[Shape], num_shards: int) -> bool:
    """The condition that GlobalLayout states, for single rows."""
    filled = [shape for shape in shapes if math.prod(shape)]
    numel = sum(map(math.prod, filled))
    if any(100 * math.prod(shape[1:]) * num_shards > numel for shape in filled):
        return False
    wasteful = []
    for row_numel in {math.prod(shape[1:]) for shape in filled}:
        family = [shape for shape in filled if math.prod(shape[1:]) == row_numel]
        rows = sum(map(row_count, family))
        if 100 * (-rows % num_shards) > rows:
            wasteful += family
    return roomy(filled, num_shards) or roomy(wasteful, num_shards)


def check_rules(
    layout: GlobalLayout, shapes: Sequence[Shape], num_shards: int, granularity: Sequence[Grain]
) -> None:
    """Rules 1, 2 and 5 of a layout, and the part of rule 4 that knows no exception."""
    end = 0
    for index, segment in enumerate(layout.segments):
        assert (segment.index, segment.offset) == (index, end)
        assert segment.numel == segment.shard_numel * num_shards
        position = end
        end += segment.numel
        for i in segment.tensors:
            numel, offset = math.prod(shapes[i]), layout.offset(i)
            if numel == 0:
                assert segment.offset <= offset <= end
                continue
            assert offset >= position, "tensors overlap, or are not listed in order"
            position = offset + numel
            # A boundary at either end of the tensor cuts nothing. Those inside lie on block edges
            # if the first does and, where there is a second, so does the distance between them.
            block = block_numel(shapes[i], granularity[i])
            start = offset - segment.offset
            first = (start // segment.shard_numel + 1) * segment.shard_numel
            inside = range(first, start + numel, segment.shard_numel)
            assert not inside or (first - start) % block == 0
            assert len(inside) < 2 or segment.shard_numel % block == 0
        assert position <= end
    listed = [i for segment in layout.segments for i in segment.tensors]
    assert sorted(listed) == list(range(len(shapes)))
    assert (layout.shapes, layout.num_shards) == (tuple(shapes), num_shards)
    assert (layout.padded_numel, layout.numel) == (end, sum(map(math.prod, shapes)))
    assert end - layout.numel <= padding_one_by_one(shapes, num_shards, granularity)


def built(shapes: Sequence[Shape], num_shards: int) -> GlobalLayout:
    """The layout of single rows, its rules checked."""
    layout = GlobalLayout.build(shapes, num_shards)
    check_rules(layout, shapes, num_shards, [1] * len(shapes))
    return layout


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


# -- one per cent ---------------------------------------------------------------------------------


@layout_settings
@given(st.lists(shapes, max_size=24), shard_counts)
def test_one_per_cent_wherever_it_is_promised(shapes: list[Shape], num_shards: int) -> None:
    """Whatever the shapes, the condition that GlobalLayout states is enough for 1 %."""
    layout = GlobalLayout.build(shapes, num_shards)
    if one_per_cent_is_promised(shapes, num_shards):
        assert 100 * (layout.padded_numel - layout.numel) <= layout.numel


@layout_settings
@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=12), st.integers(1, 16), grains)
def test_one_per_cent_where_no_tensor_is_longer_than_a_shard(
    shapes: list[Shape], num_shards: int, grain: Grain
) -> None:
    """Any number of row lengths fits into 1 % if tensors are short; so do blocks of rows."""
    kept = 40 if grain is WHOLE_TENSOR else min(int(grain), 40)
    longest_block = (1, 40 * kept)  # as a row: its length is what counts against the shard's
    copies = repeated_until_roomy([*shapes, longest_block], num_shards)
    layout = GlobalLayout.build(copies, num_shards, granularity=grain)
    check_rules(layout, copies, num_shards, [grain] * len(copies))
    assert 100 * (layout.padded_numel - layout.numel) <= layout.numel


@layout_settings
@given(
    st.dictionaries(st.integers(30, 40), st.integers(50, 60), min_size=3, max_size=6),
    st.lists(st.sampled_from((*PRIME_ROWS, 64, 128)), max_size=4, unique=True),
    st.integers(0, 50),
    st.integers(3, 24),
)
def test_one_per_cent_where_long_tensors_have_many_rows(
    short_rows: dict[int, int], long_rows: list[int], extra: int, num_shards: int
) -> None:
    """Tensors over many shards leave short ones of few rows their 1 % if they keep to theirs."""
    shapes: list[Shape] = []
    for row_numel, rows_per_shard in short_rows.items():
        tensors, rest = divmod(rows_per_shard * num_shards + 1, 40)
        shapes += [(40, row_numel)] * tensors + [(rest, row_numel)]
    shapes += [(100 * num_shards + extra, row_numel) for row_numel in long_rows]
    assert one_per_cent_is_promised(shapes, num_shards)
    layout = built(shapes, num_shards)
    assert 100 * (layout.padded_numel - layout.numel) <= layout.numel


def test_one_per_cent_is_out_of_reach_for_many_long_coprime_rows() -> None:
    """Ten tensors that cannot share a segment get the least padding there is, that of dim 0."""
    rows = (9811, 9817, 9829, 9833, 9839, 9851, 9857, 9859, 9871, 9883)
    shapes = [(1010, row_numel) for row_numel in rows]
    layout = built(shapes, 100)
    assert layout.numel >= 100 * 100 * max(rows)  # the average shard has 100 of the longest rows
    assert not one_per_cent_is_promised(shapes, 100)
    assert [len(segment.tensors) for segment in layout.segments] == [1] * 10
    assert layout.padded_numel == sum(1100 * row_numel for row_numel in rows)


# -- what the search is for -----------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [2, 3, 8, 100, 1024, 4096])
def test_many_small_tensors_share_one_segment(num_shards: int) -> None:
    """20,000 tensors of 256 row lengths and shapes of all kinds are one message, within 1 %."""
    source = random.Random(0)
    shapes: list[Shape] = [
        (source.randint(1, 16), source.randint(1, 16), source.randint(1, 16)) for _ in range(20_000)
    ]
    layout = built(shapes, num_shards)
    assert len(layout.segments) == 1
    assert 100 * (layout.padded_numel - layout.numel) <= layout.numel


@pytest.mark.parametrize("num_shards", [2, 3, 8, 64, 512])
def test_rows_without_common_divisor_do_not_multiply(num_shards: int) -> None:
    """Rows of 1009, 1013 and 1019 cost at most three segments and no more than 1 %."""
    shapes = [(51_200 + 7 * k, row_numel) for k in range(3) for row_numel in PRIME_ROWS]
    layout = built(shapes, num_shards)
    assert len(layout.segments) <= 3
    assert 100 * (layout.padded_numel - layout.numel) <= layout.numel


def test_padding_beyond_one_per_cent_does_not_buy_a_segment_less() -> None:
    """Rows of 64 and 81 keep apart where sharing costs 6 %, though dim 0 alone would cost 7 %."""
    shapes: list[Shape] = [(3200, 64), (3200, 81), *[(1, 64)] * 80]
    assert padding_one_by_one(shapes, 8, [1] * len(shapes)) > 35_000
    layout = built(shapes, 8)
    assert layout.padded_numel - layout.numel <= layout.numel // 100
    assert len(layout.segments) == 2


@pytest.mark.parametrize("num_shards", [2, 4, 8, 16, 32, 64])
def test_what_divides_evenly_is_not_padded(num_shards: int) -> None:
    """Where every dim 0 is a multiple of the shard count, the full buffer has no gap at all."""
    shapes: list[Shape] = [(64 * k, 1 + 3 * k) for k in range(1, 40)] + [(64 * 5,)] * 20
    assert built(shapes, num_shards).padded_numel == sum(map(math.prod, shapes))


@pytest.mark.parametrize(
    ("shapes", "num_shards"),
    [
        pytest.param(
            [(1320, 100), (274, 1009), (24, 64), (270, 101), (2930, 16), (182, 997), *[(59,)] * 3],
            6,
            id="tensors longer than a shard start where they cross one boundary only",
        ),
        pytest.param(
            [
                *[(276, 1013), (162, 1009), (2950, 101), (234, 997), (2590, 64), (100, 1013)],
                *[(11,)] * 4,
            ],
            8,
            id="shards as long as whole rows of the longest tensors need",
        ),
        pytest.param(
            [(193, 101), (20, 997), (291, 16), (1080, 16), (780, 100), *[(84,)] * 4],
            12,
            id="shards as long as the padding allows",
        ),
    ],
)
def test_rows_of_many_lengths_share_one_segment(shapes: list[Shape], num_shards: int) -> None:
    """Few tensors of unlike rows, some longer than a shard, fit into one segment."""
    layout = built(shapes, num_shards)
    assert any(math.prod(shape) > layout.local_numel() for shape in shapes)
    assert len(layout.segments) == 1


def test_shards_of_whole_tensors_are_filled_closely() -> None:
    """Whole tensors, short against a shard, leave far less than the 1 % that would be allowed."""
    source = random.Random(1)
    shapes = [(source.randint(1, 64), source.randint(1, 64)) for _ in range(300)]
    layout = GlobalLayout.build(shapes, 8, granularity=WHOLE_TENSOR)
    assert 1000 * (layout.padded_numel - layout.numel) <= layout.numel


def test_long_tensors_of_many_row_lengths_leave_the_short_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The short ones share a segment even where no effort is left to find out by trying."""
    monkeypatch.setattr(layout_search, "EFFORT", 0)
    source = random.Random(0)
    shapes: list[Shape] = [(6400, 5000 + 37 * k) for k in range(30)]
    shapes += [(source.randint(1, 64), source.randint(1, 64)) for _ in range(20_000)]
    layout = built(shapes, 64)
    assert len(layout.segments) <= 31
    assert 100 * (layout.padded_numel - layout.numel) <= layout.numel


@layout_settings
@given(problems())
def test_rules_do_not_depend_on_effort(problem: Problem) -> None:
    """What a bound on time leaves out costs segments, never a rule."""
    shapes, num_shards, granularity = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_search, "EFFORT", 0)
        layout = GlobalLayout.build(shapes, num_shards, granularity=granularity)
    check_rules(layout, shapes, num_shards, granularity)


def test_a_hundred_thousand_tensors() -> None:
    """Size is no obstacle: the rules hold for 100,000 tensors over 4096 shards."""
    source = random.Random(0)
    shapes: list[Shape] = [(source.randint(1, 64), source.randint(1, 64)) for _ in range(100_000)]
    assert len(built(shapes, 4096).segments) == 1


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
