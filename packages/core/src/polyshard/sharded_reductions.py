"""Owns the reads of a sharded tensor that need every rank's rows: reductions over the whole tensor.

Each rank reduces its own rows, the few results are gathered, and every rank reduces those the same
way, so all ranks get the same bits. Results are plain tensors. Shards without rows take no part: a
dummy element stands in, so that an argument the operation rejects is rejected on every rank before
anything is sent, and what it gave is dropped.

Every such read is a collective over the split's axes. Reductions over some dims only are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .row_split import Geometry
from .sharded_collectives import accumulation_dtype, gather_over_mesh, gather_over_shards
from .sharded_refusals import (
    AFTER_LAST_MICROBATCH,
    INCOMPLETE,
    Handler,
    refuse,
    refuse_plain,
    refuse_unlike,
)

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

Arguments = dict[str, Any]


def _bind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
    """Arguments by name, with the schema's defaults."""
    schema = func._schema.arguments
    bound = {a.name: a.default_value for a in schema if a.has_default_value()}
    bound.update(zip((a.name for a in schema), args, strict=False))
    bound.update(kwargs)
    return bound


def _populated_parts(value: Tensor, geometry: Geometry) -> Tensor:
    """The 0-D values of all ranks that hold elements of their own: 1-D, by shard index."""
    if geometry.split is not None and geometry.spread_axes == geometry.split.axis_order:
        populated = [stop > start for start, stop in geometry.split.ranges]
        return gather_over_shards(value, geometry)[populated]
    # How other chunks were split is known to their ranks only.
    mine = torch.tensor(geometry.local_shape.numel() > 0)
    filled = gather_over_shards(mine, geometry)
    return gather_over_shards(value, geometry)[filled.to(value.device)]


def _local_or_dummy(tensor: ShardedTensor) -> Tensor:
    local = tensor._local_tensor
    if local.numel():
        return local
    return local.new_zeros((1, *(max(size, 1) for size in local.shape[1:])))


def _result_dtype(tensor: Tensor, arguments: Arguments, of_integers: torch.dtype) -> torch.dtype:
    given: torch.dtype | None = arguments.get("dtype")
    if given is not None:
        return given
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.dtype if floating else of_integers


def _sum(tensor: ShardedTensor, func: OpOverload, arguments: Arguments) -> Tensor:
    dtype = _result_dtype(tensor, arguments, torch.int64)
    wide = accumulation_dtype(dtype)
    part = _local_or_dummy(tensor).to(dtype).sum(dtype=wide)
    return _populated_parts(part, tensor._geometry).sum(dtype=wide).to(dtype)


def _mean(tensor: ShardedTensor, func: OpOverload, arguments: Arguments) -> Tensor:
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        # The same error, or the same cast, as for a plain tensor.
        torch.ones(1, dtype=tensor.dtype).mean(dtype=arguments["dtype"])
    dtype = arguments["dtype"] or tensor.dtype
    wide = accumulation_dtype(dtype)
    part = _local_or_dummy(tensor).to(dtype).sum(dtype=wide)
    return (_populated_parts(part, tensor._geometry).sum() / tensor._geometry.numel).to(dtype)


def _prod(tensor: ShardedTensor, func: OpOverload, arguments: Arguments) -> Tensor:
    dtype = _result_dtype(tensor, arguments, torch.int64)
    wide = accumulation_dtype(dtype)
    part = _local_or_dummy(tensor).to(dtype).prod(dtype=wide)
    return _populated_parts(part, tensor._geometry).prod(dtype=wide).to(dtype)


def _count(tensor: ShardedTensor, func: OpOverload, arguments: Arguments) -> Tensor:
    part = torch.count_nonzero(_local_or_dummy(tensor))
    return _populated_parts(part, tensor._geometry).sum()


def _same_again(tensor: ShardedTensor, func: OpOverload, arguments: Arguments) -> Tensor:
    """Operations whose value over parts is the same operation over the parts' values."""
    part: Tensor = func(_local_or_dummy(tensor))
    combined: Tensor = func(_populated_parts(part, tensor._geometry))
    return combined


def _norm(tensor: ShardedTensor, func: OpOverload, arguments: Arguments) -> Tensor:
    order = arguments["ord"] if "ord" in arguments else arguments.get("p")
    return _norms([tensor], 2 if order is None else order, arguments.get("dtype"))[0]


