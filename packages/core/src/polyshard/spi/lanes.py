"""Lanes and tickets: in-order queues of work and the points on them that others wait for.

Knows no collectives and no buffers.
"""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..errors import BackendError


class Ticket:
    """A point on a lane. Opaque: only lanes of the backend that made it can wait for it."""

    __slots__ = ()


class LaneFailure:
    """The first error of submitted work, shared by all lanes of a backend (clause 2)."""

    def __init__(self) -> None:
        self._message: str | None = None
        self._cause: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def occurred(self) -> bool:
        """True once work failed; from then on lanes drop what they are given."""
        return self._message is not None

    def record(self, label: str, cause: BaseException) -> None:
        """Keep the first failure; later ones are its consequences."""
        _put_traceback_into_words(cause)
        message = str(cause)
        if not message.startswith(label):
            message = f"{label} failed: {type(cause).__name__}: {message}"
        with self._lock:
            if self._message is None:
                self._cause, self._message = cause, message

    def raise_if_any(self) -> None:
        """Raise BackendError with the label of the work that failed, chained to its cause."""
        if self._message is not None:
            raise BackendError(self._message) from self._cause


def _put_traceback_into_words(error: BaseException) -> None:
    """Keep where the error and its causes came from as a note, and let go of their frames.

    Frames hold the buffers that the work used, and a failure outlives their models.
    """
    lines = traceback.format_exception(error)
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            chain += [link.__cause__, link.__context__]
    error.add_note("".join(["The work of the lane failed here:\n", *lines]))


class Lane(ABC):
    """An in-order queue of work: a CUDA stream, a deferred queue on a CPU, or compute itself."""

    @abstractmethod
    def submit(self, work: Callable[[], None], *, label: str) -> None:
        """Queue ``work``. It runs after all earlier work of this lane (clause 1)."""

    @abstractmethod
    def mark(self) -> Ticket:
        """The point after everything submitted so far."""

    @abstractmethod
    def wait(self, ticket: Ticket) -> None:
        """Order later work of this lane after ``ticket``.

        On the compute lane of a CPU this blocks the caller; on a stream it does not.
        """

    @abstractmethod
    def synchronize(self, timeout: float) -> None:
        """Block the caller until the lane is empty; never in the hot path.

        Args:
            timeout: seconds, after which BackendError names the work still running.
        """


class _Done(Ticket):
    """A point that lies in the past."""

    __slots__ = ()


class HostLane(Lane):
    """A lane whose work is done when ``submit`` returns, for compute on a CPU and for backends
    whose communication blocks. It can wait only for tickets of other host lanes.
    """

    _done = _Done()

    def __init__(self, failure: LaneFailure | None = None) -> None:
        self.failure = failure or LaneFailure()

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        if self.failure.occurred:
            return
        try:
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                # Tensors made in inference mode could never be trained on.
                with torch.inference_mode(False), torch.no_grad():
                    work()
            else:
                work()
        except Exception as error:
            self.failure.record(label, error)

    def mark(self) -> Ticket:
        self.failure.raise_if_any()
        return self._done

    def wait(self, ticket: Ticket) -> None:
        self.failure.raise_if_any()
        if ticket is not self._done:
            raise BackendError(
                f"a HostLane cannot wait for a {type(ticket).__name__}; its tickets come from "
                "another lane, so the backend must supply a compute lane that understands them."
            )

    def synchronize(self, timeout: float) -> None:
        self.failure.raise_if_any()
