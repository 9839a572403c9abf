"""What the units of one root share: passes, windows, orders, and the end of a backward.

Knows units and the schedule's decisions; knows nothing of what modules compute, and no buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import cast

import torch
from torch import nn

from .agreement import agree_on_order
from .autograd import BackwardSession, current_graph_task
from .backward import BackwardPass
from .calls import Call, EnteredCalls, ForwardPass
from .errors import BackendError, UnsupportedError
from .group import ParameterGroup
from .order import Order
from .schedule import reduction_order
from .sharded_tensor import dispatch_is_honoured
from .spi import Traffic
from .transport import Transport
from .unit import Unit
from .unit import unit_of as unit_of


class FsdpContext:
    """Shared by the units that run under one root. Holds them weakly; they hold it.

    Made with each unit; when a common ancestor first runs, its context takes in the others.
    At most one forward and one backward run at a time; a backward may run inside a forward.
    """

    _sequence = count(1)

    def __init__(self, unit: Unit) -> None:
        self._references = [weakref.ref(unit)]
        self._were_roots: weakref.WeakSet[Unit] = weakref.WeakSet()
        #: What `microbatch` says now: whether a forward that starts is a last microbatch.
        self.is_last = True
        self.window_open = False
        self.sequence = 0  # of the latest forward, over all contexts
        self.latest_forward = ForwardPass(is_last=True)
        self._open_passes: list[ForwardPass] = []  # forwards that wait for their backward
        # Whether backwards cover all of them at once, as far as is known: then a unit is reduced
        # once for all, else once for each.
        self._joint = True
        self.backward: BackwardPass | None = None
        # A backward was recorded (create_graph), and none has brought gradients of weights since.
        self._graph_is_kept = False
        self._task = -1  # the graph task in which a hook of this context ran last
        self._root: weakref.ref[Unit] | None = None  # of the forward that runs, or was interrupted
        self._forward_order = Order([0])
        self._backward_order: Order | None = None
        self._reduction_order: tuple[int, ...] | None = None  # agreed with the other ranks
        _contexts.add(self)

    # -- units --------------------------------------------------------------------------------

    @property
    def units(self) -> list[Unit]:
        """In registration order: as the root's modules are traversed, parents first."""
        alive = [unit for reference in self._references if (unit := reference()) is not None]
        if len(alive) < len(self._references):
            self._number(alive)  # a module was deleted or replaced
        return alive

    def _number(self, units: Sequence[Unit]) -> None:
        """Number the units in this order; what was known of other orders is forgotten."""
        for index, unit in enumerate(units):
            unit.index = index
        self._references = [weakref.ref(unit) for unit in units]
        self._forward_order = Order(list(range(len(units))))
        self._backward_order = self._reduction_order = None

    def transports(self) -> list[Transport]:
        """Those in use, each once, in the order of the units."""
        return list(dict.fromkeys(unit.transport for unit in self.units))

    @property
    def forward_order(self) -> tuple[int, ...]:
        """The units by index, as the next forward expects them: at first as they are registered."""
        return self._forward_order.expected

    @property
    def backward_order(self) -> tuple[int, ...] | None:
        """The same for the next backward; None before the first."""
        return None if self._backward_order is None else self._backward_order.expected

    def traffic(self) -> Traffic:
        """What this rank moved so far on the meshes of these units: calls and bytes by kind."""
        total = Traffic()
        for transport in self.transports():
            total += transport.traffic()
        return total

    def _take_in_descendants(self, root: Unit) -> None:
        """The first time a unit runs as a root, the units below it join its context."""
        module = root.module()
        if root in self._were_roots or module is None:
            return
        self._were_roots.add(root)
        below = {
            unit: path
            for path, child in module.named_modules()
            if (unit := unit_of(child)) is not None
        }
        known = self.units
        if below.keys() < set(known):
            return  # a child alone, after its ancestor ran: names and order stand
        for unit, path in below.items():
            other = context_of(unit)
            if other.backward is not None or (other is not self and other._root is not None):
                raise UnsupportedError(
                    f"unit {unit.name!r} is in a pass of its own while its ancestor {root.name!r} "
                    "runs for the first time; run the ancestor once before."
                )
            self.window_open = self.window_open or other.window_open
            self._open_passes += [p for p in other._open_passes if p not in self._open_passes]
            unit.scheduled_by = self
            unit.rename(path)
        self._number([*below, *(unit for unit in known if unit not in below)])

    # -- forward ------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> bool:
        """The unit's forward begins: gather it. True if it is recomputed inside a backward."""
        if current_graph_task() != -1:
            # Queues the end of backward on the outermost task, where a reentrant checkpoint runs
            # this before any of our backward hooks.
            self.enter_backward()
            unit.entered_forward |= torch.is_grad_enabled()
            unit.submit_gather(forward=False)
            self._gather_ahead(unit)
            unit.await_gather()
            return True
        if self._root is None or self.is_root(unit):
            self._begin_forward(unit)
        unit.submit_gather(forward=True)
        units, elements = unit.schedule.forward_units, unit.schedule.forward_elements
        for other in self._forward_order.ahead(unit, units=units, elements=elements):
            other.submit_gather(forward=True)
        self.latest_forward.entered.add((id(unit), torch.is_grad_enabled()))
        unit.take_part(self.latest_forward)
        unit.await_gather()
        return False

    def begin_call(self, unit: Unit) -> Call:
        """A forward of the unit whose gradients are recorded."""
        task = current_graph_task() if unit.recomputing else -1
        return self.latest_forward.begin_call(unit, task=task)

    def is_root(self, unit: Unit) -> bool:
        """Whether the forward that runs began with ``unit``."""
        return self._root is not None and self._root() is unit

    def leave_forward(self, unit: Unit, *, recompute: bool) -> None:
        """The unit's forward is over, by return or by exception."""
        if recompute:
            return
        if unit.reshard_after_forward or not torch.is_grad_enabled():
            unit.release()
        if self.is_root(unit):
            self._end_forward()

    def _begin_forward(self, root: Unit) -> None:
        _drop_failed_backward()
        if self._root is not None:
            # The last pass was interrupted where no hook could notice.
            self.abandon()
        self._take_in_descendants(root)
        self._root = weakref.ref(root)
        self.sequence = next(self._sequence)
        self.latest_forward = ForwardPass(self.is_last)
        if torch.is_grad_enabled():
            self._open_passes.append(self.latest_forward)
        units = self.units
        for unit in units:
            unit.examine_modules()
            if not self.window_open:
                unit.pinned = unit.entered_without_grad = False
            if not self.window_open or not dispatch_is_honoured():
                # Nothing made outside a window, or where writes go unseen, is trusted again.
                unit.release(copies=True)
            unit.sync_requires_grad()
        self.window_open = self.window_open or torch.is_grad_enabled()
        self._forward_order.begin(units)

    def _end_forward(self) -> None:
        self._root = None
        self._forward_order = self._forward_order.next()
        keep_gathered = self.window_open and torch.is_grad_enabled()
        for unit in self.units:
            if not self.window_open:
                if not unit.pinned:
                    unit.release(copies=True)
            elif unit.reshard_after_forward or not keep_gathered:
                unit.release()
        self._settle()

    # -- backward -----------------------------------------------------------------------------

    def enter_backward(self, forward_pass: ForwardPass | None = None) -> None:
        """Some hook of this context runs inside a backward, whose end is to be noticed.

        It covers ``forward_pass``; where the first hook names none, the latest.
        """
        task = current_graph_task()
        if self.backward is None or task != self._task:
            _drop_failed_backward()
            self._task = task
            if self.backward is None:
                units = self.units
                order = self._reduction_order or reduction_order(len(units), None)
                self.backward = BackwardPass(units, order)
                self._backward_order = self._backward_order or self._forward_order.reversed()
                self._backward_order.begin(units)
                _active.append(self)
                forward_pass = forward_pass or self.latest_forward
            _session.enter()
        if forward_pass is not None and forward_pass not in self.backward.covered:
            self.backward.covered.add(forward_pass)
            forward_pass.begin_backward()
            if forward_pass not in self._open_passes:  # its graph was retained
                self._open_passes.append(forward_pass)
                for unit in self.units:
                    unit.take_part(forward_pass)

    def enter_call(self, call: Call, groups: Sequence[ParameterGroup], moment: int) -> None:
        """Backward is about to use the weights in ``groups`` for a call of their unit.

        At first all of the unit is gathered; what was released since only where it is used again.
        What it reaches now was there at the tick ``moment``.
        """
        if call.recomputed and not _session.nests(call.task):
            return  # by way of an input that it handed on: nothing of it is in this graph
        unit = call.unit
        self.enter_backward(None if call.recomputed else call.forward_pass)
        is_first, is_new = not unit.entered_backward, call not in unit.entered_calls
        if is_new:
            unit.entered_calls.add(call)
            unit.not_left.add(call)
        if torch.is_grad_enabled():
            # create_graph: what this backward computes with these weights has a backward, too.
            unit.pinned = self._graph_is_kept = True
        # First, to make room; but what another call of this unit had is still of use. What a rank
        # uses of a unit in between is its own affair: all ranks are where a call is entered of a
        # unit that gathers.
        everywhere = is_new and unit.is_collective
        _leave(_entered.passed(moment, everywhere=everywhere), everywhere=everywhere)
        if everywhere:
            _rest()
        if is_new:
            _entered.enter(call, current_graph_task())
            call.ask_back()
        elif call not in unit.not_left:
            return  # by way of an input that it handed on: all that it computed has run
        # Recomputation inside the unit looks its parameters up.
        unit.show_full()
        wanted = None if is_first else [group for group in groups if not group.is_ready]
        unit.submit_gather(wanted, forward=False)
        if is_first:
            self._gather_ahead(unit)
        unit.await_gather(wanted)

    def _gather_ahead(self, unit: Unit) -> None:
        """Backward comes to a unit, by recomputing it or by its outputs: once for each."""
        if unit.met_in_backward or self._backward_order is None:
            return
        unit.met_in_backward = True
        units, elements = unit.schedule.backward_units, unit.schedule.backward_elements
        for other in self._backward_order.ahead(unit, units=units, elements=elements):
            if not other.met_in_backward:
                other.submit_gather(forward=False)

    def leave_call(self, call: Call, *, everywhere: bool) -> None:
        """Backward has run all that the call computed: what gradients it gives are there."""
        call.uncount()
        unit = call.unit
        more_to_come = any(other.open_calls[id(unit)] for other in self._open_passes)
        unit.leave(call, more_to_come=more_to_come, everywhere=everywhere)
        if unit.may_rest:
            _left[unit] = None
        # Recomputation comes on top of the calls that were counted, maybe on some ranks only.
        more_in_pass = call.forward_pass.open_calls[id(unit)] if not call.recomputed else 0
        if not unit.is_collective:
            more_in_pass |= call.recomputed or unit.entered_without_grad
        is_done = not (unit.not_left or more_in_pass or (more_to_come and self._joint))
        # Roots reduce in the reverse order of their forwards.
        later_open = any(
            other.window_open and other.sequence > self.sequence
            for other in list(_contexts)
            if other is not self
        )
        assert self.backward is not None
        self.backward.on_left(unit, is_done=is_done, may_reduce=not later_open)

    def finish_backward(self) -> None:
        """The outermost backward is over: reduce what is left, show gradients, let go."""
        backward = self.backward
        assert backward is not None
        units = self.units
        backward.reduce_rest()
        if self._reduction_order is None:
            self._reduction_order = agree_on_order(list(backward.done), units)
        self._settle()
        backward.collect()
        self.backward = None
        if self._backward_order is not None:
            self._backward_order = self._backward_order.next()
        self._graph_is_kept = self._graph_is_kept and not backward.brought_gradients
        window_ends = backward.final and not self._graph_is_kept
        for unit in units:
            unit.end_backward()
            if window_ends:
                unit.entered_forward = unit.pinned = False
            elif unit.index in backward.reduced:
                # What was added to waits for the next final backward, also where the forward was
                # in a window that another backward has ended.
                unit.entered_forward = True
            unit.release(copies=window_ends or not self.window_open)
        self.window_open = self.window_open and not window_ends
        self._close_passes(backward)
        for transport in self.transports():
            transport.join()

    def _close_passes(self, backward: BackwardPass) -> None:
        waiting = [other for other in self._open_passes if other not in backward.covered]
        if any(other.open_calls.total() for other in waiting):
            # Where units may be used by some ranks only, those that do must not reduce them twice.
            self._joint = any(unit.trainable and not unit.is_collective for unit in self.units)
        elif len(backward.covered) > 1:
            self._joint = True
        self._open_passes = [] if backward.final else waiting

    def abandon(self) -> None:
        """Forget a pass that failed: the next one finds everything at rest."""
        for unit in self.units:
            # A lane that failed says so again at the next pass; here it must not stop the rest.
            with suppress(BackendError):
                unit.abandon()
        self.backward = self._root = None
        self.window_open = self._graph_is_kept = False
        self._open_passes = []

    def _settle(self) -> None:
        """Peers are done with what this rank lent them, and compute has joined every lane."""
        for transport in self.transports():
            transport.settle()
            transport.join()
        for unit in self.units:
            unit.joined()


