"""Owns how the pieces of a sharded tensor are brought together for a read: gathers over mesh axes.

Knows geometries and torch.distributed; no tensor subclass, and not the training path, whose
collectives go through a backend. Bytes travel, so every dtype does. Every function is a collective
over the split's axes: all ranks call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Shard

from .errors import BackendError
from .row_split import Geometry
from .submesh import distributed, submesh


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for floats of lower precision, else the dtype itself."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


@torch.no_grad()
def gather_equal(value: Tensor, geometry: Geometry, axis: int) -> Tensor:
    """Values of all members of a mesh axis: shape ``(members, *value.shape)``, by coordinate.

    ``value`` has the same shape and dtype on all of them.
    """
    members = geometry.members(axis)
    if len(members) == 1:
        return value.unsqueeze(0)
    group = geometry.mesh.get_group(axis)
    sent = _travelling(value, geometry)
    received = torch.empty((len(members), *value.shape), dtype=value.dtype, device=sent.device)
    slots = [_bytes(slot) for slot in received.unbind(0)]
    # A group numbers its ranks in ascending order, a mesh as its ranks were given.
    by_group_rank = [slots[members.index(rank)] for rank in dist.get_process_group_ranks(group)]
    with _all_come(geometry, axis):
        dist.all_gather(by_group_rank, _bytes(sent), group=group)
    return received.to(value.device)


def gather_over_shards(value: Tensor, geometry: Geometry) -> Tensor:
    """Values of all ranks that hold different elements, by chunk and shard index: shape
    ``(ranks, *value.shape)``."""
    gathered = value
    for axis in reversed(geometry.spread_axes):
        gathered = gather_equal(gathered, geometry, axis)
    return gathered.reshape(-1, *value.shape)


def gather_over_mesh(value: Tensor, geometry: Geometry) -> Tensor:
    """Values of all ranks of the mesh: shape ``(ranks, *value.shape)``."""
    gathered = value
    for axis in range(geometry.mesh.ndim):
        gathered = gather_equal(gathered, geometry, axis)
    return gathered.reshape(-1, *value.shape)


@torch.no_grad()
def gather_rows(local: Tensor, geometry: Geometry) -> Tensor:
    """The whole tensor from this rank's rows: a fresh contiguous tensor of ``geometry.shape``.

    ``local`` is the value, not a contribution to it (see :func:`reduce_partial`).
    """
    if local.is_meta:
        return local.new_empty(geometry.shape)
    rows = local
    for axis in reversed(geometry.split.axis_order if geometry.split is not None else ()):
        rows = _gather_blocks(rows, geometry.block_rows(axis), geometry, axis)
    part = (rows.clone() if rows is local else rows).reshape(geometry.part_shape)
    chunked = [axis for axis in geometry.spread_axes if type(geometry.placements[axis]) is Shard]
    if not chunked:
        return part
    placements = [geometry.placements[axis] for axis in chunked]
    mesh = submesh(geometry.mesh, chunked)
    return distributed(part, mesh, placements, geometry.shape).full_tensor()


@torch.no_grad()
def reduce_partial(local: Tensor, geometry: Geometry) -> Tensor:
    """Sum or average ``local`` over the axes placed Partial; a fresh tensor where there are any.

    Floats of lower precision than float32 are accumulated in float32.
    """
    if not geometry.is_partial or local.is_meta:
        return local
    total = _travelling(local, geometry).to(accumulation_dtype(local.dtype))
    total = total.clone() if total.data_ptr() == local.data_ptr() else total
    flat = torch.view_as_real(total) if total.is_complex() else total
    divisor = 1
    for axis, placement in enumerate(geometry.placements):
        if isinstance(placement, Partial):
            if len(geometry.members(axis)) > 1:
                with _all_come(geometry, axis):
                    dist.all_reduce(flat, group=geometry.mesh.get_group(axis))
            divisor *= geometry.mesh.size(axis) if placement.reduce_op == "avg" else 1
    return (total / divisor if divisor > 1 else total).to(local.device, local.dtype)


@torch.no_grad()
def take_first_members(rows: Tensor, geometry: Geometry) -> Tensor:
    """``rows``, of whatever values, as the first of the ranks that hold the same rows has them."""
    taken = rows
    for axis, placement in enumerate(geometry.placements):
        if placement.is_replicate() and len(geometry.members(axis)) > 1:
            taken = gather_equal(taken, geometry, axis)[0]
    return taken


def _gather_blocks(rows: Tensor, lengths: Sequence[int], geometry: Geometry, axis: int) -> Tensor:
    """Concatenate the members' blocks of rows, of the given lengths, by coordinate."""
    if len(lengths) == 1:
        return rows
    total, longest, rest = sum(lengths), max(lengths), rows.shape[1:]
    if total == lengths[0] * len(lengths) or longest * len(lengths) <= 2 * total:
        padded = rows
        if rows.shape[0] < longest:
            padded = rows.new_zeros((longest, *rest))
            padded[: rows.shape[0]] = rows
        gathered = gather_equal(padded, geometry, axis)
        if longest * len(lengths) == total:
            return gathered.reshape(total, *rest)
        return torch.cat([block[:length] for block, length in zip(gathered, lengths, strict=True)])
    # Mostly empty shards: padding to the longest would cost a multiple of the whole tensor.
    sent = _travelling(rows, geometry)
    whole = torch.empty((total, *rest), dtype=rows.dtype, device=sent.device)
    own = geometry.mesh.get_coordinate()[axis]  # type: ignore[index]
    group = geometry.mesh.get_group(axis)
    blocks = torch.split(whole, list(lengths))
    for coordinate, (block, source) in enumerate(zip(blocks, geometry.members(axis), strict=True)):
        if block.shape[0] == 0:
            continue
        if coordinate == own:
            block.copy_(sent)
        with _all_come(geometry, axis):
            dist.broadcast(_bytes(block), src=source, group=group)
    return whole.to(rows.device)


@contextmanager
def _all_come(geometry: Geometry, axis: int) -> Iterator[None]:
    """Say what a transport does not: which ranks had to read together."""
    try:
        yield
    except RuntimeError as error:
        raise BackendError(
            f"reading a sharded tensor of shape {tuple(geometry.shape)} takes ranks "
            f"{list(geometry.members(axis))} together, and it failed on rank {dist.get_rank()}: "
            f"{error} Every rank has to call norm(), full_tensor(), clip_grad_norm_() and the "
            "like, in the same order, and not inside `if rank == 0`; or a rank has ended."
        ) from error


def _travelling(value: Tensor, geometry: Geometry) -> Tensor:
    """``value`` contiguous, no lazy conjugation, on the device the mesh communicates on."""
    device = geometry.mesh.device_type
    value = value if value.device.type == device else value.to(device)
    return value.resolve_conj().resolve_neg().contiguous()


def _bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
