"""Wires units into modules and autograd: hooks around forwards, and before backward reaches what
they returned.

Hooks hold units, never modules; a hook on a tensor holds its group weakly. Compiled code runs
around them: what they do is not for a graph.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .autograd import SavedMark, before_node, producers, tensors_in
from .calls import Call, tick
from .casting import cast
from .context import context_of
from .errors import UnsupportedError
from .group import ParameterGroup
from .unit import Unit


def attach(
    unit: Unit,
    module: nn.Module,
    owners: Iterable[nn.Module],
    undo: list[Callable[[], object]],
) -> None:
    """Register the hooks of ``unit``.

    Args:
        module: the unit's module.
        owners: the submodules that hold parameters of the unit directly. Backward through any of
            their outputs needs the weights, whether or not it comes through the unit's own.
        undo: takes what removes each hook at once, so that a failure half-way can be undone.
    """
    take_gradients(unit)
    before = _PreForward(unit)
    handles = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(_Returned(unit)),
        module.register_forward_hook(_Left(unit), always_call=True),
    ]
    undo += [handle.remove for handle in handles]
    groups = unit.groups_by_holder()
    for owner in owners:
        if owner is not module:
            watch = _WatchOutput(unit, groups[id(owner._parameters)])
            undo.append(owner.register_forward_hook(watch).remove)


def take_gradients(unit: Unit) -> None:
    """Let the unit's gradients be taken over as they come."""
    for group in unit.groups:
        group.on_grad = _OnGrad(weakref.ref(unit))


class UnitHook:
    """A hook on a module of ``unit``."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit


class _PreForward(UnitHook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return _enter_apart(self.unit, module, args, kwargs)
        return enter(self.unit, module, args, kwargs)


class _Returned(UnitHook):
    """Called after a return only."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if torch.compiler.is_compiling():
            return _returned_apart(self.unit, output)
        return returned(self.unit, output)


class _Left(UnitHook):
    """Called after a return and after an exception."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            _left_apart(self.unit)
        else:
            left(self.unit)


class _WatchOutput(UnitHook):
    def __init__(self, unit: Unit, groups: Sequence[ParameterGroup]) -> None:
        super().__init__(unit)
        self.groups = groups

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return  # what happens inside a graph, no backward reaches alone
        if torch.is_grad_enabled() and self.unit.call is not None:
            _hook_producers(self.unit, self.groups, tensors_in(output))


def enter(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward of the unit begins: its weights are there. Returns other arguments, or None."""
    context = context_of(unit)
    if unit.depth and (not context.is_root(unit) or _runs_inside_itself(module)):
        unit.depth += 1  # its weights are there
        _mark(unit)
        return None
    unit.refuse_unwritten()
    unit.recomputing = context.enter_forward(unit)
    unit.depth = 1
    unit.show_full()
    unit.call = context.begin_call(unit) if torch.is_grad_enabled() else None
    mark = _mark(unit)
    if unit.call is not None:
        unit.call.mark = mark
    precision = unit.precision
    if precision.compute_dtype is None or not precision.cast_forward_inputs:
        return None
    dtype = precision.compute_dtype
    return cast(args, dtype), cast(kwargs, dtype)


def _mark(unit: Unit) -> SavedMark | None:
    """Save a point that recomputation without reentry must reach: every rank then recomputes a
    region up to the gathered units in it, and at the first of them. What a forward saves, its
    recomputation has to save too."""
    return SavedMark() if unit.is_collective and torch.is_grad_enabled() else None


def returned(unit: Unit, output: Any) -> Any:
    """Hook the output for backward, and cast it; None leaves it as it is."""
    if unit.depth > 1:
        return None
    _watch(unit, output)
    unit.refuse_writes()
    dtype = unit.precision.output_dtype
    return None if dtype is None else cast(output, dtype)


def left(unit: Unit) -> None:
    """The forward is over, by a return or by an exception."""
    if unit.depth == 0:
        return  # it failed before it began
    unit.depth -= 1
    if unit.depth == 0:
        _end_call(unit)
        if not unit.recomputing:
            # After a recomputation backward goes on inside the unit, and may recompute more.
            unit.show_sharded()
        context_of(unit).leave_forward(unit, recompute=unit.recomputing)


def interrupted(unit: Unit, depth: int) -> None:
    """The forward is over by Ctrl-C or the like, of which modules tell no hook.

    Nothing is waited for here, for that may be what was interrupted; the next forward of the root
    lets go of what the pass has gathered.

    Args:
        depth: how many forwards of the module ran when it began.
    """
    if unit.depth <= depth:
        return  # it had not begun, or hooks were told
    unit.depth = depth
    if depth == 0:
        _end_call(unit)
        if not unit.recomputing:
            unit.show_sharded()


def _end_call(unit: Unit) -> None:
    if unit.call is not None:
        unit.call.end()
        unit.call = None


_enter_apart, _returned_apart, _left_apart = map(torch.compiler.disable, (enter, returned, left))


def _watch(unit: Unit, output: object) -> None:
    """Gather again before backward runs through ``output``; keep what it is a view of."""
    if not unit.groups:
        return
    tensors = list(tensors_in(output))
    if unit.shares_storage(tensors):
        unit.pinned = True
    if torch.is_grad_enabled() and unit.call is not None:
        _hook_producers(unit, unit.groups, tensors)


def _hook_producers(
    unit: Unit, groups: Sequence[ParameterGroup], tensors: Iterable[Tensor]
) -> None:
    hook: Callable[[], None] | None = None
    call = unit.call
    assert call is not None
    for tensor in tensors:
        if not tensor.requires_grad:
            continue
        if hook is None:
            hook = _BeforeBackward(call, groups)
        for node in producers(tensor):
            before_node(node, hook)


class _BeforeBackward:
    """Runs before backward reaches what a call computed with the weights of some groups."""

    __slots__ = ("_call", "_groups", "_moment")

    def __init__(self, call: Call, groups: Sequence[ParameterGroup]) -> None:
        self._call, self._groups, self._moment = call, groups, tick()
        call.count()

    def __call__(self) -> None:
        call = self._call
        context_of(call.unit).enter_call(call, self._groups, self._moment)


class _OnGrad:
    """Takes a gradient over as soon as autograd has finished it."""

    def __init__(self, unit: weakref.ref[Unit]) -> None:
        self._unit = unit

    def __call__(self, group: ParameterGroup, index: int, parameter: Tensor) -> None:
        unit = self._unit()
        if unit is None:
            return
        grad, parameter.grad = parameter.grad, None
        if grad is None:
            return
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"backward(create_graph=True) reached {group.parameters[index].name!r} of unit "
                f"{unit.name!r}: gradients of sharded parameters are reduced outside of autograd "
                "and have no graph. Take those of inputs, with torch.autograd.grad(loss, inputs, "
                "create_graph=True), and call backward() without create_graph on what you compute "
                "from them."
            )
        context = context_of(unit)
        context.enter_backward()
        assert context.backward is not None
        context.backward.brought_gradients = True
        local = group.parameters[index].local_grad(grad)
        group.gradients.add(index, local)


def _runs_inside_itself(module: nn.Module) -> bool:
    """Whether an outer call of ``module`` is on the stack; else it was interrupted and never left.

    Looked up only where a forward begins that seems to be running: a recursive one is, and one that
    Ctrl-C ended in compiled code is not.
    """
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        calls += frame.f_code.co_name in CALLERS and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls > 1


#: Functions whose frame, with the module as ``self``, is a call of it.
CALLERS = {"_call_impl", "_call_as_forward"}
