"""The NCCL backend of polyshard. The core finds it through its entry point, by the name `nccl`."""

from .backend import NcclBackend

__all__ = ["NcclBackend"]
