"""One managed parameter: its two faces and the places in modules where they show.

Knows no buffers and no collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .errors import UnsupportedError
from .sharded_tensor import ShardedTensor
from .submesh import distributed


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
        """Of the whole, other parallelism included."""
        return self.full.shape

    @property
    def local(self) -> Tensor:
        """What this rank holds of the full parameter: all of it, but for other parallelism."""
        full = self.full
        return full._local_tensor if isinstance(full, DTensor) else full.detach()

    @property
    def other_mesh(self) -> DeviceMesh | None:
        """The mesh of other parallelism, if the parameter has any."""
        return self.full.device_mesh if isinstance(self.full, DTensor) else None

    @property
    def other_placements(self) -> tuple[Placement, ...]:
        """How it lies on that mesh."""
        return tuple(self.full.placements) if isinstance(self.full, DTensor) else ()

    def view(self, local: Tensor) -> None:
        """Let the full parameter be a view of ``local``: the same object, except that a DTensor
        cannot change its dtype or device."""
        full = self.full
        if isinstance(full, DTensor):
            part = full._local_tensor
            if (part.dtype, part.device) == (local.dtype, local.device):
                full._local_tensor = local
            else:
                self.full = nn.Parameter(self._distributed(local), full.requires_grad)
        elif full.is_meta == local.is_meta:
            full.data = local
        else:
            # A tensor cannot change from meta to memory; an object can change its tensor. `.data`
            # has a version counter of its own, not that of the buffer.
            other = nn.Parameter(local.data, full.requires_grad)
            vars(other).update(vars(full))
            torch.utils.swap_tensors(full, other)

    def copy_attributes(self) -> None:
        """Give the sharded parameter what users have set on theirs."""
        for name, value in vars(self.full).items():
            if not name.startswith("_polyshard"):
                setattr(self.sharded, name, value)

    def twin(self) -> ManagedParameter:
        """Another parameter like this one, whose full face has no memory yet."""
        full = self.full
        part = full._local_tensor if isinstance(full, DTensor) else full
        empty = torch.empty(1, dtype=part.dtype, device=part.device).expand(part.shape)
        local = self._distributed(empty) if isinstance(full, DTensor) else empty
        parameter = nn.Parameter(local, self.sharded.requires_grad)
        return ManagedParameter(parameter, self.slots)

    def local_grad(self, grad: Tensor) -> Tensor:
        """A gradient of the full parameter as it lies; what is pending on other axes is summed."""
        if not isinstance(grad, DTensor):
            return grad
        if tuple(grad.placements) != self.other_placements:
            grad = grad.redistribute(placements=self.other_placements)
        return grad._local_tensor

    def whole(self, part: Tensor) -> Tensor:
        """The whole of which ``part`` is what the full parameter holds here; collective over the
        axes of other parallelism."""
        return self._distributed(part).full_tensor() if isinstance(self.full, DTensor) else part

    def _distributed(self, local: Tensor) -> DTensor:
        assert isinstance(self.full, DTensor)
        return distributed(local, self.full.device_mesh, self.full.placements, self.full.shape)

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

    @property
    def shows_full(self) -> bool:
        """The full parameter is what is registered."""
        return all(slot.holder.get(slot.name) is self.full for slot in self.slots)

    def show_sharded(self) -> None:
        """Register the sharded parameter."""
        for slot in self.slots:
            slot.holder[slot.name] = self.sharded


def owner_of(parameter: Tensor) -> Any:
    """The unit that looks after a parameter, whichever face this is; None if none does."""
    full = getattr(parameter, "_hook_target", None)
    reference = getattr(parameter if full is None else full, "_polyshard_owner", None)
    return None if reference is None else reference()


def part_in_words(parameters: Sequence[ManagedParameter], part: frozenset[int]) -> str:
    """Which of them are in ``part``, to go after a noun; empty if all are."""
    others = [index for index in range(len(parameters)) if index not in part]
    if not others:
        return ""
    word, listed = ("of", sorted(part)) if len(part) < len(others) else ("but of", others)
    return f" {word} {', '.join(repr(parameters[index].name) for index in listed) or 'none'}"


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
