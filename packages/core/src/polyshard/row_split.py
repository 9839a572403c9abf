"""Owns where the rows of a tensor lie: the placement that says so, and what it means on this rank.

Knows no tensor storage and no collectives. A tensor's rows (indices of dim 0) are spread unevenly
over the shards of a flat buffer, and some shards hold none; PyTorch's ``Shard(0)`` cannot say that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .errors import PlacementError, UnsupportedError
from .layout import RowRanges

Rows = tuple[int, int]


class RowSplit(Shard):
    """Rows of dim 0, cut where a flat buffer was cut.

    Args:
        ranges: rows ``[start, stop)`` by shard index. Together they cover every row once, in
            order; a shard that holds none has ``start == stop``. A 0-D tensor counts as one row.
        axis_order: the mesh axes the rows are spread over, from slowest to fastest in the shard
            index: with ``(1, 0)`` the index is ``coordinate[1] * size(0) + coordinate[0]``. Each
            of these axes carries this same placement.

    Equal to PyTorch's ``Shard(0)``, because ``DTensorSpec`` accepts nothing else on dim 0, and to
    splits with the same rows and axes; different from every other split. The hash includes the
    rows, so it differs from that of ``Shard(0)``: never mix the two as keys of one dict.

    Raises:
        PlacementError: ranges that overlap, leave rows out or run backwards; repeated axes.
    """

    ranges: Sequence[Rows]
    axis_order: tuple[int, ...]

    def __init__(self, ranges: Sequence[Rows], axis_order: Sequence[int]) -> None:
        super().__init__(0)
        # Those of a layout cover every row once by construction, and are not worth writing out.
        self.ranges = ranges if isinstance(ranges, RowRanges) else _normalised(ranges)
        axes = tuple(axis_order)
        if not self.ranges or len(set(axes)) != len(axes) or min(axes, default=0) < 0:
            raise PlacementError(
                f"a row split needs ranges and distinct, non-negative mesh axes; got "
                f"{len(self.ranges)} ranges over axes {axes}."
            )
        self.axis_order = axes
        some_rows = (len(self.ranges), self.ranges[-1], self.ranges[len(self.ranges) // 2])
        self._hash = hash((RowSplit, some_rows, self.axis_order))

    @property
    def row_count(self) -> int:
        """Rows of the whole tensor."""
        return self.ranges[-1][1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowSplit):
            if self._hash != other._hash or self.axis_order != other.axis_order:
                return False
            return self.ranges == other.ranges or tuple(self.ranges) == tuple(other.ranges)
        return type(other) is Shard and other.dim == 0

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[RowSplit], tuple[Any, ...]]:
        return (RowSplit, (self.ranges, self.axis_order))

    def __repr__(self) -> str:
        rows = ", ".join(f"{start}:{stop}" for start, stop in self.ranges)
        return f"RowSplit([{rows}], axis_order={self.axis_order})"

    __str__ = __repr__

    def _local_shard_size_and_offset(  # type: ignore[override]
        self, curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """What PyTorch's own shape arithmetic asks of a placement, one axis at a time."""
        if len(self.axis_order) == 1 and curr_local_size == self.row_count:
            start, stop = self.ranges[rank]
            return stop - start, start
        _refuse_plain_dtensor(self)


def _normalised(ranges: Sequence[Rows]) -> tuple[Rows, ...]:
    cursor = 0
    normalised: list[Rows] = []
    for index, (start, stop) in enumerate(ranges):
        if stop < start or (start != stop and start != cursor):
            raise PlacementError(
                f"shard {index} holds rows [{start}, {stop}) but the shards before it end at "
                f"row {cursor}; give ranges that cover every row once, in order."
            )
        cursor = max(cursor, stop) if start != stop else cursor
        normalised.append((cursor, cursor) if start == stop else (start, stop))
    return tuple(normalised)


def _refuse_plain_dtensor(split: RowSplit, *args: object, **kwargs: object) -> NoReturn:
    raise UnsupportedError(
        f"PyTorch's DTensor cannot carry {split}: it would cut and gather as if every rank held "
        "an equal chunk. Use ShardedTensor.wrap, or full_tensor() and distribute the result anew."
    )


