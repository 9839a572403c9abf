"""A backend for groups of one rank on a CPU: what the core needs to run with no backend installed.

Its collectives are copies that are done when they return. Knows no transport and no other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import BackendError, UnsupportedError
from ..spi import (
    Buffer,
    BufferOps,
    Capabilities,
    CollectiveBackend,
    Communicator,
    HostLane,
    Lane,
    LaneFailure,
    LaneRole,
    Lifetime,
    Op,
    StorageBuffer,
    Use,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: What torch adds up on a CPU.
REDUCE_DTYPES = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


class LoopbackBackend(CollectiveBackend):
    """Serves groups of one rank on the CPU. Sums and averages of one rank are the identity.

    It is not registered: pass an instance as ``backend=``.

    Raises:
        UnsupportedError: another device than a CPU, or a group of more than one rank.
        ValueError: communicator options; it has none.
    """

    name = "loopback"
    spi = (1, 0)
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        reduce_dtypes=REDUCE_DTYPES,
        fp32_accumulation=True,
    )

    def __init__(self) -> None:
        self.ops = BufferOps()
        failure = LaneFailure()
        self._compute_lane = HostLane(failure)
        self._lanes: dict[LaneRole, HostLane] = {
            "gather": HostLane(failure),
            "reduce": HostLane(failure),
            "outer": HostLane(failure),
        }

    def unavailable_reason(self, device_type: str) -> str | None:
        return None if device_type == "cpu" else "its collectives are copies on the CPU"

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        _require_cpu(device)
        return self._lanes[role]

    def compute_lane(self, device: torch.device) -> Lane:
        _require_cpu(device)
        return self._compute_lane

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
            raise ValueError(f"the loopback backend has no options, got {sorted(options)}.")
        if group.size() != 1:
            raise UnsupportedError(
                f"the loopback backend serves groups of one rank, got one of {group.size()}; use "
                "an installed backend such as gloo."
            )
        return _LoopbackCommunicator(
            group.rank(), group.size(), device, reduce_dtypes=REDUCE_DTYPES
        )

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        _require_cpu(device)
        return StorageBuffer(numel, dtype, device, lifetime)


class _LoopbackCommunicator(Communicator):
    """The only rank's contributions are the results."""

    _closed = False

    def settle(self) -> None:
        """Nothing is in flight once a collective returned."""

    def close(self) -> None:
        self._closed = True

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        self._require_open(label)
        _copy_all(outputs, shards)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        self._require_open(label)
        _copy_all(outputs, inputs)

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        """The sum and the average over one rank are what it has."""
        self._require_open(label)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        """The only rank is the source."""
        self._require_open(label)

    def _require_open(self, label: str) -> None:
        if self._closed:
            raise BackendError(f"{label}: this communicator was closed.")


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target.data_ptr() != source.data_ptr():
            # Through .data, because a refill must not bump the version that autograd compares
            # with the one it saved (clause 7).
            target.data.copy_(source)


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise UnsupportedError(f"the loopback backend serves the CPU, not {device}.")
