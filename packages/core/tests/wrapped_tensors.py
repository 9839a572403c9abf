"""Sharded tensors over one rank, for tests."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyshard.row_split import RowSplit
from polyshard.sharded_tensor import ShardedTensor

aten = torch.ops.aten
row_counts = st.lists(st.integers(0, 5), min_size=1, max_size=8)


def split_of(counts: list[int], axes: tuple[int, ...] = (0,)) -> RowSplit:
    return RowSplit(list(pairwise([0, *accumulate(counts)])), axes)


def wrap(full: Tensor, mesh: DeviceMesh, name: str = "weight", **given: Any) -> ShardedTensor:
    split = split_of([full.shape[0] if full.dim() else 1])
    return ShardedTensor.wrap(
        full, shape=full.shape, mesh=mesh, placements=[split], name=name, **given
    )
