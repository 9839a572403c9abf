"""Fully-sharded data parallelism for PyTorch whose communication is a plug-in."""

from .api import fully_shard, microbatch
from .backends import available_backends
from .buffer import DBuffer
from .clipping import clip_grad_norm_
from .context import FsdpContext
from .errors import BackendError, PlacementError, UnsupportedError
from .explain import explain
from .full_load import load_full_state_dict
from .methods import register_forward_method
from .module import FsdpModule
from .optimizer import fully_shard_optimizer
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
    "clip_grad_norm_",
    "explain",
    "full_state_dict",
    "fully_shard",
    "fully_shard_optimizer",
    "load_full_state_dict",
    "microbatch",
    "register_forward_method",
    "unsharded",
]
