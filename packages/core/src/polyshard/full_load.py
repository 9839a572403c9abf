"""Loads a plain state dict of whole tensors into a sharded module: ``load_full_state_dict``.

Knows modules, their units' meshes and the faces of parameters; knows no flat buffers: each rank
copies its rows through the sharded tensor, which counts the write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from .context import unit_of
from .preflight import agree
from .row_split import Geometry
from .sharded_tensor import ShardedTensor
from .transport import Transport

EXTRA_STATE = "_extra_state"


class IncompatibleKeys(NamedTuple):
    """Names that do not correspond, as ``nn.Module.load_state_dict`` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full_state_dict(
    module: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    rank0_only: bool = False,
) -> IncompatibleKeys:
    """Copy whole tensors into ``module``: main weights, buffers, plain parameters, extra state.

    The mirror of :func:`full_state_dict`: it takes the names and shapes that one returns, each
    rank keeps its own rows, and values are cast to what they are copied into. The next forward
    uses them. Names are those the module saves under; hooks that rewrite a dict before loading
    (``register_load_state_dict_pre_hook``) are not run.

    Args:
        module: any module; collective over the meshes of its units.
        state_dict: plain tensors on any device, the same on every rank; with ``rank0_only`` that
            of global rank 0, the others' is not looked at.
        strict: names that are missing or unexpected are an error.
        rank0_only: broadcast the values from global rank 0, one tensor at a time; collective over
            all ranks of the job, each of which holds the module.

    Returns:
        ``(missing_keys, unexpected_keys)``, empty unless ``strict`` is False.

    Raises:
        RuntimeError: names or shapes that do not fit, in PyTorch's terms.
        ValueError: what is neither a mapping nor None where it counts; a value that is no whole
            tensor.
        PlacementError, BackendError: ranks differ in what they pass, or another rank refused.
            Whatever is raised of these, nothing was changed.
    """
    transports = _transports(module)
    reads = not rank0_only or dist.get_rank() == 0
    entries: dict[str, _Entry] | None = None
    targets: dict[str, Any] = {}
    result = IncompatibleKeys([], [])
    failure: Exception | None = None
    try:
        targets = _targets(module)
        entries = _describe(state_dict) if reads else None
    except Exception as error:  # whatever it is: the other ranks wait to hear of it
        failure = error
    if rank0_only:
        box = [entries]
        dist.broadcast_object_list(box, src=0)
        entries = box[0]
    if failure is None and entries is not None:
        try:
            result = _compare(type(module).__name__, targets, entries, strict)
        except Exception as error:
            failure = error
    entries = entries or {}
    description = sorted(f"{name!r} {entry.label}" for name, entry in entries.items())
    groups = _groups(transports, rank0_only)
    if groups:
        agree("load_full_state_dict", description, failure, groups)
    elif failure is not None:
        raise failure

    for name, target in targets.items():
        if name not in entries:
            continue
        value = state_dict[name] if reads and state_dict is not None else None
        if rank0_only:
            value = _from_first_rank(value, entries[name], _travel_device(transports, target))
        _copy(target, value)
    return result


@dataclass(frozen=True)
class _Entry:
    """What is known of a value before it comes; ``shape`` and ``dtype`` of tensors only."""

    shape: torch.Size | None
    dtype: torch.dtype | None

    @property
    def label(self) -> str:
        return "no tensor" if self.shape is None else f"of shape {tuple(self.shape)}"


def _describe(state_dict: object) -> dict[str, _Entry]:
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"load_full_state_dict takes a state dict, got a {type(state_dict).__name__}; with "
            "rank0_only=True all ranks but the first may pass None."
        )
    entries = {}
    for name, value in state_dict.items():
        if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.is_meta):
            what = "has no values (meta)" if value.is_meta else f"is a {type(value).__name__}"
            raise ValueError(
                f"{name!r} {what}; load_full_state_dict takes whole plain tensors, as "
                "full_state_dict returns them."
            )
        tensor = isinstance(value, Tensor)
        entries[name] = _Entry(value.shape, value.dtype) if tensor else _Entry(None, None)
    return entries


def _targets(module: nn.Module) -> dict[str, Any]:
    """By saved name what is to be written: a tensor of the module, or the owner of extra state."""
    owners = {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: child
        for path, child in module.named_modules(remove_duplicate=False)
    }
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    targets: dict[str, Any] = {}
    # keep_vars: the entries are then the registered objects themselves.
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) in registered:
            targets[name] = value
        elif name in owners:
            targets[name] = owners[name]
        else:
            raise RuntimeError(
                f"the state_dict of {type(module).__name__} holds {name!r}, which is neither a "
                "parameter, a buffer nor extra state, so there is nowhere to load it to."
            )
    return targets


def _compare(
    module: str, targets: Mapping[str, Any], entries: Mapping[str, _Entry], strict: bool
) -> IncompatibleKeys:
    missing = [name for name in targets if name not in entries]
    unexpected = [name for name in entries if name not in targets]
    problems = []
    if strict:
        for title, names in (("Unexpected", unexpected), ("Missing", missing)):
            if names:
                listed = ", ".join(f'"{name}"' for name in names)
                problems.append(f"{title} key(s) in state_dict: {listed}.")
    for name, target in targets.items():
        entry = entries.get(name)
        if entry is None or not isinstance(target, Tensor):
            continue
        if entry.shape is None:
            problems.append(f"no tensor for {name}, which is one in the model.")
        elif target.is_meta:
            problems.append(f"{name} is on meta in the model; call module.to_empty(device=...).")
        elif entry.shape != target.shape and not (entry.shape == (1,) and target.dim() == 0):
            problems.append(
                f"size mismatch for {name}: {tuple(entry.shape)} given, "
                f"{tuple(target.shape)} in the model."
            )
    if problems:
        lines = "".join(f"\n\t{problem}" for problem in problems)
        raise RuntimeError(f"Error(s) in loading state_dict for {module}:{lines}")
    return IncompatibleKeys(missing, unexpected)


def _transports(module: nn.Module) -> list[Transport]:
    units = (unit_of(child) for child in module.modules())
    found = {id(unit.transport): unit.transport for unit in units if unit is not None}
    return list(found.values())


def _groups(transports: Sequence[Transport], whole_job: bool) -> list[ProcessGroup]:
    """What to agree over: all ranks, or those of every mesh, one axis after the other."""
    if whole_job:
        everyone = dist.group.WORLD
        assert everyone is not None
        return [everyone]
    return [group for transport in transports for group in transport.dp_mesh.get_all_groups()]


def _travel_device(transports: Sequence[Transport], target: Any) -> torch.device:
    if transports:
        return transports[0].device
    return target.device if isinstance(target, Tensor) else torch.device("cpu")


def _from_first_rank(value: Any, entry: _Entry, device: torch.device) -> Any:
    if entry.shape is None:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    if value is None:
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    else:
        whole = value.detach().to(device).resolve_conj().resolve_neg().contiguous()
    if whole.numel():
        # As bytes, so that every dtype travels.
        dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)
    return whole


@torch.no_grad()
def _copy(target: Any, value: Any) -> None:
    if not isinstance(target, Tensor):
        target.set_extra_state(value)
        return
    whole = value.reshape(target.shape)
    if isinstance(target, DTensor) and not isinstance(target, ShardedTensor):
        # Other parallelism's: it takes no plain tensor.
        geometry = Geometry.of(target.shape, target.device_mesh, target.placements)
        target.to_local().copy_(geometry.local_of(whole))
    else:
        target.copy_(whole)
