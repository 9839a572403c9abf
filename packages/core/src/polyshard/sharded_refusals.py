"""Owns how an operation on a sharded tensor is refused: which, what, why, and what to do instead.

Knows no operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .autograd import current_graph_task
from .errors import UnsupportedError

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

Handler = Callable[[type["ShardedTensor"], tuple[Any, ...], dict[str, Any]], Any]
"""Runs one operation, given the class of sharded tensors, the arguments and the keywords."""

REMEDY = (
    "Run it inside `with unsharded(module):`, where weights are whole, or take a copy with "
    "full_tensor()."
)
PARAMETER_REMEDY = (
    "It is whole only inside its unit's forward, inside methods given to "
    "register_forward_method(module, name), and inside `with unsharded(module):`; full_tensor() "
    "takes a copy."
)
RECOMPUTED_REMEDY = (
    "This is in what a backward recomputes, as checkpoint does, and backward came there through no "
    "output of the unit: by something that another module kept. Return what was kept from the "
    "forward, or give the recomputed module to fully_shard as a unit of its own; where "
    "use_reentrant is True, use_reentrant=False may do."
)
INCOMPLETE = (
    "it is placed Partial: each rank holds its own contribution to a value that is only summed on "
    "the last microbatch"
)
AFTER_LAST_MICROBATCH = "Do this after the backward of the last microbatch."


def refuse(
    tensor: ShardedTensor | None, operation: object, reason: str, remedy: str = REMEDY
) -> NoReturn:
    """Raise UnsupportedError."""
    name = "a sharded tensor" if tensor is None else repr(tensor._name)
    unit = None if tensor is None else _unit_name(tensor)
    if unit is not None:
        name = f"{name} of unit {unit!r}"
        remedy = remedy.replace(REMEDY, PARAMETER_REMEDY)
    if current_graph_task() != -1 and torch.is_grad_enabled():
        remedy = remedy.replace(REMEDY, RECOMPUTED_REMEDY)
        remedy = remedy.replace(PARAMETER_REMEDY, RECOMPUTED_REMEDY)
    operation = getattr(operation, "__name__", operation)
    raise UnsupportedError(f"{name}: {operation} is refused: {reason}. {remedy}")


def _unit_name(tensor: ShardedTensor) -> str | None:
    """Of the unit whose parameter this is; None of any other tensor."""
    reference = getattr(tensor._hook_target, "_polyshard_owner", None)
    unit = None if reference is None else reference()
    return None if unit is None else unit.name


def refuse_plain(first: ShardedTensor | None, operation: object, plain: Tensor) -> NoReturn:
    """Refuse a plain tensor as the other operand of a sharded one."""
    refuse(
        first,
        operation,
        f"the other operand is a {type(plain).__name__} of shape {tuple(plain.shape)}, which may "
        "differ from rank to rank",
        "Use tensors split like this one, numbers, or tensors of one element; take in a whole "
        f"plain tensor with copy_. {REMEDY}",
    )


def refuse_unlike(first: ShardedTensor, operation: object, other: ShardedTensor) -> NoReturn:
    """Refuse two sharded tensors that lie differently."""
    if first._geometry.is_partial != other._geometry.is_partial and first.shape == other.shape:
        refuse(
            first,
            operation,
            "one operand is a gradient that waits for the last microbatch, a sum on this rank "
            "only, and the other is complete, such as the gradient of a penalty on sharded weights",
            "Add such a penalty to the loss of the first microbatch of a step, which has the same "
            "effect, or compute it from the weights inside the forward.",
        )
    refuse(
        first,
        operation,
        f"the other operand {other._name!r} lies differently (shape {tuple(other.shape)} "
        f"{other.placements}, against shape {tuple(first.shape)} {first.placements})",
        "Bring it to the same rows with redistribute(), or copy_ its full_tensor().",
    )


def refuse_mixed(first: ShardedTensor, operation: object, other: ShardedTensor) -> NoReturn:
    """Refuse to write to one precision from another: an optimizer step on unlike gradients."""
    refuse(
        first,
        operation,
        f"it writes to {first.dtype} from {other._name!r} in {other.dtype}, as an optimizer does "
        "whose main weights and gradients differ in precision",
        "Call fully_shard_optimizer(optimizer), or give fully_shard "
        f"MixedPrecisionPolicy(main_grads_dtype={first.dtype}), or cast with .to(...) first.",
    )


def first_sharded(cls: type[ShardedTensor], arguments: Any) -> ShardedTensor | None:
    """The first sharded tensor among (nested) arguments."""
    if isinstance(arguments, cls):
        return arguments
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if not isinstance(arguments, list | tuple):
        return None
    return next((t for a in arguments if (t := first_sharded(cls, a)) is not None), None)


def refused(operation: object, reason: str, remedy: str = REMEDY) -> Handler:
    """A handler that refuses the operation, whatever its arguments."""

    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NoReturn:
        refuse(first_sharded(cls, (args, kwargs)), operation, reason, remedy)

    return handler
