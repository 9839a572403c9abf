"""Asking ``fully_shard`` for what it refuses, and seeing that nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training import make_mesh

from polyshard import Placements, fully_shard

ZERO3 = Placements.zero3("dp")


@dataclass
class Request:
    """What a rank asks ``fully_shard`` for."""

    module: Any
    options: dict[str, Any]
    mesh: DeviceMesh
    placements: Any = ZERO3


@dataclass(frozen=True)
class Refusal:
    """What a rank was told."""

    kind: str
    message: str


def hooked_linear(*sizes: int, bias: bool = True) -> nn.Linear:
    """A module with all that must stay: hooks, an attribute, a gradient, a buffer."""
    module = nn.Linear(*(sizes or (3, 2)), bias=bias)
    module.register_buffer("steps", torch.tensor(3))
    module.register_forward_hook(_no_change)
    module.weight.register_hook(_no_change)
    module.weight.tag = "mine"  # type: ignore[attr-defined]
    module.weight.grad = torch.ones_like(module.weight)
    return module


def _no_change(*_: object) -> None:
    return None


# -- nothing changed ----------------------------------------------------------------------------


def state_of(root: Any) -> list[Any]:
    """Everything that ``fully_shard`` changes in a module, in comparable form."""
    if not isinstance(root, nn.Module):
        return [id(root), repr(root)]
    state: list[Any] = []
    for path, module in root.named_modules():
        held = {name: value for name, value in vars(module).items() if not isinstance(value, dict)}
        state.append((path, type(module), id(module), sorted(held)))
        for name, value in vars(module).items():
            if isinstance(value, dict):  # parameters, buffers, children, and every kind of hook
                state.append((name, [(key, id(entry)) for key, entry in value.items()]))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                state.append((path, name, *_tensor_state(tensor)))
    if not isinstance(root, torch.jit.ScriptModule):
        state.append(list(root.state_dict(keep_vars=True)))
    return state


def _tensor_state(tensor: Tensor) -> list[Any]:
    hooks = [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]  # type: ignore[attr-defined]
    known: list[Any] = [id(tensor), type(tensor), tensor.requires_grad, id(tensor.grad)]
    known += [None if hook is None else list(hook) for hook in hooks]
    known += [(name, id(value)) for name, value in vars(tensor).items()]
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's rows
    if not (nn.parameter.is_lazy(tensor) or tensor.is_meta):
        known += [local.data_ptr(), local._version]
        # A parameter that another unit looks after has no memory between passes.
        known.append(local.untyped_storage().nbytes() and local.tolist())
    return known


def refuse(rank: int, make: Callable[[int], Request]) -> Refusal:
    """Make the request; it is refused, and the module is as before, and works."""
    request = make(rank)
    before = state_of(request.module)
    try:
        fully_shard(request.module, request.mesh, request.placements, **request.options)
    except (RuntimeError, ValueError) as error:
        refusal = Refusal(type(error).__name__, str(error))
    else:
        raise AssertionError("it was not refused")
    assert state_of(request.module) == before
    return refusal


def on(module: Any, *, placements: Any = ZERO3, **options: Any) -> Request:
    return Request(module, options, make_mesh(), placements)
