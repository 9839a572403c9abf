"""What a test has at hand on one rank: the backend, its lanes and communicators, its device.

Owns how work is put on lanes and waited for, and closes what a test opened. Compares nothing.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...spi import (
    Buffer,
    CollectiveBackend,
    Communicator,
    Lane,
    LaneRole,
    Lifetime,
    Op,
    Role,
    Ticket,
    Use,
)
from .data import require
from .subject import Subject

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROLES: tuple[LaneRole, ...] = ("gather", "reduce", "outer")

#: Seconds after which host work that a test holds back goes on, whatever happened.
LONGEST_HOLD = 30.0

#: Seconds that something may take which happens on its own.
_SOON = 10.0


class Bench:
    """One rank's side of a test. Communicators that it made are closed when the test passed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = subject.device(self.rank)
        self._lanes: dict[int, LaneRole] = {}
        self._communicators: list[Communicator] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._communicators:
            # Nobody leaves before all have what they need.
            dist.barrier()
            for communicator in self._communicators:
                communicator.close()

    @cached_property
    def backend(self) -> CollectiveBackend:
        """The process's one instance of the backend under test."""
        return self.subject.make_backend()

    @property
    def world(self) -> ProcessGroup:
        """The group of all ranks."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def compute(self) -> Lane:
        """The lane that the test computes on."""
        return self.backend.compute_lane(self.device)

    @property
    def runs_on_host(self) -> bool:
        """Submitted work is done by the host, so that a test can hold it back there."""
        return self.device.type == "cpu"

    def lane(self, role: LaneRole) -> Lane:
        """One of the three lanes."""
        return self.backend.lane(role, self.device)

    def all_lanes(self) -> dict[str, Lane]:
        """The three lanes and the compute lane, by name."""
        return {**{str(role): self.lane(role) for role in ROLES}, "compute": self.compute}

    def lane_of(self, communicator: Communicator) -> Lane:
        """The lane of a communicator's purpose."""
        return self.lane(self._lanes[id(communicator)])

    def communicator(
        self, purpose: LaneRole = "gather", group: ProcessGroup | None = None, **options: Any
    ) -> Communicator:
        """A communicator over ``group``, by default all ranks, closed at the end of the test."""
        communicator = self.backend.communicator(
            group or self.world,
            self.device,
            purpose=purpose,
            options={**self.subject.options, **options},
        )
        self._lanes[id(communicator)] = purpose
        self._communicators.append(communicator)
        return communicator

    def forget(self, communicator: Communicator) -> None:
        """The test closes, or drops, this one itself."""
        self._communicators = [kept for kept in self._communicators if kept is not communicator]

    def buffer(
        self,
        communicator: Communicator,
        role: Role,
        numel: int,
        dtype: torch.dtype = torch.float32,
        lifetime: Lifetime = Lifetime.TRANSIENT,
    ) -> Buffer:
        """A buffer for one use."""
        uses = [Use(communicator, role)]
        return self.backend.allocate(uses, numel, dtype, self.device, lifetime)

    def submit(self, communicator: Communicator, work: Callable[[], None], *, label: str) -> Ticket:
        """Put work that uses what was computed so far on the lane of ``communicator``."""
        lane = self.lane_of(communicator)
        lane.wait(self.compute.mark())
        lane.submit(work, label=label)
        return lane.mark()

    def perform(self, communicator: Communicator, work: Callable[[], None], *, label: str) -> None:
        """The same, and compute goes on after it."""
        self.compute.wait(self.submit(communicator, work, label=label))

    def all_gather(
        self,
        communicator: Communicator,
        outputs: Sequence[Tensor],
        shards: Sequence[Tensor],
        label: str = "unit gather",
    ) -> None:
        """Gather on the communicator's lane, and wait."""
        self.perform(
            communicator,
            lambda: communicator.all_gather(outputs, shards, label=label),
            label=label,
        )

    def reduce_scatter(
        self,
        communicator: Communicator,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        op: Op,
        label: str = "unit reduce",
    ) -> None:
        """Reduce and scatter on the communicator's lane, and wait."""
        self.perform(
            communicator,
            lambda: communicator.reduce_scatter(outputs, inputs, op, label=label),
            label=label,
        )

    def all_reduce(
        self,
        communicator: Communicator,
        buffers: Sequence[Tensor],
        op: Op,
        label: str = "unit all-reduce",
    ) -> None:
        """All-reduce on the communicator's lane, and wait."""
        self.perform(
            communicator, lambda: communicator.all_reduce(buffers, op, label=label), label=label
        )

    def broadcast(
        self,
        communicator: Communicator,
        buffers: Sequence[Tensor],
        source: int,
        label: str = "unit broadcast",
    ) -> None:
        """Broadcast on the communicator's lane, and wait."""
        self.perform(
            communicator,
            lambda: communicator.broadcast(buffers, source, label=label),
            label=label,
        )

    def settle_on(self, communicator: Communicator) -> None:
        """Settle on the communicator's lane, and wait."""
        self.perform(communicator, communicator.settle, label="settle")

    def eventually(self, condition: Callable[[], bool], said: Callable[[], str]) -> None:
        """Go on once ``condition`` holds; raises Violation where it does not within a while.

        For what happens soon after something else, on another thread.
        """
        deadline = time.monotonic() + min(_SOON, self.subject.timeout / 2)
        while not condition():
            require(time.monotonic() < deadline, said)
            gc.collect()
            time.sleep(0.02)

    def mesh(self) -> DeviceMesh:
        """All ranks on two axes, both longer than one where the number of ranks allows it.

        On the CPU whatever the device: it is used for its groups only.
        """
        return init_device_mesh("cpu", mesh_shape(self.size), mesh_dim_names=("outer", "inner"))

    def everyones(self, value: Any) -> list[Any]:
        """Each rank's ``value``, carried by the world's own process group."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def meet(self) -> None:
        """Go on when every rank is here."""
        dist.barrier()


def mesh_shape(size: int) -> tuple[int, int]:
    """The squarest (outer, inner) with ``size`` ranks; inner is 1 where the number is prime."""
    inner = max(n for n in range(1, int(size**0.5) + 1) if size % n == 0)
    return size // inner, inner


class Hold:
    """Host work that stays until it is let go.

    ``ran_inline``: the lane ran it inside ``submit``, where waiting would never end.
    ``released``: it has ended.
    """

    def __init__(self) -> None:
        self.entered, self._leave = threading.Event(), threading.Event()
        self.ran_inline = self.released = False
        self._home = threading.get_ident()

    def __call__(self) -> None:
        if threading.get_ident() == self._home:
            self.ran_inline = True
        else:
            self.entered.set()
            self._leave.wait(LONGEST_HOLD)
        self.released = True

    def let_go(self) -> None:
        """Let the work end, or not begin to wait."""
        self._leave.set()
