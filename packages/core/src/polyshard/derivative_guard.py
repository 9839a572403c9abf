"""Says what autograd cannot do with sharded weights, where it would say nothing or something else.

Forwards compute with the full face of a weight; the sharded one, which users hold, is in no graph.
What is written to it shows in the full one's version only once that is dated.

Knows the faces of parameters; nothing of units but their names.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from .autograd import NEVER_SAVED, current_graph_task
from .errors import UnsupportedError
from .parameter import owner_of
from .sharded_tensor import ShardedTensor

_installed = False


class Dated(Protocol):
    """Has full parameters that may stay between a forward and backwards."""

    def date(self) -> None:
        """Give them the versions of their weights as they are now."""


_dated: weakref.WeakSet[Dated] = weakref.WeakSet()


def guard_derivatives(dated: Dated) -> None:
    """Check every ``autograd.grad`` and ``backward`` from now on, and date ``dated``, held weakly,
    before each: a backward may reach its weights through no hook of their unit.
    Nothing in PyTorch is told of these calls, so the functions themselves are wrapped."""
    global _installed
    _dated.add(dated)
    if not _installed:
        torch.autograd.grad = _guarded(torch.autograd.grad)
        torch.autograd.backward = _guarded(torch.autograd.backward)
        _installed = True


def _guarded(function: Callable[..., Any]) -> Any:
    place = list(inspect.signature(function).parameters).index("inputs")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        inputs = args[place] if len(args) > place else kwargs.get("inputs")
        if isinstance(inputs, Iterator):  # model.parameters() can be read once
            inputs = tuple(inputs)
            if len(args) > place:
                args = (*args[:place], inputs, *args[place + 1 :])
            else:
                kwargs["inputs"] = inputs
        if inputs is not None:
            _examine(function.__name__, inputs)
        if current_graph_task() == -1:
            for each in list(_dated):
                each.date()
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if f"version {NEVER_SAVED};" in str(error):
                raise UnsupportedError(_RELEASED) from error
            raise

    return guarded


_RELEASED = (
    "backward needs a weight that was released after the forward of its unit: it came to what was "
    "computed with that weight, but through no output of the unit or of the submodule that holds "
    "the weight. Return what you kept from inside the forward, or compute it in a submodule of its "
    "own, or give fully_shard reshard_after_forward=False. Where autograd.grad(create_graph=True) "
    "made it, run one backward through it, before another one brings gradients of weights."
)


def _examine(function: str, inputs: Any) -> None:
    if isinstance(inputs, Mapping):
        inputs = inputs.values()
    several = isinstance(inputs, Iterable) and not isinstance(inputs, Tensor)
    for given in inputs if several else (inputs,):
        unit = owner_of(given) if isinstance(given, ShardedTensor) else None
        if unit is not None:
            raise UnsupportedError(
                f"torch.autograd.{function} with {given._name!r} of unit {unit.name!r} among its "
                "inputs: forwards do not compute with the sharded parameter but with what is "
                "gathered from it, so it would get no gradient. Call backward() without inputs "
                "and read .grad, which is reduced over ranks; to leave parameters out, freeze "
                "them with requires_grad_(False) before the forward."
            )
