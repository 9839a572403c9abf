"""Owns the operations that act on each element alone, one tensor or a list of tensors at a time.

Run on every rank's rows, such an operation gives the rows of its result. The names are the claim
that it is one; nothing is inferred. Knows the parts of a ShardedTensor (``_local_tensor``,
``_geometry``, ``writes``, ``_name``) and no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .autograd import current_graph_task
from .row_split import Geometry
from .sharded_refusals import (
    AFTER_LAST_MICROBATCH,
    INCOMPLETE,
    Handler,
    first_sharded,
    refuse,
    refuse_mixed,
    refuse_plain,
    refuse_unlike,
)

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

# Each name stands for all its overloads, in place and not.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_not
    bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone conj_physical copysign cos cosh
    deg2rad digamma div eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod
    frac ge gt heaviside hypot i0 isinf isnan isneginf isposinf le lerp lgamma log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill
    maximum minimum mul nan_to_num ne neg nextafter pow rad2deg reciprocal relu remainder round
    rsqrt rsub sgn sigmoid sigmoid_backward sign signbit sin sinc sinh sqrt sub tan tanh
    tanh_backward threshold_backward trunc xlogy zero
    _to_copy empty_like full_like ones_like zeros_like
    """.split()
)
ELEMENTWISE_OVERLOADS = frozenset(
    {"max.other", "min.other", "where.self", "where.ScalarOther", "where.ScalarSelf"}
)
FOREACH = frozenset(
    """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp
    expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round
    rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
    """.split()
)
# Which argument is the list of step counts: plain 0-D tensors, that some versions declare written.
FUSED = {"_fused_adagrad_": 3, "_fused_adam_": 5, "_fused_adamw_": 5, "_fused_sgd_": None}

# What each rank may do to its contribution to a pending sum: anything that commutes with the sum.
_PARTIAL_ALIKE = frozenset({"clone", "copy", "empty_like", "neg", "zero", "zeros_like"})
_PARTIAL_ADDED = frozenset({"add", "sub"})
_PARTIAL_SCALED = frozenset({"mul", "div"})


def elementwise(
    func: Callable[..., Any], base: str, *, in_place: bool, out: str | None = None
) -> Handler:
    """The handler of an operation on single tensors.

    Args:
        func: run on the local rows.
        base: its name without ``_``.
        in_place: it writes its first argument.
        out: the keyword of the tensor it writes its result to.
    """

    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first: Any = None
        geometry: Any = None
        has_plain = False
        local: list[Any] = []
        for argument in args:
            if type(argument) is cls:
                if geometry is None:
                    first, geometry = argument, argument._geometry
                elif argument._geometry is not geometry:
                    refuse_unlike(first, func, argument)
                local.append(argument._local_tensor)
            else:
                has_plain = has_plain or isinstance(argument, Tensor)
                local.append(argument)
        if geometry is None:  # torch.add(plain, plain, out=sharded)
            refuse_plain(first_sharded(cls, kwargs), func, args[0])
        target = first if in_place else None
        local_kwargs = kwargs
        if kwargs:
            _check_format(first, func, kwargs)
            for keyword, value in kwargs.items():
                if not isinstance(value, Tensor):
                    continue
                if keyword != out or type(value) is not cls:
                    refuse_plain(first, func, value)
                if value._geometry is not geometry:
                    refuse_unlike(first, func, value)
                target = value
                local_kwargs = {**kwargs, keyword: value._local_tensor}
        if in_place:
            for argument in args[1:]:
                if type(argument) is cls and unlike_precision(first, argument):
                    refuse_mixed(first, func, argument)
        if has_plain:
            if in_place and type(args[0]) is not cls:
                refuse_plain(first, func, args[0])
            for position, argument in enumerate(args):
                if isinstance(argument, Tensor) and type(argument) is not cls:
                    local[position] = as_replicated(first, func, argument, geometry)
        if geometry.is_partial:
            rounds = kwargs.get("rounding_mode") is not None
            _check_partial(first, func, "rounded" if rounds else base, args)
        if target is None:
            return cls._assemble(func(*local, **local_kwargs), geometry, first._name)
        try:
            func(*local, **local_kwargs)
        finally:
            # Also when it failed: part of it may have been written.
            target.writes.count += 1
        return target

    return handler


