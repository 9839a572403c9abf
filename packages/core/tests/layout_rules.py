"""Shapes to lay out, drawn at random, and the rules of a layout written down a second time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from polyshard.layout import WHOLE_TENSOR, GlobalLayout, Granularity

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
