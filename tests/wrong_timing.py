"""Gloo backends that break one promise each: when things are done, and what is left behind.

Among them is one that is right, whose inputs are in use for longer than gloo's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from wrong_backends import Wrong

from polyshard import BackendError
from polyshard.spi import Communicator, Op
from polyshard_gloo.communicator import GlooCommunicator

Tensors = Sequence[Tensor]


class _ReturnsEarly(GlooCommunicator):
    _running: threading.Thread | None = None

    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        kept = [shard.clone() for shard in shards]

        def gather() -> None:
            time.sleep(0.02)
            GlooCommunicator._all_gather(self, outputs, kept, label=label)

        self._finish()
        self._running = threading.Thread(target=gather)
        self._running.start()

    def _broadcast(self, buffers: Tensors, source: int, *, label: str) -> None:
        self._finish()
        super()._broadcast(buffers, source, label=label)

    def settle(self) -> None:
        self._finish()

    def close(self) -> None:
        self._finish()
        super().close()

    def _finish(self) -> None:
        if self._running is not None:
            self._running.join()
            self._running = None


class ReturnsEarly(Wrong):
    """A gather is done some time after its ticket."""

    communicators = _ReturnsEarly


_staging = torch.empty(4 * 2**20, dtype=torch.uint8)


def _staged(tensors: Tensors) -> list[Tensor]:
    position, staged = 0, []
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        place = _staging[position : position + nbytes].view(tensor.dtype)
        staged.append(place.copy_(tensor))
        position += -(-nbytes // 64) * 64
    time.sleep(0.002)
    return staged


class _SharesStaging(GlooCommunicator):
    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        super()._all_gather(outputs, _staged(shards), label=label)

    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, op: Op, *, label: str) -> None:
        super()._reduce_scatter(outputs, _staged(inputs), op, label=label)


class SharesStaging(Wrong):
    """What one lane has put into staging is overwritten by another before it was sent."""

    communicators = _SharesStaging


_leaked: list[Tensor] = []


class _LeaksStaging(GlooCommunicator):
    def close(self) -> None:
        if not self._closed:
            _leaked.append(torch.ones(4 * 2**20))
        super().close()


class LeaksStaging(Wrong):
    """Staging stays when its communicator was closed."""

    communicators = _LeaksStaging


class LeaksThreads(Wrong):
    """Every communicator leaves a thread behind."""

    def communicator(self, *args: Any, **kwargs: Any) -> Communicator:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().communicator(*args, **kwargs)


class _HangsOnNothing(GlooCommunicator):
    def _reduce_scatter(self, outputs: Tensors, inputs: Tensors, op: Op, *, label: str) -> None:
        if not any(tensor.numel() for tensor in inputs):
            threading.Event().wait()
        super()._reduce_scatter(outputs, inputs, op, label=label)


class HangsOnNothing(Wrong):
    """A reduction of no elements never returns."""

    communicators = _HangsOnNothing


class _ClosesOnce(GlooCommunicator):
    def close(self) -> None:
        if self._closed:
            raise RuntimeError("closed already")
        super().close()


class ClosesOnce(Wrong):
    """The second close raises."""

    communicators = _ClosesOnce


class _ReadsLate(GlooCommunicator):
    """A broadcast returns at its source at once, and is read from there later."""

    _reading: threading.Thread | None = None
    _error: BackendError | None = None

    def _broadcast(self, buffers: Tensors, source: int, *, label: str) -> None:
        self._finish()
        if self.rank != source or self._is_alone(label):
            super()._broadcast(buffers, source, label=label)
            return

        def read() -> None:
            time.sleep(0.02)
            try:
                GlooCommunicator._broadcast(self, buffers, source, label=label)
            except BackendError as error:
                self._error = error

        self._reading = threading.Thread(target=read)
        self._reading.start()

    def _all_gather(self, outputs: Tensors, shards: Tensors, *, label: str) -> None:
        self._finish()
        super()._all_gather(outputs, shards, label=label)

    def settle(self) -> None:
        self._finish()

    def close(self) -> None:
        with suppress(BackendError):
            self._finish()
        super().close()

    def _finish(self) -> None:
        if self._reading is not None:
            self._reading.join()
            self._reading = None
        if self._error is not None:
            raise self._error


class ReadsLate(Wrong):
    """Not wrong: a transport whose inputs are in use after the collective, until it settles."""

    communicators = _ReadsLate


class _SettlesNothing(_ReadsLate):
    def settle(self) -> None:
        """Peers may still be reading."""


class SettlesNothing(Wrong):
    """The same, but settle does nothing."""

    communicators = _SettlesNothing
