"""One backward of one context: which units reduce, in which order, and when.

Knows units and the agreed order; knows no modules, no hooks and no other context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .calls import ForwardPass
from .unit import Unit

#: Units whose reduction may still read its input while later units pack theirs.
REDUCTIONS_IN_FLIGHT = 1


class BackwardPass:
    """Reduces units in one order on every rank, never in the order of this rank's own backward.

    Args:
        units: of the context, by index.
        order: every unit's index, the same on every rank.
    """

    def __init__(self, units: Sequence[Unit], order: Sequence[int]) -> None:
        self._units, self._order = units, order
        self.covered: set[ForwardPass] = set()
        self.brought_gradients = False  # of weights, not of inputs alone
        #: Units in the order in which backward was done with them; the values say nothing.
        self.done: dict[int, None] = {}
        self.reduced: set[int] = set()
        self._unfinished: set[int] = set()  # reduced before it was known to be final
        self._unreduced: set[int] = set()  # calls were left since the last reduction
        self._until = 0  # everything before it in the order was reduced or takes no part
        self._in_flight: deque[Unit] = deque()

    @property
    def final(self) -> bool:
        """A forward that it covers was a last microbatch."""
        return any(forward_pass.is_last for forward_pass in self.covered)

    def on_left(self, unit: Unit, *, is_done: bool, may_reduce: bool) -> None:
        """Backward has left a call of ``unit``, at the same point of the program on every rank.

        Args:
            is_done: no other calls of it are known to come: reduce it, and what waited for it.
        """
        self._unreduced.add(unit.index)
        if not is_done:
            return
        self.done.setdefault(unit.index)
        if not may_reduce:
            return
        if unit.index in self.reduced:
            self._reduce(unit)
        while self._until < len(self._order):
            following = self._units[self._order[self._until]]
            if following.index not in self.reduced and _may_take_part(following):
                if following.index not in self.done:
                    return
                self._reduce(following)
            self._until += 1

    def reduce_rest(self) -> None:
        """The backward is over: what has not come by now counts as zero."""
        for index in self._order:
            unit = self._units[index]
            known = index in self.reduced and not (self.final and index in self._unfinished)
            # What was used outside of any call, inside `unsharded`, has no other sign.
            started = index in self._unreduced or unit.started
            if unit.trainable and (started or (not known and _takes_part(unit))):
                self._reduce(unit)

    def collect(self) -> None:
        """Show the gradients. Compute has joined the lanes."""
        self._in_flight.clear()
        for index in sorted(self.reduced):
            self._units[index].collect(final=self.final)

    def _reduce(self, unit: Unit) -> None:
        self.reduced.add(unit.index)
        self._unreduced.discard(unit.index)
        if not self.final:
            self._unfinished.add(unit.index)
        unit.reduce(final=self.final)
        self._in_flight.append(unit)
        while len(self._in_flight) > REDUCTIONS_IN_FLIGHT:
            self._in_flight.popleft().release_inputs()


def _may_take_part(unit: Unit) -> bool:
    """Whether the unit may still take part in this backward, by recomputation."""
    return _takes_part(unit) or (unit.trainable and unit.entered_without_grad)


def _takes_part(unit: Unit) -> bool:
    """Whether every rank reduces the unit in this backward.

    A gathered unit is entered by all ranks or by none. One that is always there may have been used
    on another rank, so it is reduced even where this rank did not.
    """
    if not unit.trainable:
        return False
    return not unit.is_collective or unit.entered_forward or unit.entered_backward
