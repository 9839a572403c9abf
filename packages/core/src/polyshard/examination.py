"""What ``fully_shard`` refuses about modules and parameters on sight, before other ranks are asked.

Changes nothing. Knows no arguments but the mesh, no buffers and no collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import is_lazy

from .errors import PlacementError, UnsupportedError
from .module import FsdpModule
from .parameter import Slot, owner_of
from .submesh import shared_ranks, submesh
from .unit import Unit


def examine_module(module: object) -> None:
    """Raise UnsupportedError unless it is a module that can become a unit."""
    if not isinstance(module, nn.Module):
        raise UnsupportedError(f"fully_shard takes a module, got {type(module).__name__}.")
    if isinstance(module, FsdpModule):
        raise UnsupportedError(
            f"this {type(module).__name__} was already given to fully_shard; call it once per "
            "module."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError("a ScriptModule cannot be sharded; shard the Python module.")
    if type(module).forward is nn.Module.forward:
        raise UnsupportedError(
            f"{type(module).__name__} has no forward, so nothing would gather its parameters; "
            "give fully_shard its children, or the module that calls them."
        )


def examine_submodules(
    named_modules: Sequence[tuple[str, nn.Module]], module: str, ignored: Collection[int]
) -> None:
    """Raise UnsupportedError if one of them writes to its parameter in forward."""
    for path, child in named_modules:
        if not isinstance(child, nn.Embedding | nn.EmbeddingBag) or child.max_norm is None:
            continue
        weight = child._parameters.get("weight")  # one that is computed is nobody's to keep
        if weight is not None and id(weight) not in ignored:
            raise UnsupportedError(
                f"parameter {f'{path}.weight'.lstrip('.')!r} of {module} belongs to an "
                f"{type(child).__name__} with max_norm={child.max_norm}, which rewrites the rows "
                "it looks up, on every rank others. Set max_norm to None and renormalise between "
                "steps, inside `with unsharded(module):`, or list the parameter in ignored_params."
            )


def examine_parameter(
    parameter: nn.Parameter, slots: Sequence[Slot], module: str, device: torch.device
) -> None:
    """Raise if it cannot lie in a flat buffer on ``device``, or lies in one already."""
    _refuse_owned(parameter, slots, module)
    name = f"parameter {slots[0].path!r} of {module}"
    if is_lazy(parameter):
        raise UnsupportedError(f"{name} is not initialised; run the lazy module once first.")
    kind = _unfit_kind(parameter)
    if kind is not None:
        raise UnsupportedError(
            f"{name} {kind}; only dense (strided) plain tensors, and DTensors, are sharded. Make "
            "it one, or list it in ignored_params."
        )
    if parameter.device != device and not parameter.is_meta:
        raise PlacementError(
            f"{name} is on {parameter.device}, the mesh on {device}; move the module there first, "
            f"e.g. module.to({str(device)!r})."
        )


def _unfit_kind(parameter: Tensor) -> str | None:
    if parameter.is_nested:
        return "is a nested tensor"
    if parameter.layout is not torch.strided:
        return f"has layout {parameter.layout}"
    if parameter.is_quantized:
        return f"is quantized ({parameter.dtype})"
    # A class that computes by its own rules keeps its values by its own rules, too.
    computes = getattr(type(parameter), "__torch_dispatch__", None)
    if computes is not Tensor.__torch_dispatch__ and not isinstance(parameter, DTensor):
        return f"is a {type(parameter).__name__}, a class of tensors that holds values its own way"
    return None


def _refuse_owned(parameter: nn.Parameter, slots: Sequence[Slot], module: str) -> None:
    """Raise if another unit looks after the parameter."""
    unit: Unit | None = owner_of(parameter)
    if unit is None:
        return
    known = next(m for m in unit.parameters if m.full is parameter or m.sharded is parameter)
    places = [(id(slot.holder), slot.name) for slot in known.slots]
    remedy = "tied parameters must belong to one unit: leave both users to a common ancestor"
    if any((id(slot.holder), slot.name) in places for slot in slots):
        remedy = "call fully_shard bottom-up, and leave what two units share to a common ancestor"
    raise UnsupportedError(
        f"parameter {slots[0].path!r} of {module} is {known.name!r} of unit {unit.name!r} already; "
        f"{remedy}."
    )


def examine_distributed(
    parameter: DTensor, path: str, module: str, mesh: DeviceMesh, axes: Sequence[int]
) -> None:
    """Raise if other parallelism distributes the parameter as polyshard cannot go on from."""
    shared = shared_ranks(submesh(mesh, axes), parameter.device_mesh)
    if shared:
        raise PlacementError(
            f"parameter {path!r} of {module} is already distributed over {parameter.device_mesh}, "
            f"which shares ranks {shared} with the axes to shard over; name other axes in dp_axes."
        )
    for placement in parameter.placements:
        if not (type(placement) is Shard or placement.is_replicate()):
            raise UnsupportedError(
                f"parameter {path!r} of {module} is placed {placement} on {parameter.device_mesh}; "
                "together with polyshard a parameter may be Shard or Replicate there."
            )
