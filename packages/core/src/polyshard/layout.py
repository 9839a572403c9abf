"""Where every row of every tensor lies, in the full buffer and in each shard's part of it.

Pure arithmetic on shapes. Knows no torch, no processes and no dtypes. `layout_search` decides what
shares a segment; this file gives the decision its meaning. docs/notes/layout.md has the reasoning.
"""

from __future__ import annotations

import enum
import gc
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, SupportsIndex, cast, overload

from .layout_search import pack


class Granularity(enum.Enum):
    """Granularities that are not a number of rows."""

    WHOLE_TENSOR = "whole tensor"


#: The granularity of a tensor that has to lie on one shard entirely, as matrix optimizers ask for.
WHOLE_TENSOR: Final = Granularity.WHOLE_TENSOR


@dataclass(frozen=True)
class Segment:
    """A run of the full buffer that is gathered and reduced as one piece; lengths in elements.

    Attributes:
        index: its place among the segments.
        offset: its first element in the full buffer.
        numel: its length with padding, `num_shards * shard_numel`.
        shard_numel: the length of each shard's part of it.
        tensors: indices of its tensors, in ascending order of their offsets.
    """

    index: int
    offset: int
    numel: int
    shard_numel: int
    tensors: tuple[int, ...]


@dataclass(frozen=True)
class GlobalLayout:
    """How tensors lie in a flat buffer that is split over shards; made by `build`.

    The full buffer is the segments one after the other. Shard r holds the r-th of `num_shards`
    equal parts of every segment, and its local buffer is these parts one after the other. A row is
    one index of dim 0; a 0-D tensor is one row; an empty tensor takes no room.

    Guarantees, "row" standing for a block of `granularity` rows where that is more than one:

    - Every tensor is one contiguous run of the full buffer, and no shard boundary cuts a row.
    - Padding is never more than it takes to give every shard equally many rows of each tensor: the
      sum over tensors of `ceil(rows / num_shards) * num_shards * row_numel - tensor_numel`.
    - Padding is at most 1 % of `numel` if the average shard, `numel / num_shards`, is no shorter
      than any tensor and than 100 times any row. The same holds if not all tensors meet this, but
      those do, seen by themselves, whose row length would pad more than 1 % in a segment of its
      own. Elsewhere 1 % is aimed for; docs/notes/layout.md proves that it can be out of reach.
    - The same arguments give the same layout in every process.

    Attributes:
        shapes: of the full tensors.
        num_shards: shards of the finest split.
        segments: in the order in which they lie in the full buffer.
        padded_numel: elements of the full buffer.
        numel: elements of the tensors.
    """

    shapes: tuple[tuple[int, ...], ...] = field(repr=False)
    num_shards: int
    segments: tuple[Segment, ...] = field(repr=False)
    padded_numel: int
    numel: int
    _offsets: tuple[int, ...] = field(repr=False)
    _segment_of: tuple[int, ...] = field(repr=False)

    @classmethod
    def build(
        cls,
        shapes: Sequence[Sequence[int]],
        num_shards: int,
        *,
        granularity: int | Granularity | Sequence[int | Granularity] = 1,
    ) -> GlobalLayout:
        """Lay out tensors of the given shapes over `num_shards` shards.

        Args:
            shapes: one per tensor, in the same order on every rank.
            num_shards: at least 1.
            granularity: how many rows, counted from a tensor's first, no shard boundary separates:
                a number or `WHOLE_TENSOR`, for all tensors or one per tensor. The last rows of a
                tensor may make a shorter block.

        Raises:
            ValueError: an argument is not what is described here.
        """
        with _collection_paused():
            return cls._build(shapes, num_shards, granularity)

    @classmethod
    def _build(
        cls,
        shapes: Sequence[Sequence[int]],
        num_shards: int,
        granularity: int | Granularity | Sequence[int | Granularity],
    ) -> GlobalLayout:
        checked = [_checked_shape(index, shape) for index, shape in enumerate(shapes)]
        num_shards = _at_least(1, num_shards, "num_shards")
        numels = [math.prod(shape) for shape in checked]
        blocks = _block_numels(checked, numels, granularity)
        filled = [index for index, numel in enumerate(numels) if numel]
        packings = pack(
            [numels[index] for index in filled], [blocks[index] for index in filled], num_shards
        )
        segments: list[Segment] = []
        offsets = [0] * len(checked)
        segment_of = [0] * len(checked)
        offset = 0
        for index, packing in enumerate(packings):
            tensors = tuple([filled[place] for place in packing.tensors])
            for tensor, start in zip(tensors, packing.starts, strict=True):
                offsets[tensor] = offset + start
                segment_of[tensor] = index
            numel = packing.shard_numel * num_shards
            segments.append(Segment(index, offset, numel, packing.shard_numel, tensors))
            offset += numel
        empty = tuple([index for index, numel in enumerate(numels) if not numel])
        if empty:
            first = segments[0] if segments else Segment(0, 0, 0, 0, ())
            segments[:1] = [replace(first, tensors=empty + first.tensors)]
        return cls(
            shapes=tuple(checked),
            num_shards=num_shards,
            segments=tuple(segments),
            padded_numel=offset,
            numel=sum(numels),
            _offsets=tuple(offsets),
            _segment_of=tuple(segment_of),
        )

    def offset(self, i: int) -> int:
        """Return the first element of tensor `i` in the full buffer, 0 for an empty tensor."""
        return self._offsets[self._known(i)]

    def local_range(self, rank: int, i: int, *, num_shards: int | None = None) -> tuple[int, int]:
        """Return the rows [start, stop) of tensor `i` that shard `rank` holds.

        From rank to rank the ranges adjoin, from 0 to the number of rows; start equals stop where a
        shard holds none. The rows of an empty tensor, if it has any, all belong to shard 0.

        Args:
            rank: of the shard, from 0 to `num_shards - 1`.
            i: index of the tensor.
            num_shards: of a coarser split, a divisor of the layout's, which it defaults to. Each
                coarser shard is the union of a run of finer ones.

        Raises:
            ValueError: the layout has no such rank, tensor or coarser split.
        """
        ranges = self.row_ranges(i, num_shards=num_shards)
        if not 0 <= rank < len(ranges):
            raise ValueError(f"rank {rank}: shards are numbered from 0 to {len(ranges) - 1}.")
        return ranges[rank]

    def row_ranges(self, i: int, *, num_shards: int | None = None) -> RowRanges:
        """Return the `local_range` of every shard, computed when it is looked at."""
        offset = self._offsets[self._known(i)]
        count = self._split(num_shards)
        segment = self.segments[self._segment_of[i]] if self.segments else Segment(0, 0, 0, 0, ())
        shape = self.shapes[i]
        return RowRanges(
            row_count=shape[0] if shape else 1,
            row_numel=math.prod(shape[1:]),
            num_shards=count,
            shard_numel=segment.numel // count,
            offset=offset - segment.offset,
        )

    def local_offset(self, rank: int, i: int, *, num_shards: int | None = None) -> int:
        """Return where the rows of tensor `i` that shard `rank` holds start in its local buffer.

        Where it holds none, the result is still a place in the buffer that an empty view fits at.
        Arguments and errors are those of `local_range`.
        """
        local_offset, _, _ = self._local_part(rank, i, num_shards)
        return local_offset

    def local_numel(self, *, num_shards: int | None = None) -> int:
        """Return the elements of a local buffer, padding included; the same on all shards."""
        return self.padded_numel // self._split(num_shards)

    def _local_part(self, rank: int, i: int, num_shards: int | None) -> tuple[int, int, int]:
        """Return where shard `rank` holds its part of tensor `i`, and the part's [start, stop)."""
        offset = self._offsets[self._known(i)]
        count = self._split(num_shards)
        if not 0 <= rank < count:
            raise ValueError(f"rank {rank}: shards are numbered from 0 to {count - 1}.")
        segment = self.segments[self._segment_of[i]]
        part_numel = segment.numel // count
        # The part's start, counted from the tensor's: negative where the tensor starts after it.
        before = rank * part_numel - (offset - segment.offset)
        numel = math.prod(self.shapes[i])
        start = min(max(before, 0), numel)
        stop = min(max(before + part_numel, 0), numel)
        return segment.offset // count + min(max(-before, 0), part_numel), start, stop

    def _known(self, i: int) -> int:
        if not 0 <= i < len(self.shapes):
            raise ValueError(f"tensor {i}: the layout has {len(self.shapes)} tensors.")
        return i

    def _split(self, num_shards: int | None) -> int:
        if num_shards is None:
            return self.num_shards
        if num_shards < 1 or self.num_shards % num_shards:
            raise ValueError(
                f"num_shards={num_shards}: a coarser split has a number of shards that divides"
                f" the layout's {self.num_shards}."
            )
        return num_shards


