"""An NCCL backend that connects groups of one rank too, which otherwise only copy.

So a single GPU runs what several would: process groups, their launches, watching and ending.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from polyshard.spi import Communicator, LaneRole
from polyshard_nccl import NcclBackend
from polyshard_nccl.communicator import NcclCommunicator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ConnectedNccl(NcclBackend):
    """As its base in everything else."""

    def communicator(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        purpose: LaneRole,
        options: Mapping[str, Any] | None = None,
    ) -> Communicator:
        """As that of the base, but never without a connection."""
        made = super().communicator(group, device, purpose=purpose, options=options)
        if made.size > 1:
            return made
        return NcclCommunicator(
            self._connection(group, device, purpose, self.options.updated(options)),
            rank=0,
            size=1,
            device=device,
            capability=self._runtime.capability(device),
            lane=self._stream_lane(purpose, device),
            domain=self._domain,
            watcher=self._watcher,
        )
