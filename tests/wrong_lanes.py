"""Gloo backends that break one promise each: lanes, buffers, and what they say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch import Tensor
from wrong_backends import Wrong

from polyshard import BackendError
from polyshard.spi import (
    Buffer,
    BufferOps,
    Communicator,
    Lane,
    LaneFailure,
    LaneRole,
    Lifetime,
    StorageBuffer,
    Ticket,
)
from polyshard_gloo import GlooBackend
from polyshard_gloo.communicator import GlooCommunicator
from polyshard_gloo.faults import FaultDomain
from polyshard_gloo.lanes import WorkerLane


class _WithLanes(GlooBackend):
    """A gloo backend whose lanes are of another class."""

    lanes: ClassVar[type[WorkerLane]] = WorkerLane

    def __init__(self) -> None:
        super().__init__()
        self._lanes = {role: self.lanes(role, self._domain) for role in self._lanes}


class _InTheSubmittersMode(WorkerLane):
    def submit(self, work: Callable[[], None], *, label: str) -> None:
        mode = torch.is_inference_mode_enabled()

        def in_mode() -> None:
            with torch.inference_mode(mode):
                work()

        super().submit(in_mode, label=label)


class InTheSubmittersMode(_WithLanes):
    """Work runs in inference mode where it was submitted in it."""

    lanes = _InTheSubmittersMode


class _WaitsForNothing(WorkerLane):
    def wait(self, ticket: Ticket) -> None:
        """Later work begins at once."""


class WaitsForNothing(_WithLanes):
    """A lane does not wait for a ticket."""

    lanes = _WaitsForNothing


class _KeepsWork(WorkerLane):
    def __init__(self, name: str, domain: FaultDomain) -> None:
        super().__init__(name, domain)
        self.kept: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None], *, label: str) -> None:
        self.kept.append(work)
        super().submit(work, label=label)


class KeepsWork(_WithLanes):
    """A lane remembers all that it ever ran."""

    lanes = _KeepsWork


class _RunsOn(WorkerLane):
    def submit(self, work: Callable[[], None], *, label: str) -> None:
        if self._domain.occurred:
            with suppress(Exception):
                work()
        super().submit(work, label=label)


class RunsOn(_WithLanes):
    """Work that comes after an error runs all the same."""

    lanes = _RunsOn


class _SynchronizesNothing(WorkerLane):
    def synchronize(self, timeout: float) -> None:
        self._domain.raise_if_any()


class SynchronizesNothing(_WithLanes):
    """synchronize returns at once."""

    lanes = _SynchronizesNothing


class _RaisesAtSubmit(WorkerLane):
    def submit(self, work: Callable[[], None], *, label: str) -> None:
        self._domain.raise_if_any()
        super().submit(work, label=label)


class RaisesAtSubmit(_WithLanes):
    """submit tells of the error of earlier work."""

    lanes = _RaisesAtSubmit


class HasOneLane(GlooBackend):
    """All that is communicated shares a lane."""

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        return super().lane("gather", device)


class MakesNewLanes(GlooBackend):
    """Every call of lane gives another one."""

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        return WorkerLane(role, self._domain)


class _TellsTheLast(FaultDomain):
    def record(self, label: str, cause: BaseException) -> None:
        self._message = None
        super().record(label, cause)


class _DropsOnly(FaultDomain):
    def record(self, label: str, cause: BaseException) -> None:
        LaneFailure.record(self, label, cause)


class _KeepsFrames(FaultDomain):
    def __init__(self) -> None:
        super().__init__()
        self.frames: list[object] = []

    def record(self, label: str, cause: BaseException) -> None:
        self.frames.append(cause.__traceback__)
        super().record(label, cause)


class _WithDomain(GlooBackend):
    """A gloo backend whose failures are kept in another way."""

    domain: ClassVar[type[FaultDomain]] = FaultDomain

    def __init__(self) -> None:
        super().__init__()
        self._domain.__class__ = self.domain
        self._domain.__dict__.update(self.domain().__dict__)


class KeepsPeersWaiting(_WithDomain):
    """A rank whose work failed does not let its peers know."""

    domain = _DropsOnly


class KeepsFrames(_WithDomain):
    """An error holds on to where it came from."""

    domain = _KeepsFrames


class _LeavesMemory(StorageBuffer):
    def release(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT:
            super().release()


class _MovesAway(StorageBuffer):
    def acquire(self) -> None:
        if self.tensor.untyped_storage().nbytes() == 0:
            self.tensor.data = torch.empty_like(self.tensor, device="cpu").data

    def release(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT:
            super().release()
        self.tensor.data = _without_memory(self.tensor)


class _StartsDirty(StorageBuffer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.lifetime is Lifetime.PERSISTENT:
            self.tensor.fill_(1)


class _ClearsAtAcquire(StorageBuffer):
    def acquire(self) -> None:
        super().acquire()
        self.tensor.data.zero_()


class _ReleasesAll(StorageBuffer):
    def release(self) -> None:
        self.tensor.untyped_storage().resize_(0)


_remembered: list[Tensor] = []


class _Remembered(StorageBuffer):
    def acquire(self) -> None:
        super().acquire()
        _remembered.append(self.tensor)


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor)
    empty.untyped_storage().resize_(0)
    return empty


class _WithBuffers(GlooBackend):
    """A gloo backend whose buffers are of another class."""

    buffers: ClassVar[type[StorageBuffer]] = StorageBuffer

    def allocate(
        self,
        uses: Sequence[object],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        return self.buffers(numel, dtype, torch.device("cpu"), lifetime)


class LeavesMemory(_WithBuffers):
    """A released buffer keeps its memory."""

    buffers = _LeavesMemory


class MovesAway(_WithBuffers):
    """A buffer gets another storage when it is acquired."""

    buffers = _MovesAway


class StartsDirty(_WithBuffers):
    """PERSISTENT memory is not zeros."""

    buffers = _StartsDirty


class ClearsAtAcquire(_WithBuffers):
    """Acquiring what is acquired clears it."""

    buffers = _ClearsAtAcquire


class ReleasesAll(_WithBuffers):
    """PERSISTENT buffers can be released."""

    buffers = _ReleasesAll


class Remembers(_WithBuffers):
    """Memory that became a gradient is never freed."""

    buffers = _Remembered


class _RoundsTwice(BufferOps):
    def pack(self, out: Tensor, pieces: Sequence[tuple[int, Tensor]], scale: float) -> None:
        narrow = [(offset, piece.to(out.dtype)) for offset, piece in pieces]
        super().pack(out, narrow, 1.0)
        for offset, piece in narrow:
            out[offset : offset + piece.numel()].mul_(torch.tensor(scale, dtype=out.dtype))


class RoundsTwice(GlooBackend):
    """Packed values are cast before they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = _RoundsTwice()


class RaisesWhenAsked(GlooBackend):
    """To ask whether it is available is an error."""

    def unavailable_reason(self, device_type: str) -> str | None:
        if device_type not in self.capabilities.device_types:
            raise BackendError(f"no {device_type}")
        return None


class StartsAtOnce(GlooBackend):
    """Its thread starts when it is made."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class NeverEnds(GlooBackend):
    """Its threads keep the process alive."""

    def communicator(self, *args: Any, **kwargs: Any) -> Communicator:
        threading.Thread(target=threading.Event().wait).start()
        return super().communicator(*args, **kwargs)


class _ForgetsLabels(GlooCommunicator):
    def _is_alone(self, label: str) -> bool:
        return super()._is_alone("collective")


class ForgetsLabels(Wrong):
    """A closed communicator does not say which collective it refused."""

    communicators = _ForgetsLabels
