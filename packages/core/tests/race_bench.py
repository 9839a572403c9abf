"""What tests of the race checker share: its lanes, and work on them without a core."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from polyshard.spi import Buffer, Communicator, Lane, LaneRole, Lifetime, Role, Use
from polyshard.testing.race import Policy, RaceBackend

CPU = torch.device("cpu")


class Bench:
    """A backend, its lanes, and buffers of four numbers."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.backend = RaceBackend(policy, seed=seed, timeout=10.0)
        self.compute = self.backend.compute_lane(CPU)
        self._communicators: dict[LaneRole, Communicator] = {}
        self._held: list[Tensor] = []

    def lane(self, role: LaneRole) -> Lane:
        return self.backend.lane(role, CPU)

    def communicator(self, purpose: LaneRole) -> Communicator:
        if purpose not in self._communicators:
            group = dist.group.WORLD
            assert group is not None
            self._communicators[purpose] = self.backend.communicator(group, CPU, purpose=purpose)
        return self._communicators[purpose]

    def buffer(self, role: Role, lifetime: Lifetime = Lifetime.TRANSIENT) -> Buffer:
        purpose: LaneRole = "gather" if "gather" in role.value else "reduce"
        uses = [Use(self.communicator(purpose), role)]
        return self.backend.allocate(uses, 4, torch.float32, CPU, lifetime)

    def gather(self, *, wait: bool = True) -> Buffer:
        """Four ones, gathered for 'block: gather'."""
        buffer, communicator = self.buffer(Role.GATHER_OUTPUT), self.communicator("gather")
        shard = self.buffer(Role.GATHER_INPUT, Lifetime.PERSISTENT).tensor
        shard.fill_(1.0)
        self._held.append(shard)
        lane = self.lane("gather")
        lane.wait(self.compute.mark())

        def work() -> None:
            buffer.acquire()
            communicator.all_gather([buffer.tensor], [shard], label="block: gather")

        lane.submit(work, label="block: gather")
        if wait:
            self.compute.wait(lane.mark())
        return buffer

    def release(self, buffer: Buffer, *, wait: bool = True) -> None:
        """After what compute does with it."""
        lane = self.lane("gather")
        if wait:
            lane.wait(self.compute.mark())
        lane.submit(buffer.release, label="block: release")

    def end(self) -> None:
        """Settle what was lent, and join the lanes."""
        for purpose, communicator in self._communicators.items():
            self.lane(purpose).submit(communicator.settle, label=f"settle {purpose}")
        for role in ("gather", "reduce", "outer"):
            self.compute.wait(self.lane(role).mark())
