"""What fails together: the lanes and communicators of one backend in one process.

Owns the failure they share and the end of the process. Knows no collectives and no streams.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from polyshard.spi import LaneFailure

if TYPE_CHECKING:
    from .watcher import Watcher

# How long the end of the process waits for its device, and then for the watcher, in seconds.
_GRACE = 5.0


class Member(Protocol):
    """A communicator's connection, as far as its end goes."""

    def is_done(self) -> bool:
        """The device has done all that was submitted."""

    def abort(self) -> None:
        """Let go of the transport at once; idempotent."""


class FaultDomain(LaneFailure):
    """The first failure of any lane.

    After it every lane drops its work, so peers would wait for this rank in vain. They are told
    by way of the store; see watcher.py.
    """

    def __init__(self) -> None:
        super().__init__()
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._process = os.getpid()
        self.watcher: Watcher | None = None
        _domains.add(self)

    def add(self, member: Member) -> None:
        """Abort it at the end of the process, unless that was done. Held weakly."""
        self._members.add(member)

    def record(self, label: str, cause: BaseException) -> None:
        super().record(label, cause)
        if self.watcher is not None:
            self.watcher.wake()

    @property
    def message(self) -> str | None:
        """What the first failure said."""
        return self._message

    def watch(self) -> None:
        """There is something under way that may hang."""
        if self.watcher is not None:
            self.watcher.expect()

    def shut_down(self) -> None:
        """At the end of the process: nothing may wait for peers any more."""
        if os.getpid() != self._process:
            return  # A forked child has no right to the connections.
        # The host is ahead of the device: peers need what was submitted and has not run yet.
        deadline = time.monotonic() + _GRACE
        while not self.occurred and time.monotonic() < deadline:
            if all(member.is_done() for member in list(self._members)):
                break
            time.sleep(0.01)
        if self.watcher is not None:
            self.watcher.stop(_GRACE)
        # torch would do this when it takes its groups down, and complain that nobody else did.
        for member in list(self._members):
            member.abort()


_domains: weakref.WeakSet[FaultDomain] = weakref.WeakSet()


@atexit.register
def _shut_down_all() -> None:
    for domain in list(_domains):
        domain.shut_down()
