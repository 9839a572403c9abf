"""The placements that multi-rank tests train with: every preset, and mixes that have no name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from training import make_mesh

from polyshard import Flat, Partial, Placements, Replicate

AXES = ("outer", "middle", "inner")


@dataclass(frozen=True)
class Strategy:
    """Placements, and the meshes they are made for."""

    placements: Placements

    def mesh(self, shape: Sequence[int] | None = None, *, device_type: str = "cpu") -> DeviceMesh:
        """All ranks, with the axes that the placements name; by default all on the outermost."""
        return mesh_for(self.placements, shape, device_type=device_type)


def mesh_for(
    placements: Placements, shape: Sequence[int] | None = None, *, device_type: str = "cpu"
) -> DeviceMesh:
    """All ranks, with the axes that the placements name; by default all on the outermost."""
    outermost = (dist.get_world_size(), *(1 for _ in placements.dp_axes[1:]))
    return make_mesh(shape or outermost, placements.dp_axes, device_type=device_type)


def _mix(parameter: str, gradient: str, optimizer: str) -> Placements:
    letters = {"R": Replicate(), "F": Flat(), "P": Partial()}
    axes = ("outer", "inner") if len(parameter) == 2 else AXES
    return Placements(
        axes, *([letters[letter] for letter in each] for each in (parameter, gradient, optimizer))
    )


STRATEGIES = {
    "ddp": Strategy(Placements.ddp("dp")),
    "zero1": Strategy(Placements.zero1("dp")),
    "zero2": Strategy(Placements.zero2("dp")),
    "zero3": Strategy(Placements.zero3("dp")),
    "hsdp": Strategy(Placements.hsdp("outer", "inner")),
    "hfsdp": Strategy(Placements.hfsdp("outer", "inner")),
    # Gradients are sharded where weights are not, and finished over the outer axis at last.
    "once": Strategy(_mix("RR", "PF", "FF")),
    # Reduced over every axis in every microbatch, and kept whole on one of them.
    "early": Strategy(_mix("RF", "RF", "FF")),
    # Reduced over the inner axis in every microbatch, over the outer one at last, then sliced.
    "sliced": Strategy(_mix("RR", "PR", "FF")),
    "three-axes": Strategy(_mix("RRF", "PFF", "FFF")),
}
