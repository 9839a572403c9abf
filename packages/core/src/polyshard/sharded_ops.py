"""Owns which operations run on sharded tensors: those named in the tables of the files below it.

Everything else is refused, with the parameter's name and what to do instead. A handler is chosen
once per operation and kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload

from .sharded_elementwise import (
    ELEMENTWISE,
    ELEMENTWISE_OVERLOADS,
    FOREACH,
    FUSED,
    elementwise,
    on_lists,
    written_arguments,
)
from .sharded_memory_ops import MEMORY_OPERATIONS
from .sharded_random import random_handler
from .sharded_reductions import reduction_handler
from .sharded_refusals import Handler, refused

if TYPE_CHECKING:
    from .sharded_tensor import ShardedTensor

_handlers: dict[OpOverload, Handler] = {}


def dispatch(
    cls: type[ShardedTensor], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``func`` on operands of which at least one is a ``cls``; UnsupportedError if refused."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = choose(func)
    return handler(cls, args, kwargs)


def choose(func: OpOverload) -> Handler:
    """The handler of an operation; one that refuses it if it is not named anywhere."""
    qualified: str = func.name()
    namespace, _, name = qualified.partition("::")
    if namespace != "aten":
        return refused(func, "it is not an operation of PyTorch")
    if name in MEMORY_OPERATIONS:
        return MEMORY_OPERATIONS[name](func)
    reduction = reduction_handler(func, name)
    if reduction is not None:
        return reduction
    packet = name.partition(".")[0]
    base = packet.removesuffix("_")
    written = written_arguments(func)
    out = next((a.name for a in func._schema.arguments if a.is_out), None)
    if name in ELEMENTWISE_OVERLOADS or base in ELEMENTWISE:
        return elementwise(func, base, in_place=written == [0], out=out)
    each = base.removeprefix("_foreach_")
    if (each != base and each in FOREACH and out is None) or packet in FUSED:
        return on_lists(func, each, written=written, steps=FUSED.get(packet))
    return random_handler(func, packet) or refused(
        func, "each rank holds some rows only, and it is not known to act row by row"
    )
