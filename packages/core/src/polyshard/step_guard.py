"""Refuses optimizer steps whose gradients have another precision than their weights.

Without it such a step fails in the middle, with some weights already decayed, or silently rounds.
Knows sharded tensors and optimizers; nothing of units.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .errors import UnsupportedError
from .sharded_elementwise import mixed_precision_is_allowed
from .sharded_tensor import ShardedTensor

_installed = False


def guard_steps() -> None:
    """Check every optimizer step from now on. Called once there is a parameter that needs it."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_refuse_unlike_gradients)
        _installed = True


def _refuse_unlike_gradients(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if mixed_precision_is_allowed():
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if not isinstance(parameter, ShardedTensor) or grad is None:
                continue
            if grad.dtype != parameter.dtype:
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step(): the main weight of {parameter._name!r} is "
                    f"{parameter.dtype} and its gradient {grad.dtype}. Call "
                    "fully_shard_optimizer(optimizer), which casts gradients for the step, or give "
                    f"fully_shard MixedPrecisionPolicy(main_grads_dtype={parameter.dtype}), so "
                    "that they are kept in that precision."
                )
