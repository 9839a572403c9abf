"""What a backend is: a factory of lanes, communicators and buffers, and what it promises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from .buffers import Buffer, Lifetime, Role, Use
from .communicator import Communicator
from .lanes import Lane
from .ops import BufferOps

if TYPE_CHECKING:  # a torch without torch.distributed can still ask why a backend is unavailable
    from torch.distributed import ProcessGroup

#: Version of this interface. A backend fits when its major is the same and its minor not above.
SPI_VERSION = (1, 0)

LaneRole: TypeAlias = Literal["gather", "reduce", "outer"]


@dataclass(frozen=True)
class Capabilities:
    """What a backend promises.

    Args:
        device_types: the ``torch.device`` types it serves.
        reduce_dtypes: dtypes its reductions accept; gathers and broadcasts take any dtype.
            The backend hands them to its communicators, which refuse all others.
        fp32_accumulation: reductions of half-precision floats accumulate in fp32.
        persistent_roles: roles whose buffers it wants allocated once and kept (clause 4); not
            REDUCE_OUTPUT, which becomes ``.grad`` and goes with it.
        graph_capture: lanes and collectives can be captured in a CUDA graph (clause 8).
    """

    device_types: frozenset[str]
    reduce_dtypes: frozenset[torch.dtype]
    fp32_accumulation: bool
    persistent_roles: frozenset[Role] = frozenset()
    graph_capture: bool = False

    def __post_init__(self) -> None:
        if Role.REDUCE_OUTPUT in self.persistent_roles:
            raise ValueError(
                "persistent_roles has REDUCE_OUTPUT, but gradients become .grad and are freed with "
                "it; reduce into staging of the backend's own and copy."
            )


class CollectiveBackend(ABC):
    """One way to communicate. Made without arguments, once per process; cheap until used.

    ``name`` is the entry point's name, ``spi`` the interface version it was written for.
    """

    name: str
    spi: tuple[int, int]
    capabilities: Capabilities
    ops: BufferOps

    @abstractmethod
    def unavailable_reason(self, device_type: str) -> str | None:
        """Why it cannot serve ``device_type`` here, or None. Never raises, never initialises a
        device."""

    @abstractmethod
    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        """The lane for that kind of work; the same object at every call."""

    @abstractmethod
    def compute_lane(self, device: torch.device) -> Lane:
        """The lane the caller computes on, resolved at each use of it (the current stream)."""

    @abstractmethod
    def communicator(
        self,
        group: ProcessGroup,
        device: torch.device,
        *,
        purpose: LaneRole,
        options: Mapping[str, Any] | None = None,
    ) -> Communicator:
        """A new communicator over the ranks of ``group``. Collective over that group only."""

    @abstractmethod
    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        """A buffer that can serve ``uses``. PERSISTENT: collective over every group in ``uses``,
        same order on every rank. TRANSIENT: private and local."""
