"""What units on one mesh share to move data: a backend's lanes and communicators.

Knows no parameters and no schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from .debug import CheckedCommunicator, debugging
from .spi import (
    Buffer,
    CollectiveBackend,
    Communicator,
    Lane,
    LaneRole,
    Lifetime,
    Role,
    Ticket,
    Traffic,
    Use,
)
from .submesh import joined, submesh


class Transport:
    """Lanes and communicators of one backend over some axes of one mesh.

    Shared by every unit with the same backend, mesh and axes; communicators are made on first
    request, which every rank of the axis makes in the same order, and closed with the last unit.
    """

    _all: ClassVar[weakref.WeakValueDictionary[object, Transport]] = weakref.WeakValueDictionary()

    def __init__(
        self,
        backend: CollectiveBackend,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.backend, self.mesh, self.axes, self.device = backend, mesh, axes, device
        self.sizes = tuple(mesh.size(axis) for axis in axes)
        self.coordinates = tuple(mesh.get_local_rank(axis) for axis in axes)
        self.compute_lane = backend.compute_lane(device)
        self.gather_lane = backend.lane("gather", device)
        self.reduce_lane = backend.lane("reduce", device)
        self.outer_lane = backend.lane("outer", device)
        #: The mesh of these axes alone: on other axes parameters may differ.
        self.dp_mesh = submesh(mesh, axes)
        self.ranks = frozenset(self.dp_mesh.mesh.flatten().tolist())
        self.number = 0  # by which ranks tell it from others made for the same; from 1
        self._joined: dict[DeviceMesh, DeviceMesh] = {}
        self._communicators: dict[tuple[LaneRole, int], Communicator] = {}
        self._finalizer = weakref.finalize(self, _close, self._communicators)

    @classmethod
    def in_use(
        cls,
        backend: CollectiveBackend,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        device: torch.device,
    ) -> Transport | None:
        """What units of this rank have for these, if garbage collection has not come to it."""
        return cls._all.get((id(backend), mesh, axes, device))

    @classmethod
    def new(
        cls,
        backend: CollectiveBackend,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        device: torch.device,
        *,
        number: int,
    ) -> Transport:
        """Another one, which units made later find in use.

        Args:
            number: the same on every rank, and above those of all before it.
        """
        transport = cls(backend, mesh, axes, device)
        transport.number = number
        cls._all[id(backend), mesh, axes, device] = transport
        return transport

    def communicators(
        self, purpose: LaneRole, axes: Sequence[int] | None = None
    ) -> Mapping[int, Communicator]:
        """The communicators of ``purpose`` by dp axis position; collective where they are new."""
        wanted = range(len(self.axes)) if axes is None else axes
        for axis in wanted:
            if (purpose, axis) not in self._communicators:
                group = self.mesh.get_group(self.axes[axis])
                communicator = self.backend.communicator(group, self.device, purpose=purpose)
                if debugging():
                    communicator = CheckedCommunicator(communicator, group)
                self._communicators[purpose, axis] = communicator
        found = _Communicators({axis: self._communicators[purpose, axis] for axis in wanted})
        found.transport = self
        return found

    def mesh_with(self, other: DeviceMesh | None) -> DeviceMesh:
        """The mesh of the dp axes, then those of ``other``; collective where that is new."""
        if other is None:
            return self.dp_mesh
        if other not in self._joined:
            self._joined[other] = joined(self.dp_mesh, other)
        return self._joined[other]

    def lane(self, purpose: LaneRole) -> Lane:
        """The lane on which the communicators of ``purpose`` are used."""
        return {
            "gather": self.gather_lane,
            "reduce": self.reduce_lane,
            "outer": self.outer_lane,
        }[purpose]

    def allocate(
        self,
        uses: Mapping[Role, Sequence[Communicator]],
        numel: int,
        dtype: torch.dtype,
        *,
        persistent: bool = False,
    ) -> Buffer:
        """A buffer for ``uses``; kept for life if asked, or if the backend keeps such roles."""
        keep = persistent or any(self.keeps(role) for role in uses)
        listed = [
            Use(each.bare if isinstance(each, CheckedCommunicator) else each, role)
            for role, many in uses.items()
            for each in many
        ]
        lifetime = Lifetime.PERSISTENT if keep else Lifetime.TRANSIENT
        return self.backend.allocate(listed, numel, dtype, self.device, lifetime)

    @staticmethod
    def release(storage: Buffer) -> None:
        """Give back the memory of a buffer unless it is kept for life; inside submitted work."""
        if storage.lifetime is Lifetime.TRANSIENT:
            storage.release()

    def keeps(self, role: Role) -> bool:
        """Whether the backend wants buffers of ``role`` allocated once and never released."""
        return role in self.backend.capabilities.persistent_roles

    def settle(self) -> None:
        """After it, in lane order, peers are done with everything this rank lent them."""
        for (purpose, axis), communicator in self._communicators.items():
            self.lane(purpose).submit(communicator.settle, label=f"settle {purpose} axis {axis}")

    def join(self) -> None:
        """Compute waits for all submitted work; no ticket outlives a pass."""
        for lane in (self.gather_lane, self.reduce_lane, self.outer_lane):
            self.compute_lane.wait(lane.mark())

    def mark_compute(self) -> Ticket:
        """The point that compute has reached."""
        return self.compute_lane.mark()

    def traffic(self) -> Traffic:
        """What this rank moved so far, over all axes and purposes."""
        total = Traffic()
        for communicator in self._communicators.values():
            total += communicator.traffic
        return total


class _Communicators(dict[int, Communicator]):
    """Submitted work holds these, and with them the transport: it closes only after that work, also
    where a pass failed that had gathered ahead and its model was dropped at once."""

    transport: Transport


def _close(communicators: dict[tuple[LaneRole, int], Communicator]) -> None:
    for communicator in communicators.values():
        communicator.close()
    communicators.clear()
