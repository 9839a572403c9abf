"""Lanes: a thread for each role, and the caller's own thread for compute. Knows no sockets."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import torch

from polyshard import BackendError
from polyshard.spi import HostLane, Lane, LaneFailure, Ticket

# How long the end of the process waits for work that is under way, in seconds.
_GRACE = 1.0


class _Abortable(Protocol):
    def abort(self) -> None: ...


class SharedFailure(LaneFailure):
    """The first failure of any lane (clause 2), after which peers must not wait for this rank.

    From then on every lane drops its work, so whatever peers expect will not come: all
    connections are cut, and the peers fail at once instead of at their timeout (clause 2.5).
    """

    def __init__(self) -> None:
        super().__init__()
        self._watched: weakref.WeakSet[_Abortable] = weakref.WeakSet()
        self._membership = threading.Lock()

    def watch(self, connections: _Abortable) -> None:
        """Cut ``connections`` when anything fails, or now if something has. Held weakly."""
        with self._membership:
            self._watched.add(connections)
        if self.occurred:
            connections.abort()

    def record(self, label: str, cause: BaseException) -> None:
        super().record(label, cause)
        self.abort()

    def abort(self) -> None:
        """Cut all connections."""
        with self._membership:
            watched = list(self._watched)
        for connections in watched:
            connections.abort()


class HostTicket(Ticket):
    """A point on a lane: ``passed`` is set once the work before it ran or was dropped."""

    __slots__ = ("label", "passed")

    def __init__(self, label: str, *, passed: bool = False) -> None:
        self.label = label
        self.passed = threading.Event()
        if passed:
            self.passed.set()


_Item: TypeAlias = tuple[Callable[[], object], HostTicket]


class _Worker(threading.Thread):
    """Works off a queue until it finds None there. Knows no lane, so lanes can be dropped."""

    def __init__(self, role: str, failure: SharedFailure) -> None:
        # A daemon: a program that ends with an error must not wait for a peer (clause 1.9).
        super().__init__(name=f"polyshard sockets {role}", daemon=True)
        self.items: SimpleQueue[_Item | None] = SimpleQueue()
        self.failure = failure
        self.running = ""

    def run(self) -> None:
        # Both are states of a thread, so once is enough (clause 1.2).
        with torch.inference_mode(False), torch.no_grad():
            while (item := self.items.get()) is not None:
                work, ticket = item
                if not self.failure.occurred:
                    self.running = ticket.label
                    try:
                        work()
                    except BaseException as error:
                        self.failure.record(ticket.label, error)
                # Before the ticket opens: whoever waits for it may delete the model whose
                # buffers the work holds (clause 1.6).
                del item, work
                ticket.passed.set()
                del ticket


class WorkerLane(Lane):
    """An in-order queue with a thread of its own, which starts with the first work.

    The lanes of the three roles must not share a thread: where gradients are missing on some
    ranks, one rank gathers while another reduces, and each waits for the other (clause 1.3).
    """

    def __init__(self, role: str, failure: SharedFailure) -> None:
        self._role = role
        self._failure = failure
        self._worker = _Worker(role, failure)
        self._last = HostTicket("the start", passed=True)
        self._order = threading.Lock()  # _last is the ticket of the last item of the queue
        _workers.add(self._worker)
        weakref.finalize(self, self._worker.items.put, None).atexit = False

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        if not self._failure.occurred:
            self._put(work, label)

    def mark(self) -> Ticket:
        self._failure.raise_if_any()
        return self._last

    def wait(self, ticket: Ticket) -> None:
        self._failure.raise_if_any()
        ticket = _own(ticket)
        if not ticket.passed.is_set():
            self._put(ticket.passed.wait, f"waiting for {ticket.label}")

    def synchronize(self, timeout: float) -> None:
        self._failure.raise_if_any()
        if not self._last.passed.wait(timeout):
            raise BackendError(
                f"{self._worker.running}: still running on the {self._role} lane after "
                f"{timeout:g} s; another rank is late or gone, or the timeout is too short."
            )
        self._failure.raise_if_any()

    def _put(self, work: Callable[[], object], label: str) -> None:
        ticket = HostTicket(label)
        with self._order:
            if self._worker.ident is None:
                self._worker.start()
            elif not self._worker.is_alive():
                raise BackendError(
                    f"{label}: the thread of the {self._role} lane is gone: this process is "
                    "ending, or is a fork of the one that trains; communicate only in the process "
                    "that called fully_shard."
                )
            self._last = ticket
            self._worker.items.put((work, ticket))


class CallersLane(HostLane):
    """Compute: work is done when ``submit`` returns, and ``wait`` blocks (clause 1.4)."""

    _now = HostTicket("compute", passed=True)

    def mark(self) -> Ticket:
        self.failure.raise_if_any()
        return self._now

    def wait(self, ticket: Ticket) -> None:
        self.failure.raise_if_any()
        _own(ticket).passed.wait()
        # What the ticket stood for may have been dropped (clause 2.2).
        self.failure.raise_if_any()


def _own(ticket: Ticket) -> HostTicket:
    if not isinstance(ticket, HostTicket):
        raise BackendError(
            f"a lane of the sockets backend cannot wait for a {type(ticket).__name__}; wait for "
            "tickets of lanes of the same backend."
        )
    return ticket


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """Let work that is under way finish, and cut short what does not.

    A thread that comes back from torch while the interpreter is being taken down can crash the
    process, which then ends with another exit code than its own (clause 1.9).
    """
    # In a fork none is alive, and the connections are the parent's.
    alive = [worker for worker in _workers if worker.is_alive()]
    for worker in alive:
        worker.items.put(None)
    for worker in alive:
        worker.join(_GRACE)
    for worker in alive:
        if worker.is_alive():
            worker.failure.abort()
            worker.join(_GRACE)
