"""Meshes that are made of axes of other meshes. Knows process groups; no buffers, no modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh


def submesh(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """The mesh of these axes, in the mesh's own order, through this rank; local.

    It has the process groups of ``mesh``. Axes without names are called ``axis0``, ``axis1``, ...
    by their index in ``mesh``.
    """
    chosen = sorted(axes)
    if len(chosen) == mesh.ndim:
        return mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    through = tuple(slice(None) if axis in chosen else at for axis, at in enumerate(coordinate))
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    groups = [mesh.get_group(axis) for axis in chosen]
    return DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else groups,
        mesh.device_type,
        mesh=mesh.mesh[through],
        mesh_dim_names=tuple(names[axis] for axis in chosen),
    )
