"""Logical time: which of two things on lanes is certain to come first.

Pure. Every lane counts its own pieces of work, and knows how far each other lane had come at the
points it waited for (vector clocks: Fidge, Mattern, 1988). Knows no threads and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Compute first, then the lanes of a backend.
LANES = ("compute", "gather", "reduce", "outer")
Clock = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened on a lane.

    Args:
        lane: index in LANES.
        clock: how far every lane had come, as far as this one is certain of it; its own entry is
            the time of the event.
        label: of the work, or of what compute was doing.
    """

    lane: int
    clock: Clock
    label: str

    @property
    def lane_name(self) -> str:
        return LANES[self.lane]

    def precedes(self, other: Event) -> bool:
        """Whether it is certain to come before ``other``, or is part of the same work."""
        return other.clock[self.lane] >= self.clock[self.lane]


class Timeline:
    """The clock of one lane as work is submitted to it."""

    def __init__(self, lane: int) -> None:
        self.lane = lane
        self.clock: Clock = (0,) * len(LANES)

    def advance(self, label: str) -> Event:
        """The next piece of work."""
        lane = self.lane
        now = self.clock[lane] + 1
        self.clock = (*self.clock[:lane], now, *self.clock[lane + 1 :])
        return Event(lane, self.clock, label)

    def join(self, clock: Clock) -> None:
        """What comes later comes after ``clock``."""
        self.clock = tuple(map(max, self.clock, clock))

    def covers(self, other: Timeline) -> bool:
        """Whether everything submitted to ``other`` is certain to have happened."""
        return self.clock[other.lane] >= other.clock[other.lane]