def on_lists(
    func: Callable[..., Any], base: str, *, written: Sequence[int], steps: int | None = None
) -> Handler:
    """The handler of a foreach or fused operation.

    Tensors at one position of the lists belong together; positions are independent of each other,
    and may hold plain tensors only.

    Args:
        func: run on lists of local rows.
        base: its name without decoration.
        written: which arguments are lists it writes to.
        steps: which of them is a list of plain 0-D step counts.
    """

    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local = (
            None
            if kwargs and any(isinstance(value, Tensor) for value in kwargs.values())
            else _all_alike(cls, args, steps)
        )
        firsts: dict[int, ShardedTensor] | None = None
        if local is None:
            local, firsts = _match(cls, func, base, args, kwargs, written, steps)
        try:
            result = func(*local, **kwargs)
        finally:
            for written_position in written:
                for item in args[written_position]:
                    if type(item) is cls:
                        item.writes.count += 1
        if result is None:
            return None
        firsts = dict(enumerate(args[0])) if firsts is None else firsts
        return [
            cls._assemble(item, firsts[position]._geometry, firsts[position]._name)
            if position in firsts
            else item
            for position, item in enumerate(result)
        ]

    return handler


def _all_alike(
    cls: type[ShardedTensor], args: tuple[Any, ...], steps: int | None
) -> list[Any] | None:
    """Local rows of the common case, an optimizer's lists, told apart without a loop in Python.

    Every list holds sharded tensors only, which lie alike and have equal dtypes at each position,
    and none is Partial; step counts are plain. None for everything else, right or wrong.
    """
    local: list[Any] = []
    first_specs: list[DTensorSpec] | None = None
    for index, argument in enumerate(args):
        if not isinstance(argument, list | tuple) or not argument:
            if isinstance(argument, Tensor):
                return None
            local.append(argument)
        elif {*map(type, argument)} == {cls}:
            # One spec per geometry and dtype: identity is likeness.
            specs = [tensor._spec for tensor in argument]
            if first_specs is None:
                if index > 0 or any(tensor._geometry.is_partial for tensor in argument):
                    return None
                first_specs = specs
            elif len(specs) != len(first_specs) or not all(map(is_, specs, first_specs)):
                return None
            local.append([tensor._local_tensor for tensor in argument])
        elif isinstance(argument[0], Tensor):
            if index != steps or {*map(type, argument)} != {Tensor}:
                return None
            local.append(argument)
        else:
            local.append(argument)
    return local if first_specs is not None else None


def _match(
    cls: type[ShardedTensor],
    func: Callable[..., Any],
    base: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    written: Sequence[int],
    steps: int | None,
) -> tuple[list[Any], dict[int, ShardedTensor]]:
    """Local rows of any lists, and the first sharded tensor at each position; or refuse."""
    firsts: dict[int, ShardedTensor] = {}
    has_plain = has_partial = False
    local: list[Any] = []
    for argument in args:
        if type(argument) is list or type(argument) is tuple:
            items: list[Any] = []
            for position, item in enumerate(argument):
                if type(item) is cls:
                    first = firsts.get(position)
                    if first is None:
                        firsts[position] = item
                        has_partial = has_partial or item._geometry.is_partial
                    elif item._geometry is not first._geometry:
                        refuse_unlike(first, func, item)
                    elif written and unlike_precision(first, item):
                        refuse_mixed(first, func, item)
                    items.append(item._local_tensor)
                else:
                    has_plain = has_plain or isinstance(item, Tensor)
                    items.append(item)
            local.append(items)
        else:
            local.append(argument)
    for single in (*args, *kwargs.values()):
        # One for all positions: a learning rate, a scale.
        if isinstance(single, Tensor) and (isinstance(single, DTensor) or single.dim() > 0):
            refuse_plain(first_sharded(cls, (args, kwargs)), func, single)
    if has_plain:
        _check_plain_items(cls, func, args, local, firsts, [i for i in written if i != steps])
    if has_partial:
        for position, first in firsts.items():
            if first._geometry.is_partial:
                at = [a[position] if isinstance(a, list | tuple) else a for a in args]
                _check_partial(first, func, base, at)
    return local, firsts


