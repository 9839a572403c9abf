"""The race checker: a backend on which the core's scheduling is held to the contract.

It shows on a CPU what would go wrong on streams of a GPU, under any order that waits allow.
"""

from .backend import RaceBackend
from .memory import RaceError
from .schedule import Policy

__all__ = ["Policy", "RaceBackend", "RaceError"]
