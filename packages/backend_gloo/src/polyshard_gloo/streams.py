"""Lanes whose work is for a CUDA device: a worker thread per role, and a stream for each.

A ticket is a point in the thread's work and an event on its stream: the host passes the first, the
waiting stream the second. Knows no collectives and no buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from polyshard import BackendError
from polyshard.spi import HostLane, Ticket

from .faults import FaultDomain
from .lanes import HostTicket, WorkerLane

_NAP = 0.001


class Streams:
    """What is asked of torch.cuda; tests that have no GPU put something else in its place."""

    def new_stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> Any:
        """What the calling thread computes on."""
        return torch.cuda.current_stream(device)

    def new_event(self) -> Any:
        return torch.cuda.Event()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The calling thread's kernels, copies and allocations go to ``stream``."""
        return torch.cuda.stream(stream)


class StreamTicket(HostTicket):
    """A point in a thread's work and, once that has come to it, one on its stream."""

    __slots__ = ("event", "stream")

    def __init__(self, label: str, stream: Any, event: Any, *, done: bool = False) -> None:
        super().__init__(label, done=done)
        self.stream, self.event = stream, event
        if done:
            event.record(stream)

    def open(self) -> None:
        try:
            self.event.record(self.stream)
        finally:
            super().open()


class StreamWorkerLane(WorkerLane):
    """Work runs in the thread and enqueues what it has for the device on the lane's stream."""

    def __init__(
        self, name: str, domain: FaultDomain, streams: Streams, device: torch.device
    ) -> None:
        self._streams, self._stream = streams, streams.new_stream(device)
        super().__init__(f"{name} for {device}", domain)

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        on, stream = self._streams.on, self._stream

        def enqueue() -> None:
            with on(stream):
                work()

        super().submit(enqueue, label=label)

    def wait(self, ticket: Ticket) -> None:
        self._domain.raise_if_any()
        ticket, stream = _own(ticket), self._stream
        if ticket.stream is stream:
            return  # a lane is in order anyway

        def join() -> None:
            ticket.wait()
            stream.wait_event(ticket.event)

        self._put(join, f"waiting for {ticket.label}")

    def synchronize(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        last = _own(self._last)
        super().synchronize(timeout)
        while not last.event.query():
            if time.monotonic() > deadline:
                raise BackendError(
                    f"lane {self.name!r}: the device is still busy with {last.label!r} after "
                    f"{timeout:g} s."
                )
            time.sleep(_NAP)

    def _ticket(self, label: str, *, done: bool = False) -> StreamTicket:
        return StreamTicket(label, self._stream, self._streams.new_event(), done=done)


class StreamComputeLane(HostLane):
    """The caller's thread and the stream that it computes on, at each call.

    ``wait`` blocks the caller until the work before the ticket was enqueued, which a stream alone
    would not need: its collectives run on the host.
    """

    def __init__(self, domain: FaultDomain, streams: Streams, device: torch.device) -> None:
        super().__init__(domain)
        self._streams, self._device = streams, device

    def mark(self) -> Ticket:
        self.failure.raise_if_any()
        stream = self._streams.current_stream(self._device)
        return StreamTicket("compute", stream, self._streams.new_event(), done=True)

    def wait(self, ticket: Ticket) -> None:
        self.failure.raise_if_any()
        ticket = _own(ticket)
        ticket.wait()
        # What the ticket stood for may have been dropped.
        self.failure.raise_if_any()
        self._streams.current_stream(self._device).wait_event(ticket.event)

    def synchronize(self, timeout: float) -> None:
        self.failure.raise_if_any()
        deadline, ticket = time.monotonic() + timeout, _own(self.mark())
        while not ticket.event.query():
            if time.monotonic() > deadline:
                raise BackendError(f"the device still computes after {timeout:g} s.")
            time.sleep(_NAP)


def _own(ticket: Ticket) -> StreamTicket:
    if not isinstance(ticket, StreamTicket):
        raise BackendError(
            f"a lane of the gloo backend for a device cannot wait for a {type(ticket).__name__}; "
            "wait for tickets of lanes of the same backend and device."
        )
    return ticket
