"""The lanes of the race checker and their tickets: queues whose work the scheduler runs.

Knows no memory and no collectives.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import BackendError
from ...spi import HostLane, Lane, LaneFailure, Ticket
from .clock import LANES, Clock, Event, Timeline
from .memory import Findings
from .schedule import Item, Scheduler


class RaceTicket(Ticket):
    """A point on a lane: what is certain there, and the last item before it."""

    __slots__ = ("after", "clock", "label", "lane", "root_pass")

    def __init__(
        self, lane: int, clock: Clock, after: Item | None, root_pass: int, label: str
    ) -> None:
        self.lane, self.clock, self.after = lane, clock, after
        self.root_pass, self.label = root_pass, label


class Passes:
    """Which root pass runs, and whether it is being captured; shared by all lanes."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.number = 0
        self.captured = False

    def refuse_in_capture(self, what: str) -> None:
        """Raises RaceError for what a CUDA graph cannot hold (clause 8.2)."""
        if self.captured:
            raise self.findings.add(f"{what} while a graph is captured (clause 8.2).")


class _RaceLane(Lane):
    """What compute and the others have in common."""

    def __init__(self, lane: int, scheduler: Scheduler, failure: LaneFailure, passes: Passes):
        self.name = LANES[lane]
        self.timeline = Timeline(lane)
        self._scheduler, self._failure, self._passes = scheduler, failure, passes

    def _check(self, ticket: Ticket) -> RaceTicket:
        self._failure.raise_if_any()
        if not isinstance(ticket, RaceTicket):
            raise BackendError(
                f"a lane of the race checker cannot wait for a {type(ticket).__name__}; wait for "
                "tickets of lanes of the same backend."
            )
        if ticket.root_pass != self._passes.number:
            raise self._passes.findings.add(
                f"{self.name} waits for a ticket of {LANES[ticket.lane]!r}, marked after "
                f"{ticket.label!r} in an earlier root pass: no ticket outlives its pass "
                "(clause 8.1)."
            )
        return ticket

    def _refuse_work(self, what: str) -> None:
        if self._scheduler.worker_of_caller() is not None:
            raise self._passes.findings.add(
                f"{what} on lane {self.name!r} from inside submitted work."
            )


class QueueLane(_RaceLane):
    """A lane of the backend."""

    def __init__(self, lane: int, scheduler: Scheduler, failure: LaneFailure, passes: Passes):
        super().__init__(lane, scheduler, failure, passes)
        self._last: Item | None = None
        self._waits: list[Item] = []  # before the next item
        self.last_label = "nothing"

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        self._refuse_work("submit")
        if self._failure.occurred:
            return
        item = Item(work, self.timeline.advance(label), self._waits)
        self._waits, self._last, self.last_label = [], item, label
        self._scheduler.add(self.timeline.lane, item)

    def mark(self) -> Ticket:
        self._failure.raise_if_any()
        if self._waits:
            # Waits count as submitted: an item that does nothing stands for them.
            self.submit(_nothing, label=self.last_label)
        return RaceTicket(
            self.timeline.lane,
            self.timeline.clock,
            self._last,
            self._passes.number,
            self.last_label,
        )

    def wait(self, ticket: Ticket) -> None:
        ticket = self._check(ticket)
        self.timeline.join(ticket.clock)
        after = ticket.after
        if after is not None and not after.done and ticket.lane != self.timeline.lane:
            self._waits.append(after)

    def synchronize(self, timeout: float) -> None:
        self._passes.refuse_in_capture("synchronize blocks the host")
        self._failure.raise_if_any()
        self._scheduler.run_until(self._last)
        self._failure.raise_if_any()


class ComputeLane(_RaceLane):
    """The thread that trains. What it does between two marks is one event for the others."""

    def __init__(self, scheduler: Scheduler, failure: LaneFailure, passes: Passes) -> None:
        super().__init__(0, scheduler, failure, passes)
        self._caller = HostLane(failure)
        self.timeline.advance("start")

    def event(self, label: str) -> Event:
        """What compute does now."""
        return Event(0, self.timeline.clock, label)

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        self._refuse_work("submit")
        self._caller.submit(work, label=label)

    def mark(self) -> Ticket:
        self._failure.raise_if_any()
        clock = self.timeline.clock
        # What compute does from now on is not covered.
        self.timeline.advance("")
        return RaceTicket(0, clock, None, self._passes.number, "compute")

    def wait(self, ticket: Ticket) -> None:
        ticket = self._check(ticket)
        self._scheduler.run_until(ticket.after)
        self.timeline.join(ticket.clock)
        self._failure.raise_if_any()

    def synchronize(self, timeout: float) -> None:
        self._passes.refuse_in_capture("synchronize blocks the host")
        self._failure.raise_if_any()


def _nothing() -> None:
    """Work of no consequence."""