@dataclass(frozen=True)
class RowRanges(Sequence[tuple[int, int]]):
    """The rows [start, stop) of one tensor by shard: as many ranges as shards, in five numbers.

    A rank knows where the rows of thousands of tensors lie on thousands of ranks.

    Args:
        row_count: rows of the tensor; a 0-D tensor has one.
        row_numel: elements of a row.
        num_shards: of the split.
        shard_numel: elements of a shard of the tensor's segment.
        offset: of the tensor's first element in its segment.
    """

    row_count: int
    row_numel: int
    num_shards: int
    shard_numel: int
    offset: int

    def __len__(self) -> int:
        return self.num_shards

    @overload
    def __getitem__(self, rank: int) -> tuple[int, int]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[tuple[int, int]]: ...
    def __getitem__(self, rank: int | slice) -> tuple[int, int] | list[tuple[int, int]]:
        if isinstance(rank, slice):
            return [self._range(each) for each in range(*rank.indices(self.num_shards))]
        if not -self.num_shards <= rank < self.num_shards:
            raise IndexError(f"rank {rank} of {self.num_shards} shards")
        return self._range(rank % self.num_shards)

    def _range(self, rank: int) -> tuple[int, int]:
        numel = self.row_count * self.row_numel
        if not numel:
            return (0 if rank == 0 else self.row_count), self.row_count
        before = rank * self.shard_numel - self.offset
        start = min(max(before, 0), numel)
        stop = min(max(before + self.shard_numel, 0), numel)
        return start // self.row_numel, stop // self.row_numel


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collections while many objects are made, all of which are kept: they would look at
    each of them again and again, for half of the time that 100,000 tensors take."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _checked_shape(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError as error:
        raise ValueError(f"shape {index} is {shape!r}; give a sequence of integers.") from error
    if sizes and min(sizes) < 0:
        raise ValueError(f"shape {index} is {sizes}; sizes are 0 or more.")
    return sizes


