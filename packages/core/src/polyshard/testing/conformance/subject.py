"""What is held to the contract: a backend, the devices it is tried on, and how.

Owns the way from a name or a class to the process's one backend. Knows no tests.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...backends import choose_backend
from ...errors import BackendError
from ...spi import CollectiveBackend

_made: dict[str, CollectiveBackend] = {}


@dataclass(frozen=True)
class Subject:
    """A backend under test; travels to the ranks, which make the backend.

    Args:
        backend: a registered name, or ``module:Class``.
        device_type: the ``type`` of a ``torch.device``; of several devices, rank r uses index r.
        world_size: ranks, one process each.
        largest_numel: elements that are more than any piece the backend moves at a time.
        timeout: seconds in which any test must end; what has not ended then has hung.
        options: of every communicator.
    """

    backend: str
    device_type: str = "cpu"
    world_size: int = 2
    largest_numel: int = 2_500_003
    timeout: float = 120.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"backend {self.backend!r} on {self.device_type}, {ranks}"

    def device(self, rank: int) -> torch.device:
        """The device that ``rank`` computes on."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, rank)

    def make_backend(self) -> CollectiveBackend:
        """The process's one instance.

        Raises:
            BackendError: it cannot be made, or does not fit; with the reason.
        """
        module, _, name = self.backend.partition(":")
        if not name:
            return choose_backend(self.backend, device_type=self.device_type)
        if self.backend not in _made:
            made: Any = importlib.import_module(module)
            for part in name.split("."):
                made = getattr(made, part)
            _made[self.backend] = made()
        return choose_backend(_made[self.backend], device_type=self.device_type)


def backend_reference(backend: object) -> str:
    """How ranks are told of a backend: a registered name as it is, a class by where it lives.

    Raises:
        BackendError: other processes could not find the class.
        TypeError: it is neither.
    """
    if isinstance(backend, str) and backend:
        return backend
    if not (isinstance(backend, type) and issubclass(backend, CollectiveBackend)):
        raise TypeError(
            f"backend must be a registered name or a subclass of CollectiveBackend, got {backend!r}"
        )
    if backend.__module__ == "__main__" or "<locals>" in backend.__qualname__:
        raise BackendError(
            f"{backend.__qualname__} is defined in {backend.__module__!r} where other processes "
            "cannot import it; move it to the top level of a module of its own."
        )
    return f"{backend.__module__}:{backend.__qualname__}"
