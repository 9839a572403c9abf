"""The order in which units are entered: what is expected, and what is recorded of a pass.

Knows units by index and size only.
"""

from __future__ import annotations

import weakref
from itertools import accumulate

from .schedule import prefetch
from .unit import Unit


class Order:
    """An order in which units are expected, and the one that is being recorded."""

    def __init__(self, expected: list[int]) -> None:
        self._expected = expected
        self._first = {index: place for place, index in reversed(list(enumerate(expected)))}
        self._place = -1
        self._recorded: list[int] = []
        self._units: list[weakref.ref[Unit]] = []  # weakly: they hold the context that holds this
        self._sizes: list[int] = []
        self._gathered: list[int] = []  # of those expected, the ones that gather anything
        self._before: list[int] = []  # how many of them are expected up to each place

    @property
    def expected(self) -> tuple[int, ...]:
        """Units by index, in the order in which they are expected; one may come several times."""
        return tuple(self._expected)

    def begin(self, units: list[Unit]) -> None:
        """A pass begins."""
        self._place, self._recorded, self._units = -1, [], list(map(weakref.ref, units))
        self._sizes = [unit.gathered_numel for unit in units]
        self._gathered = [index for index in self._expected if self._sizes[index]]
        self._before = list(accumulate(self._sizes[index] > 0 for index in self._expected))

    def ahead(self, unit: Unit, *, units: int, elements: int | None) -> list[Unit]:
        """Record that ``unit`` is entered; which ones to gather while it computes?"""
        self._recorded.append(unit.index)
        following = self._place + 1
        if following < len(self._expected) and self._expected[following] == unit.index:
            self._place = following
        else:
            # Another order than last time: go on from where this unit was.
            self._place = self._first.get(unit.index, self._place)
        # Units that gather nothing are left out beforehand: with most of them, every look ahead
        # would go through all.
        place = self._before[self._place] - 1 if self._place >= 0 else -1
        chosen = prefetch(self._gathered, place, sizes=self._sizes, units=units, elements=elements)
        return [other for index in chosen if (other := self._units[index]()) is not None]

    def next(self) -> Order:
        """What to expect of the next pass: what was recorded, if anything was."""
        if not self._recorded or self._recorded == self._expected:
            return self
        return Order(self._recorded)

    def reversed(self) -> Order:
        return Order(list(dict.fromkeys(self._expected[::-1])))
