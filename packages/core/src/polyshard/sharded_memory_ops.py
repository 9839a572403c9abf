"""Owns the operations on sharded tensors that share, copy or make memory, and reads of one element.

Whatever shares memory with a sharded tensor shares its write counter, so that a write through any
of them is seen by all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .sharded_collectives import gather_rows
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


def alias(func: Callable[..., Any]) -> Handler:
    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor: ShardedTensor = args[0]
        return tensor._alias()

    return handler


def _detach_in_place(func: Callable[..., Any]) -> Handler:
    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor: ShardedTensor = args[0]
        return tensor

    return handler


def _same_shape(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether ``wanted``, which may contain one -1, is ``shape``."""
    return len(shape) == len(wanted) and all(
        w in (s, -1) for s, w in zip(shape, wanted, strict=True)
    )


def _view(func: Callable[..., Any]) -> Handler:
    """view and expand to the shape the tensor has already."""

    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor, wanted = args[0], args[1]
        if isinstance(tensor, cls) and _same_shape(tensor.shape, wanted):
            return tensor._alias()
        refuse(
            tensor,
            func,
            f"rows of shape {tuple(tensor.shape[1:])} are not rows of a tensor of shape "
            f"{tuple(wanted)}",
        )

    return handler


def complex_view(func: Callable[..., Any]) -> Handler:
    """view_as_real and view_as_complex, with which optimizers take complex weights."""
    to_real = func.__name__.startswith("view_as_real")

    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor: ShardedTensor = args[0]
        shape = (*tensor.shape, 2) if to_real else tuple(tensor.shape[:-1])
        if not tensor.shape or not shape:
            refuse(tensor, func, "a 0-D tensor counts as one row, of which this would make more")
        local = func(tensor._local_tensor)
        geometry = tensor._geometry.with_shape(shape)
        return tensor._alias(local, geometry)

    return handler


def copy_into(func: Callable[..., Any]) -> Handler:
    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        target, source = args[0], args[1]
        if not isinstance(target, cls):
            refuse(
                source,
                func,
                f"the target is a {type(target).__name__}, and would get this rank's rows only",
                "Copy from full_tensor(), which all ranks call.",
            )
        geometry = target._geometry
        if isinstance(source, DTensor) and not isinstance(source, cls):
            # As torch.distributed.checkpoint.state_dict hands them in; collective.
            source = source.full_tensor()
        if isinstance(source, cls):
            if source._geometry is not geometry:
                refuse_unlike(target, func, source)
            rows = source._local_tensor
        elif geometry.is_partial:
            refuse(target, func, INCOMPLETE, AFTER_LAST_MICROBATCH)
        elif source.numel() == 1 and source.dim() <= target.dim():
            rows = source.reshape(1) if not geometry.shape and geometry.split else source
        elif source.shape == geometry.shape:
            rows = geometry.local_of(source)
        else:
            refuse_plain(target, func, source)
        try:
            target._local_tensor.copy_(rows, *args[2:], **kwargs)
        finally:
            target.writes.count += 1
        return target

    return handler


_LIKE: dict[str, Callable[..., Tensor]] = {
    "new_empty": torch.empty_like,
    "new_empty_strided": torch.empty_like,
    "new_zeros": torch.zeros_like,
    "new_ones": torch.ones_like,
    "new_full": torch.full_like,
}


def _new(func: Callable[..., Any]) -> Handler:
    """new_empty, new_zeros, new_ones and new_full of the tensor's own shape."""
    name = func.__name__.partition(".")[0]

    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor, size, *rest = args
        if tensor._geometry.is_partial and name in ("new_ones", "new_full"):
            refuse(tensor, func, INCOMPLETE, AFTER_LAST_MICROBATCH)
        strides = rest.pop() if name == "new_empty_strided" else list(tensor.stride())
        if tuple(size) != tuple(tensor.shape) or list(strides) != list(tensor.stride()):
            refuse(
                tensor,
                func,
                f"only tensors of its own shape {tuple(tensor.shape)} can lie as it does, not of "
                f"{tuple(size)}",
                "Make a plain tensor with torch.empty, zeros, ones or full.",
            )
        local = _LIKE[name](tensor._local_tensor, *rest, **kwargs)
        return cls._assemble(local, tensor._geometry, tensor._name)

    return handler


def _item(func: Callable[..., Any]) -> Handler:
    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: ShardedTensor = args[0]
        if tensor._geometry.is_partial:
            refuse(tensor, func, INCOMPLETE, AFTER_LAST_MICROBATCH)
        return func(gather_rows(tensor._local_tensor, tensor._geometry))

    return handler


MEMORY_OPERATIONS: dict[str, Callable[[Callable[..., Any]], Handler]] = {
    "alias": alias,
    "detach": alias,
    "detach_": _detach_in_place,
    "view": _view,
    "_unsafe_view": _view,
    "expand": _view,
    "view_as_real": complex_view,
    "view_as_complex": complex_view,
    "copy_": copy_into,
    "new_empty": _new,
    "new_empty_strided": _new,
    "new_zeros": _new,
    "new_ones": _new,
    "new_full": _new,
    "_local_scalar_dense": _item,
}
"""Makers of handlers, by the operation's name with its overload."""
