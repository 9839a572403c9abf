"""The thread that notices what the host cannot see: collectives that hang, peers that failed,
and communicators that all ranks are done with.

Asks the store now and then and the device once, at the end of a timeout; see docs/notes/nccl.md.
Knows lanes' outstanding tickets and communicators' boards; knows no collectives.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from polyshard import BackendError

from .board import Board
from .failures import FaultDomain
from .lanes import Outstanding, StreamTicket

_log = logging.getLogger("polyshard.nccl")

# Seconds between two looks. Nothing is asked of the device in them.
_PERIOD = 1.0
# Something that takes this long is worth a look at the store.
_PATIENCE = 5.0
# Ahead of torch's watchdog, which ends the process: ranks tell each other what they wait for.
_HEAD_START = 0.1
_LONGEST_HEAD_START = 15.0

RECORDER_HINT = (
    "To see every rank's latest collectives, set TORCH_FR_BUFFER_SIZE=2000 and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1 and read the dumps with torchfrtrace."
)


class Connected(Protocol):
    """What is watched of a communicator. ``outstanding`` is its lane's, which it may share."""

    board: Board
    timeout: float
    lane: str
    shares_stream: bool
    outstanding: Outstanding

    def abort(self) -> None: ...


@dataclass
class _Leaving:
    """A communicator that this rank is done with; its peers may not be."""

    connection: Connected
    #: The last point of its lane when it was closed.
    ticket: StreamTicket | None
    deadline: float
    said: bool = field(default=False)


