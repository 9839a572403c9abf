"""DBuffer: a flat buffer of many tensors, spread over mesh axes. Owns views and redistribution.

Knows layouts, placements and collectives; knows no modules, no lanes and no schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from .layout import GlobalLayout
from .placements import Flat, Partial, Placement, Replicate
from .spi import Buffer, Communicator, Op


@dataclass(frozen=True)
class ShardGrid:
    """Where this rank stands among the dp axes, and the order in which axes split a buffer.

    Args:
        sizes: ranks along each dp axis.
        coordinates: this rank's place along each.
        order: positions of the axes that split, slowest in the shard index first. Every placement
            used with the grid is ``Flat`` on a prefix of it, so that each coarser shard is one
            contiguous run of finer ones.
    """

    sizes: tuple[int, ...]
    coordinates: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def num_shards(self) -> int:
        """Shards of the finest split."""
        return prod(self.sizes[axis] for axis in self.order)

    def split_axes(self, placements: Sequence[Placement]) -> tuple[int, ...]:
        """The axes ``placements`` are Flat on, slowest first: a prefix of ``order``."""
        axes = tuple(axis for axis in self.order if isinstance(placements[axis], Flat))
        assert axes == self.order[: len(axes)], (placements, self.order)
        return axes

    def shard(self, placements: Sequence[Placement]) -> tuple[int, int]:
        """(number of shards, index of this rank's) under ``placements``."""
        count, index = 1, 0
        for axis in self.split_axes(placements):
            count *= self.sizes[axis]
            index = index * self.sizes[axis] + self.coordinates[axis]
        return count, index


class StepKind(Enum):
    """One move along one axis."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    SLICE = "slice"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True)
class Step:
    """One move of a redistribution: what, along which dp axis, and how contributions combine."""

    kind: StepKind
    axis: int
    op: Op = Op.AVG


@lru_cache(maxsize=1024)
def plan_steps(
    source: tuple[Placement, ...], target: tuple[Placement, ...], order: tuple[int, ...]
) -> tuple[Step, ...]:
    """The moves from ``source`` to ``target`` placements: pure, the same on every rank.

    Splitting moves come first, slowest axis first, so that all-reduces and gathers move the
    least. Raises ValueError where a value would have to become Partial.
    """
    steps: list[Step] = []
    for axis in order:
        before, after = source[axis], target[axis]
        if isinstance(after, Flat) and isinstance(before, Partial):
            steps.append(Step(StepKind.REDUCE_SCATTER, axis, Op(before.reduce_op)))
        elif isinstance(after, Flat) and isinstance(before, Replicate):
            steps.append(Step(StepKind.SLICE, axis))
    for axis, (before, after) in enumerate(zip(source, target, strict=True)):
        if isinstance(before, Partial) and isinstance(after, Replicate):
            steps.append(Step(StepKind.ALL_REDUCE, axis, Op(before.reduce_op)))
        elif isinstance(after, Partial) and before != after:
            raise ValueError(f"axis {axis}: cannot turn {before} into {after}.")
    for axis in reversed(order):
        if isinstance(source[axis], Flat) and isinstance(target[axis], Replicate):
            steps.append(Step(StepKind.ALL_GATHER, axis))
    return tuple(steps)


class Spread:
    """How the tensors of a layout lie on this rank under some placements.

    Shared by all buffers so placed: gradients get a new buffer in every step, and nothing here
    changes from one to the next.
    """

    def __init__(
        self, layout: GlobalLayout, grid: ShardGrid, placements: Sequence[Placement]
    ) -> None:
        self.layout, self.grid, self.placements = layout, grid, tuple(placements)
        count, index = grid.shard(self.placements)
        self.num_shards = count
        self.numel = layout.local_numel(num_shards=count)
        self.piece_numels = [segment.numel // count for segment in layout.segments]
        self.rows: list[tuple[int, int]] = []
        self.regions: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        for tensor, whole in enumerate(layout.shapes):
            start, stop = rows = layout.local_range(index, tensor, num_shards=count)
            shape = tuple(whole) if count == 1 else (stop - start, *whole[1:])
            strides = tuple(max(1, prod(shape[dim + 1 :])) for dim in range(len(shape)))
            offset = layout.local_offset(index, tensor, num_shards=count)
            self.rows.append(rows)
            self.regions.append((shape, strides, offset))


class Spreads:
    """The spreads of one layout and grid, by placements."""

    def __init__(self, layout: GlobalLayout, grid: ShardGrid) -> None:
        self.layout, self.grid = layout, grid
        self._known: dict[tuple[Placement, ...], Spread] = {}

    def of(self, placements: Sequence[Placement]) -> Spread:
        """The spread under ``placements``; made once."""
        key = tuple(placements)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Spread(self.layout, self.grid, key)
        return known


class DBuffer:
    """One rank's part of a flat buffer: a layout, a placement per dp axis, and storage.

    The storage holds, segment after segment, this rank's run of each.
    """

    def __init__(
        self,
        layout: GlobalLayout,
        grid: ShardGrid,
        placements: Sequence[Placement],
        storage: Buffer,
    ) -> None:
        self._lay(Spread(layout, grid, placements), storage)

    @classmethod
    def over(cls, spread: Spread, storage: Buffer) -> DBuffer:
        """A buffer that shares what depends on its placements only."""
        buffer = cls.__new__(cls)
        buffer._lay(spread, storage)
        return buffer

    def _lay(self, spread: Spread, storage: Buffer) -> None:
        assert storage.tensor.numel() == spread.numel
        self.spread, self.storage = spread, storage
        self.layout, self.grid, self.placements = spread.layout, spread.grid, spread.placements
        self.num_shards = spread.num_shards

    @property
    def flat(self) -> Tensor:
        """The whole local storage, 1-D."""
        return self.storage.tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.tensor.dtype

    @cached_property
    def pieces(self) -> tuple[Tensor, ...]:
        """This rank's run of each segment. First asked for while the storage has its memory:
        PyTorch makes no views of storage that has none."""
        lengths = self.spread.piece_numels
        if len(lengths) == 1:
            return (self.flat,)
        return torch.split(self.flat, lengths) if lengths else ()

    def rows(self, index: int) -> tuple[int, int]:
        """Rows [start, stop) of tensor ``index`` that lie here."""
        return self.spread.rows[index]

    def view(self, index: int) -> Tensor:
        """This rank's rows of tensor ``index``, shape (rows, *rest), sharing the storage.

        Unsplit buffers give the tensor in its own shape; split 0-D tensors have one row.
        """
        return self.flat.as_strided(*self.spread.regions[index])

    def redistribute(
        self,
        target: DBuffer,
        communicators: Mapping[int, Communicator],
        *,
        label: str,
        counts: Tensor | None = None,
    ) -> list[Tensor]:
        """Move this buffer's value into ``target``; runs inside submitted work.

        Reductions and slices narrow in place, so a source that is Partial is used up. A cast, where
        dtypes differ, happens on the smaller side.

        Args:
            target: a buffer of the same layout and grid.
            communicators: by dp axis.
            label: for errors.
            counts: one number per tensor, of this buffer's dtype, reduced alongside in the same
                launches.

        Returns:
            Tensors made here that peers may read until the communicators were settled.
        """
        lent: list[Tensor] = []
        steps = plan_steps(self.placements, target.placements, self.grid.order)
        pieces: Sequence[Tensor] = self.pieces
        last_scatter = _last(steps, StepKind.REDUCE_SCATTER) if self.dtype == target.dtype else -1
        for position, step in enumerate(steps):
            if step.kind is StepKind.ALL_GATHER:
                break
            size, coordinate = self.grid.sizes[step.axis], self.grid.coordinates[step.axis]
            if step.kind is StepKind.SLICE:
                pieces = narrow(pieces, size, coordinate)
                continue
            communicator = communicators[step.axis]
            if step.kind is StepKind.ALL_REDUCE:
                riders = [] if counts is None else [counts]
                communicator.all_reduce([*pieces, *riders], step.op, label=label)
            else:
                # The last split writes to its destination at once, unless more is to follow.
                final = position == last_scatter == len(steps) - 1
                outputs = target.pieces if final else narrow(pieces, size, coordinate)
                if counts is None:
                    communicator.reduce_scatter(outputs, pieces, step.op, label=label)
                else:
                    # Every rank wants the sum of the counts: each slot carries all of them.
                    lent.append(counts.repeat(size))
                    communicator.reduce_scatter(
                        [*outputs, counts], [*pieces, lent[-1]], step.op, label=label
                    )
                pieces = outputs
        self._gather(pieces, steps, target, communicators, label)
        return lent

    def _gather(
        self,
        pieces: Sequence[Tensor],
        steps: Sequence[Step],
        target: DBuffer,
        communicators: Mapping[int, Communicator],
        label: str,
    ) -> None:
        gathers = [step for step in steps if step.kind is StepKind.ALL_GATHER]
        # Destinations, from the whole target down to this rank's finest run in it.
        slots = [target.pieces]
        for step in reversed(gathers):
            axis = step.axis
            size, coordinate = self.grid.sizes[axis], self.grid.coordinates[axis]
            slots.append(narrow(slots[-1], size, coordinate))
        if not gathers or self.dtype != target.dtype:
            for slot, piece in zip(slots[-1], pieces, strict=True):
                if slot.data_ptr() != piece.data_ptr() or slot.dtype != piece.dtype:
                    slot.copy_(piece)
            pieces = slots[-1]
        for step, outputs in zip(gathers, reversed(slots[:-1]), strict=True):
            communicators[step.axis].all_gather(outputs, pieces, label=label)
            pieces = outputs

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Runs [start, stop) of a replicated buffer that belong to no tensor."""
        assert self.num_shards == 1
        position = 0
        sizes = [prod(shape) for shape in self.layout.shapes]
        for segment in self.layout.segments:
            for index in segment.tensors:
                start = self.layout.offset(index)
                if start > position:
                    yield position, start
                position = max(position, start + sizes[index])
        if position < self.layout.padded_numel:
            yield position, self.layout.padded_numel


def narrow(pieces: Sequence[Tensor], size: int, coordinate: int) -> tuple[Tensor, ...]:
    """Part ``coordinate`` of ``size`` equal parts of every piece."""
    if size == 1:
        return tuple(pieces)
    narrowed = []
    for piece in pieces:
        length = piece.numel() // size
        narrowed.append(piece[coordinate * length : (coordinate + 1) * length])
    return tuple(narrowed)


def _last(steps: Sequence[Step], kind: StepKind) -> int:
    return max((i for i, step in enumerate(steps) if step.kind is kind), default=-1)
