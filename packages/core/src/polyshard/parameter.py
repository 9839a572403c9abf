"""One managed parameter: its two faces and the places in modules where they show.

Knows no buffers and no collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .errors import UnsupportedError
from .sharded_tensor import ShardedTensor


@dataclass(frozen=True)
class Slot:
    """One name under which a module holds a parameter.

    ``holder`` is the module's own dict of parameters: holding it does not keep the module alive.
    """

    holder: dict[str, Any]
    name: str
    path: str


class ManagedParameter:
    """A parameter that polyshard looks after.

    Args:
        full: the user's own Parameter object, which the module sees in forward and backward.
        slots: where it is registered, every tied name included.
    """

    def __init__(self, full: nn.Parameter, slots: Sequence[Slot]) -> None:
        self.full = full
        self.slots = tuple(slots)
        self.name = self.slots[0].path
        #: The face at rest: an nn.Parameter over a ShardedTensor. Set when the group installs it.
        self.sharded: ShardedTensor

    @property
    def shape(self) -> torch.Size:
        return self.full.shape

    def show_full(self, unit: str) -> None:
        """Register the full parameter; refuses if someone put another one in its place."""
        for slot in self.slots:
            shown = slot.holder.get(slot.name)
            if shown is not self.sharded and shown is not self.full:
                raise UnsupportedError(
                    f"parameter {slot.path!r} of unit {unit!r} was replaced or removed after "
                    "fully_shard; copy values into it instead, inside `with unsharded(module):`."
                )
        for slot in self.slots:
            slot.holder[slot.name] = self.full

    def show_sharded(self) -> None:
        """Register the sharded parameter."""
        for slot in self.slots:
            slot.holder[slot.name] = self.sharded


def find_parameters(
    named_modules: Sequence[tuple[str, nn.Module]], ignored: frozenset[int]
) -> list[tuple[nn.Parameter, list[Slot]]]:
    """Every distinct parameter held by these modules, with all its slots, in registration order.

    Args:
        named_modules: (path inside the unit, module).
        ignored: ids of parameters to leave alone.
    """
    found: dict[int, tuple[nn.Parameter, list[Slot]]] = {}
    for path, module in named_modules:
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored:
                continue
            slot = Slot(module._parameters, name, f"{path}.{name}" if path else name)
            found.setdefault(id(parameter), (parameter, []))[1].append(slot)
    return list(found.values())
