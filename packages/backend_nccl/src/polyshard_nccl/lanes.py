"""Lanes on streams, and tickets that are events.

Knows no collectives and no buffers. Nothing here makes the host wait but ``synchronize``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from polyshard import BackendError
from polyshard.spi import Lane, Ticket

from .failures import FaultDomain
from .runtime import Runtime

# Labels that one ticket remembers: of what hangs, the first is what matters.
_MOST_LABELS = 8
_MOST_POOLED_EVENTS = 256
_LONGEST_NAP = 0.01


class StreamTicket(Ticket):
    """A point on a stream: an event, which goes back to its pool with the ticket.

    An event may be recorded anew as soon as nobody can wait for the old point any more: streams
    that were told to wait have taken note of it.
    """

    __slots__ = (
        "_pool",
        "captured",
        "connections",
        "event",
        "labels",
        "launches",
        "stream",
        "when",
    )

    def __init__(self, stream: Any, event: Any, *, captured: bool, pool: list[Any]) -> None:
        self.stream, self.event, self.captured = stream, event, captured
        self.labels: tuple[str, ...] = ()
        self.launches: tuple[str, ...] = ()
        #: Of the communicators whose collectives are before it, as the watcher sees them.
        self.connections: tuple[Any, ...] = ()
        self.when = 0.0
        self._pool = pool

    def __del__(self) -> None:
        # What a graph recorded stays with it.
        if self.event is not None and not self.captured and len(self._pool) < _MOST_POOLED_EVENTS:
            self._pool.append(self.event)

    @property
    def described(self) -> str:
        """The collectives before this point, or else the work."""
        return ", ".join(self.launches or self.labels)


#: A point that lies in the past of everything: of lanes that have had nothing to do.
IDLE = StreamTicket(None, None, captured=False, pool=[])


class Outstanding:
    """Tickets of one lane that the device may not have reached, the oldest first."""

    def __init__(self) -> None:
        self._tickets: deque[StreamTicket] = deque()
        self._order = threading.Lock()

    def add(self, ticket: StreamTicket) -> None:
        """One more. Two that the device has reached go for it, so there are never many."""
        self._tickets.append(ticket)
        self.drop_reached(2)

    def drop_reached(self, most: int | None = None) -> bool:
        """Forget up to ``most`` of the oldest, those the device has reached; whether none is
        left. Asks events, so never during capture."""
        with self._order:
            while self._tickets and most != 0 and self._tickets[0].event.query():
                self._tickets.popleft()
                most = None if most is None else most - 1
            return not self._tickets

    @property
    def oldest(self) -> StreamTicket | None:
        """The first that was not known to be reached when that was last looked at."""
        try:
            return self._tickets[0]
        except IndexError:
            return None

    @property
    def newest(self) -> StreamTicket | None:
        """The last one, likewise."""
        try:
            return self._tickets[-1]
        except IndexError:
            return None


class LaneSettings:
    """How the lanes' streams are made; open until the first one is."""

    def __init__(self, *, high_priority: bool, shared_stream: bool) -> None:
        self.high_priority, self.shared_stream = high_priority, shared_stream
        self._made: dict[tuple[torch.device, str], Any] = {}

    def request(self, *, high_priority: bool, shared_stream: bool) -> None:
        """Take these, or raise ValueError where streams exist that were made otherwise."""
        if (high_priority, shared_stream) == (self.high_priority, self.shared_stream):
            return
        if self._made:
            raise ValueError(
                f"options high_priority={high_priority}, shared_stream={shared_stream} come too "
                f"late: streams were made with {self.high_priority}, {self.shared_stream}. Give "
                "all communicators the same, or give fully_shard "
                "backend=NcclBackend(high_priority=..., shared_stream=...)."
            )
        self.high_priority, self.shared_stream = high_priority, shared_stream

    def stream(self, name: str, device: torch.device, runtime: Runtime) -> Any:
        """The stream of the lane ``name``, made if it is the first time."""
        key = (device, "all" if self.shared_stream else name)
        if key not in self._made:
            self._made[key] = runtime.new_stream(device, high_priority=self.high_priority)
        return self._made[key]


