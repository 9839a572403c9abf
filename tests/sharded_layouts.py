"""Where the rows of a tensor lie on two and four ranks, and how results are compared."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    Partial,
    Placement,
    Replicate,
)

from polyshard.row_split import RowSplit
from polyshard.sharded_tensor import ShardedTensor

aten = torch.ops.aten

# name: (ranks, mesh, axes from slowest to fastest, rows by shard index). Axes that are not named
# are replicated. The permuted mesh numbers its ranks otherwise than its process groups do.
Layout = tuple[int, list[Any], tuple[int, ...], tuple[int, ...]]
LAYOUTS: dict[str, Layout] = {
    "uneven": (2, [0, 1], (0,), (4, 2)),
    "first_empty": (2, [0, 1], (0,), (0, 6)),
    "last_empty": (2, [0, 1], (0,), (6, 0)),
    "replicated": (2, [0, 1], (), (6,)),
    "uneven_four": (4, [0, 1, 2, 3], (0,), (2, 0, 3, 1)),
    "one_of_four": (4, [0, 1, 2, 3], (0,), (0, 0, 6, 0)),
    "hybrid": (4, [[0, 1], [2, 3]], (1,), (5, 1)),
    "both_axes": (4, [[0, 1], [2, 3]], (1, 0), (1, 3, 0, 2)),
    "permuted": (4, [[3, 1], [0, 2]], (1, 0), (1, 3, 0, 2)),
}


def on_world(size: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout[0] == size]


def mesh_of(layout: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(LAYOUTS[layout][1]))


def placements_of(layout: str, row_counts: tuple[int, ...] | None = None) -> list[Placement]:
    _, ranks, order, counts = LAYOUTS[layout]
    edges = [0, *accumulate(row_counts or counts)]
    placements: list[Placement] = [Replicate()] * torch.tensor(ranks).ndim
    for axis in order:
        placements[axis] = RowSplit(list(pairwise(edges)), order)
    return placements


def shard(
    full: Tensor,
    layout: str,
    mesh: DeviceMesh,
    name: str = "weight",
    row_counts: tuple[int, ...] | None = None,
) -> ShardedTensor:
    placements = placements_of(layout, row_counts)
    split = next((p for p in placements if isinstance(p, RowSplit)), None)
    rows = full.reshape(1) if full.dim() == 0 and split is not None else full
    if split is not None:
        index = 0
        for axis in split.axis_order:
            index = index * mesh.size(axis) + mesh.get_coordinate()[axis]
        rows = rows[slice(*split.ranges[index])]
    return ShardedTensor.wrap(
        rows.clone(), shape=full.shape, mesh=mesh, placements=placements, name=name
    )


def whole(value: Any) -> Any:
    """Results with every sharded tensor replaced by its full tensor."""
    if isinstance(value, ShardedTensor):
        return value.full_tensor()
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    return value


def differs(got: Any, expected: Any) -> str | None:
    """How a result differs from the expected whole: of a sharded tensor, this rank's rows."""
    if isinstance(got, list | tuple):
        if not isinstance(expected, list | tuple) or len(got) != len(expected):
            return f"{got} is not like {expected}"
        pairs = zip(got, expected, strict=True)
        return next((d for one, other in pairs if (d := differs(one, other))), None)
    if isinstance(got, ShardedTensor):
        if type(expected) is not Tensor or got.shape != expected.shape:
            return f"{got} is not like {expected}"
        if any(isinstance(placement, Partial) for placement in got.placements):
            got = got.full_tensor()
        else:
            if got.row_split is not None:
                expected = expected.reshape(1) if expected.dim() == 0 else expected
                expected = expected[slice(*got.rows)]
            got = got.to_local()
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None