_contexts: weakref.WeakSet[FsdpContext] = weakref.WeakSet()
_entered = EnteredCalls()
_left: dict[Unit, None] = {}  # by the backward that runs, and not released for sure
_active: list[FsdpContext] = []  # those that take part in the backward that runs


def register_unit(module: nn.Module, unit: Unit) -> FsdpContext:
    """Make ``unit`` the module's, with a context of its own until an ancestor runs."""
    module.__dict__["_polyshard_unit"] = unit
    context = FsdpContext(unit)
    unit.scheduled_by = context
    return context


def context_of(unit: Unit) -> FsdpContext:
    """The context a unit runs under."""
    return cast(FsdpContext, unit.scheduled_by)


def _leave(calls: Iterable[Call], *, everywhere: bool) -> None:
    for call in calls:
        context_of(call.unit).leave_call(call, everywhere=everywhere)


def _rest() -> None:
    for unit in _left:
        unit.rest()
    _left.clear()


def _finish_active() -> None:
    try:
        _leave(_entered.passed(-1, everywhere=True), everywhere=True)
        _entered.clear()
        _left.clear()
        # In the reverse order of their forwards, the same on every rank.
        _active.sort(key=lambda context: context.sequence)
        while _active:
            _active[-1].finish_backward()
            _active.pop()
    except BaseException:
        _drop_failed_backward()
        raise


def _drop_failed_backward() -> None:
    if _active and not _session.running:
        _entered.clear()
        _left.clear()
        while _active:
            _active.pop().abandon()


_session = BackwardSession(
    on_end=_finish_active,
    on_failure=_drop_failed_backward,
    on_nested_end=lambda task: _leave(_entered.ended(task), everywhere=True),
)