def _check_plain_items(
    cls: type[ShardedTensor],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    local: list[Any],
    firsts: dict[int, ShardedTensor],
    written: Sequence[int],
) -> None:
    """Make plain tensors that stand beside sharded ones fit their rows, in ``local``; or refuse."""
    for argument, (value, items) in enumerate(zip(args, local, strict=True)):
        if not isinstance(value, list | tuple):
            continue
        for position, item in enumerate(value):
            if position in firsts and isinstance(item, Tensor) and type(item) is not cls:
                first = firsts[position]
                if argument in written:
                    refuse_plain(first, func, item)
                items[position] = as_replicated(first, func, item, first._geometry)


_mixed_precision_allowed = ContextVar("mixed_precision_allowed", default=False)


@contextmanager
def mixed_precision_allowed() -> Iterator[None]:
    """In this scope writes from another precision run as on plain tensors."""
    token = _mixed_precision_allowed.set(True)
    try:
        yield
    finally:
        _mixed_precision_allowed.reset(token)


def mixed_precision_is_allowed() -> bool:
    """Whether the scope of :func:`mixed_precision_allowed` is open."""
    return _mixed_precision_allowed.get()


def unlike_precision(one: Tensor, other: Tensor) -> bool:
    """Whether both are floating and differ in dtype, and nobody vouched that this is meant."""
    return (
        one.dtype != other.dtype
        and one.is_floating_point()
        and other.is_floating_point()
        and not mixed_precision_is_allowed()
    )


def written_arguments(operation: OpOverload) -> list[int]:
    """Positions of the arguments an operation writes to."""
    arguments = operation._schema.arguments
    return [
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]


def as_replicated(
    first: ShardedTensor, func: Callable[..., Any], plain: Tensor, geometry: Geometry
) -> Tensor:
    """``plain`` as an operand beside local rows if it is one value; UnsupportedError otherwise."""
    if not isinstance(plain, DTensor):
        if plain.dim() == 0:
            # The rows of a split 0-D tensor are 1-D; its operands keep equal rank in promotion.
            return plain.reshape(1) if geometry.split is not None and not geometry.shape else plain
        if plain.numel() == 1 and plain.dim() <= len(geometry.shape):
            return plain
        if plain.shape == geometry.shape and plain.numel():
            if not any(plain.stride()):
                # One value expanded: what the backward of sum() hands on.
                return plain.as_strided(
                    geometry.local_shape, plain.stride(), plain.storage_offset()
                )
            if current_graph_task() != -1 and not plain.is_meta and _is_one_value(plain):
                # The same divided by a number, which torch writes out: of mean().
                return plain.flatten()[:1].expand(geometry.local_shape)
    refuse_plain(first, func, plain)


def _is_one_value(plain: Tensor) -> bool:
    """Whether all elements are alike, NaN to NaN; waits for a device."""
    values = plain.detach().flatten()
    return torch.allclose(values, values[:1].expand_as(values), rtol=0, atol=0, equal_nan=True)


def _check_partial(
    first: ShardedTensor, func: Callable[..., Any], base: str, operands: Sequence[Any]
) -> None:
    """Let through only what commutes with the pending sum over ranks."""
    sharded = [isinstance(operand, type(first)) for operand in operands] + [False]
    if base in _PARTIAL_ALIKE:
        linear = sharded[0] and (base != "copy" or sharded[1])
    elif base in _PARTIAL_SCALED:
        linear = sharded[0] + sharded[1] == 1 and (base == "mul" or sharded[0])
    else:
        linear = base in _PARTIAL_ADDED and sharded[0] and sharded[1]
    if not linear:
        refuse(
            first,
            func,
            f"{INCOMPLETE}, and only scaling it by numbers and adding contributions that lie "
            "alike keep that sum right",
            AFTER_LAST_MICROBATCH,
        )


def _check_format(first: ShardedTensor, func: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    formats = (None, torch.preserve_format, torch.contiguous_format)
    if kwargs.get("memory_format") not in formats or kwargs.get("layout") not in (
        None,
        torch.strided,
    ):
        refuse(
            first,
            func,
            "the rows lie contiguous and strided in a flat buffer",
            "Leave memory_format and layout as they are.",
        )
