"""Buffers on a GPU, and memory that NCCL allocated and registered. Knows no collectives."""

from __future__ import annotations

from typing import Any

import torch

from polyshard.spi import Lifetime, StorageBuffer

from .group import Transport
from .runtime import Runtime


class UserBuffers:
    """One pool of registered memory for a device, made with the first communicator that wants it.

    What the pool grows by later is registered by torch with every communicator that it was
    registered with before.
    """

    def __init__(self, device: torch.device, runtime: Runtime) -> None:
        self.device, self.runtime = device, runtime
        self.pool: Any = None

    def register(self, transport: Transport) -> None:
        """Let a connected communicator use the pool's memory as it lies."""
        if self.pool is None:
            self.pool = self.runtime.new_pool(transport.mem_allocator)
        transport.register_mem_pool(self.pool)

    def deregister(self, transport: Transport) -> None:
        """Before the communicator ends."""
        transport.deregister_mem_pool(self.pool)


class RegisteredBuffer(StorageBuffer):
    """A buffer whose memory comes from the pool, each time that it is acquired."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
        user_buffers: UserBuffers,
    ) -> None:
        self._user_buffers = user_buffers
        with user_buffers.runtime.allocating_from(user_buffers.pool, device):
            super().__init__(numel, dtype, device, lifetime)

    def acquire(self) -> None:
        if self.tensor.untyped_storage().nbytes() == 0:
            buffers = self._user_buffers
            with buffers.runtime.allocating_from(buffers.pool, buffers.device):
                super().acquire()
