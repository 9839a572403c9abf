"""What the search for a layout finds: padding within one per cent, and few segments."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_rules import (
    PRIME_ROWS,
    Grain,
    Problem,
    Shape,
    built,
    check_rules,
    grains,
    layout_settings,
    one_per_cent_is_promised,
    padding_one_by_one,
    problems,
    repeated_until_roomy,
    shapes,
    shard_counts,
    sizes,
)

from polyshard import layout_search
from polyshard.layout import WHOLE_TENSOR, GlobalLayout

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