def _norms(
    tensors: Sequence[ShardedTensor], order: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """Vector norms of split tensors; one gather per mesh, axes they are split over, and dtype."""
    together: dict[object, list[int]] = {}
    for index, tensor in enumerate(tensors):
        geometry = tensor._geometry
        key = (id(geometry.mesh), geometry.spread_axes, tensor.dtype, tensor.device)
        together.setdefault(key, []).append(index)
    norms: dict[int, Tensor] = {}
    for indices in together.values():
        members = [tensors[index] for index in indices]
        given = [_local_or_dummy(member).to(dtype or member.dtype) for member in members]
        wide = None if given[0].is_complex() else accumulation_dtype(given[0].dtype)
        parts = torch.stack(torch._foreach_norm(given, order, wide))
        without_rows = [member._local_tensor.numel() == 0 for member in members]
        # What leaves the norm of the parts' norms as it is.
        parts[without_rows] = math.inf if order < 0 else 0
        gathered = gather_over_shards(parts, members[0]._geometry)
        if order == 0:
            totals = gathered.sum(0)
        else:
            totals = torch.linalg.vector_norm(gathered, order, dim=0)
        result = given[0].dtype.to_real() if given[0].is_complex() else given[0].dtype
        norms.update(zip(indices, totals.to(result).unbind(0), strict=True))
    return [norms[index] for index in range(len(tensors))]


_Reduction = Callable[["ShardedTensor", OpOverload, Arguments], Tensor]
_REDUCTIONS: dict[str, _Reduction] = {
    "sum": _sum,
    "sum.dim_IntList": _sum,
    "mean": _mean,
    "mean.dim": _mean,
    "prod": _prod,
    "count_nonzero": _count,
    "max": _same_again,
    "min": _same_again,
    "amax": _same_again,
    "amin": _same_again,
    "all": _same_again,
    "any": _same_again,
    "linalg_vector_norm": _norm,
    "norm.Scalar": _norm,
    "norm.ScalarOpt_dtype": _norm,
    "norm.ScalarOpt_dim": _norm,
    "norm.ScalarOpt_dim_dtype": _norm,
}


def _refuse_partial(tensor: ShardedTensor, func: OpOverload) -> None:
    if tensor._geometry.is_partial:
        refuse(tensor, func, INCOMPLETE, AFTER_LAST_MICROBATCH)


def _reduction(func: OpOverload, reduce: _Reduction) -> Handler:
    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: ShardedTensor = args[0]
        geometry = tensor._geometry
        _refuse_partial(tensor, func)
        if geometry.is_whole or geometry.numel == 0 or tensor._local_tensor.is_meta:
            if geometry.split is not None and not geometry.shape:
                return func(tensor._local_tensor.reshape(()), *args[1:], **kwargs)
            return func(tensor._local_tensor, *args[1:], **kwargs)
        arguments = _bind(func, args, kwargs)
        dim = arguments.get("dim")
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        ndim = len(geometry.shape)
        if dims and sorted(d % max(ndim, 1) for d in dims) != list(range(max(ndim, 1))):
            refuse(
                tensor,
                func,
                f"it reduces dims {dims} of {ndim}, and only whole tensors are reduced where "
                "they are",
            )
        result = reduce(tensor, func, arguments)
        return result.reshape([1] * ndim) if arguments.get("keepdim") else result

    return handler


def _foreach_norm(func: OpOverload) -> Handler:
    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        arguments = _bind(func, args, kwargs)
        tensors: Sequence[Tensor] = arguments["self"]
        order, dtype = arguments["ord"], arguments.get("dtype")
        norms: dict[int, Tensor] = {}
        split: dict[int, ShardedTensor] = {}
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, cls):
                _refuse_partial(tensor, func)
                if not tensor._geometry.is_whole and tensor._geometry.numel:
                    split[index] = tensor
                    continue
                tensor = tensor._local_tensor
            norms[index] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        norms.update(zip(split, _norms(list(split.values()), order, dtype), strict=True))
        return [norms[index] for index in range(len(tensors))]

    return handler


def _comparison(func: OpOverload) -> Handler:
    """torch.equal and torch.allclose."""

    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        one, other = args[0], args[1]
        for tensor in (one, other):
            if not isinstance(tensor, cls):
                refuse_plain(one if isinstance(one, cls) else other, func, tensor)
            _refuse_partial(tensor, func)
        if one._geometry is not other._geometry:
            refuse_unlike(one, func, other)
        geometry = one._geometry
        if geometry.is_whole or geometry.numel == 0:
            return bool(func(one._local_tensor, other._local_tensor, *args[2:], **kwargs))
        same = func(_local_or_dummy(one), _local_or_dummy(other), *args[2:], **kwargs)
        return bool(_populated_parts(torch.tensor(same), geometry).all())

    return handler


def _check_and_unscale(func: OpOverload) -> Handler:
    """What GradScaler does to gradients; all ranks must come to the same verdict.

    A rank that skipped its optimizer step alone would leave the others' weights ahead of its own.
    """

    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grads, found_inf, inverse_scale = args
        local = []
        meshes: dict[int, Geometry] = {}
        for grad in grads:
            if isinstance(grad, cls):
                _refuse_partial(grad, func)
                meshes.setdefault(id(grad._geometry.mesh), grad._geometry)
                local.append(grad._local_tensor)
            else:
                local.append(grad)
        try:
            func(local, found_inf, inverse_scale)
        finally:
            for grad in grads:
                if isinstance(grad, cls):
                    grad.writes.count += 1
        # Small meshes first: the largest one then spreads what they found.
        for geometry in sorted(meshes.values(), key=lambda geometry: geometry.mesh.size()):
            found_inf.copy_(gather_over_mesh(found_inf, geometry).amax(0))

    return handler


_OTHERS: dict[str, Callable[[OpOverload], Handler]] = {
    "_foreach_norm.Scalar": _foreach_norm,
    "equal": _comparison,
    "allclose": _comparison,
    "_amp_foreach_non_finite_check_and_unscale_": _check_and_unscale,
}


def reduction_handler(func: OpOverload, name: str) -> Handler | None:
    """The handler of the operation called ``name`` (packet and overload), if it is a reduction."""
    if name in _REDUCTIONS:
        return _reduction(func, _REDUCTIONS[name])
    return _OTHERS[name](func) if name in _OTHERS else None
