"""Which cases have an answer: where a plain process says what a sharded model is to do.

Owns these rules, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from random_case import LAYERS, Block, Call, Case, Operation, Use

#: Strategies under which no unit needs the other ranks to be entered.
NEVER_GATHERED = ("ddp",)


def objections(case: Case) -> Iterator[str]:
    """Why a case has no answer, if so."""
    root = case.root
    if not any(LAYERS[layer.kind].is_trainable for _, layer in case.parameters()):
        yield "nothing can be trained"
    if case.guards & {"rank", "data"}:
        # Else a backward would come by on some ranks only, and a unit be gathered there alone.
        if not case.input_grad:
            yield "ranks choose, and inputs need no gradient"
        if not (root.unit and _begins_with_a_layer(root)):
            yield "ranks choose, and a backward of the whole need not reach the root"
    chooses = bool(case.guards & {"rank", "data"})
    for block in case.blocks:
        if chooses and "reentrant" in case.checkpoints and _may_hand_on(block):
            yield "a unit hands on what it was given, a leaf in a reentrant checkpoint"
        if chooses and any(o.target for o in case.operations) and _may_hand_on(block):
            yield "a unit hands on what it was given, a leaf where its module runs alone"
        for call in block.calls:
            if chooses and call.checkpoint == "plain" and case.block(call.block).takes == "nothing":
                yield "a region that keeps nothing of the one around it, recomputed on some ranks"
            gathers = case.strategy not in NEVER_GATHERED and _has_unit(case, call.block)
            if call.guard in ("rank", "data") and gathers:
                yield "some ranks skip a gathered unit: an error of its own, tested elsewhere"
            if call.inplace and case.guards & {"rank", "data"}:
                yield "ranks choose, and may raise at different points"
            if call.inplace and case.block(call.block).returns == "parameter":
                yield "a whole weight is written through an output, which is refused"
    if "plain" in case.checkpoints and any(
        isinstance(step, Use) and step.no_grad and _kind_of(block, step) == "batch norm"
        for block in case.blocks
        for step in block.steps
    ):
        yield "how often what saves nothing runs in a checkpointed region is not promised"
    by_data = "data" in case.guards or "chosen rows" in case.kinds
    if by_data and any(operation.mode == "autocast" for operation in case.operations):
        yield "rounding in autocast could choose otherwise"
    if case.loss == "kept" and any(
        block.checkpoints
        or (block.calls and any(LAYERS[layer.kind].parameters == ("",) for layer in block.layers))
        for block in case.blocks
    ):
        yield "backward reaches weights through no output of a module"
    yield from _objections_to_operations(case)


def _objections_to_operations(case: Case) -> Iterator[str]:
    for index, operation in enumerate(case.operations):
        if operation.kind in ("forward", "mishap") and not operation.last and not case.root.unit:
            yield "each of several roots counts only the microbatches that it took part in"
        if operation.mode == "backward" and case.guards & {"rank", "data"}:
            yield "ranks choose, and may raise at different points"
        if operation.kind == "forward" and operation.target:
            block = next(b for b in case.blocks if case.path(b.name) == operation.target)
            if not (block.unit and always_trains(block)):
                yield "a backward of a module alone need not reach it on every rank"
        in_flight = _in_flight(case.operations, index)
        if operation.kind == "freeze" and in_flight:
            yield "freezing is honoured from the next forward on"
        if operation.kind in ("write", "step", "load", "load full") and in_flight:
            if case.guards & {"rank", "data"}:
                yield "ranks choose, and may raise at different points"
            if operation.kind == "step" and case.optimizer == "adamw fused":
                yield "a fused optimizer writes plain weights without autograd's knowledge"
            if operation.mode == "data":
                yield "writes to .data are without autograd's knowledge"
        if operation.kind in ("save full", "load full") and "batch norm" in case.kinds:
            yield "buffers differ by rank"


def _in_flight(operations: tuple[Operation, ...], index: int) -> set[str]:
    """Forwards before ``index`` whose backward comes after it."""
    before = {o.name for o in operations[:index] if o.kind == "forward"}
    after = {name for o in operations[index:] if o.kind == "backward" for name in o.names}
    return before & after


def always_trains(block: Block) -> bool:
    """Whether it has an input and a layer that gets a gradient whatever the rank and the data."""
    trainable = {
        layer.name
        for layer in block.layers
        if not layer.frozen and LAYERS[layer.kind].is_trainable and LAYERS[layer.kind].used
    }
    return block.takes != "nothing" and any(
        isinstance(step, Use) and step.layer in trainable and not (step.guard or step.no_grad)
        for step in block.steps
    )


def _may_hand_on(block: Block) -> bool:
    """Whether it is a unit that may return what it was given."""
    kinds = {layer.name: layer.kind for layer in block.layers}
    computes = any(
        isinstance(step, Use) and not step.guard and LAYERS[kinds[step.layer]].used
        for step in block.steps
    )
    return block.unit and block.takes != "nothing" and not computes


def _begins_with_a_layer(root: Block) -> bool:
    """So that no output is an input itself."""
    if not root.steps or isinstance(root.steps[0], Call) or root.steps[0].guard:
        return False
    return bool(LAYERS[_kind_of(root, root.steps[0])].used)


def _kind_of(block: Block, step: Use) -> str:
    """Of the layer that a step uses."""
    return next(layer.kind for layer in block.layers if layer.name == step.layer)


def _has_unit(case: Case, name: str) -> bool:
    block = case.block(name)
    return block.unit or any(_has_unit(case, call.block) for call in block.calls)
