"""Owns the random operations on sharded tensors: initialisation, and noise of a tensor's own shape.

Every rank draws the numbers of the whole tensor, which its generator would give one process, and
keeps its rows. So ranks whose generators stand alike get what one process gets, and go on alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .sharded_collectives import take_first_members
from .sharded_refusals import AFTER_LAST_MICROBATCH, INCOMPLETE, Handler, first_sharded, refuse

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

IN_PLACE = frozenset(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()
)
LIKE = frozenset("rand_like randint_like randn_like".split())
#: Those whose numbers belong to more than one tensor.
REFUSED = frozenset("bernoulli native_dropout normal rrelu_with_noise".split())


def random_handler(func: Callable[..., Any], name: str) -> Handler | None:
    """The handler of a random operation, by its name without overload; None of any other."""
    if name in REFUSED:
        return _refused(func)
    if name not in IN_PLACE and name not in LIKE:
        return None

    def handler(
        cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ShardedTensor:
        tensor, *rest = args
        if not isinstance(tensor, cls) or any(isinstance(value, Tensor) for value in rest):
            return _refused(func)(cls, args, kwargs)
        if tensor._geometry.is_partial:
            refuse(tensor, func, INCOMPLETE, AFTER_LAST_MICROBATCH)
        local, geometry = tensor._local_tensor, tensor._geometry
        whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        whole = func(whole, *rest, **kwargs)
        rows = geometry.local_of(whole)
        # Where several ranks hold the same rows, they hold the same numbers.
        rows = take_first_members(rows.contiguous(), geometry)
        if name in LIKE:
            return cls._assemble(rows.clone(), geometry, tensor._name)
        try:
            local.copy_(rows)
        finally:
            tensor.writes.count += 1
        return tensor

    return handler


def _refused(func: Callable[..., Any]) -> Handler:
    def handler(cls: type[ShardedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse(
            first_sharded(cls, (args, kwargs)),
            func,
            "every rank would draw numbers for its own rows, not those that one process draws",
            "Run it inside `with unsharded(module):`, with the same seed on all ranks.",
        )

    return handler
