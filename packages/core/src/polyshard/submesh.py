"""Meshes that are made of axes of other meshes, and what lies on them under other parallelism.

Knows process groups and PyTorch's DTensor; no buffers, no modules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def submesh(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """The mesh of these axes, in the mesh's own order, through this rank; local.

    It has the process groups of ``mesh``. Axes without names are called ``axis0``, ``axis1``, ...
    by their index in ``mesh``.
    """
    chosen = sorted(axes)
    if len(chosen) == mesh.ndim:
        return mesh
    through = tuple(
        slice(None) if axis in chosen else at for axis, at in enumerate(_coordinate(mesh))
    )
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    groups = [mesh.get_group(axis) for axis in chosen]
    return DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else groups,
        mesh.device_type,
        mesh=mesh.mesh[through],
        mesh_dim_names=tuple(names[axis] for axis in chosen),
    )


def ranks_along(mesh: DeviceMesh, axis: int) -> tuple[int, ...]:
    """The global ranks along one axis through this rank, by coordinate."""
    line = tuple(slice(None) if a == axis else c for a, c in enumerate(_coordinate(mesh)))
    return tuple(mesh.mesh[line].tolist())


def joined(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """The mesh whose axes are those of ``mesh``, then those of ``other``, through this rank.

    Collective over the axes of ``mesh``. It has the process groups of both, which share no rank
    but this one (see :func:`shared_ranks`).
    """
    ranks: object = other.mesh.tolist()
    for axis in reversed(range(mesh.ndim)):
        gathered: list[object] = [None] * mesh.size(axis)
        dist.all_gather_object(gathered, ranks, group=mesh.get_group(axis))
        # A group numbers its ranks in ascending order, a mesh as its ranks were given.
        numbers = dist.get_process_group_ranks(mesh.get_group(axis))
        ranks = [gathered[numbers.index(rank)] for rank in ranks_along(mesh, axis)]
    names = [*(mesh.mesh_dim_names or (f"axis{axis}" for axis in range(mesh.ndim)))]
    for axis in range(other.ndim):
        name = (other.mesh_dim_names or ())[axis] if other.mesh_dim_names else f"other{axis}"
        names.append(name if name not in names else f"{name}_{len(names)}")
    return DeviceMesh.from_group(
        [*mesh.get_all_groups(), *other.get_all_groups()],
        mesh.device_type,
        mesh=torch.tensor(ranks),
        mesh_dim_names=tuple(names),
    )


def distributed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor of a contiguous whole of ``shape``, over what this rank holds of it; local."""
    result: DTensor = DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return result


def shared_ranks(mesh: DeviceMesh, other: DeviceMesh) -> list[int]:
    """Ranks that are on both meshes, if this one is not alone there."""
    shared = set(mesh.mesh.flatten().tolist()) & set(other.mesh.flatten().tolist())
    return sorted(shared) if shared - {dist.get_rank()} else []


def _coordinate(mesh: DeviceMesh) -> list[int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return list(coordinate)
