"""Lanes on a CPU: a worker thread per role, and the caller's own thread for compute.

Knows no collectives and no buffers.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from polyshard import BackendError
from polyshard.spi import HostLane, Lane, LaneFailure, Ticket

from .faults import FaultDomain


class HostTicket(Ticket):
    """A point on a lane of this backend: a gate that opens when the work before it is done."""

    __slots__ = ("_gate", "label")

    def __init__(self, label: str, *, done: bool = False) -> None:
        self.label = label
        # A lock that is held until the work is done; waiting is taking it and giving it back.
        self._gate = threading.Lock()
        if not done:
            self._gate.acquire()

    @property
    def done(self) -> bool:
        """True once the work before this point ran or was dropped."""
        return not self._gate.locked()

    def open(self) -> None:
        """Let everyone pass. Called once, by the lane."""
        self._gate.release()

    def wait(self, timeout: float = -1) -> bool:
        """Block until done, without holding the interpreter; False after ``timeout`` seconds."""
        if not self._gate.acquire(timeout=timeout):
            return False
        self._gate.release()
        return True


class _Progress:
    """What a worker is doing, for error messages."""

    __slots__ = ("label",)

    def __init__(self) -> None:
        self.label = ""


_Item = tuple[Callable[[], object], HostTicket]


class WorkerLane(Lane):
    """An in-order queue that one daemon thread works off; the thread starts at first use."""

    def __init__(self, name: str, domain: FaultDomain) -> None:
        self.name = name
        self._domain = domain
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._progress = _Progress()
        self._last = self._ticket("start", done=True)
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._order = threading.Lock()  # the queue and _last change together
        domain.add_lane(self)
        weakref.finalize(self, self._queue.put, None).atexit = False

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        if not self._domain.occurred:
            self._put(work, label)

    def mark(self) -> Ticket:
        self._domain.raise_if_any()
        return self._last

    def wait(self, ticket: Ticket) -> None:
        self._domain.raise_if_any()
        ticket = _own(ticket)
        # Work of this lane is in order anyway.
        if ticket is not self._last and not ticket.done:
            self._put(ticket.wait, f"waiting for {ticket.label}")

    def synchronize(self, timeout: float) -> None:
        self._domain.raise_if_any()
        if not self._last.wait(timeout):
            raise BackendError(
                f"lane {self.name!r} is still busy with {self._progress.label!r} after "
                f"{timeout:g} s; another rank is late or gone, or the timeout is too short."
            )
        self._domain.raise_if_any()

    def _ticket(self, label: str, *, done: bool = False) -> HostTicket:
        return HostTicket(label, done=done)

    def stop(self) -> None:
        """End the thread after everything submitted so far."""
        with self._order:
            self._stopped = True
            self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within ``timeout`` seconds of being stopped."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _put(self, work: Callable[[], object], label: str) -> None:
        ticket = self._ticket(label)
        with self._order:
            if self._stopped or (self._thread is not None and not self._thread.is_alive()):
                raise BackendError(
                    f"{label}: lane {self.name!r} has stopped: the process is ending, or was "
                    "forked from the one that trains; communicate only in the process that "
                    "called fully_shard."
                )
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work_off,
                    args=(self._queue, self._domain, self._progress),
                    name=f"polyshard {self.name}",
                    daemon=True,  # An error that ends the program must not wait for a peer.
                )
                self._thread.start()
            self._last = ticket
            self._queue.put((work, ticket))


class ComputeLane(HostLane):
    """The caller's thread: work is done when ``submit`` returns, and ``wait`` blocks."""

    _now = HostTicket("compute", done=True)

    def mark(self) -> Ticket:
        self.failure.raise_if_any()
        return self._now

    def wait(self, ticket: Ticket) -> None:
        self.failure.raise_if_any()
        _own(ticket).wait()
        # What the ticket stood for may have been dropped.
        self.failure.raise_if_any()


def _own(ticket: Ticket) -> HostTicket:
    if not isinstance(ticket, HostTicket):
        raise BackendError(
            f"a lane of the gloo backend cannot wait for a {type(ticket).__name__}; wait for "
            "tickets of lanes of the same backend."
        )
    return ticket


def _work_off(queue: SimpleQueue[_Item | None], failure: LaneFailure, progress: _Progress) -> None:
    """The life of a worker thread. Holds neither its lane nor work that ran: closures hold the
    buffers of models that may be deleted while the thread lives on."""
    # Both are properties of a thread, so once is enough.
    with torch.inference_mode(False), torch.no_grad():
        while (item := queue.get()) is not None:
            work, ticket = item
            del item
            if not failure.occurred:
                progress.label = ticket.label
                try:
                    work()
                except BaseException as error:
                    failure.record(ticket.label, error)
            del work
            ticket.open()
            del ticket
