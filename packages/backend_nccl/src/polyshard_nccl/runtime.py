"""What this package asks of torch.cuda, in one place. Knows no lanes and no collectives.

Tests put a recorder here, so that what lanes do with streams can be seen without a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class Runtime:
    """Streams, events, allocator pools and names of devices. Nothing here runs before it is
    called, and :meth:`missing` initialises no device."""

    def missing(self) -> str | None:
        """What this machine or this torch lacks, as far as it shows without starting the driver."""
        if torch.version.cuda is None:
            return "this torch was built without CUDA"
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            return "this torch was built without NCCL"
        try:
            # Loading the driver's library starts nothing: a process may still fork after it.
            ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError:
            return "no NVIDIA driver is installed here (its library libcuda.so.1 is not found)"
        return None

    def device_problem(self, device: torch.device) -> str | None:
        """Why ``device`` cannot be used, or None. Starts the driver."""
        if device == torch.device(device.type):
            return f"{device} has no index; give the device of this rank, like cuda:0"
        count = torch.cuda.device_count()
        if device.index < count:
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return f"{device} does not exist: this process sees {count} GPUs{seen}"

    def device_identity(self, device: torch.device) -> str:
        """The same for two processes if they use the same GPU of the same machine."""
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {properties.uuid}"

    def capability(self, device: torch.device) -> tuple[int, int]:
        """The compute capability, like (9, 0)."""
        return torch.cuda.get_device_capability(device)

    def nccl_version(self) -> str:
        """Of the library that torch runs with, like ``2.28.9``."""
        return ".".join(map(str, torch.cuda.nccl.version()))

    def new_stream(self, device: torch.device, *, high_priority: bool) -> Any:
        """A side stream; of two priorities, lower numbers go first."""
        return torch.cuda.Stream(device, priority=-1 if high_priority else 0)

    def current_stream(self, device: torch.device) -> Any:
        """What the calling thread computes on."""
        return torch.cuda.current_stream(device)

    def new_event(self) -> Any:
        """Without timing: recording one costs the device next to nothing."""
        return torch.cuda.Event()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Kernels, copies and allocations go to ``stream``."""
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        """The calling thread's current stream is being captured in a graph."""
        return torch.cuda.is_current_stream_capturing()

    def is_part_of_capture(self, stream: Any) -> bool:
        """``stream`` itself is being captured: it has waited for a stream that is."""
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def range(self, label: str) -> Iterator[None]:
        """Name what the host enqueues: an NVTX range, and one of torch.profiler while it runs."""
        torch.cuda.nvtx.range_push(label)
        try:
            if is_profiling():
                with torch.profiler.record_function(label):
                    yield
            else:
                yield
        finally:
            torch.cuda.nvtx.range_pop()

    def new_pool(self, allocator: Any) -> Any:
        """A pool of the caching allocator whose memory comes from ``allocator``."""
        return torch.cuda.MemPool(allocator)

    def allocating_from(self, pool: Any, device: torch.device) -> AbstractContextManager[Any]:
        """What this thread allocates on ``device`` comes from ``pool``."""
        return torch.cuda.use_mem_pool(pool, device)


def is_profiling() -> bool:
    """Whether torch.profiler runs; asking costs less than a range that nobody records."""
    return bool(torch.autograd.profiler._is_profiler_enabled)
