"""The case of a seed. Owns what is drawn how often.

Knows no rendering and no running; which cases have an answer is in random_rules.

Of what could be drawn without breaking a rule, this is left out:

- Weights are not stepped, clipped, scaled or frozen while gradients wait for a last microbatch.
- Nothing draws random numbers while training.
- Adam adds 1e-4 to what it divides by, so that rounding does not decide about steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from random_case import LAYERS, ROOT, Block, Call, Case, Layer, Use, tidy
from random_draw_operations import OperationsDraw
from random_rules import NEVER_GATHERED, objections

STRATEGIES = ("zero3", "zero1", "hfsdp", "zero2", "ddp", "hsdp")
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw fused", "adamw foreach", "adam loop")
MESHES = {2: ((2, 1), (1, 2)), 4: ((2, 2), (4, 1), (1, 4))}


def drawn(
    seed: int, *, strategy: str | None = None, ranks: int | None = None, backend: str = ""
) -> Case:
    """The case of ``seed``; what is given is not drawn."""
    draw = random.Random(seed)
    strategy = strategy or draw.choice(STRATEGIES)
    ranks = ranks or draw.choice((2, 2, 2, 2, 4))
    while True:
        model = _model(draw, seed, strategy, ranks, backend)
        if not any(LAYERS[layer.kind].is_trainable for _, layer in model.parameters()):
            continue
        case = tidy(replace(model, operations=tuple(OperationsDraw(draw, model).drawn())))
        if case is not None and not any(objections(case)):
            return case


def _model(draw: random.Random, seed: int, strategy: str, ranks: int, backend: str) -> Case:
    maybe = _chances(draw)
    precision = draw.choices(("float64", "float32", "mixed"), (8, 1, 1))[0]
    case = Case(
        seed,
        _blocks(draw, strategy, precision),
        (),
        strategy=strategy,
        mesh=draw.choice(MESHES.get(ranks, ((ranks, 1),)))
        if strategy in ("hsdp", "hfsdp")
        else (ranks,),
        width=draw.choice((3, 4, 5, 7)),
        rows=draw.choice(((4,), (3,), (2, 5), (4, 2, 3))),
        reshard=maybe(0.7),
        prefetch=draw.choice(((1, 1), (1, 1), (0, 0), (2, 2), (3, 0))),
        divisor=draw.choice((1.0, 1.0, 1.0, 4.0)),
        precision=precision,
        optimizer=draw.choice(OPTIMIZERS),
        loss=draw.choice(("output", "kept", "both", "both")),
        backend=backend,
    )
    if case.loss == "kept" and any(objections(case)):
        case = replace(case, loss="both")
    ways = case.guards & {"data", "rank"}
    case = replace(case, input_grad=bool(ways) or maybe(0.3))
    if not all(LAYERS[kind].is_plain for kind in case.kinds) and case.optimizer == "adamw fused":
        case = replace(case, optimizer="adamw")
    linears = [
        f"{case.path(block.name)}.{layer.name}".lstrip(".")
        for block in case.blocks
        if block.name == ROOT or case.parents(block.name)
        for layer in block.layers
        if layer.kind == "linear"
    ]
    if len(linears) > 1 and maybe(0.7):
        case = replace(case, ties=(tuple(draw.sample(linears, 2)),))  # type: ignore[arg-type]
    return case


def _chances(draw: random.Random) -> Callable[[float], bool]:
    return lambda chance: draw.random() < chance


def _blocks(draw: random.Random, strategy: str, precision: str) -> tuple[Block, ...]:
    """A root and up to four blocks; each is called by an earlier one, or by two."""
    maybe = _chances(draw)
    number = draw.choice((0, 1, 2, 2, 3, 3, 4))
    bare_root = number > 0 and maybe(0.08)
    names = [ROOT, *(f"b{index}" for index in range(1, number + 1))]
    callers: dict[str, list[str]] = {name: [] for name in names}
    for index, name in enumerate(names[1:], start=1):
        parents = draw.choices((names[max(0, index - 1)], ROOT, draw.choice(names[:index])), k=1)
        if maybe(0.2):
            parents.append(draw.choice(names[:index]))
        for parent in parents:
            callers[parent].append(name)
    ways = draw.choices(((), ("rank",), ("data",), ("rank", "data")), (5, 3, 2, 2))[0]
    if bare_root:
        ways = ()
    if precision == "float32":
        ways = tuple(way for way in ways if way != "data")
    kinds = [kind for kind in LAYERS if precision == "float64" or LAYERS[kind].is_plain]
    if precision == "float32":
        kinds = [kind for kind in kinds if kind not in ("batch norm", "chosen rows")]
    recomputed = ("", "plain", "reentrant") if maybe(0.5) else ("",)
    blocks: list[Block] = []
    for name in reversed(names):  # those that are called first
        bare = bare_root and name == ROOT
        below = {block.name: block for block in blocks}
        unit = maybe(0.7) if name != ROOT else not bare
        if bare:
            below = {child: replace(block, unit=True) for child, block in below.items()}
            blocks = [
                below[block.name] if block.name in callers[ROOT] else block for block in blocks
            ]
        block = _block(draw, name, callers[name], below, unit, bare, ways, kinds, strategy)
        blocks.append(_checkpointed(draw, block, below, recomputed))
    return tuple(reversed(blocks))


def _block(
    draw: random.Random,
    name: str,
    called: Sequence[str],
    below: dict[str, Block],
    unit: bool,
    bare: bool,
    ways: Sequence[str],
    kinds: Sequence[str],
    strategy: str,
) -> Block:
    maybe = _chances(draw)
    if not called and name != ROOT and maybe(0.12):
        layers = (Layer("n0", "rows", maybe(0.2)), Layer("n1", draw.choice(("vector", "unused"))))
        returns = draw.choice(("tensor", "parameter", "tuple"))
        steps = (Use("n1"),) if maybe(0.7) else ()
        return Block(name, layers, steps, unit, takes="nothing", returns=returns)
    common = ("linear", "linear", "wide")
    chosen = [
        draw.choice(common) if maybe(0.4) else draw.choice(kinds)
        for _ in range(0 if bare else draw.choice((0, 1, 1, 2, 2, 3)))
    ]
    if name == ROOT and not bare:
        chosen.insert(0, draw.choice(common))
    layers = tuple(
        Layer(f"n{index}", kind, frozen=LAYERS[kind].is_trainable and maybe(0.12))
        for index, kind in enumerate(chosen)
    )
    steps: list[Use | Call] = []
    for index, layer in enumerate(layers):
        guard = draw.choice([*ways, *ways, "", "", "", "0"]) if index or name != ROOT else ""
        steps += [Use(layer.name, guard, no_grad=maybe(0.06))] * (2 if maybe(0.1) else 1)
    for child in called:
        always = strategy not in NEVER_GATHERED and _has_unit(child, below)
        guards = ["", "", "", "", "0", "1", "2"] + ([] if always else 5 * [*ways])
        for _ in range(draw.choice((1, 1, 1, 2))):
            writable = below[child].returns != "parameter" and not ways
            call = Call(child, draw.choice(guards), maybe(0.06), inplace=writable and maybe(0.2))
            steps.insert(draw.randint(1 if name == ROOT and steps else 0, len(steps)), call)
    return Block(
        name,
        layers,
        tuple(steps),
        unit,
        takes="tensor" if name == ROOT else draw.choices(("tensor", "keyword"), (4, 1))[0],
        returns="tensor"
        if maybe(0.6)
        else draw.choice(("tuple", "dict", "dataclass", "nested", "view")),
        keeps=maybe(0.2),
    )


def _checkpointed(
    draw: random.Random, block: Block, below: dict[str, Block], ways: Sequence[str]
) -> Block:
    """The block, with checkpoints inside and around what it calls."""

    def way() -> str:
        return draw.choice(ways) if draw.random() < 0.5 else ""

    steps = []
    for step in block.steps:
        if isinstance(step, Call):
            around = way()
            if around == "reentrant" and below[step.block].returns not in (
                "tensor",
                "view",
                "tuple",
            ):
                around = ""  # it hands on gradients of tensors only
            step = replace(step, checkpoint=around)
        steps.append(step)
    return replace(block, steps=tuple(steps), checkpoint=way())


def _has_unit(name: str, below: dict[str, Block]) -> bool:
    block = below[name]
    return block.unit or any(_has_unit(call.block, below) for call in block.calls)
