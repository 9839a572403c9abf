"""Buffers: storage that a backend places. Knows no layout and starts no collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import BackendError

if TYPE_CHECKING:
    from .communicator import Communicator


class Role(Enum):
    """What a collective does with a buffer."""

    GATHER_INPUT = "gather input"
    GATHER_OUTPUT = "gather output"
    REDUCE_INPUT = "reduce input"
    REDUCE_OUTPUT = "reduce output"


class Lifetime(Enum):
    """How long a buffer's storage lives (clause 4)."""

    PERSISTENT = "persistent"
    TRANSIENT = "transient"


@dataclass(frozen=True)
class Use:
    """One communicator's use of a buffer; a buffer may serve several."""

    communicator: Communicator
    role: Role


class Buffer(ABC):
    """A flat run of storage.

    ``tensor`` is 1-D and contiguous, and its storage is the same object for life, because
    autograd saves views of it. ``lifetime`` is what it was allocated with.
    """

    tensor: Tensor
    lifetime: Lifetime

    @abstractmethod
    def acquire(self) -> None:
        """Give the buffer memory. Contents are undefined afterwards; local, never collective."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back, on the lane that acquired it. TRANSIENT only; idempotent."""


class StorageBuffer(Buffer):
    """A buffer in ordinary memory of any device: its storage is resized in place.

    A PERSISTENT one has its memory, filled with zeros, from the start; a TRANSIENT one has none
    until it is acquired.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, lifetime: Lifetime
    ) -> None:
        self.lifetime = lifetime
        # A buffer may first be needed inside inference mode and be trained on later.
        with torch.inference_mode(False), torch.no_grad():
            if lifetime is Lifetime.PERSISTENT:
                self.tensor = torch.zeros(numel, dtype=dtype, device=device)
            else:
                self.tensor = torch.empty(0, dtype=dtype, device=device)
                _reserve(self.tensor, numel)

    def acquire(self) -> None:
        storage = self.tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.tensor.numel() * self.tensor.element_size())

    def release(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT:
            raise BackendError("a persistent buffer cannot be released; it lives until close.")
        self.tensor.untyped_storage().resize_(0)


def _reserve(tensor: Tensor, numel: int) -> None:
    """Give an empty tensor its length and no memory."""
    # torch has no way to set a length alone: the memory comes, untouched, and goes at once.
    tensor.resize_(numel)
    tensor.untyped_storage().resize_(0)
