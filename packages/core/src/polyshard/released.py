"""What the full face of a parameter says while its memory is released.

Whoever holds it outside of its unit, such as a module that a weight is tied to, would read memory
that is not there. Knows parameters; nothing of units but their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import new_class
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import UnsupportedError
from .parameter import owner_of


def withdraw(parameters: Sequence[Tensor]) -> None:
    """From now on computing with them is an error that names them; autograd keeps what it saved."""
    for parameter in parameters:
        kind = type(parameter)
        if not hasattr(kind, _ORIGINAL):
            parameter.__class__ = _released(kind)


def give_back(parameters: Sequence[Tensor]) -> None:
    """Their memory is there: they are what they were."""
    for parameter in parameters:
        original = getattr(type(parameter), _ORIGINAL, None)
        if original is not None:
            parameter.__class__ = original


@functools.cache
def _released(original: type[Tensor]) -> type[Tensor]:
    # An object changes its class only between classes that store the same.
    members = {"__slots__": (), _ORIGINAL: original, "__repr__": _told}
    members |= {"__torch_function__": classmethod(_answer), "__module__": original.__module__}
    kind: type[Tensor] = new_class(original.__name__, (original,), {}, lambda n: n.update(members))
    return kind


_ORIGINAL = "_polyshard_original"

#: What needs no memory, beside attributes.
_ALLOWED = frozenset(
    """__hash__ __len__ data_ptr dim element_size get_device is_complex is_contiguous
    is_floating_point ndimension nelement numel register_hook register_post_accumulate_grad_hook
    requires_grad_ size storage_offset stride untyped_storage""".split()
)
#: Attributes that are tensors over the same memory.
_OF_VALUES = tuple(getattr(Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag"))


def _answer(
    cls: type[Tensor],
    function: Callable[..., Any],
    types: object,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    name = getattr(function, "__name__", repr(function))
    attribute = getattr(function, "__self__", None) if name in ("__get__", "__set__") else None
    if name in _ALLOWED or (attribute is not None and attribute not in _OF_VALUES):
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    _refuse(name if attribute is None else attribute.__name__, (args, kwargs))


def _refuse(name: str, arguments: Any) -> NoReturn:
    parameter = _first_released(arguments)
    raise UnsupportedError(
        f"{name} got {'a weight' if parameter is None else _told(parameter)}. It was taken from "
        "the module before fully_shard or inside a forward, or another module outside of the unit "
        "holds it, as tied weights are. Leave all users of a weight to one unit, a common "
        "ancestor; elsewhere take the parameter from the module each time."
    )


def _told(parameter: Tensor) -> str:
    unit = owner_of(parameter)
    known = () if unit is None else unit.parameters
    names = [f"{each.name!r} of unit {unit.name!r}" for each in known if each.full is parameter]
    return f"the whole weight {''.join(names)}".rstrip() + ", which is released outside of forwards"


def _first_released(arguments: Any) -> Tensor | None:
    if hasattr(type(arguments), _ORIGINAL):
        found: Tensor = arguments
        return found
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if not isinstance(arguments, list | tuple):
        return None
    return next((t for a in arguments if (t := _first_released(a)) is not None), None)
