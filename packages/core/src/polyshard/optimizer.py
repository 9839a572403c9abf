"""Prepares an optimizer for main weights and gradients of different precision.

Knows optimizers and the dtypes of tensors; knows no units and no ranks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import UnsupportedError
from .sharded_elementwise import mixed_precision_allowed

_prepared: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()


def fully_shard_optimizer(
    optimizer: Optimizer, *, precision_aware: bool = False, flat: bool | None = None
) -> None:
    """Let ``optimizer`` step weights whose gradients have another dtype, in place.

    From now on, for as long as ``optimizer.step`` runs, ``.grad`` of such weights is a copy in the
    weight's dtype; then the original is back, also after an exception, and the copy is freed. All
    copies are held at once. Step hooks see them; what is written to them is for this step only.
    A closure sees the originals, and the copies are made after each evaluation of it.

    Nothing else needs this: weights are always fresh, and equal dtypes cost one look at each
    parameter. Before or after learning-rate schedulers; copies and pickles of the optimizer are
    as it was before and need a call of their own. Calling twice with the same choice is fine.

    Args:
        precision_aware: the optimizer takes such gradients as they are: do not cast them, and let
            its step combine the precisions.
        flat: stepping one flat tensor in place of many is not built; leave it None or False.

    Raises:
        ValueError: not a ``torch.optim.Optimizer``, or one prepared with the other choice.
        UnsupportedError: ``flat=True``.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"fully_shard_optimizer takes a torch.optim.Optimizer, got a "
            f"{type(optimizer).__name__}; of a wrapper, give the optimizer inside."
        )
    if flat:
        raise UnsupportedError(
            "flat=True is not built: optimizers step every parameter on its own, which keeps "
            "their parameter groups and state_dict as they are. Use the fused=True or foreach=True "
            "of torch.optim to launch fewer kernels."
        )
    if optimizer in _prepared:
        if _prepared[optimizer] != bool(precision_aware):
            raise ValueError(
                f"this {type(optimizer).__name__} was prepared with "
                f"precision_aware={_prepared[optimizer]}; build a new one to choose otherwise."
            )
        return
    _wrap_step(optimizer, _step_as_it_is if precision_aware else _step_with_casts)
    _prepared[optimizer] = bool(precision_aware)


Step = Callable[..., Any]


def _wrap_step(optimizer: Optimizer, around: Callable[..., Any]) -> None:
    # A learning-rate scheduler, made before, leaves a step of its own on the object.
    patched: Step | None = vars(optimizer).get("step")

    @functools.wraps(type(optimizer).step if patched is None else patched)
    def method(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(type(self).step, self) if patched is None else patched
        return around(self, original, args, kwargs)

    # Weakly: a bound method kept on its own object would keep weights and state past their end.
    reference = weakref.ref(optimizer)

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = reference()
        assert alive is not None
        return method(alive, *args, **kwargs)

    # Where schedulers, made later, look for the function behind the method.
    step.__func__ = method  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


def _step_as_it_is(
    optimizer: Optimizer, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with mixed_precision_allowed():
        return step(*args, **kwargs)


def _step_with_casts(
    optimizer: Optimizer, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    casts = _Casts(optimizer)
    if args and callable(args[0]):
        args = (casts.between(args[0]), *args[1:])
    elif callable(kwargs.get("closure")):
        kwargs = {**kwargs, "closure": casts.between(kwargs["closure"])}
    with casts.in_place():
        return step(*args, **kwargs)


class _Casts:
    """Gradients of the weight's dtype in place of those that have another."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._replaced: list[tuple[Tensor, Tensor, torch.dtype | None]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Gradients have the weight's dtype until the scope ends, however it does."""
        try:
            self._replace()
            yield
        finally:
            self._restore()

    def between(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """``closure`` evaluated on the original gradients, whose casts are then made anew."""

        @functools.wraps(closure)
        def evaluate() -> Any:
            self._restore()
            result = closure()
            self._replace()
            return result

        return evaluate

    @torch.no_grad()
    def _replace(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or grad.dtype == parameter.dtype:
                    continue
                cast = grad.to(parameter.dtype)
                self._replaced.append((parameter, grad, parameter.grad_dtype))
                _assign(parameter, cast, parameter.dtype)

    def _restore(self) -> None:
        replaced, self._replaced = self._replaced, []
        for parameter, grad, dtype in replaced:
            # Cleared during the step stays cleared; anything else was for the step only.
            _assign(parameter, None if parameter.grad is None else grad, dtype)


def _assign(parameter: Tensor, grad: Tensor | None, dtype: torch.dtype | None) -> None:
    parameter.grad = None  # the dtype changes only where there is no gradient
    parameter.grad_dtype = dtype
    parameter.grad = grad
