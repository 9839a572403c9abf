"""The gloo backend: lanes, communicators and buffers on a CPU; for tests, also on a GPU."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from polyshard import BackendError, UnsupportedError
from polyshard.spi import (
    Buffer,
    BufferOps,
    Capabilities,
    CollectiveBackend,
    Communicator,
    Lane,
    LaneRole,
    Lifetime,
    StorageBuffer,
    Use,
)

from .communicator import GlooCommunicator
from .connections import Connections
from .faults import FaultDomain
from .lanes import ComputeLane, WorkerLane
from .reduction import REDUCE_DTYPES
from .staging import StagedCommunicator
from .streams import StreamComputeLane, Streams, StreamWorkerLane

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TIMEOUT_VARIABLE = "POLYSHARD_GLOO_TIMEOUT"
_STAGING_VARIABLE = "POLYSHARD_GLOO_STAGING"
_CPU = torch.device("cpu")


class GlooBackend(CollectiveBackend):
    """Serves CPUs, on one machine or several, over gloo's TCP connections.

    Each lane is a thread that starts when it first gets work. Compute runs in the caller's
    thread, so a wait of the compute lane blocks the caller.

    A collective fails after a timeout: the communicator's option ``timeout`` (a timedelta), else
    the environment variable POLYSHARD_GLOO_TIMEOUT (seconds), else the timeout that the group's
    store was given, which is that of ``torch.distributed.init_process_group`` unless it was
    given a store.

    Where POLYSHARD_GLOO_STAGING=1 is set, it serves CUDA devices too: tensors are copied to the
    host and back, around each collective. That is slow, and made for tests, in which several ranks
    share a GPU.
    """

    name = "gloo"
    spi = (1, 0)
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        reduce_dtypes=REDUCE_DTYPES,
        fp32_accumulation=True,
    )

    def __init__(self) -> None:
        self.ops = BufferOps()
        self._domain = FaultDomain()
        self._compute_lane = ComputeLane(self._domain)
        self._lanes = {role: WorkerLane(role, self._domain) for role in get_args(LaneRole)}
        self._streams = Streams()
        self._staged_lanes: dict[tuple[LaneRole, torch.device], Lane] = {}

    def unavailable_reason(self, device_type: str) -> str | None:
        if device_type not in self.capabilities.device_types:
            return f"it communicates between CPUs, not {device_type!r} devices"
        if not torch.distributed.is_available():
            return "this build of torch has no torch.distributed"
        if not torch.distributed.is_gloo_available():
            return "this build of torch has no gloo"
        if device_type == "cuda" and torch.version.cuda is None:
            return "this torch was built without CUDA"
        if device_type == "cuda" and os.environ.get(_STAGING_VARIABLE) != "1":
            return (
                "it would move CUDA tensors through host memory, which is slow and made for tests; "
                f"set {_STAGING_VARIABLE}=1 if that is what you want"
            )
        return None

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        _require_role(role)
        device = self._known(device)
        if not self._is_staged(device):
            return self._lanes[role]
        if (role, device) not in self._staged_lanes:
            lane = StreamWorkerLane(role, self._domain, self._streams, device)
            self._staged_lanes[role, device] = lane
        return self._staged_lanes[role, device]

    def compute_lane(self, device: torch.device) -> Lane:
        device = self._known(device)
        if not self._is_staged(device):
            return self._compute_lane
        return StreamComputeLane(self._domain, self._streams, device)

    def _is_staged(self, device: torch.device) -> bool:
        """Whether its tensors go through host memory."""
        return device.type != "cpu"

    def _known(self, device: torch.device) -> torch.device:
        """The device, by the one name that it has here."""
        if device.type not in self.capabilities.device_types:
            raise UnsupportedError(f"the gloo backend serves CPUs, not {device}.")
        if device.type == "cpu":
            return _CPU
        if device.index is None:
            raise ValueError(f"{device} has no index; give the device of this rank, like cuda:0.")
        return device

    def communicator(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        purpose: LaneRole,
        options: Mapping[str, Any] | None = None,
    ) -> Communicator:
        """See :meth:`polyshard.spi.CollectiveBackend.communicator`.

        Args:
            group: of any torch.distributed backend: only its ranks and its store are used.
            device: the CPU, or where staging is on, this rank's GPU with its index.
            purpose: the role of the lane that it is used on.
            options: ``timeout``, a positive timedelta.

        Raises:
            ValueError: a purpose or an option it does not know, or a group without this rank.
            BackendError: not all ranks of the group came within the timeout.
        """
        device = self._known(device)
        _require_role(purpose)
        rank, size = group.rank(), group.size()
        if not 0 <= rank < size:
            raise ValueError(f"this process is not in the group given for {purpose!r}.")
        timeout = _requested_timeout(options or {})
        self._domain.raise_if_any()
        connections = None
        if size > 1:
            if timeout is None:
                # The stubs of torch give the property to subclasses only.
                timeout = cast(timedelta, group.get_group_store().timeout)  # type: ignore[attr-defined]
            connections = Connections.open(group, purpose=purpose, timeout=timeout)
        host = GlooCommunicator(connections, rank=rank, size=size, device=_CPU, domain=self._domain)
        return StagedCommunicator(host, device) if self._is_staged(device) else host

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        """Ordinary memory, whatever it is for: peers never see it."""
        return StorageBuffer(numel, dtype, self._known(device), lifetime)


def _require_role(role: LaneRole) -> None:
    if role not in get_args(LaneRole):
        known = ", ".join(map(repr, get_args(LaneRole)))
        raise ValueError(f"{role!r} is not a lane; the lanes are {known}.")


def _requested_timeout(options: Mapping[str, Any]) -> timedelta | None:
    """What the communicator's options or else the environment ask for."""
    unknown = sorted(set(options) - {"timeout"})
    if unknown:
        raise ValueError(f"unknown options {unknown}; the gloo backend has 'timeout'.")
    if "timeout" in options:
        timeout = options["timeout"]
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ValueError(f"option 'timeout' must be a positive timedelta, got {timeout!r}.")
        return timeout
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BackendError(
            f"{_TIMEOUT_VARIABLE}={text!r} is not a number of seconds above 0; correct or unset it."
        )
    return timedelta(seconds=seconds)
