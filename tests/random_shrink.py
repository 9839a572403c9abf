"""Makes a failing case smaller for as long as it fails the same way. Knows no ranks.

Greedy: of the neighbours that are simpler in one way the first that still fails is taken, until
none does; then those that are simpler in the next way, until nothing is left to try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from random_case import LAYERS, Block, Call, Case, Layer, Operation, Use, tidy
from random_rules import objections

#: Attributes that are set to the simplest value, in this order.
SIMPLEST_CASE = {
    "strategy": ("zero3", "ddp"),
    "backend": ("",),
    "reshard": (True,),
    "prefetch": ((1, 1), (0, 0)),
    "divisor": (1.0,),
    "precision": ("float64",),
    "optimizer": ("sgd",),
    "rows": ((4,),),
    "width": (3,),
    "loss": ("output", "kept"),
    "input_grad": (False,),
    "ties": ((),),
}
SIMPLEST_BLOCK = {
    "returns": ("tensor",),
    "takes": ("tensor",),
    "checkpoint": ("", "plain"),
    "keeps": (False,),
    "unit": (False,),
}
SIMPLEST_CALL = {
    "guard": ("", "0"),
    "no_grad": (False,),
    "checkpoint": ("", "plain"),
    "inplace": (False,),
}
SIMPLEST_USE = {"guard": ("", "0", "rank"), "no_grad": (False,)}
SIMPLEST_OPERATION = {"last": (True,), "mode": ("",), "route": (3,)}


def shrunk(
    case: Case,
    still_fails: Callable[[Case], bool],
    *,
    most_runs: int = 400,
    on_progress: Callable[[Case, int], None] = lambda case, runs: None,
) -> Case:
    """The smallest case found that ``still_fails``, after at most so many runs."""
    runs, tried, before = 0, {case}, None
    while case != before:
        before = case
        for simpler in (_fewer_operations, _fewer_blocks, _simpler_case, _simpler_parts):
            found: Case | None = case
            while found is not None:
                case, found = found, None
                for candidate in simpler(case):
                    neat = tidy(candidate)
                    if neat is None or neat in tried or any(objections(neat)):
                        continue
                    if runs == most_runs:
                        return case
                    tried.add(neat)
                    runs += 1
                    if still_fails(neat):
                        found = neat
                        on_progress(neat, runs)
                        break
    return case


def _fewer_blocks(case: Case) -> Iterator[Case]:
    if case.ranks > 2:
        yield replace(case, mesh=(2,) if len(case.mesh) == 1 else (2, 1))
        yield replace(case, mesh=(2,) if len(case.mesh) == 1 else (1, 2))
    for index in range(len(case.blocks) - 1, 0, -1):
        yield _without_block(case, index)
    for index, block in enumerate(case.blocks):
        if block.layers and block.steps:
            yield _with_block(case, index, replace(block, layers=(), keeps=False))
        yield from _inlined(case, index)


def _simpler_case(case: Case) -> Iterator[Case]:
    for name, values in SIMPLEST_CASE.items():
        for value in _before(getattr(case, name), values):
            changed = replace(case, **{name: value})
            if name == "strategy":
                changed = replace(changed, mesh=(case.ranks,))
            yield changed


def _simpler_parts(case: Case) -> Iterator[Case]:
    for index, block in enumerate(case.blocks):
        for candidate in _simpler_block(block):
            yield _with_block(case, index, candidate)
    for index, operation in enumerate(case.operations):
        for name, values in SIMPLEST_OPERATION.items():
            if operation.kind != "forward":
                continue
            for value in _before(getattr(operation, name), values):
                changed = replace(operation, **{name: value})
                yield replace(case, operations=_replaced(case.operations, index, changed))


def _before(value: object, values: tuple[object, ...]) -> tuple[object, ...]:
    """Those of ``values``, simplest first, that are simpler than ``value``."""
    return values[: values.index(value)] if value in values else values


def _fewer_operations(case: Case) -> Iterator[Case]:
    operations = case.operations
    size = len(operations) // 2
    while size:
        for start in range(0, len(operations), size):
            rest = operations[:start] + operations[start + size :]
            yield replace(case, operations=rest)
        size //= 2
    # A forward with its backward.
    for operation in operations:
        if operation.kind == "forward":
            rest = tuple(
                o for o in operations if o is not operation and operation.name not in o.names
            )
            yield replace(case, operations=rest)


def _without_block(case: Case, index: int) -> Case:
    """Nobody calls it."""
    name = case.blocks[index].name
    blocks = tuple(
        replace(
            block,
            steps=tuple(s for s in block.steps if not (isinstance(s, Call) and s.block == name)),
        )
        for block in case.blocks
    )
    return replace(case, blocks=blocks)


def _simpler_block(block: Block) -> Iterator[Block]:
    for index, step in enumerate(block.steps):
        yield replace(block, steps=block.steps[:index] + block.steps[index + 1 :])
        choices = SIMPLEST_USE if isinstance(step, Use) else SIMPLEST_CALL
        for name, values in choices.items():
            for value in _before(getattr(step, name), values):
                changed = replace(step, **{name: value})
                yield replace(block, steps=_replaced(block.steps, index, changed))
    for index, layer in enumerate(block.layers):
        yield replace(block, layers=block.layers[:index] + block.layers[index + 1 :])
        if layer.frozen:
            yield replace(
                block, layers=_replaced(block.layers, index, replace(layer, frozen=False))
            )
        for kind in _before(layer.kind, ("vector", "linear")):
            changed = Layer(layer.name, str(kind), layer.frozen and LAYERS[str(kind)].is_trainable)
            yield replace(block, layers=_replaced(block.layers, index, changed))
    for name, values in SIMPLEST_BLOCK.items():
        for value in _before(getattr(block, name), values):
            yield replace(block, **{name: value})


def _inlined(case: Case, index: int) -> Iterator[Case]:
    """What a block calls is called by its caller in its place."""
    block = case.blocks[index]
    if index == 0 or not block.calls:
        return
    blocks = []
    for other in case.blocks:
        steps: list[Use | Call] = []
        for step in other.steps:
            is_call = isinstance(step, Call) and step.block == block.name
            steps += block.calls if is_call else [step]
        blocks.append(replace(other, steps=tuple(steps)))
    yield replace(case, blocks=tuple(blocks))


def _with_block(case: Case, index: int, block: Block) -> Case:
    return replace(case, blocks=_replaced(case.blocks, index, block))


def _replaced(items: tuple, index: int, item: Block | Layer | Use | Call | Operation) -> tuple:
    return (*items[:index], item, *items[index + 1 :])
