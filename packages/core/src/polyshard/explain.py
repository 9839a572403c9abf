"""What lies where, in numbers, in a table and in a picture: ``explain``.

Reads units, groups and layouts; changes nothing and needs no other rank.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torch import nn

from .context import unit_of
from .errors import UnsupportedError
from .explain_orders import explain_orders
from .explain_picture import picture as draw
from .explain_table import table
from .explained import (
    ExplainedGroup,
    ExplainedOrder,
    ExplainedSegment,
    ExplainedTensor,
    ExplainedUnit,
    HeldBytes,
    Holders,
    RowsByRank,
)
from .group import ParameterGroup
from .parameter import ManagedParameter, owner_of
from .placements import Partial, Placement
from .spi import Lifetime, Role
from .transport import Transport
from .unit import Unit


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found. ``print`` it for a table; notebooks show the picture too.

    Attributes:
        module_class: the name of the explained module's class.
        units: parents first.
        orders: of prefetching, one for each root.
        unmanaged: names of parameters that no unit has: they are as they were.
        owned_elsewhere: names of parameters of a unit outside of the explained module.
    """

    module_class: str
    units: tuple[ExplainedUnit, ...]
    orders: tuple[ExplainedOrder, ...]
    unmanaged: tuple[str, ...]
    owned_elsewhere: tuple[str, ...]

    @property
    def bytes(self) -> HeldBytes:
        """The sum over the units, as if all were gathered; `ExplainedOrder` tells how much is."""
        return sum((unit.bytes for unit in self.units), HeldBytes())

    def svg(self) -> str:
        """A picture of the flat buffers, coloured by tensor and rank: an SVG document."""
        return draw(self.module_class, self.units)

    def __str__(self) -> str:
        return table(
            self.module_class, self.units, self.orders, self.unmanaged, self.owned_elsewhere
        )

    def __repr__(self) -> str:
        groups = sum(len(unit.groups) for unit in self.units)
        return f"<Explanation of {self.module_class}: {len(self.units)} units, {groups} groups>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>{self.svg()}"


def explain(module: nn.Module, *, picture: str | os.PathLike[str] | None = None) -> Explanation:
    """What lies where: units, groups, segments, placements, dtypes, bytes, prefetch order.

    Local: any rank may call it alone, at any time, also inside a forward. Nothing is gathered,
    released or moved. Ranks and rows are those of this rank's data-parallel meshes.

    Args:
        module: a module with units, itself or below it.
        picture: a path ending in ``.svg`` to write the picture to; replaced if it exists, whole
            or not at all.

    Raises:
        UnsupportedError: no unit in ``module``.
        ValueError: a path that is not one of an SVG file in an existing folder.
        OSError: the file cannot be written. Whatever is raised, nothing was.
    """
    path = None if picture is None else _checked(picture)
    if not isinstance(module, nn.Module):
        raise UnsupportedError(f"explain takes a module, got {type(module).__name__}.")
    found = {
        unit: path for path, child in module.named_modules() if (unit := unit_of(child)) is not None
    }
    if not found:
        raise UnsupportedError(
            f"{type(module).__name__} has no units; call fully_shard before explain."
        )
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    units = tuple(
        _explained_unit(index, unit, path, names)
        for index, (unit, path) in enumerate(found.items())
    )
    managed = {
        id(face)
        for unit in found
        for parameter in unit.parameters
        for face in (parameter.full, parameter.sharded)
    }
    outside = [
        (name, parameter)
        for name, parameter in module.named_parameters()
        if id(parameter) not in managed
    ]
    result = Explanation(
        type(module).__name__,
        units,
        explain_orders(found),
        tuple(name for name, parameter in outside if owner_of(parameter) is None),
        tuple(name for name, parameter in outside if owner_of(parameter) is not None),
    )
    if path is not None:
        _write(path, result.svg())
    return result


# -- units, groups, segments, tensors -------------------------------------------------------------


def _explained_unit(
    index: int, unit: Unit, path: str, names: dict[int, list[str]]
) -> ExplainedUnit:
    module, transport = unit.module(), unit.transport
    axis_names = transport.mesh.mesh_dim_names
    axes = (
        axis_names[axis] if axis_names is not None else f"axis{axis}" for axis in transport.axes
    )
    return ExplainedUnit(
        index=index,
        name=path,
        module_class=type(module).__name__,
        backend=transport.backend.name,
        axes=tuple(zip(axes, transport.sizes, strict=True)),
        reshard_after_forward=unit.reshard_after_forward,
        schedule=unit.schedule,
        groups=tuple(
            _explained_group(place, group, path, names) for place, group in enumerate(unit.groups)
        ),
    )


