"""What users do to modules that parameters of units cannot follow: ``.to(...)`` and its like, and
``load_state_dict(assign=True)``.

Knows modules and the faces of parameters; knows no buffers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UnsupportedError
from .parameter import owner_of
from .sharded_tensor import ShardedTensor


class Conversion:
    """Stands in for ``module._apply``, which `.to()`, `.half()`, `.cuda()`, `.to_empty()` call.

    Parameters of units stay as they are; everything else is converted. What would change their
    dtype or device is refused, before anything changed in the module and those below it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        """That of the copy of the module, which is made before its attributes are."""
        return Conversion(memo[id(self._module())])

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module = self._module()
        assert module is not None
        for child in module.modules() if recurse else (module,):
            for name, parameter in child._parameters.items():
                if parameter is not None and owner_of(parameter) is not None:
                    _refuse_change(name, parameter, fn)
        parameters = module._parameters
        managed = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter is not None and owner_of(parameter) is not None
        }
        # nn.LSTM and its like list their parameters beside, and list anew what is there now.
        listed = {key: value for key, value in vars(module).items() if _lists_parameters(value)}
        parameters.update(dict.fromkeys(managed))
        try:
            return type(module)._apply(module, fn, recurse)
        finally:
            parameters.update(managed)
            vars(module).update(listed)


def keep_parameters(owners: Iterable[nn.Module], undo: list[Callable[[], object]]) -> None:
    """Let conversions and loads of these modules leave the parameters of units where they are.

    Args:
        undo: takes what undoes each step, at once.
    """
    for owner in owners:
        owner.__dict__["_apply"] = Conversion(owner)
        undo.append(functools.partial(owner.__dict__.pop, "_apply"))
        undo.append(owner.register_load_state_dict_pre_hook(_refuse_assign).remove)


def _refuse_change(name: str, parameter: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> None:
    rows = parameter._local_tensor if isinstance(parameter, ShardedTensor) else parameter.detach()
    before = torch.empty_like(rows[:0] if rows.dim() else rows)
    after = fn(before)
    if after.dtype == before.dtype and after.device == before.device:
        return
    unit = owner_of(parameter)
    became = after.dtype if after.dtype != before.dtype else after.device
    raise UnsupportedError(
        f"parameter {name!r} of unit {unit.name!r} cannot become {became}: its memory is part of "
        "the unit's buffer. Convert the model before fully_shard; to compute in another dtype "
        "than the optimizer's, give fully_shard MixedPrecisionPolicy(compute_dtype=...)."
    )


def _lists_parameters(value: object) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, nn.Parameter) and owner_of(item) is not None for item in value
    )


def _refuse_assign(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers", False):
        raise UnsupportedError(
            f"load_state_dict(assign=True) of {type(module).__name__}: parameters of units are "
            "parts of a buffer, and others in their place would not be sharded. Leave assign out, "
            "which copies; load_full_state_dict(module, state_dict) takes a plain state dict."
        )
