"""Refuses optimizer steps that would go wrong.

Steps on weights that are not the ones at rest would change nothing. Steps whose gradients have
another precision than their weights would fail in the middle, with some weights already decayed, or
silently round.

Knows sharded tensors and optimizers; nothing of units but their names.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .errors import UnsupportedError
from .parameter import owner_of
from .sharded_elementwise import mixed_precision_is_allowed
from .sharded_tensor import ShardedTensor

_installed = False


def guard_steps() -> None:
    """Check every optimizer step from now on. Called once there is a unit."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_examine)
        _installed = True


def _examine(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mixed = mixed_precision_is_allowed()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not isinstance(parameter, ShardedTensor):
                if owner_of(parameter) is not None:
                    _refuse_whole(optimizer, parameter)
                continue
            grad = parameter.grad
            if isinstance(grad, ShardedTensor) and grad._geometry.is_partial:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step(): the gradient of {parameter._name!r} waits "
                    "for the last microbatch: it is a sum on this rank only. Step after the "
                    "backward of a forward inside `with microbatch(module, is_last=True):`."
                )
            if grad is not None and grad.dtype != parameter.dtype and not mixed:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step(): the main weight of {parameter._name!r} is "
                    f"{parameter.dtype} and its gradient {grad.dtype}. Call "
                    "fully_shard_optimizer(optimizer), which casts gradients for the step, or give "
                    f"fully_shard MixedPrecisionPolicy(main_grads_dtype={parameter.dtype}), so "
                    "that they are kept in that precision."
                )


def _refuse_whole(optimizer: Optimizer, parameter: Tensor) -> NoReturn:
    unit = owner_of(parameter)
    managed = next(managed for managed in unit.parameters if managed.full is parameter)
    raise UnsupportedError(
        f"{type(optimizer).__name__}.step(): it holds {managed.name!r} of unit {unit.name!r} as it "
        "was before fully_shard, or as it is inside a forward, so the step would change nothing. "
        "Build the optimizer after fully_shard, from model.parameters()."
    )