def _at_least(minimum: int, value: object, what: str) -> int:
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError as error:
        raise ValueError(f"{what} is {value!r}; give an integer.") from error
    if number < minimum:
        raise ValueError(f"{what} is {number}; it is at least {minimum}.")
    return number


def _block_numels(
    shapes: Sequence[tuple[int, ...]],
    numels: Sequence[int],
    granularity: int | Granularity | Sequence[int | Granularity],
) -> list[int]:
    """Return for each tensor how many elements no shard boundary separates, 0 if it is empty."""
    if not isinstance(granularity, Sequence):
        block_rows = [_block_rows(granularity, "granularity")] * len(shapes)
    elif len(granularity) == len(shapes):
        block_rows = [
            _block_rows(entry, f"granularity of tensor {index}")
            for index, entry in enumerate(granularity)
        ]
    else:
        raise ValueError(
            f"granularity has {len(granularity)} entries for {len(shapes)} tensors; give one for"
            " all, or one per tensor."
        )
    return [
        numel if rows is None or not shape or rows >= shape[0] else rows * (numel // shape[0])
        for shape, numel, rows in zip(shapes, numels, block_rows, strict=True)
    ]


def _block_rows(granularity: int | Granularity, what: str) -> int | None:
    """Return the rows of a block, None for all of them."""
    return None if granularity is WHOLE_TENSOR else _at_least(1, granularity, what)
