"""The NCCL backend: lanes, communicators and buffers on CUDA devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch

from polyshard import BackendError, UnsupportedError
from polyshard.spi import (
    Buffer,
    Capabilities,
    CollectiveBackend,
    Communicator,
    Lane,
    LaneRole,
    Lifetime,
    StorageBuffer,
    Use,
)

from .board import Board
from .communicator import Connection, NcclCommunicator
from .failures import FaultDomain
from .group import Group, connect, timeout_of
from .lanes import ComputeLane, LaneSettings, StreamLane
from .meeting import Card, Place, meet
from .memory import RegisteredBuffer, UserBuffers
from .ops import REDUCE_DTYPES, ForeachOps
from .options import Options
from .runtime import Runtime
from .watcher import Watcher


class NcclBackend(CollectiveBackend):
    """Serves CUDA devices, on one machine or several, through NCCL process groups.

    Lanes are streams, tickets are events; nothing in training waits on the host. Every
    communicator has a process group of its own, so gathers, reductions and outer reductions run
    beside each other.

    Args:
        options: defaults for every communicator; see :class:`polyshard_nccl.Options`. For others
            than the usual ones give ``fully_shard`` an instance: ``backend=NcclBackend(...)``.

    Raises:
        ValueError: an option that does not exist, or a value that makes no sense.
    """

    name = "nccl"
    spi = (1, 0)
    # NCCL's rings round half precision at every hop, and which algorithm runs is its own choice.
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        reduce_dtypes=REDUCE_DTYPES,
        fp32_accumulation=False,
        graph_capture=True,
    )

    def __init__(self, **options: Any) -> None:
        self.options = Options().updated(options)
        self.ops = ForeachOps()
        self._runtime = self._make_runtime()
        self._domain = FaultDomain()
        self._watcher = self._domain.watcher = Watcher(self._domain)
        self._settings = LaneSettings(
            high_priority=self.options.high_priority, shared_stream=self.options.shared_stream
        )
        self._lanes: dict[tuple[LaneRole, torch.device], StreamLane] = {}
        self._compute_lanes: dict[torch.device, ComputeLane] = {}
        self._user_buffers: dict[torch.device, UserBuffers] = {}

    def _make_runtime(self) -> Runtime:
        """What stands for torch.cuda; tests have their own."""
        return Runtime()

    def _connect(self, place: Place, device: torch.device, purpose: str, options: Options) -> Group:
        """What stands for NCCL; likewise."""
        return connect(place, device, purpose, options)

    def unavailable_reason(self, device_type: str) -> str | None:
        if device_type not in self.capabilities.device_types:
            return f"it serves cuda devices, not {device_type}"
        return self._runtime.missing()

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        return self._stream_lane(role, device)

    def _stream_lane(self, role: LaneRole, device: torch.device) -> StreamLane:
        _require_role(role)
        self._require_device(device)
        if (role, device) not in self._lanes:
            self._lanes[role, device] = StreamLane(
                role, device, self._runtime, self._domain, self._settings
            )
        return self._lanes[role, device]

    def compute_lane(self, device: torch.device) -> Lane:
        self._require_device(device)
        if device not in self._compute_lanes:
            self._compute_lanes[device] = ComputeLane(
                "compute", device, self._runtime, self._domain
            )
        return self._compute_lanes[device]

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
            device: this rank's GPU, with its index.
            purpose: the role of the lane that it is used on.
            options: see :class:`polyshard_nccl.Options`; others than the backend's own.

        Raises:
            ValueError: a purpose or an option it does not know, options of streams that exist
                already, or a group without this rank.
            UnsupportedError: a device that is no GPU.
            BackendError: no such GPU, no driver, two ranks on one GPU, ranks that differ in what
                they want, or not all of them came within the timeout.
        """
        _require_role(purpose)
        chosen = self.options.updated(options)
        self._require_device(device)
        if problem := self._runtime.missing() or self._runtime.device_problem(device):
            raise BackendError(f"the NCCL backend cannot use {device}: {problem}.")
        rank, size = group.rank(), group.size()
        if not 0 <= rank < size:
            raise ValueError(f"this process is not in the group given for {purpose!r}.")
        self._domain.raise_if_any()
        self._settings.request(
            high_priority=chosen.high_priority, shared_stream=chosen.shared_stream
        )
        connection = self._connection(group, device, purpose, chosen) if size > 1 else None
        return NcclCommunicator(
            connection,
            rank=rank,
            size=size,
            device=device,
            capability=self._runtime.capability(device),
            lane=self._stream_lane(purpose, device),
            domain=self._domain,
            watcher=self._watcher,
        )

    def _connection(
        self, group: ProcessGroup, device: torch.device, purpose: LaneRole, options: Options
    ) -> Connection:
        timeout = options.timeout_or(timeout_of(group))
        runtime = self._runtime
        card = Card(
            purpose, runtime.device_identity(device), runtime.nccl_version(), options.user_buffers
        )
        place = meet(group, card, timeout)
        # A limit that holds for NCCL too, also where the environment or the group set it.
        connected = self._connect(place, device, purpose, options.updated({"timeout": timeout}))
        registered = None
        if options.user_buffers:
            registered = self._user_buffers.setdefault(device, UserBuffers(device, runtime))
            registered.register(connected.transport)
        return Connection(
            connected,
            Board(place.store, place.rank, place.ranks),
            self._stream_lane(purpose, device),
            timeout=timeout.total_seconds(),
            shares_stream=options.shared_stream,
            user_buffers=registered,
        )

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        """Memory of torch's caching allocator; registered memory where a use wants that."""
        self._require_device(device)
        for use in uses:
            connection = getattr(use.communicator, "connection", None)
            if connection is not None and connection.user_buffers is not None:
                return RegisteredBuffer(numel, dtype, device, lifetime, connection.user_buffers)
        return StorageBuffer(numel, dtype, device, lifetime)

    def _require_device(self, device: torch.device) -> None:
        if device.type not in self.capabilities.device_types:
            raise UnsupportedError(
                f"the NCCL backend serves cuda devices, not {device}; put the model there, or take "
                "backend='gloo' on a CPU."
            )


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def _require_role(role: LaneRole) -> None:
    if role not in get_args(LaneRole):
        known = ", ".join(map(repr, get_args(LaneRole)))
        raise ValueError(f"{role!r} is not a lane; the lanes are {known}.")