def _explained_group(
    index: int, group: ParameterGroup, path: str, names: dict[int, list[str]]
) -> ExplainedGroup:
    layout, placements = group.layout, group.placements
    holders = _holders(group.transport, group, placements.optimizer)
    shard_of = {rank: shard for shard, ranks in enumerate(holders) for rank in ranks}
    segments = tuple(
        ExplainedSegment(
            index=segment.index,
            offset=segment.offset,
            numel=segment.numel,
            shard_numel=segment.shard_numel,
            tensors=tuple(
                _explained_tensor(place, group, shard_of, path, names) for place in segment.tensors
            ),
        )
        for segment in layout.segments
    )
    return ExplainedGroup(
        index=index,
        placements=placements,
        dtypes=group.dtypes,
        parameter_holders=_holders(group.transport, group, placements.parameter),
        gradient_holders=_holders(group.transport, group, placements.gradient),
        main_holders=holders,
        segments=segments,
        bytes=_held(group),
    )


def _explained_tensor(
    index: int,
    group: ParameterGroup,
    shard_of: dict[int, int],
    path: str,
    names: dict[int, list[str]],
) -> ExplainedTensor:
    parameter = group.parameters[index]
    registered = [*names.get(id(parameter.sharded), ()), *names.get(id(parameter.full), ())]
    # A parameter that was replaced is known by its old name.
    first = f"{path}.{parameter.name}" if path else parameter.name
    return ExplainedTensor(
        label=parameter.name,
        names=tuple(registered) or (first,),
        shape=tuple(parameter.shape),
        local_shape=group.layout.shapes[index],
        distribution=_distribution(parameter),
        trainable=parameter.sharded.requires_grad,
        offset=group.layout.offset(index),
        rows=RowsByRank(group.layout.row_ranges(index), shard_of),
    )


def _distribution(parameter: ManagedParameter) -> str:
    mesh = parameter.other_mesh
    if mesh is None:
        return ""
    axes = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    return ", ".join(
        f"{placement} on {axis}"
        for axis, placement in zip(axes, parameter.other_placements, strict=True)
    )


def _holders(
    transport: Transport, group: ParameterGroup, placements: Sequence[Placement]
) -> Holders:
    """The global ranks that hold each shard under ``placements``."""
    in_mesh = sorted(transport.axes)
    ranks = transport.dp_mesh.mesh.permute([in_mesh.index(axis) for axis in transport.axes])
    split = group.grid.split_axes(placements)
    rest = [axis for axis in range(ranks.dim()) if axis not in split]
    count, _ = group.grid.shard(placements)
    return tuple(map(tuple, ranks.permute([*split, *rest]).reshape(count, -1).tolist()))


def _held(group: ParameterGroup) -> HeldBytes:
    grid, layout, dtypes = group.grid, group.layout, group.dtypes
    optimizer, gradient = group.placements.optimizer, group.placements.gradient

    def local_bytes(placements: Sequence[Placement], itemsize: int) -> int:
        return layout.local_numel(num_shards=grid.shard(placements)[0]) * itemsize

    kept = copies = gathered = 0
    if group.model is not group.main:
        copies = group.model.flat.numel() * group.model.dtype.itemsize
        if group.model.storage.lifetime is Lifetime.PERSISTENT:
            kept, copies = kept + copies, 0
    if group.full is not group.model:
        gathered = group.full.flat.numel() * group.full.dtype.itemsize
        if group.full.storage.lifetime is Lifetime.PERSISTENT:
            kept, gathered = kept + gathered, 0
    if group.kept_whole_main is not None:
        kept += group.kept_whole_main.flat.numel() * dtypes.main.itemsize
    is_late = [isinstance(placement, Partial) for placement in gradient]
    if group.transport.keeps(Role.REDUCE_INPUT):
        if not all(is_late):
            kept += layout.padded_numel * dtypes.grad_comm.itemsize
        if any(is_late):
            kept += local_bytes(gradient, dtypes.grad_comm.itemsize)
    is_trained = any(parameter.sharded.requires_grad for parameter in group.parameters)
    return HeldBytes(
        main=group.main.flat.numel() * group.main.dtype.itemsize,
        kept=kept,
        gradients=local_bytes(optimizer, dtypes.main_grad.itemsize) if is_trained else 0,
        accumulators=(
            local_bytes(gradient, dtypes.main_grad.itemsize) if is_trained and any(is_late) else 0
        ),
        copies=copies,
        gathered=gathered,
    )


# -- the picture's file ---------------------------------------------------------------------------


def _checked(picture: str | os.PathLike[str]) -> Path:
    path = Path(picture)
    if path.suffix.lower() != ".svg":
        raise ValueError(
            f"picture={os.fspath(picture)!r}: the picture is SVG, which browsers show; give a path "
            "that ends in .svg."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"picture={os.fspath(picture)!r}: there is no folder {str(path.parent)!r}; make it "
            "first."
        )
    if path.is_dir():
        raise ValueError(f"picture={os.fspath(picture)!r} is a folder; give the path of a file.")
    return path


def _write(path: Path, document: str) -> None:
    """Whole or not at all, also where several ranks write the same file."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        draft.write_text(document, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
