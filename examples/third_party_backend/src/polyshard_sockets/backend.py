"""What polyshard asks of a backend: what it can do, and its lanes, communicators and buffers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

import torch

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
    StorageBuffer,
    Use,
)

from .communicator import REDUCE_DTYPES, SocketsCommunicator
from .connections import connect
from .lanes import CallersLane, SharedFailure, WorkerLane

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class SocketsBackend(CollectiveBackend):
    """Serves CPUs of one machine. Making it starts nothing: threads and sockets come with use.

    A collective that is not over in time fails: after the communicator's option ``timeout``, a
    timedelta, or else after the timeout of the process group's store.
    """

    name = "sockets"
    spi = (1, 0)
    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        reduce_dtypes=REDUCE_DTYPES,
        fp32_accumulation=True,
    )

    def __init__(self) -> None:
        self.ops = BufferOps()
        self._failure = SharedFailure()
        self._compute_lane = CallersLane(self._failure)
        self._lanes = {role: WorkerLane(role, self._failure) for role in get_args(LaneRole)}

    def unavailable_reason(self, device_type: str) -> str | None:
        if device_type != "cpu":
            return f"it moves bytes between processes on CPUs, not {device_type!r} devices"
        if not torch.distributed.is_available():
            return "this torch was built without torch.distributed"
        if not hasattr(socket, "AF_UNIX"):
            return "this Python has no Unix-domain sockets"
        return None

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        _require_cpu(device)
        _require_role(role)
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
        """Meet the other ranks of ``group`` and connect to each of them.

        Raises:
            ValueError: an unknown purpose or option, or a group that this process is not in.
            BackendError: a rank did not come in time, or came for something else.
        """
        _require_cpu(device)
        _require_role(purpose)
        timeout = _requested_timeout(options or {})
        if group.rank() < 0:
            raise ValueError(f"this process is not in the group given for {purpose!r}.")
        self._failure.raise_if_any()
        connections = connect(group, purpose=purpose, timeout=timeout)
        self._failure.watch(connections)
        return SocketsCommunicator(connections, device)

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        """Ordinary memory, whatever it is for: no other process ever looks at it."""
        _require_cpu(device)
        return StorageBuffer(numel, dtype, device, lifetime)


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise UnsupportedError(f"the sockets backend serves CPUs, not {device}.")


def _require_role(role: LaneRole) -> None:
    if role not in get_args(LaneRole):
        raise ValueError(f"{role!r} is not a lane; the lanes are {', '.join(get_args(LaneRole))}.")


def _requested_timeout(options: Mapping[str, Any]) -> timedelta | None:
    unknown = sorted(set(options) - {"timeout"})
    if unknown:
        raise ValueError(f"unknown options {unknown}; the sockets backend has 'timeout'.")
    timeout = options.get("timeout")
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        raise ValueError(f"option 'timeout' must be a positive timedelta, got {timeout!r}.")
    return timeout