# A plain DTensor that was given this placement (``DTensor.from_local(x, mesh, p.placements)``,
# ``distribute_tensor``) would move rows by chunk arithmetic. Every step by which it could do so
# refuses; left out is only what moves nothing.
for _step in (
    "_split_tensor",
    "_select_split_tensor",
    "_shard_tensor",
    "_reduce_shard_tensor",
    "_maybe_pad_tensor",
    "_maybe_unpad_tensor",
    "_to_replicate_tensor",
    "_replicate_to_shard",
    "_to_new_shard_dim",
):
    setattr(RowSplit, _step, _refuse_plain_dtensor)


class Geometry:
    """The resolved placement of one tensor on one mesh, as this rank sees it.

    Made by :meth:`of`, which hands out one object per (mesh, shape, placements): two tensors lie
    alike exactly when their geometries are the same object, which makes the check one pointer
    comparison on every operation.

    Attributes:
        shape: of the whole tensor.
        part_shape, part_offset: what other parallelism leaves of it to this rank, and where in the
            whole that begins: the chunk of every axis placed as PyTorch's own ``Shard``.
        split: the row split of the part, or None where all its rows are here.
        rows: ``(start, stop)`` of this rank, in the part.
        local_shape: ``(stop - start, *part_shape[1:])`` of a split tensor, else ``part_shape``. A
            split 0-D tensor has local shape ``(1,)`` on its owner and ``(0,)`` elsewhere.
        spread_axes: mesh axes whose ranks hold different elements, slowest first.
        is_whole: every rank holds all elements.
        is_partial: the value is a sum or an average over some axis that was not taken yet.
    """

    __slots__ = (
        "__weakref__",
        "_members",
        "_specs",
        "is_partial",
        "is_whole",
        "local_shape",
        "mesh",
        "part_offset",
        "part_shape",
        "placements",
        "rows",
        "shape",
        "split",
        "spread_axes",
    )

    _known: ClassVar[WeakValueDictionary[tuple[object, ...], Geometry]] = WeakValueDictionary()

    def __init__(
        self, shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> None:
        self.shape, self.mesh, self.placements = shape, mesh, placements
        self.split = next((p for p in placements if isinstance(p, RowSplit)), None)
        self.is_partial = any(isinstance(p, Partial) for p in placements)
        chunked = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
        self.part_shape, self.part_offset = _part(shape, mesh, placements, chunked)
        split_axes = () if self.split is None else self.split.axis_order
        self.spread_axes = (*chunked, *split_axes)
        self.is_whole = not self.spread_axes
        self._specs: dict[torch.dtype, DTensorSpec] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        if self.split is None:
            self.rows = (0, shape[0] if shape else 1)
            self.local_shape = self.part_shape
        else:
            self.rows = self.split.ranges[self.shard_index]
            self.local_shape = torch.Size((self.rows[1] - self.rows[0], *self.part_shape[1:]))

    @classmethod
    def of(
        cls, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> Geometry:
        """The geometry of these values, checked.

        Raises:
            PlacementError: naming the axis and what it would accept; a rank outside the mesh.
        """
        # By type as well: a plain Shard(0) equals any split (see RowSplit).
        key = (mesh, torch.Size(shape), tuple((type(p), p) for p in placements))
        known = cls._known.get(key)
        # Meshes compare by ranks and names; one that outlived its process groups is another mesh.
        if known is None or not (known.mesh is mesh or _same_groups(known.mesh, mesh)):
            for axis, placement in enumerate(placements):
                _check_axis(axis, placement)
            _check_whole(mesh, key[1], tuple(placements))
            known = cls._known[key] = cls(key[1], mesh, tuple(placements))
        return known

    def with_shape(self, shape: Sequence[int]) -> Geometry:
        """The same rows of a tensor whose other dims differ."""
        return Geometry.of(shape, self.mesh, self.placements)

    def local_of(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor: a view."""
        part = whole
        for dim, (offset, length) in enumerate(zip(self.part_offset, self.part_shape, strict=True)):
            part = part.narrow(dim, offset, length)
        if self.split is None:
            return part
        start, stop = self.rows
        return (part if self.shape else part.reshape(1))[start:stop]

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """What DTensor keeps beside the local tensor; one object per dtype, never modified."""
        spec = self._specs.get(dtype)
        if spec is None:
            strides = [1] * len(self.shape)
            for dim in range(len(self.shape) - 2, -1, -1):
                strides[dim] = strides[dim + 1] * max(self.shape[dim + 1], 1)
            meta = TensorMeta(self.shape, tuple(strides), dtype)
            spec = self._specs[dtype] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return spec

    @property
    def shard_index(self) -> int:
        """This rank's index into the ranges of the split."""
        assert self.split is not None
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        index = 0
        for axis in self.split.axis_order:
            index = index * self.mesh.size(axis) + coordinate[axis]
        return index

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def members(self, axis: int) -> tuple[int, ...]:
        """Global ranks along a mesh axis through this rank, by coordinate."""
        if axis not in self._members:
            coordinate = self.mesh.get_coordinate()
            assert coordinate is not None
            line = tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))
            self._members[axis] = tuple(self.mesh.mesh[line].tolist())
        return self._members[axis]

    def block_rows(self, axis: int) -> list[int]:
        """Rows each member of a split axis holds once all faster axes have been gathered.

        The blocks follow each other, because shard indices along the axis do.
        """
        assert self.split is not None
        order = self.split.axis_order
        position = order.index(axis)
        width = math.prod(self.mesh.size(a) for a in order[position + 1 :])
        size = self.mesh.size(axis)
        base = self.shard_index // (width * size) * (width * size)
        edges = [self.split.ranges[base + j * width : base + (j + 1) * width] for j in range(size)]
        return [block[-1][1] - block[0][0] for block in edges]


def _part(
    shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...], chunked: Sequence[int]
) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and offset of the chunk that plain ``Shard`` placements leave, as torch.chunk cuts."""
    lengths, offsets = list(shape), [0] * len(shape)
    for axis in chunked:
        dim, size, at = placements[axis].dim, mesh.size(axis), mesh.get_local_rank(axis)  # type: ignore[attr-defined]
        step = -(-lengths[dim] // size)
        start = min(at * step, lengths[dim])
        offsets[dim] += start
        lengths[dim] = min(step, lengths[dim] - start)
    return torch.Size(lengths), tuple(offsets)


def _same_groups(one: DeviceMesh, other: DeviceMesh) -> bool:
    try:
        return all(one.get_group(a) is other.get_group(a) for a in range(one.ndim))
    except (RuntimeError, ValueError, KeyError):
        return False


def _check_axis(axis: int, placement: object) -> None:
    if isinstance(placement, Partial):
        if placement.reduce_op not in ("sum", "avg"):
            raise PlacementError(
                f"mesh axis {axis} is {placement}; a sharded tensor is summed or averaged, use "
                "Partial('sum') or Partial('avg')."
            )
    elif not (isinstance(placement, RowSplit | Replicate) or type(placement) is Shard):
        raise PlacementError(
            f"mesh axis {axis} is {placement!r}; use RowSplit, which knows the rows of every rank, "
            "or PyTorch's Replicate, Partial or Shard, whose chunks are equal but for the last."
        )


def _check_whole(mesh: DeviceMesh, shape: torch.Size, placements: tuple[Placement, ...]) -> None:
    if mesh.get_coordinate() is None:
        raise PlacementError(f"this rank is not part of {mesh}; wrap on the mesh's own ranks only.")
    if len(placements) != mesh.ndim:
        raise PlacementError(
            f"got {len(placements)} placements for a mesh of {mesh.ndim} axes; give one per axis."
        )
    for axis, placement in enumerate(placements):
        if type(placement) is Shard and not -len(shape) <= placement.dim < len(shape):
            raise PlacementError(
                f"mesh axis {axis} is {placement}, but the tensor has shape {tuple(shape)}."
            )
    chunked = [axis for axis, placement in enumerate(placements) if type(placement) is Shard]
    part, _ = _part(shape, mesh, placements, chunked)
    splits = {axis: p for axis, p in enumerate(placements) if isinstance(p, RowSplit)}
    for axis, split in splits.items():
        row_count = part[0] if part else 1
        shards = math.prod(mesh.size(a) if a < mesh.ndim else 0 for a in split.axis_order)
        if any(other != split for other in splits.values()) or set(split.axis_order) != set(splits):
            raise PlacementError(
                f"mesh axis {axis} is {split}, but the axes that carry a row split are "
                f"{sorted(splits)}; give every axis of axis_order the same split, and no other."
            )
        if len(split.ranges) != shards or split.row_count != row_count:
            raise PlacementError(
                f"mesh axis {axis} is {split}: {len(split.ranges)} shards of {split.row_count} "
                f"rows, for {shards} ranks and a tensor of {row_count} rows (shape "
                f"{tuple(part)})."
            )
