"""Distributed checkpoints of sharded tensors, read under other splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sharded_layouts import (
    LAYOUTS,
    differs,
    mesh_of,
    shard,
    whole,
)
from torch import Tensor, nn

from polyshard.sharded_tensor import ShardedTensor
from polyshard.testing import run_ranks


def checkpointed(layout: str, fill: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    mesh = mesh_of(layout)
    counts = LAYOUTS[layout][3]
    first = tuple(int(index == 0) for index in range(len(counts)))
    none = (0,) * len(counts)
    wide = torch.arange(12.0).reshape(6, 2)
    return {
        "weight": shard(fill(wide), layout, mesh),
        "half": shard(fill(wide).bfloat16(), layout, mesh),
        "number": shard(fill(torch.tensor(3.0)), layout, mesh, row_counts=first),
        "row": shard(fill(torch.ones(1, 4)), layout, mesh, row_counts=first),
        "no_rows": shard(fill(torch.ones(0, 4)), layout, mesh, row_counts=none),
        "plain": fill(torch.ones(3)),
        "parameter": nn.Parameter(shard(fill(wide), layout, mesh)),
    }


def save(rank: int, layout: str, path: str) -> None:
    dcp.save(checkpointed(layout, lambda full: full), checkpoint_id=path)


def load(rank: int, layout: str, path: str) -> list[str]:
    state = checkpointed(layout, torch.zeros_like)
    epochs = {name: t.epoch for name, t in state.items() if isinstance(t, ShardedTensor)}
    dcp.load(state, checkpoint_id=path)
    wrong = [
        f"{name}: {difference}"
        for name, expected in checkpointed(layout, lambda full: full).items()
        if (difference := differs(whole(state[name]), whole(expected)))
    ]
    if state["weight"].to_local().numel() and state["weight"].epoch <= epochs["weight"]:
        wrong.append("loaded unseen")
    return wrong


@pytest.mark.behaviour(33)
@pytest.mark.parametrize("target", ["last_empty", "replicated", "both_axes", "one_of_four"])
@pytest.mark.parametrize("source", ["uneven", "hybrid", "permuted"])
def test_checkpoints_move_between_splits(source: str, target: str, tmp_path: Path) -> None:
    """What one split saved is loaded under another, on another number of ranks."""
    run_ranks(LAYOUTS[source][0], save, source, str(tmp_path))
    ranks = LAYOUTS[target][0]
    assert run_ranks(ranks, load, target, str(tmp_path)) == [[]] * ranks