class _CudaLane(Lane):
    """What a side stream and the compute stream have in common."""

    def __init__(
        self, name: str, device: torch.device, runtime: Runtime, domain: FaultDomain
    ) -> None:
        self.name, self.device = name, device
        self._runtime, self._domain = runtime, domain
        self._pool: list[Any] = []

    def _record(self, stream: Any, *, captured: bool) -> StreamTicket:
        try:
            # What a graph holds must be the graph's own: see StreamTicket.__del__.
            event = self._runtime.new_event() if captured else self._pool.pop()
        except IndexError:
            event = self._runtime.new_event()
        event.record(stream)
        return StreamTicket(stream, event, captured=captured, pool=self._pool)

    def _wait_on(self, stream: Any, ticket: Ticket) -> bool:
        """Make ``stream`` wait; False where there is nothing to wait for."""
        self._domain.raise_if_any()
        if not isinstance(ticket, StreamTicket):
            raise BackendError(
                f"lane {self.name!r} of the NCCL backend cannot wait for a "
                f"{type(ticket).__name__}; wait for tickets of lanes of the same backend."
            )
        if ticket.event is None or ticket.stream == stream:
            return False  # A stream is in order anyway.
        if ticket.captured != self._runtime.is_capturing():
            when = "before the capture began" if not ticket.captured else "in a capture that ended"
            raise BackendError(
                f"lane {self.name!r} was to wait for {ticket.described or 'compute'}, marked "
                f"{when}: a CUDA graph can neither wait for what is outside it nor be waited for "
                "in parts. Capture whole passes, from a forward's begin to its backward's end."
            )
        stream.wait_event(ticket.event)
        return True

    def _work(self, work: Callable[[], None], label: str) -> None:
        """Enqueue ``work``, whose error is kept for later."""
        try:
            with self._runtime.range(label):
                if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                    # Tensors made in inference mode could never be trained on.
                    with torch.inference_mode(False), torch.no_grad():
                        work()
                else:
                    work()
        except Exception as error:
            self._domain.record(label, error)

    def _wait_on_host(self, ticket: StreamTicket, timeout: float) -> None:
        deadline, nap = time.monotonic() + timeout, 0.0
        while not ticket.event.query():
            self._domain.raise_if_any()
            if time.monotonic() >= deadline:
                raise BackendError(
                    f"lane {self.name!r} is still busy with {self._busy_with() or 'compute'} after "
                    f"{timeout:g} s; another rank is late or gone, or the timeout is too short."
                )
            time.sleep(nap)
            nap = min(2 * nap + 0.0001, _LONGEST_NAP)
        self._domain.raise_if_any()

    def _busy_with(self) -> str:
        return ""

    def _refuse_in_capture(self) -> None:
        if self._runtime.is_capturing():
            raise BackendError(
                f"lane {self.name!r}: the host cannot wait while a CUDA graph is captured; "
                "synchronize after the capture."
            )


class StreamLane(_CudaLane):
    """A side stream. Work is enqueued by the thread that submits it; the device runs it later.

    The stream is made when the lane is first used.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        runtime: Runtime,
        domain: FaultDomain,
        settings: LaneSettings,
    ) -> None:
        super().__init__(name, device, runtime, domain)
        self._settings = settings
        self._stream: Any = None
        self._last = IDLE
        self._changed = False  # since the last mark
        self._labels: list[str] = []  # likewise
        self._launches: list[str] = []  # likewise
        self._connections: dict[Any, None] = {}  # likewise
        self.outstanding = Outstanding()

    @property
    def stream(self) -> Any:
        """Where this lane's kernels, copies and allocations are."""
        if self._stream is None:
            self._stream = self._settings.stream(self.name, self.device, self._runtime)
        return self._stream

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        if self._domain.occurred:
            return
        self._changed = True
        if len(self._labels) < _MOST_LABELS:
            self._labels.append(label)
        # What is allocated in here belongs to this stream: its memory is handed out again in the
        # order of this lane, so that no block needs to remember who else used it.
        with self._runtime.on(self.stream):
            self._work(work, label)

    def launches(self, description: str, connection: Any) -> None:
        """Work that runs now puts a collective of ``connection`` on the stream."""
        self._connections[connection] = None
        if len(self._launches) < _MOST_LABELS:
            self._launches.append(description)

    def mark(self) -> Ticket:
        self._domain.raise_if_any()
        if self._stream is None:
            return IDLE
        capturing = self._runtime.is_capturing()
        if capturing and not self._runtime.is_part_of_capture(self._stream):
            return IDLE  # What it did lies before the capture, which begins with an idle device.
        if not capturing and not self._changed:
            return IDLE if self._last.captured else self._last
        ticket = self._last = self._record(self._stream, captured=capturing)
        ticket.labels, ticket.launches = tuple(self._labels), tuple(self._launches)
        ticket.connections = tuple(self._connections)
        self._labels.clear()
        self._launches.clear()
        self._connections.clear()
        self._changed = False
        # Events of a capture cannot be asked, and nothing runs before the graph does.
        if not capturing and ticket.labels:
            ticket.when = time.monotonic()
            self.outstanding.add(ticket)
            self._domain.watch()
        return ticket

    def wait(self, ticket: Ticket) -> None:
        if self._wait_on(self.stream, ticket):
            self._changed = True

    def synchronize(self, timeout: float) -> None:
        self._domain.raise_if_any()
        if self._stream is None:
            return
        self._refuse_in_capture()
        ticket = self.mark()
        assert isinstance(ticket, StreamTicket)
        if ticket.event is not None:
            self._wait_on_host(ticket, timeout)

    def _busy_with(self) -> str:
        self.outstanding.drop_reached()
        oldest = self.outstanding.oldest or self._last
        return oldest.described


class ComputeLane(_CudaLane):
    """Whatever stream the calling thread computes on, at each call."""

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        if not self._domain.occurred:
            self._work(work, label)

    def mark(self) -> Ticket:
        self._domain.raise_if_any()
        stream = self._runtime.current_stream(self.device)
        return self._record(stream, captured=self._runtime.is_capturing())

    def wait(self, ticket: Ticket) -> None:
        self._wait_on(self._runtime.current_stream(self.device), ticket)

    def synchronize(self, timeout: float) -> None:
        self._domain.raise_if_any()
        self._refuse_in_capture()
        ticket = self.mark()
        assert isinstance(ticket, StreamTicket)
        self._wait_on_host(ticket, timeout)
