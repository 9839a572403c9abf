"""Owns how a sharded tensor takes part in torch.distributed.checkpoint: one chunk of rows per rank.

Chunks carry absolute offsets, so a checkpoint can be read under any other split. DTensor's own way,
which goes axis by axis, cannot tell rows that are spread over several axes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .sharded_refusals import AFTER_LAST_MICROBATCH, INCOMPLETE, refuse

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor


def chunks(tensor: ShardedTensor) -> list[ChunkStorageMetadata]:
    """The rows this rank writes and reads: one chunk, or none where it holds no row."""
    geometry = tensor._geometry
    if geometry.is_partial:
        refuse(tensor, "a checkpoint of it", INCOMPLETE, AFTER_LAST_MICROBATCH)
    start, stop = geometry.rows
    if geometry.numel and 0 in geometry.local_shape:
        return []
    if geometry.split is not None and start == stop:
        # A tensor without rows is written once all the same, so that loading finds it.
        speaks_for_nothing = geometry.split.row_count == 0 and geometry.shard_index == 0
        if not speaks_for_nothing:
            return []
    if not geometry.shape:
        return [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
    first, *rest = geometry.part_offset
    return [ChunkStorageMetadata(torch.Size((first + start, *rest)), geometry.local_shape)]


def write_items(tensor: ShardedTensor, name: str) -> list[WriteItem]:
    """What this rank writes under ``name``."""
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks(tensor)
    ]
