"""Looking at whole weights from outside a forward: ``unsharded`` and ``full_state_dict``.

Knows units and their groups; every call is collective over the units' meshes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import agree_on_written
from .context import unit_of
from .unit import Unit


@contextmanager
def unsharded(module: nn.Module, *, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """Inside, parameters are the full plain tensors, on every rank; on axes of other parallelism
    they stay distributed. Collective: every rank of the units' meshes enters and leaves.

    Args:
        module: its units, or with ``recurse=False`` only the unit that it is itself.
        recurse: include the units below it.
        writeback: at the end copy changes into the main weights, each rank its own rows; make the
            same changes on every rank. After an exception nothing is copied. Freezing and
            unfreezing is taken over, gradients and optimizers are not looked at.

    Raises:
        UnsupportedError: a parameter was replaced or removed after ``fully_shard``.
        BackendError: communication failed.
    """
    units = [
        unit
        for child in (module.modules() if recurse else (module,))
        if (unit := unit_of(child)) is not None
    ]
    entered: list[Unit] = []
    try:
        with torch.no_grad():
            for unit in units:
                unit.submit_gather(forward=True)
            for unit in units:
                unit.await_gather()
                unit.held += 1
                entered.append(unit)
                unit.show_full()
            # Peers may still gather from what is written from here on.
            for transport in dict.fromkeys(unit.transport for unit in units):
                transport.settle()
                transport.join()
        parameters = [parameter for unit in units for parameter in unit.parameters]
        trained = [parameter.full.requires_grad for parameter in parameters]
        yield
        for unit in units:
            unit.refuse_other_faces()
        for parameter, before in zip(parameters, trained, strict=True):
            if parameter.full.requires_grad != before:
                parameter.sharded.requires_grad_(not before)
        if writeback:
            with torch.no_grad():
                for unit in units:
                    if unit.groups:
                        unit.write_back(agree_on_written(unit))
    finally:
        for unit in units:
            if unit in entered:
                unit.held -= 1
            if not unit.depth:
                unit.show_sharded()
                unit.release(copies=not unit.entered_forward)


def full_state_dict(
    module: nn.Module, *, cpu_offload: bool = True, rank0_only: bool = False
) -> dict[str, Tensor]:
    """The state dict a single process would have: whole main weights, buffers, every tied name.

    Collective: every rank of the units' meshes calls it. Gathers one unit at a time.

    Args:
        module: any module; its units need not be all of it.
        cpu_offload: return the weights on the CPU.
        rank0_only: return an empty dict on all ranks but global rank 0; all must call.

    Returns:
        Tensors in main precision that share nothing with the model.

    Raises:
        BackendError: communication failed.
    """
    keep = not rank0_only or dist.get_rank() == 0
    full: dict[int, Tensor] = {}
    for child in module.modules():
        unit = unit_of(child)
        for group in unit.groups if unit is not None else ():
            with group.whole_main() as whole:
                for index, parameter in enumerate(group.parameters):
                    value = parameter.whole(whole.view(index))
                    if keep:
                        full[id(parameter.sharded)] = _apart(value, cpu_offload)
    if not keep:
        return {}
    result: dict[str, Tensor] = {}
    # keep_vars: the entries are then the registered objects themselves.
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in full:
            result[name] = full[id(value)]
        elif isinstance(value, Tensor):
            result[name] = _apart(value.detach(), cpu_offload)
        else:
            result[name] = value
    return result


def _apart(value: Tensor, cpu_offload: bool) -> Tensor:
    return value.to("cpu", copy=True) if cpu_offload else value.clone()
