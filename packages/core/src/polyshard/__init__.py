"""Fully-sharded data parallelism for PyTorch whose communication is a plug-in."""

from .api import fully_shard, microbatch
from .backends import available_backends
from .buffer import DBuffer
from .context import FsdpContext
from .errors import BackendError, PlacementError, UnsupportedError
from .module import FsdpModule
from .placements import Flat, Partial, Placements, Replicate
from .precision import MixedPrecisionPolicy
from .schedule import SchedulePolicy
from .weights import full_state_dict, unsharded

__all__ = [
    "BackendError",
    "DBuffer",
    "Flat",
    "FsdpContext",
    "FsdpModule",
    "MixedPrecisionPolicy",
    "Partial",
    "PlacementError",
    "Placements",
    "Replicate",
    "SchedulePolicy",
    "UnsupportedError",
    "available_backends",
    "full_state_dict",
    "fully_shard",
    "microbatch",
    "unsharded",
]
