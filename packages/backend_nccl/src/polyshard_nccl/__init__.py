"""The NCCL backend of polyshard: sharded training on NVIDIA GPUs. The core finds it through its
entry point, by the name `nccl`."""

from .backend import NcclBackend
from .options import Options

__all__ = ["NcclBackend", "Options"]
