"""Which forwards of units a backward has entered, and when it has left them.

Bookkeeping by ticks: a clock that moves with every forward and every hook. Knows of units whether
their calls are left together, and of autograd one rule of its engine: of the nodes that are ready,
the one made last runs first. Backward therefore reaches what was there at a tick only after
everything that was made since, whether or not a gradient came of it, and on every rank alike.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING

from .autograd import SavedMark

if TYPE_CHECKING:
    from .unit import Unit

_clock = count(1)


def tick() -> int:
    """A moment later than all before."""
    return next(_clock)


@dataclass(eq=False)
class ForwardPass:
    """One root forward, as its backward remembers it."""

    is_last: bool
    entered: set[tuple[int, bool]] = field(default_factory=set)  # units' ids, with gradients or not
    calls: Counter[int] = field(default_factory=Counter)  # a backward can enter, by id of the unit
    open_calls: Counter[int] = field(default_factory=Counter)  # those of them that it has not left
    backwards: int = 0  # that have reached it
    innermost: Call | None = None  # of those that run now

    def begin_call(self, unit: Unit, *, task: int) -> Call:
        """A forward of ``unit``, inside the innermost; ``task`` as in :class:`Call`."""
        self.innermost = Call(unit, self, task, parent=self.innermost)
        return self.innermost

    def begin_backward(self) -> None:
        """A backward reaches it, maybe not the first, where the graph was retained."""
        self.backwards += 1
        self.open_calls = self.calls.copy()


@dataclass(eq=False)
class Call:
    """One forward of one unit with gradients."""

    unit: Unit
    forward_pass: ForwardPass
    task: int  # the backward that it is recomputed in, then it belongs to no forward pass; or -1
    start: int = field(default_factory=tick)
    left_by: int | None = None  # which backward of the forward pass has left it, 0: none yet
    mark: SavedMark | None = None  # saved where it began, if its unit is gathered
    parent: Call | None = None  # inside which it is made

    @property
    def recomputed(self) -> bool:
        """It is a forward inside a backward."""
        return self.task >= 0

    def end(self) -> None:
        """The forward is over."""
        self.forward_pass.innermost = self.parent

    def ask_back(self) -> None:
        """Recompute the checkpointed region that it is in, as far as it, if that was not done.

        Not where backward came past the outputs of a unit around it, whose weights are not there.
        """
        around = self.parent
        while around is not None and around in around.unit.entered_calls:
            around = around.parent
        if around is None and self.mark is not None:
            self.mark.ask_back()

    def count(self) -> None:
        """Backward can enter it from now on."""
        if self.left_by is None and not self.recomputed:
            self.left_by = 0
            self.forward_pass.calls[id(self.unit)] += 1
            self.forward_pass.open_calls[id(self.unit)] += 1

    def uncount(self) -> None:
        """Backward has left it."""
        forward_pass = self.forward_pass
        if self.left_by is not None and self.left_by != forward_pass.backwards:
            self.left_by = forward_pass.backwards
            forward_pass.open_calls[id(self.unit)] -= 1


class EnteredCalls:
    """The calls that the running backwards have entered and not left."""

    def __init__(self) -> None:
        self._by_start: list[Call] = []
        self._by_task: dict[int, list[Call]] = {}

    def enter(self, call: Call, task: int) -> None:
        """Backward reached an output of ``call``, in the graph task ``task``."""
        insort(self._by_start, call, key=attrgetter("start"))
        if call.recomputed:
            self._by_task.setdefault(task, []).append(call)

    def passed(self, moment: int, *, everywhere: bool) -> Iterator[Call]:
        """Backward reached what was there at ``moment``: the calls that it has left by that.

        Args:
            everywhere: all ranks are at this point. Else the calls of units that are to be left at
                such points only stay.
        """
        staying: list[Call] = []
        while self._by_start and self._by_start[-1].start > moment:
            call = self._by_start.pop()
            if everywhere or not call.unit.is_left_together:
                yield call
            else:
                staying.append(call)
        self._by_start += reversed(staying)

    def ended(self, task: int) -> Iterator[Call]:
        """A nested backward ended, and with it the calls that were recomputed for it."""
        for call in self._by_task.pop(task, ()):
            if call in self._by_start:
                self._by_start.remove(call)
                yield call

    def clear(self) -> None:
        """No backward runs."""
        self._by_start.clear()
        self._by_task.clear()
