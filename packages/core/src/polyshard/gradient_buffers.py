"""The buffers that one group's gradients pass through. Knows no parameters and no order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .accumulated import as_contribution
from .buffer import DBuffer, Spread, Spreads
from .placements import Flat, Partial, Placement, Placements, Replicate
from .precision import GroupDtypes
from .spi import Communicator, Role
from .transport import Transport


class GradientBuffers:
    """Makes them.

    Args:
        inner: communicators of the axes that every backward reduces over.
        late: of those that only the last microbatch's does.
    """

    def __init__(
        self,
        transport: Transport,
        spreads: Spreads,
        placements: Placements,
        dtypes: GroupDtypes,
        inner: Mapping[int, Communicator],
        late: Mapping[int, Communicator],
    ) -> None:
        self._transport, self._spreads = transport, spreads
        self._placements, self._dtypes = placements, dtypes
        self._communicators = [*inner.values(), *late.values()]
        self._is_reduced_early = bool(inner)
        #: The backend wants reduce inputs allocated once, in the same order on every rank.
        self.keeps_inputs = transport.keeps(Role.REDUCE_INPUT)

    def spread(self, placements: Sequence[Placement]) -> Spread:
        """How tensors lie under some placements."""
        return self._spreads.of(placements)

    def input(self) -> DBuffer:
        """What contributions are packed into where every backward reduces them over some axis."""
        # Nothing was reduced over yet: Flat and Replicate axes average, Partial ones say how.
        unreduced = [
            placement if isinstance(placement, Partial) else Partial("avg")
            for placement in self._placements.gradient
        ]
        return self._allocate(unreduced, self._dtypes.grad_comm, Role.REDUCE_INPUT)

    def accumulator(self) -> DBuffer:
        """What adds up until the last microbatch. It becomes ``.grad``, so a reduce input that is
        kept for life cannot be one: that is ``staged``."""
        roles = [] if self.keeps_inputs else [Role.REDUCE_INPUT]
        roles.insert(0 if self._is_reduced_early else len(roles), Role.REDUCE_OUTPUT)
        return self._allocate(self._placements.gradient, self._dtypes.main_grad, *roles)

    def staged(self) -> DBuffer:
        """A copy of the accumulator to reduce, in the dtype that travels."""
        return self._allocate(self._placements.gradient, self._dtypes.grad_comm, Role.REDUCE_INPUT)

    def final(self) -> DBuffer:
        """Finished gradients."""
        return self._allocate(
            self._placements.optimizer, self._dtypes.main_grad, Role.REDUCE_OUTPUT
        )

    def landing(self, kept: DBuffer, dtype: torch.dtype) -> DBuffer:
        """Where a reduction arrives that is then added to ``kept``."""
        return self._allocate(kept.placements, dtype, Role.REDUCE_OUTPUT)

    def zeros(self, placements: Sequence[Placement]) -> DBuffer:
        """Gradients that are zero, to be shown as ``.grad``."""
        buffer = self._allocate(placements, self._dtypes.main_grad, Role.REDUCE_OUTPUT)
        buffer.storage.acquire()
        buffer.flat.zero_()
        return buffer

    def contribution(self, finished: DBuffer, label: str) -> DBuffer:
        """A finished gradient as a contribution to the sum that a last microbatch finishes.

        Collective where it is to be whole again: at the same point on every rank.
        """
        gradient, optimizer = self._placements.gradient, self._placements.optimizer
        if any(
            isinstance(kept, Replicate) and isinstance(sliced, Flat)
            for kept, sliced in zip(gradient, optimizer, strict=True)
        ):
            finished = self._gathered(finished, label)
        return as_contribution(finished, tuple(gradient), self.zeros)

    def _gathered(self, finished: DBuffer, label: str) -> DBuffer:
        whole = self.zeros((Replicate(),) * len(finished.placements))
        transport = self._transport
        lane, communicators = transport.reduce_lane, transport.communicators("reduce")
        lane.wait(transport.mark_compute())

        def gather() -> None:
            finished.redistribute(whole, communicators, label=label)
            for communicator in communicators.values():
                communicator.settle()

        lane.submit(gather, label=label)
        transport.compute_lane.wait(lane.mark())
        return whole

    def _allocate(
        self, placements: Sequence[Placement], dtype: torch.dtype, *roles: Role
    ) -> DBuffer:
        spread = self._spreads.of(placements)
        uses = dict.fromkeys(roles, self._communicators)
        return DBuffer.over(spread, self._transport.allocate(uses, spread.numel, dtype))
