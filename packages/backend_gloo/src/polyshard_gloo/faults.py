"""What fails together: the lanes and communicators of one backend in one process.

Owns the failure they share and the end of the process. Knows no collectives.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

from polyshard.spi import LaneFailure

# How long the end of the process waits for work that is still running, in seconds.
_GRACE = 1.0


class _Abortable(Protocol):
    def abort(self) -> None: ...


class _Stoppable(Protocol):
    def stop(self) -> None: ...

    def join(self, timeout: float) -> bool: ...


class FaultDomain(LaneFailure):
    """The first failure of any lane, and who must hear of it.

    After a failure every lane drops its work, so peers would wait for this rank in vain: the
    connections of all communicators are cut, which ends what is in flight here and makes the
    peers fail at once instead of at their timeout.
    """

    def __init__(self) -> None:
        super().__init__()
        self._communicators: weakref.WeakSet[_Abortable] = weakref.WeakSet()
        self._lanes: weakref.WeakSet[_Stoppable] = weakref.WeakSet()
        self._membership = threading.Lock()
        self._process = os.getpid()
        _domains.add(self)

    def add_communicator(self, communicator: _Abortable) -> None:
        """Cut its connections when anything fails. Held weakly."""
        with self._membership:
            self._communicators.add(communicator)

    def add_lane(self, lane: _Stoppable) -> None:
        """Stop it when the process ends. Held weakly."""
        with self._membership:
            self._lanes.add(lane)

    def record(self, label: str, cause: BaseException) -> None:
        super().record(label, cause)
        self.abort()

    def abort(self) -> None:
        """Cut the connections of all communicators."""
        with self._membership:
            communicators = list(self._communicators)
        for communicator in communicators:
            communicator.abort()

    def shut_down(self) -> None:
        """Stop the lanes once their work is done; cut short what does not end.

        A thread that comes back from a blocking call while the interpreter is being taken down
        can end the process with a crash, so none may be left in one.
        """
        if os.getpid() != self._process:
            return  # A forked child has neither the threads nor a right to the connections.
        with self._membership:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.stop()
        if not all([lane.join(_GRACE) for lane in lanes]):
            self.abort()
            for lane in lanes:
                lane.join(_GRACE)


_domains: weakref.WeakSet[FaultDomain] = weakref.WeakSet()


@atexit.register
def _shut_down_all() -> None:
    for domain in list(_domains):
        domain.shut_down()
