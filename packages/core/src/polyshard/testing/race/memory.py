"""Who read and wrote which bytes, and which two of those accesses nothing keeps apart.

Knows events; knows no lanes, no torch operations and no transport.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...errors import BackendError
from ...spi import LaneFailure
from .clock import Event


class RaceError(BackendError):
    """Two uses of the same memory that no wait orders, or a promise of the core that was broken.

    Its message names the unit (in the labels of the work), the buffer and the missing wait.
    """


class Findings:
    """The violations found so far. Whoever finds one raises it; where that is swallowed, the
    backend has failed all the same, and the first one is told at the end."""

    def __init__(self, failure: LaneFailure) -> None:
        self.errors: list[RaceError] = []
        self._failure = failure

    def add(self, message: str) -> RaceError:
        """The error to raise."""
        error = RaceError(message)
        self.errors.append(error)
        self._failure.record("", RaceError(message))  # which loses its traceback there
        return error


@dataclass(slots=True)
class Access:
    """One use of the bytes [start, stop) of some storage."""

    start: int
    stop: int
    writes: bool
    event: Event

    def overlaps(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


@dataclass(slots=True, eq=False)
class Loan:
    """Bytes that peers may read until the communicator was settled."""

    start: int
    stop: int
    communicator: str
    event: Event
    settled: Event | None = None


@dataclass(eq=False)
class Memory:
    """The history of one storage, as far as it can still matter.

    Attributes:
        name: for messages.
        home: the lane it was allocated on; its memory goes back to that lane's allocator.
        findings: takes what is wrong.
        released: where it lost its memory; None while it has some.
    """

    name: str
    home: int
    findings: Findings
    released: Event | None = None
    accesses: list[Access] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)

    def read(self, start: int, stop: int, event: Event) -> None:
        """Raises RaceError unless every write of these bytes is certain to have happened."""
        self._require_memory(event, "reads")
        for access in self.accesses:
            if access.writes and access.overlaps(start, stop):
                self._require_order(access, event, "reads")
        self.accesses = [
            access
            for access in self.accesses
            if access.writes
            or access.event.lane != event.lane
            or access.start < start
            or access.stop > stop
        ]
        self.accesses.append(Access(start, stop, False, event))

    def write(self, start: int, stop: int, event: Event, *, verb: str = "writes") -> None:
        """Raises RaceError unless every use of these bytes, by peers too, is certainly over."""
        if verb != "acquires":
            self._require_memory(event, verb)
        for access in self.accesses:
            if access.overlaps(start, stop):
                self._require_order(access, event, verb)
        for loan in self.loans:
            if loan.start < stop and start < loan.stop:
                self._require_settled(loan, event, verb)
        self.accesses = [
            access for access in self.accesses if access.start < start or access.stop > stop
        ]
        self.accesses.append(Access(start, stop, True, event))
        self.loans = [loan for loan in self.loans if loan.start < start or loan.stop > stop]

    def lend(self, start: int, stop: int, communicator: str, event: Event) -> Loan:
        """Peers may read these bytes from now on."""
        loan = Loan(start, stop, communicator, event)
        self.loans.append(loan)
        return loan

    def free(self, event: Event) -> None:
        """The last reference was dropped: the allocator may hand the memory out again.

        Raises RaceError unless its home lane comes after every use of it.
        """
        if self.released is not None:
            return
        for access in self.accesses:
            self._require_order(access, event, "frees")
        for loan in self.loans:
            self._require_settled(loan, event, "frees")

    def _require_memory(self, event: Event, verb: str) -> None:
        if self.released is not None:
            raise self.findings.add(
                f"{event.lane_name} {verb} {self.name} in {event.label!r}, but its memory was "
                f"released in {self.released.label!r} on lane {self.released.lane_name!r} and not "
                "acquired since: it was not gathered, or what gathers it was not waited for."
            )

    def _require_order(self, access: Access, event: Event, verb: str) -> None:
        earlier = access.event
        if earlier.precedes(event):
            return
        done = "writes" if access.writes else "reads"
        raise self.findings.add(
            f"{event.lane_name} {verb} {self.name}, bytes {access.start} to {access.stop}, in "
            f"{event.label!r}, while {earlier.lane_name} {done} it in {earlier.label!r}. Missing: "
            f"{event.lane_name} must wait for a ticket of {earlier.lane_name} that was marked "
            f"after {earlier.label!r}."
        )

    def _require_settled(self, loan: Loan, event: Event, verb: str) -> None:
        if loan.settled is not None and loan.settled.precedes(event):
            return
        if loan.settled is None:
            missing = f"settle() of the {loan.communicator} communicator, submitted before"
        else:
            missing = (
                f"{event.lane_name} must wait for a ticket of {loan.settled.lane_name} that was "
                f"marked after {loan.settled.label!r}"
            )
        raise self.findings.add(
            f"{event.lane_name} {verb} {self.name}, bytes {loan.start} to {loan.stop}, in "
            f"{event.label!r}, while peers may still read it as input of {loan.event.label!r}. "
            f"Missing: {missing}."
        )
