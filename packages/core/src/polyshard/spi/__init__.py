"""The collective interface: what a backend implements and all that the core knows of one.

The numbered clauses that every implementation keeps are in ``docs/contract.md``.
"""

from .backend import SPI_VERSION, Capabilities, CollectiveBackend, LaneRole
from .buffers import Buffer, Lifetime, Role, StorageBuffer, Use
from .communicator import Communicator, Op, Traffic
from .lanes import HostLane, Lane, LaneFailure, Ticket
from .ops import BufferOps

__all__ = [
    "SPI_VERSION",
    "Buffer",
    "BufferOps",
    "Capabilities",
    "CollectiveBackend",
    "Communicator",
    "HostLane",
    "Lane",
    "LaneFailure",
    "LaneRole",
    "Lifetime",
    "Op",
    "Role",
    "StorageBuffer",
    "Ticket",
    "Traffic",
    "Use",
]
