"""Clips gradients by their total norm, wherever they lie.

Knows sharded tensors and the collectives of their meshes; knows no units. Every rank reduces its
own rows to one number per mesh and kind of split; those are gathered, and every rank combines them
the same way, so all ranks come to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from .errors import UnsupportedError
from .parameter import owner_of
from .row_split import Geometry
from .sharded_collectives import (
    accumulation_dtype,
    gather_equal,
    gather_over_shards,
    reduce_partial,
)
from .sharded_tensor import ShardedTensor

#: Keeps the scale finite where all gradients are zero.
TINY = 1e-6

Ranks = frozenset[int]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place, so that their total norm is at most ``max_norm``.

    The norm is that which one process would find over the whole gradients of all ``parameters``
    together. Collective over the meshes of the sharded gradients; all their ranks pass the same
    parameters in the same order, and get the same norm.

    Gradients that are still ``Partial``, between microbatches, count as what they would be if they
    were finished now. Each rank's contribution is scaled, which scales the finished gradient; for
    the norm a reduced copy of all of them is held for a moment.

    Gradients of ignored parameters, also where they are DTensors, are taken as they are: they must
    be the same on every rank that shares a sharded parameter. Where some parameters are sharded
    over a part of the ranks over which others are (experts on a subgroup), the ranks around them
    hold different parameters of that kind, and all of them count. Over axes of other parallelism,
    along which parameters of the same mesh are chunked, what is not chunked counts once.

    Args:
        parameters: one or many; those without gradient are passed over.
        max_norm: at least 0; ``inf`` measures and changes nothing.
        norm_type: order of the norm, any number or ``inf``. As in PyTorch, 0 counts the gradients
            that are not all zero.
        error_if_nonfinite: raise instead of scaling by a norm that is nan or infinite.
        foreach: False takes tensors one by one; None and True take them by lists.

    Returns:
        The total norm before clipping: a plain 0-D tensor, on the first gradient's device, of at
        least float32. 0 where there are no gradients.

    Raises:
        ValueError: a negative ``max_norm``; a parameter that is not a tensor.
        RuntimeError: a norm that is not finite, if asked; nothing was scaled.
        UnsupportedError: meshes of which neither holds the other.
        PlacementError: a DTensor of other parallelism whose placements are not known here.
    """
    max_norm, order = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}.")
    grads = _gradients([parameters] if isinstance(parameters, Tensor) else list(parameters))
    if not grads:
        return torch.tensor(0.0)
    total = _total_norm(grads, order, foreach is not False)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the gradients' total norm of order {order} is non-finite ({total.item()}), so they "
            "were not clipped. Pass error_if_nonfinite=False to scale them by it all the same."
        )
    scale = (max_norm / (total + TINY)).clamp(max=1.0)
    for alike in _alike([_scalable(grad) for grad in grads]):
        if foreach is False:
            for grad in alike:
                grad.mul_(scale.to(grad.device))
        else:
            torch._foreach_mul_(alike, scale.to(alike[0].device))
    return total


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    grads = []
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise ValueError(
                f"clip_grad_norm_ takes parameters, got a {type(parameter).__name__}; pass "
                "model.parameters()."
            )
        if not isinstance(parameter, ShardedTensor) and (unit := owner_of(parameter)) is not None:
            raise UnsupportedError(
                f"clip_grad_norm_ got a whole parameter of unit {unit.name!r}, taken before "
                "fully_shard or inside a forward, whose gradient is never final; pass "
                "model.parameters() as they are now."
            )
        if parameter.grad is not None:
            grads.append(parameter.grad)
    return grads


@dataclass(frozen=True)
class _Rows:
    """What this rank holds of one gradient; ``geometry`` says of what, None of a plain one."""

    local: Tensor
    geometry: Geometry | None
    is_ours: bool  # sharded here; a DTensor of other parallelism lies as its placements say

    @classmethod
    def of(cls, grad: Tensor) -> _Rows:
        if isinstance(grad, ShardedTensor):
            return cls(grad._local_tensor, grad._geometry, True)
        if isinstance(grad, DTensor):
            geometry = Geometry.of(grad.shape, grad.device_mesh, grad.placements)
            return cls(grad.to_local(), geometry, False)
        return cls(grad, None, False)


