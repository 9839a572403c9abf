"""The backend's identity, and why it cannot be used yet. Touches no device, imports no CuPy."""

from __future__ import annotations

import importlib.machinery
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup

from polyshard import UnsupportedError
from polyshard.spi import (
    Buffer,
    BufferOps,
    Capabilities,
    CollectiveBackend,
    Communicator,
    Lane,
    LaneRole,
    Lifetime,
    Use,
)


class SymmMemBackend(CollectiveBackend):
    """Shards that peers read and write in place: torch's symmetric memory, with CuPy for raw
    buffer operations, on CUDA devices.

    This version can be found, chosen and asked; ``unavailable_reason`` always has an answer, and
    every operation raises UnsupportedError.
    """

    name = "symm_mem"
    spi = (1, 0)
    # Nothing but the device type is promised: there are no reductions to promise anything about.
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}), reduce_dtypes=frozenset(), fp32_accumulation=False
    )
    ops = BufferOps()

    def unavailable_reason(self, device_type: str) -> str | None:
        if device_type not in self.capabilities.device_types:
            return f"it serves cuda devices, not {device_type}"
        # How torch was built, not which devices there are: counting those starts the driver.
        if torch.version.cuda is None:
            return "this torch was built without CUDA"
        # Found, not imported: importing CuPy looks for the driver's libraries.
        if importlib.machinery.PathFinder.find_spec("cupy") is None:
            major = torch.version.cuda.partition(".")[0]
            return f'CuPy is missing; pip install "polyshard-symm-mem[cuda{major}]"'
        return "this version of polyshard-symm-mem has no communication yet"

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        self._refuse("lane")

    def compute_lane(self, device: torch.device) -> Lane:
        self._refuse("compute_lane")

    def communicator(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        purpose: LaneRole,
        options: Mapping[str, Any] | None = None,
    ) -> Communicator:
        self._refuse("communicator")

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        self._refuse("allocate")

    def _refuse(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"SymmMemBackend.{operation}: this version of polyshard-symm-mem has no communication "
            'yet; train on CPUs with pip install "polyshard[gloo]".'
        )
