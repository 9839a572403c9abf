"""RaceBackend: a backend on CPUs that finds what nothing orders.

Knows its lanes, communicators and memory; knows nothing of the core but what the contract says.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...spi import (
    Buffer,
    BufferOps,
    Capabilities,
    CollectiveBackend,
    Communicator,
    Lane,
    LaneFailure,
    LaneRole,
    Lifetime,
    Role,
    StorageBuffer,
    Use,
)
from ..loopback import REDUCE_DTYPES
from .clock import LANES, Event
from .communicator import RaceCommunicator
from .exchange import Exchange
from .lanes import ComputeLane, Passes, QueueLane
from .memory import Findings
from .schedule import Policy, Scheduler
from .watch import Memories, WatchOperations, watch_host

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RaceBackend(CollectiveBackend):
    """A virtual backend for finding races in scheduling, without a GPU.

    Its lanes run their work when ``policy`` says so, always within what tickets and waits allow,
    and it tracks what is certain to happen before what. Reading a gathered buffer that no ticket
    made ready, releasing or overwriting what compute or a peer may still use, memory released on
    another lane than acquired it, tickets used after their pass, ranks whose collectives differ:
    each raises :class:`RaceError` (or BackendError, chained to it) that names the unit, the buffer
    and the missing wait. Memory that is fresh or was released holds NaN.

    Pass an instance as ``backend=``. Everything that touches the model happens inside
    :meth:`checking`, every root forward and every backward inside :meth:`root_pass`.

    Args:
        policy: when lanes run what they were given.
        seed: of the random policy.
        persistent_roles: roles of buffers that are to be kept for life.
        timeout: seconds that peers have to come to a collective.
    """

    name = "race"
    spi = (1, 0)
    ops: BufferOps

    def __init__(
        self,
        policy: Policy | str = Policy.LATE,
        *,
        seed: int = 0,
        persistent_roles: Collection[Role] = (),
        timeout: float = 20.0,
    ) -> None:
        self.capabilities = Capabilities(
            device_types=frozenset({"cpu"}),
            reduce_dtypes=REDUCE_DTYPES,
            fp32_accumulation=True,
            persistent_roles=frozenset(persistent_roles),
            graph_capture=True,
        )
        self.ops = BufferOps()
        #: Elements in acquired buffers by their roles, at most at one time.
        self.peak: dict[frozenset[Role], int] = {}
        self._failure = _TellPeers(self)
        self._findings = Findings(self._failure)
        self._passes = Passes(self._findings)
        self._memories = Memories(self.now, self._latest, self._findings)
        self._scheduler = Scheduler(
            Policy(policy),
            seed,
            self._failure,
            timeout,
            lambda: WatchOperations(self._memories, _stay),
        )
        self._compute = ComputeLane(self._scheduler, self._failure, self._passes)
        self._lanes = {
            role: QueueLane(LANES.index(role), self._scheduler, self._failure, self._passes)
            for role in ("gather", "reduce", "outer")
        }
        self._communicators: list[weakref.ref[RaceCommunicator]] = []
        self._buffers: weakref.WeakSet[RaceBuffer] = weakref.WeakSet()

    # -- what a program does --------------------------------------------------------------------

    @contextmanager
    def checking(self, *, leaves: Collection[Role] = (Role.REDUCE_OUTPUT,)) -> Iterator[None]:
        """The life of the model: everything that touches it happens inside.

        At the end what was submitted is run, and the threads are ended.

        Args:
            leaves: buffers with one of these roles may keep their memory at the end.

        Raises:
            RaceError: the first violation, where it is found or else at the end.
            BackendError: work failed.
        """
        refuse = self._passes.refuse_in_capture
        come_by = partial(self._scheduler.come_by, chance=0.05)
        try:
            with watch_host(self._memories, refuse), WatchOperations(self._memories, come_by):
                yield
            self.check_released(leaves=leaves)
            self.raise_if_any()
        except BaseException as error:
            if self._findings.errors and error is not self._findings.errors[0]:
                raise self._findings.errors[0] from error
            raise
        finally:
            self._scheduler.stop()

    @contextmanager
    def root_pass(self) -> Iterator[None]:
        """A root forward, or a backward with all that belongs to it.

        Raises:
            RaceError: at its end compute has not joined every lane, or peers may still read what
                was lent to them.
        """
        yield
        for lane in self._lanes.values():
            if not self._compute.timeline.covers(lane.timeline):
                raise self._findings.add(
                    f"compute has not joined lane {lane.name!r} at the end of a root pass: nothing "
                    f"waits for {lane.last_label!r} (clause 8.1)."
                )
        for communicator in self._open_communicators():
            if communicator.loans:
                raise self._findings.add(
                    f"nothing settles the {communicator.name} communicator after "
                    f"{communicator.loans[0].event.label!r} (clause 6.3)."
                )
        self._passes.number += 1
        self.raise_if_any()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """What happens inside could be captured in a CUDA graph, or raises RaceError: no wait of
        the host, no rendezvous, no ticket from before, nothing kept for life is allocated."""
        self._passes.number += 1  # whatever ticket there is comes from before
        self._passes.captured = True
        try:
            yield
        finally:
            self._passes.captured = False

    def check_released(self, *, leaves: Collection[Role] = (Role.REDUCE_OUTPUT,)) -> None:
        """Raise RaceError if a buffer holds memory that has none of the roles in ``leaves``."""
        self._scheduler.drain()
        self._failure.raise_if_any()
        for buffer in list(self._buffers):
            if buffer.acquired is not None and not buffer.roles & set(leaves):
                raise self._findings.add(
                    f"{buffer.name} was acquired in {buffer.acquired.label!r} on lane "
                    f"{buffer.acquired.lane_name!r} and is never released."
                )

    def raise_if_any(self) -> None:
        """Raise what was found, if anything was."""
        if self._findings.errors:
            raise self._findings.errors[0]
        self._failure.raise_if_any()

    # -- what the core asks ---------------------------------------------------------------------

    def unavailable_reason(self, device_type: str) -> str | None:
        return None if device_type == "cpu" else "it checks schedules on CPUs"

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        _require_cpu(device)
        return self._lanes[role]

    def compute_lane(self, device: torch.device) -> Lane:
        _require_cpu(device)
        return self._compute

    def communicator(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        purpose: LaneRole,
        options: Mapping[str, Any] | None = None,
    ) -> Communicator:
        _require_cpu(device)
        if options:
            raise ValueError(f"the race checker has no options, got {sorted(options)}.")
        self._passes.refuse_in_capture("a communicator is made")
        # The ranks of a group make its communicators in the same order.
        name = f"{purpose} {group.group_name}"
        _made[name] += 1
        exchange = Exchange(
            group if group.size() > 1 else None,
            f"{name} {_made[name]}",
            rank=group.rank(),
            size=group.size(),
            pause=self._pause,
        )
        communicator = RaceCommunicator(
            purpose,
            exchange,
            device,
            memories=self._memories,
            now=self.now,
            paused=self._memories.paused,
        )
        self._communicators.append(weakref.ref(communicator))
        return communicator

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        _require_cpu(device)
        if lifetime is Lifetime.PERSISTENT:
            self._passes.refuse_in_capture("a buffer is allocated for life")
        roles = frozenset(use.role for use in uses)
        with self._memories.paused():
            buffer = RaceBuffer(self, roles, numel, dtype, device, lifetime)
        self._buffers.add(buffer)
        return buffer

    # -- what happens ---------------------------------------------------------------------------

    def now(self, label: str) -> Event:
        """The event that the caller is part of: the work that runs, or what compute does."""
        worker = self._scheduler.worker_of_caller()
        if worker is not None:
            return worker.queue[0].event
        return self._compute.event(label)

    def _latest(self, lane: int) -> Event:
        if lane == 0:
            return self._compute.event("memory of tensors that are gone is used again")
        timeline = self._lanes[LANES[lane]].timeline
        return Event(lane, timeline.clock, "memory of tensors that are gone is used again")

    def _pause(self, until: Callable[[], bool]) -> None:
        worker = self._scheduler.worker_of_caller()
        assert worker is not None, "a collective outside of submitted work"
        worker.pause(lambda: self._failure.occurred or until())
        self._failure.raise_if_any()

    def _count(self) -> None:
        held: Counter[frozenset[Role]] = Counter()
        for buffer in self._buffers:
            if buffer.acquired is not None:
                held[buffer.roles] += buffer.tensor.numel()
        for roles, numel in held.items():
            self.peak[roles] = max(self.peak.get(roles, 0), numel)

    def _dropped(self, buffer: RaceBuffer) -> None:
        """A buffer is gone that a lane acquired and did not release. Finalizers cannot raise."""
        assert buffer.acquired is not None
        self._findings.add(
            f"{buffer.name} was acquired in {buffer.acquired.label!r} on lane "
            f"{buffer.acquired.lane_name!r} and dropped without being released there (clause 4.5)."
        )

    def _tell_peers(self, reason: str) -> None:
        for communicator in self._open_communicators():
            communicator.fail(reason)

    def _open_communicators(self) -> list[RaceCommunicator]:
        return [known for ref in self._communicators if (known := ref()) is not None]


#: Communicators made so far in this process, by group and purpose.
_made: Counter[str] = Counter()


def _stay() -> None:
    """Work that runs leaves the scheduling to the thread that trains."""


class _TellPeers(LaneFailure):
    """A failure of which the peers are told, which would wait for this rank else."""

    def __init__(self, backend: RaceBackend) -> None:
        super().__init__()
        self._backend = weakref.ref(backend)

    def record(self, label: str, cause: BaseException) -> None:
        first = not self.occurred
        super().record(label, cause)
        backend = self._backend()
        if first and backend is not None:
            backend._tell_peers(str(cause))


class RaceBuffer(StorageBuffer):
    """A buffer whose uses are recorded. What was not written yet is NaN."""

    def __init__(
        self,
        backend: RaceBackend,
        roles: frozenset[Role],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> None:
        super().__init__(numel, dtype, device, lifetime)
        self.roles = roles
        self.acquired: Event | None = None  # of a TRANSIENT one
        self._backend = backend
        names = " and ".join(sorted(role.value for role in roles)) or "buffer"
        self.name = f"a {names} of {numel} x {dtype}"
        self.memory = backend._memories.of(self.tensor, self.name)
        if lifetime is Lifetime.TRANSIENT:
            self.memory.released = backend.now("allocation")

    def __del__(self) -> None:
        # What becomes `.grad` is acquired by compute and goes with its last tensor (clause 4.6).
        if self.acquired is not None and self.acquired.lane != 0:
            self._backend._dropped(self)

    def acquire(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT or self.acquired is not None:
            return
        event = self._backend.now("acquire")
        self.memory.write(0, self._nbytes, event, verb="acquires")
        self.memory.released, self.memory.home = None, event.lane
        self.acquired = event
        super().acquire()
        self._poison()
        self._backend._count()

    def release(self) -> None:
        if self.acquired is None:
            super().release()  # refuses what is kept for life
            return
        event = self._backend.now("release")
        if event.lane != self.acquired.lane:
            raise self._backend._findings.add(
                f"{event.lane_name} releases {self.name} in {event.label!r}, but lane "
                f"{self.acquired.lane_name!r} acquired it in {self.acquired.label!r}: release it "
                "there (clause 4.5)."
            )
        self.memory.write(0, self._nbytes, event, verb="releases")
        self.memory.released, self.acquired = event, None
        self._poison()
        super().release()

    @property
    def _nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def _poison(self) -> None:
        with self._backend._memories.paused():
            poison(self.tensor)


def poison(tensor: Tensor) -> None:
    """Fill with what no computation survives: NaN, or the largest number."""
    values = tensor.data
    if values.is_floating_point() or values.is_complex():
        values.fill_(float("nan"))
    elif values.dtype == torch.bool:
        values.fill_(True)
    else:
        values.fill_(torch.iinfo(values.dtype).max)


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise UnsupportedError(f"the race checker serves the CPU, not {device}.")