def _total_norm(grads: Sequence[Tensor], order: float, foreach: bool) -> Tensor:
    device = grads[0].device
    wide = accumulation_dtype(grads[0].dtype.to_real())
    for grad in grads:
        wide = torch.promote_types(wide, grad.dtype.to_real())
    every = [_Rows.of(grad) for grad in grads]
    data_axes = _data_axes([rows.geometry for rows in every if rows.geometry and rows.is_ours])
    around: dict[Ranks, Geometry] = {}
    # Spread alike: the ranks over which one gather completes all of them.
    alike: dict[object, tuple[Ranks, list[_Rows]]] = {}
    for rows in _finished(every):
        geometry, ranks = rows.geometry, Ranks()
        if geometry is not None and rows.is_ours:
            ranks = _ranks_along(geometry, data_axes[geometry.mesh])
            around[ranks] = geometry
        spread = None if geometry is None else (geometry.mesh, geometry.spread_axes)
        alike.setdefault((ranks, spread), (ranks, []))[1].append(rows)
    larger = _larger_ranks(around)
    parts: dict[Ranks, list[Tensor]] = {}
    for ranks, held in alike.values():
        norms, geometry = _norms(held, order, wide, device, foreach), held[0].geometry
        if geometry is not None and not geometry.is_whole:
            # For order 0 only the pieces of each gradient together tell whether it is all zero.
            mine = norms if order == 0 else _combine(norms, order)
            pieces = gather_over_shards(mine, geometry)
            norms = pieces.amax(0) if order == 0 else _combine(pieces, order)
        parts.setdefault(ranks, []).append(_combine(norms, order, of_gradients=True))
    for ranks, above in larger.items():
        norm = _combine(torch.stack(parts.pop(ranks)), order)
        # The parameters that a set of ranks shares are spoken for once, by its first rank.
        speaks = min(ranks) == dist.get_rank()
        heard = norm if speaks else torch.full_like(norm, _neutral(order))
        for axis in data_axes[around[above].mesh]:
            heard = gather_equal(heard, around[above], axis)
        parts[above].append(_combine(heard.flatten(), order))
    return _combine(torch.stack([part for each in parts.values() for part in each]), order)


def _finished(gradients: Iterable[_Rows]) -> list[_Rows]:
    """The rows of every gradient; of contributions, reduced copies: one reduction for each mesh."""
    finished = []
    partial: dict[object, list[_Rows]] = {}
    for rows in gradients:
        geometry = rows.geometry
        if geometry is None or not geometry.is_partial:
            finished.append(rows)
            continue
        pending = tuple(p if isinstance(p, Partial) else None for p in geometry.placements)
        key = (geometry.mesh, pending, rows.local.dtype, rows.local.device)
        partial.setdefault(key, []).append(rows)
    for members in partial.values():
        geometry = members[0].geometry
        assert geometry is not None
        locals_ = [member.local.reshape(-1) for member in members]
        contributions = torch.cat(locals_).to(accumulation_dtype(locals_[0].dtype))
        reduced = reduce_partial(contributions, geometry)
        pieces = reduced.split([local.numel() for local in locals_])
        for member, piece in zip(members, pieces, strict=True):
            finished.append(_Rows(piece, member.geometry, member.is_ours))
    return finished


def _norms(
    held: Sequence[_Rows], order: float, wide: torch.dtype, device: torch.device, foreach: bool
) -> Tensor:
    """The norm of each one's rows, in their order: 1-D. Without rows, what changes no norm."""
    result = torch.full((len(held),), _neutral(order), dtype=wide, device=device)
    filled = [index for index, rows in enumerate(held) if rows.local.numel()]
    for positions in _positions_alike([held[index].local for index in filled]):
        indices = [filled[position] for position in positions]
        locals_ = [held[index].local for index in indices]
        dtype = locals_[0].dtype
        computed = None if dtype.is_complex else accumulation_dtype(dtype)
        norms = (
            torch._foreach_norm(locals_, order, computed)
            if foreach
            else [torch.linalg.vector_norm(local, order, dtype=computed) for local in locals_]
        )
        result[indices] = torch.stack(list(norms)).to(device, wide)
    return result


def _combine(norms: Tensor, order: float, *, of_gradients: bool = False) -> Tensor:
    """The norm of everything whose norms these are: 0-D. Of single gradients' norms, order 0
    counts those that are not zero; other norms of order 0 are counts already."""
    if order == 0:
        return (norms != 0).to(norms.dtype).sum() if of_gradients else norms.sum()
    return torch.linalg.vector_norm(norms, order)


def _neutral(order: float) -> float:
    return math.inf if order < 0 else 0.0


def _data_axes(geometries: Iterable[Geometry]) -> dict[DeviceMesh, list[int]]:
    """The axes of each mesh along which no parameter is chunked by other parallelism."""
    axes: dict[DeviceMesh, list[int]] = {}
    for geometry in geometries:
        known = axes.get(geometry.mesh, range(geometry.mesh.ndim))
        axes[geometry.mesh] = [a for a in known if type(geometry.placements[a]) is not Shard]
    return axes


def _ranks_along(geometry: Geometry, axes: Sequence[int]) -> Ranks:
    coordinate = geometry.mesh.get_coordinate()
    assert coordinate is not None
    line = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return Ranks(geometry.mesh.mesh[line].flatten().tolist())


def _larger_ranks(every: Iterable[Ranks]) -> dict[Ranks, Ranks]:
    """For each set of ranks the next larger one, smallest first."""
    by_size = sorted(every, key=len)
    for ranks, above in pairwise(by_size):
        if not ranks < above:
            raise UnsupportedError(
                f"these parameters are sharded over ranks {sorted(ranks)} and {sorted(above)}, of "
                "which neither holds the other, so ranks would disagree on the total norm. Call "
                "clip_grad_norm_ for the parameters of each mesh apart."
            )
    return dict(pairwise(by_size))


def _scalable(grad: Tensor) -> Tensor:
    """What to scale: other parallelism's DTensors where their elements are."""
    is_ours = isinstance(grad, ShardedTensor) or not isinstance(grad, DTensor)
    return grad if is_ours else _Rows.of(grad).local


def _positions_alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    alike: dict[object, list[int]] = {}
    for position, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(position)
    return list(alike.values())


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[tensors[i] for i in positions] for positions in _positions_alike(tensors)]
