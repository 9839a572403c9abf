"""Other ways into a unit than its forward: ``register_forward_method``.

Knows the class of a unit's module and the hooks around a forward; knows no parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .context import unit_of
from .errors import UnsupportedError
from .hooks import enter, left, returned


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a unit's module use the unit's weights, as its forward does.

    Calls of the method gather the unit before and release it after, backward reaches its results,
    and it may call the module itself or other units. Like a forward, every rank calls it.

    Args:
        module: a unit; calling this twice changes nothing.
        method_name: a method that its class defines or inherits, such as ``"generate"``.

    Raises:
        UnsupportedError: the module was not given to ``fully_shard``, or its class has no such
            method, or it returns before its body has run (a generator or a coroutine).
    """
    unit = unit_of(module)
    title = f"register_forward_method({type(module).__name__}, {method_name!r})"
    if unit is None:
        raise UnsupportedError(f"{title}: give the module to fully_shard before.")
    shown = inspect.getattr_static(module, method_name, None)
    if method_name in vars(module) or not inspect.isfunction(shown):
        what = "nothing of that name" if shown is None else f"a {type(shown).__name__} there"
        raise UnsupportedError(
            f"{title}: it has {what}; name a method that its class defines or inherits."
        )
    if method_name == "forward":
        return
    returns_early = (inspect.isgeneratorfunction, inspect.iscoroutinefunction)
    if any(test(shown) for test in (*returns_early, inspect.isasyncgenfunction)):
        raise UnsupportedError(
            f"{title}: it hands out a generator or coroutine and runs only afterwards, when the "
            "weights are released. Register a method that runs to its end."
        )
    unit.forward_methods.add(method_name)
    if method_name not in vars(type(module)):
        setattr(type(module), method_name, _as_forward(type(module), method_name, shown))


def _as_forward(managed: type, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The method for a class of ours: for the units that registered it, a forward of its own."""

    @functools.wraps(original)
    def _call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        method = getattr(super(managed, self), name)
        unit = unit_of(self)
        if unit is None or name not in unit.forward_methods:
            return method(*args, **kwargs)
        args, kwargs = enter(unit, self, args, kwargs) or (args, kwargs)
        try:
            output = method(*args, **kwargs)
            replaced = returned(unit, output)
            return output if replaced is None else replaced
        finally:
            left(unit)

    # What it calls may be compiled; it is not.
    return torch.compiler.disable(_call_as_forward, recursive=False)
