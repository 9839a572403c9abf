"""Copies units: ``copy.deepcopy`` of a sharded model, as for an average of its weights.

Knows how a unit is made of groups and shown in modules; knows no schedule.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .context import register_unit, unit_of
from .errors import UnsupportedError
from .hooks import take_gradients
from .parameter import Slot
from .structure import Structure, own_modules
from .unit import Unit

Copy = Callable[[dict[int, Any]], nn.Module]


def copy_unit(module: nn.Module, memo: dict[int, Any], copy_module: Copy) -> nn.Module:
    """An independent module with a unit of its own, on the same mesh and with equal weights.

    The main weights are copied, each rank its rows; nothing is gathered. As of plain parameters,
    gradients and tensor hooks are not copied. Where the backend allocates buffers with its peers,
    every rank copies.

    Args:
        module: a unit that is at rest; units below it copy themselves.
        memo: of ``copy.deepcopy``.
        copy_module: copies the module as its class would, all of it but its unit.

    Raises:
        UnsupportedError: the unit is in a forward, or inside ``unsharded``.
    """
    unit = unit_of(module)
    assert unit is not None
    if unit.depth or unit.held:
        where = "its forward" if unit.depth else "`with unsharded(...)`"
        raise UnsupportedError(
            f"copy.deepcopy of unit {unit.name!r} inside {where}: whole weights belong to the "
            "original. Copy the model outside."
        )
    twin = Unit(
        module,
        [group.twin() for group in unit.groups],
        transport=unit.transport,
        precision=unit.precision,
        schedule=unit.schedule,
        reshard_after_forward=unit.reshard_after_forward,
        structure=Structure(()),
    )
    twin.name, twin.forward_methods = unit.name, set(unit.forward_methods)
    # Hooks and modules that hold the unit, its groups or its parameters will hold the twin's.
    memo[id(unit)] = twin
    for group, other_group in zip(unit.groups, twin.groups, strict=True):
        memo[id(group)] = other_group
        other_group.install()
    for parameter, other in zip(unit.parameters, twin.parameters, strict=True):
        other.full._polyshard_owner = weakref.ref(twin)  # type: ignore[attr-defined]
        memo[id(parameter.full)], memo[id(parameter.sharded)] = other.full, other.sharded
        for face, shown in ((parameter.full, other.full), (parameter.sharded, other.sharded)):
            for name, value in vars(face).items():
                if not name.startswith("_polyshard"):
                    setattr(shown, name, copy.deepcopy(value, memo))
    copied = copy_module(memo)
    twin.module = weakref.ref(copied)
    for other in twin.parameters:
        other.slots = tuple(
            Slot(memo[id(slot.holder)], slot.name, slot.path)
            for slot in other.slots
            if id(slot.holder) in memo  # else its module was taken out of the model
        )
    take_gradients(twin)
    register_unit(copied, twin)
    twin.show_sharded()
    twin.take_structure(own_modules(copied))
    return copied