class Watcher:
    """One daemon thread of a backend, started with its first communicator of several ranks.

    Args:
        domain: where failures go.
        clock: the time in seconds; sleeping is done by ``threading``.
    """

    def __init__(self, domain: FaultDomain, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._domain, self._clock = domain, clock
        self._connections: weakref.WeakSet[Connected] = weakref.WeakSet()
        self._leaving: list[_Leaving] = []
        #: When to look at a board again; a look is a round trip to the store.
        self._deaf_until: weakref.WeakKeyDictionary[Board, float] = weakref.WeakKeyDictionary()
        self._told = False
        self._stopped = False
        self._idle = False
        # Whoever holds it may collect garbage, and so come to leave() again.
        self._membership = threading.RLock()
        # Its put() may be called while garbage is collected inside another put() or get().
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, connection: Connected) -> None:
        """Watch this one from now on, for as long as someone else holds it."""
        with self._membership:
            self._connections.add(connection)
            self._start()

    def leave(self, connection: Connected) -> None:
        """Abort this one when every rank is done with it, or after its timeout. Returns at once."""
        newest, deadline = connection.outstanding.newest, self._clock() + connection.timeout
        leaving = _Leaving(connection, newest, deadline)
        with self._membership:
            self._connections.discard(connection)
            # The thread runs, for this connection was there until now.
            self._leaving.append(leaving)
        self.wake()

    def _start(self) -> None:
        if self._thread is None and not self._stopped:
            self._thread = threading.Thread(
                target=self._run, name="polyshard nccl watcher", daemon=True
            )
            self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._bell.put(None)

    def expect(self) -> None:
        """Something is under way. Costs nothing where the thread looks again by itself."""
        if self._idle:
            self._idle = False
            self._bell.put(None)

    def stop(self, grace: float) -> None:
        """Have a last look, and end. Waits for it up to ``grace`` seconds."""
        self._stopped = True
        self.wake()
        if (thread := self._thread) is not None:
            thread.join(grace)
        for leaving in self._leaving:
            leaving.connection.abort()

    def _run(self) -> None:
        while True:
            stopped = self._stopped
            while not self._bell.empty():
                self._bell.get()
            # From here on whoever adds something rings: the look may have passed it already.
            self._idle = True
            try:
                busy = self.look()
            except Exception:  # The interpreter or the device may be going down under it.
                _log.debug("a look at collectives under way failed", exc_info=True)
                busy = True
            if stopped:
                return
            with self._membership:
                if not busy and not self._connections and not self._leaving:
                    self._thread = None  # The next connection starts another one.
                    return
            if busy:
                self._idle = False
            with suppress(Empty):
                self._bell.get(timeout=_PERIOD if busy else None)

    def look(self) -> bool:
        """One look at everything; whether another one is needed without being woken."""
        with self._membership:
            connections = list(self._connections)
        if self._domain.occurred:
            self._tell_peers(connections)
        now = self._clock()
        tickets = self._oldest(connections)
        if self._domain.occurred or not tickets:
            return self._see_off(now)
        late = []
        for outstanding, ticket in tickets:
            age = now - ticket.when
            for connection in ticket.connections:
                if age > min(_PATIENCE, connection.timeout / 2):
                    self._hear(connection, ticket)
                head_start = min(_LONGEST_HEAD_START, _HEAD_START * connection.timeout)
                if age > connection.timeout - head_start and self._is_late(outstanding):
                    late.append((connection, ticket))
        if late and not self._domain.occurred:
            self._give_up(late)
        self._see_off(now)
        return True

    @staticmethod
    def _oldest(connections: list[Connected]) -> list[tuple[Outstanding, StreamTicket]]:
        """The oldest ticket of each lane, as far as is known without asking the device."""
        lanes = {id(connection.outstanding): connection.outstanding for connection in connections}
        oldest = [(outstanding, outstanding.oldest) for outstanding in lanes.values()]
        return [(outstanding, ticket) for outstanding, ticket in oldest if ticket is not None]

    def _tell_peers(self, connections: list[Connected]) -> None:
        """Once: peers would learn of a failure here at their timeout only."""
        if not self._told:
            self._told = True
            for connection in connections:
                connection.board.say_failed(self._domain.message or "")

    def _hear(self, connection: Connected, ticket: StreamTicket) -> None:
        """Fail if a peer said that it did: it will not come."""
        board, now = connection.board, self._clock()
        if self._domain.occurred or now < self._deaf_until.get(board, now):
            return
        self._deaf_until[board] = now + min(_PATIENCE, connection.timeout / 4)
        said = board.failure()
        if said is not None:
            self._fail(
                f"{ticket.described}: {board.name(board.rank)} waits for a rank that failed. {said}"
            )

    @staticmethod
    def _is_late(outstanding: Outstanding) -> bool:
        """The device has not come to what it should have. The only question to the device."""
        oldest = outstanding.oldest
        outstanding.drop_reached(1)
        return outstanding.oldest is oldest

    def _give_up(self, late: list[tuple[Connected, StreamTicket]]) -> None:
        """Fail with what every rank says it waits for, just before torch ends the process."""
        for connection, ticket in late:
            connection.board.say_waiting(ticket.described)
        # One communicator tells enough: the one whose work began first.
        connection, ticket = min(late, key=lambda pair: pair[1].when)
        time.sleep(min(3.0, 0.3 * _HEAD_START * connection.timeout))
        self._fail(self._accusation(connection, ticket))

    def _accusation(self, connection: Connected, ticket: StreamTicket) -> str:
        board, said = connection.board, connection.board.waiting()
        others = [rank for rank in range(len(board.ranks)) if rank != board.rank]
        where = [
            f"{board.name(rank)} waits for {said[rank]}"
            if rank in said
            else f"{board.name(rank)} waits for nothing here: it ended, or hangs elsewhere"
            for rank in others
        ]
        shared = (
            " Gathers and reductions share one stream (shared_stream=True), so ranks must also "
            "issue them in the same order; leave that option out if they cannot."
            if connection.shares_stream
            else ""
        )
        return (
            f"{ticket.described}: {board.name(board.rank)} has waited "
            f"{self._clock() - ticket.when:.0f} s on lane {connection.lane!r}. "
            f"{'; '.join(where)}. Every rank must issue the same collectives in the same order; "
            "POLYSHARD_DEBUG=1 compares them before they start. Where a rank is only slow, raise "
            f"the timeout (POLYSHARD_NCCL_TIMEOUT, in seconds).{shared} {RECORDER_HINT}"
        )

    def _fail(self, message: str) -> None:
        # The host may be in a call that never returns: then nobody raises this, and torch's
        # watchdog ends the process.
        _log.error("%s", message)
        self._domain.record("", BackendError(message))

    def _see_off(self, now: float) -> bool:
        """Abort what all ranks are done with; whether some is left."""
        for leaving in list(self._leaving):
            connection, ticket = leaving.connection, leaving.ticket
            failed = self._domain.occurred or now > leaving.deadline
            if ticket is not None and not failed and not ticket.event.query():
                continue
            leaving.ticket = None
            if not leaving.said:
                leaving.said = True
                connection.board.say_done()
            if failed or connection.board.all_are_done():
                connection.abort()
                with self._membership:
                    self._leaving.remove(leaving)
        return bool(self._leaving)
