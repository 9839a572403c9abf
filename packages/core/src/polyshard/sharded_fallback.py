"""Owns what sharded tensors do where torch ignores a DTensor subclass's ``__torch_dispatch__``.

There, calls made in Python are intercepted one floor higher, by function name. Elementwise, foreach
and fused functions run on the local rows as always, without autograd; all else but metadata is
refused. What C++ does on its own is not seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .sharded_elementwise import (
    ELEMENTWISE,
    FOREACH,
    FUSED,
    elementwise,
    on_lists,
    written_arguments,
)
from .sharded_memory_ops import alias, complex_view, copy_into
from .sharded_refusals import Handler, first_sharded, refuse, refused

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

_ATTRIBUTES = frozenset(
    """
    _version device dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf is_meta is_sparse itemsize
    layout nbytes ndim requires_grad shape
    """.split()
)
_METADATA = frozenset(
    """
    __len__ dim element_size get_device is_complex is_contiguous is_floating_point is_signed
    is_inference nelement ndimension numel requires_grad_ size stride
    """.split()
)

_WITHOUT_GRADIENT = frozenset({"detach", "empty_like", "full_like", "ones_like", "zeros_like"})


@functools.cache
def dispatch_is_honoured() -> bool:
    """Whether torch runs a DTensor subclass's own ``__torch_dispatch__``; tried once.

    torch 2.11 sends every DTensor to its own dispatch in C++. From 2.12 on this is true.
    """
    reached = []

    class Probe(DTensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls,
            func: Any,
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Tensor:
            reached.append(func)
            return torch.zeros(1)

    meta = TensorMeta(torch.Size((1,)), (1,), torch.float32)
    # Without a mesh: torch's own dispatch fails on it, ours never looks at it.
    spec = DTensorSpec(None, (Replicate(),), tensor_meta=meta)  # type: ignore[arg-type]
    with torch.inference_mode(False), torch.no_grad():
        probe = Tensor._dtensor__new__(Probe, torch.zeros(1), spec, requires_grad=False)
        try:
            torch.neg(probe)
        except Exception:
            return False
    return bool(reached)


def function_fallback(
    cls: type[ShardedTensor],
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The ``__torch_function__`` of sharded tensors where dispatch is not honoured."""
    name = func.__name__
    kwargs = kwargs or {}
    if name in _METADATA or (
        name in ("__get__", "__set__")
        and getattr(getattr(func, "__self__", None), "__name__", None) in _ATTRIBUTES
    ):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name not in _WITHOUT_GRADIENT and torch.is_grad_enabled():
        for argument in args:
            if isinstance(argument, cls) and argument.requires_grad:
                refuse(
                    argument,
                    func,
                    "this version of torch cannot track gradients through it",
                    "Use torch.no_grad(), or torch 2.12 or later.",
                )
    with torch._C.DisableTorchFunctionSubclass():
        return _handler(name, func)(cls, args, kwargs)


def _handler(name: str, func: Callable[..., Any]) -> Handler:
    if name in _SPECIAL:
        return _SPECIAL[name](func)
    base = name.removesuffix("_")
    if base in ELEMENTWISE:
        return elementwise(func, base, in_place=name.endswith("_"), out="out")
    each = base.removeprefix("_foreach_")
    if each != base and each in FOREACH:
        return on_lists(func, each, written=[0] if name.endswith("_") else [])
    if name in FUSED:
        written = written_arguments(getattr(torch.ops.aten, name).default)
        return on_lists(func, each, written=written, steps=FUSED[name])
    return _refused(func)


def _refused(func: Callable[..., Any]) -> Handler:
    return refused(
        func,
        "this version of torch lets sharded tensors take part in elementwise operations only",
        "Use torch 2.12 or later, `with unsharded(module):`, or full_tensor().",
    )


def _where(func: Callable[..., Any]) -> Handler:
    chosen = elementwise(func, "where", in_place=False)

    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Given a condition alone it finds indices.
        return (chosen if len(args) == 3 else _refused(func))(cls, args, kwargs)

    return handler


def _to(func: Callable[..., Any]) -> Handler:
    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor = args[0]
        if not isinstance(tensor, cls):
            refuse(first_sharded(cls, args), func, "only it is cast, not others by its example")
        local = func(tensor._local_tensor, *args[1:], **kwargs)
        if local is tensor._local_tensor:
            return tensor
        return cls._assemble(local, tensor._geometry, tensor._name)

    return handler


_SPECIAL: dict[str, Callable[[Callable[..., Any]], Handler]] = {
    "copy_": copy_into,
    "detach": alias,
    "to": _to,
    "view_as_complex": complex_view,
    "view_as_real": complex_view,
    "where": _where,
}
