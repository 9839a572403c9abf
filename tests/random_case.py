"""A small model and what is done to it, as plain data.

Owns what a case consists of, which cases make sense, and which features one covers. Knows no torch
and nothing of how a case is drawn, written down or run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

ROOT = "model"


@dataclass(frozen=True)
class LayerKind:
    """How a piece with parameters is made and used, as expressions of a script.

    ``parameters`` are the names below the layer's own; one that is a parameter itself has "".
    ``is_trainable``: it may have a gradient. ``is_plain``: all its numbers are floats of the
    case's precision.
    """

    made: str
    used: str
    parameters: tuple[str, ...] = ("",)
    is_trainable: bool = True
    is_plain: bool = True


LINEAR = ("weight", "bias")
LAYERS = {
    "linear": LayerKind("nn.Linear({w}, {w})", "x + torch.tanh({it}(x))", LINEAR),
    "wide": LayerKind(
        "nn.Sequential(nn.Linear({w}, {odd}), nn.GELU(), nn.Linear({odd}, {w}))",
        "x + 0.5 * {it}(x)",
        ("0.weight", "0.bias", "2.weight", "2.bias"),
    ),
    "transposed": LayerKind("nn.Parameter(torch.randn({w}, {w}))", "x + 0.1 * (x @ {it}.t())"),
    "scalar": LayerKind("nn.Parameter(torch.tensor(1.25))", "x * {it}"),
    "vector": LayerKind("nn.Parameter(torch.randn({w}))", "x + torch.sin({it})"),
    "row": LayerKind("nn.Parameter(torch.randn(1, {w}))", "x * (1 + 0.1 * {it})"),
    "rows": LayerKind("nn.Parameter(torch.randn(3, {w}))", "x + 0.3 * {it}.sum(0)"),
    "empty": LayerKind("nn.Parameter(torch.empty(0, {w}))", "x + {it}.sum(0)"),
    "unused": LayerKind("nn.Parameter(torch.randn(3, {odd}))", ""),
    "embedding": LayerKind(
        "nn.Embedding(7, {w})", "x + {it}(torch.arange(len(x)) % 3)", ("weight",)
    ),
    "chosen rows": LayerKind(
        "nn.Embedding(2, {w})", "x + {it}((x.detach()[:, 0] > 0).long())", ("weight",)
    ),
    "convolution": LayerKind(
        "nn.Conv1d(1, 1, 3, padding=1)", "x + {it}(x.unsqueeze(1)).squeeze(1)", LINEAR
    ),
    "attention": LayerKind(
        "nn.MultiheadAttention({w}, 1, batch_first=True)",
        "x + {it}(x[None], x[None], x[None], need_weights=False)[0][0]",
        ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"),
    ),
    "batch norm": LayerKind("nn.BatchNorm1d({w})", "{it}(x)", LINEAR),
    "layer norm": LayerKind("nn.LayerNorm({w})", "{it}(x)", LINEAR),
    "integer": LayerKind(
        "nn.Parameter(torch.arange({w}), requires_grad=False)",
        "x + 0.1 * {it}.to(x.dtype)",
        is_trainable=False,
        is_plain=False,
    ),
    "boolean": LayerKind(
        "nn.Parameter(torch.arange({w}) % 2 == 0, requires_grad=False)",
        "torch.where({it}, x, 0.5 * x)",
        is_trainable=False,
        is_plain=False,
    ),
    "complex": LayerKind(
        "nn.Parameter(torch.randn({w}, dtype=torch.complex128))",
        "x + 0.2 * (x * {it}).real",
        is_plain=False,
    ),
    "other dtype": LayerKind(
        "nn.Parameter(torch.randn({w}, dtype=torch.{other}))",
        "x + 0.5 * {it}.to(x.dtype)",
        is_plain=False,
    ),
}


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str
    frozen: bool = False

    @property
    def parameters(self) -> list[str]:
        """Their names, within the block."""
        return [f"{self.name}.{name}".rstrip(".") for name in LAYERS[self.kind].parameters]


@dataclass(frozen=True)
class Use:
    """A layer of the block is used, where ``guard`` holds: "", "data", "rank" or a bit of the
    route that all ranks take, "0" to "2"; nobody takes the last."""

    layer: str
    guard: str = ""
    no_grad: bool = False


@dataclass(frozen=True)
class Call:
    """Another block is called; ``inplace`` changes what it returned."""

    block: str
    guard: str = ""
    no_grad: bool = False
    checkpoint: str = ""  # around it: "", "plain" or "reentrant"
    inplace: bool = False


@dataclass(frozen=True)
class Block:
    """A module. ``keeps``: what it computes is kept aside, for the loss."""

    name: str
    layers: tuple[Layer, ...] = ()
    steps: tuple[Use | Call, ...] = ()
    unit: bool = True
    takes: str = "tensor"  # or "keyword", or "nothing"
    returns: str = "tensor"  # or "view", "tuple", "dict", "dataclass", "nested", "parameter"
    checkpoint: str = ""  # inside it
    keeps: bool = False

    @property
    def calls(self) -> list[Call]:
        return [step for step in self.steps if isinstance(step, Call)]

    @property
    def checkpoints(self) -> set[str]:
        """Their kinds, inside it and around what it calls."""
        return {self.checkpoint, *(call.checkpoint for call in self.calls)} - {""}


@dataclass(frozen=True)
class Operation:
    """Something done to the model, between comparisons; fields mean what ``kind`` makes of them."""

    kind: str
    name: str = ""  # of losses, or of what was saved
    names: tuple[str, ...] = ()
    data: int = 0
    route: int = 3
    last: bool = True
    mode: str = ""
    target: str = ""  # a parameter, a block or a module
    flag: bool = False


@dataclass(frozen=True)
class Case:
    """The first block is the root; a block is called by earlier ones only."""

    seed: int
    blocks: tuple[Block, ...]
    operations: tuple[Operation, ...]
    strategy: str = "zero3"
    mesh: tuple[int, ...] = (2,)
    width: int = 5
    rows: tuple[int, ...] = (4,)  # of data, by rank in turn
    ties: tuple[tuple[str, str], ...] = ()  # of weights of linear layers, by full name
    reshard: bool = True
    prefetch: tuple[int, int] = (1, 1)
    divisor: float = 1.0
    precision: str = "float64"  # or "float32", or "mixed": float32 of float64 main weights
    optimizer: str = "sgd"
    input_grad: bool = False
    loss: str = "output"  # or "kept", or "both"
    backend: str = ""

    @property
    def ranks(self) -> int:
        return self.mesh[0] * (self.mesh[1] if len(self.mesh) > 1 else 1)

    def block(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    @property
    def root(self) -> Block:
        return self.blocks[0]

    def parents(self, name: str) -> list[Block]:
        """The blocks that call one, each once."""
        return [block for block in self.blocks if any(call.block == name for call in block.calls)]

    def path(self, name: str) -> str:
        """The dotted path of a block, along the first blocks that call it; "" for the root."""
        if name == self.root.name:
            return ""
        above = self.path(self.parents(name)[0].name)
        return f"{above}.{name}".lstrip(".")

    def owners(self, name: str) -> set[str]:
        """The units that would own the parameters of a block; "" where nothing does."""
        if self.block(name).unit:
            return {name}
        found = {owner for parent in self.parents(name) for owner in self.owners(parent.name)}
        return found or {""}

    def parameters(self) -> Iterator[tuple[str, Layer]]:
        """Full names, tied ones under each of theirs."""
        for block in self.blocks:
            for layer in block.layers:
                for name in layer.parameters:
                    yield f"{self.path(block.name)}.{name}".lstrip("."), layer

    @property
    def guards(self) -> set[str]:
        return {step.guard for block in self.blocks for step in block.steps}

    @property
    def checkpoints(self) -> set[str]:
        return {kind for block in self.blocks for kind in block.checkpoints}

    @property
    def kinds(self) -> set[str]:
        return {layer.kind for block in self.blocks for layer in block.layers}


def tidy(case: Case) -> Case | None:
    """Without what refers to nothing; None for a case that makes no sense."""
    before = None
    while case != before:
        before = case
        called = {ROOT, *(call.block for block in case.blocks for call in block.calls)}
        blocks = tuple(block for block in case.blocks if block.name in called)
        known = {block.name for block in blocks}
        case = replace(case, blocks=tuple(_tidy_block(block, known) for block in blocks))
    for block in case.blocks:
        owners = case.owners(block.name)
        if len(owners) > 1 or ("" in owners and block.layers):
            return None
    if not any(block.unit for block in case.blocks):
        return None
    weights = {name: layer.kind for name, layer in case.parameters()}
    layers = {
        f"{case.path(block.name)}.{layer.name}".lstrip("."): (layer.kind, case.owners(block.name))
        for block in case.blocks
        for layer in block.layers
    }
    ties = tuple(
        (one, other)
        for one, other in case.ties
        if one != other
        and layers.get(one, "one") == layers.get(other, "other")
        and layers[one][0] == "linear"
    )
    made: set[str] = set()
    operations = []
    modules = {"", *layers, *(case.path(block.name) for block in case.blocks)}
    for operation in case.operations:
        if operation.kind in ("forward", "save", "save full"):
            made.add(operation.name)
        names = tuple(name for name in operation.names if name in made)
        needs_names = operation.kind in ("backward", "load", "load full")
        wanted = modules if operation.kind in ("forward", "mishap") else {"", *weights}
        if operation.target in wanted and (names or not needs_names):
            operations.append(replace(operation, names=names))
    keeps = any(block.keeps for block in case.blocks)
    loss = case.loss if keeps else "output"
    return replace(case, ties=ties, operations=tuple(operations), loss=loss)


def _tidy_block(block: Block, known: set[str]) -> Block:
    layers = {layer.name for layer in block.layers}
    steps = tuple(
        step
        for step in block.steps
        if (step.layer in layers if isinstance(step, Use) else step.block in known)
    )
    has_row = any(layer.kind == "rows" for layer in block.layers)
    takes, returns = block.takes, block.returns
    if takes == "nothing" and not has_row:
        takes = "tensor"
    if returns == "parameter" and not (has_row and takes == "nothing"):
        returns = "tensor"
    return replace(block, steps=steps, takes=takes, returns=returns)


def features(case: Case) -> Counter[str]:
    """What a case covers; the keys are the words of FEATURES, and of summaries."""
    steps = [step for block in case.blocks for step in block.steps]
    calls = [step for step in steps if isinstance(step, Call)]
    callers = Counter(call.block for call in calls)
    units = {block.name for block in case.blocks if block.unit}
    layers = [layer for block in case.blocks for layer in block.layers]
    operations = case.operations
    kinds = Counter(operation.kind for operation in operations)
    writes = [operation.mode for operation in operations if operation.kind == "write"]
    found = {f"layer: {layer.kind}" for layer in layers}
    found |= {f"strategy: {case.strategy}", f"{case.ranks} ranks", f"dtype: {case.precision}"}
    found |= {f"optimizer: {case.optimizer}"}
    found |= {f"returns: {block.returns}" for block in case.blocks}
    found |= {f"takes: {block.takes}" for block in case.blocks}
    found |= {f"guard: {g}" for g in case.guards & {"data", "rank"}}
    found |= {f"checkpoint inside: {block.checkpoint}" for block in case.blocks if block.checkpoint}
    found |= {f"checkpoint around: {call.checkpoint}" for call in calls if call.checkpoint}
    found |= {f"operation: {kind}" for kind in kinds if kind not in ("write", "mishap")}
    found |= {f"write: {mode}" for mode in writes}
    for operation in operations:
        if operation.kind == "mishap":
            found.add(f"exception in {operation.mode}")
        elif operation.kind == "forward":
            found.add(f"forward: {operation.mode or 'with gradients'}")
            if operation.target:
                found.add("a child unit alone")
            if not operation.last:
                found.add("a microbatch that is not the last")
        elif operation.kind == "backward":
            if len(operation.names) > 1:
                found.add("one backward of two forwards")
            if operation.flag:
                found.add("a kept graph")
        elif operation.kind == "zero":
            found.add("zero_grad: to None" if operation.flag else "zero_grad: in place")
    found |= {f"forwards in flight: {order}" for order in _orders(operations)}
    conditions = {
        "nested units": any(call.block in units for b in case.blocks[1:] for call in b.calls),
        "a module in a unit that is none": any(not block.unit for block in case.blocks),
        "no unit above the others": not case.root.unit,
        "a shared module": any(len(case.parents(name)) > 1 for name in callers),
        "repeated calls": any(
            count > 1
            for block in case.blocks
            for count in Counter(call.block for call in block.calls).values()
        ),
        "calls that the route skips": any(step.guard in ("0", "1") for step in calls),
        "a unit that nobody enters": any(step.guard == "2" for step in calls),
        "a unit that some ranks skip": any(step.guard in ("rank", "data") for step in calls),
        "frozen parts": any(layer.frozen for layer in layers),
        "a no-grad section": any(step.no_grad for step in steps),
        "an output changed in place": any(call.inplace for call in calls),
        "tied weights": bool(case.ties),
        "ties across modules": any(
            a.rpartition(".")[0] != b.rpartition(".")[0] for a, b in case.ties
        ),
        "a kept intermediate": case.loss != "output",
        "weights kept gathered": not case.reshard,
        "no prefetch": case.prefetch == (0, 0),
        "prefetch of several units": max(case.prefetch) > 1,
        "a gradient divisor": case.divisor != 1,
        "input gradients": case.input_grad,
        "ranks with different amounts of data": len(set(case.rows)) > 1,
    }
    found |= {word for word, holds in conditions.items() if holds}
    return Counter(found)


def _orders(operations: tuple[Operation, ...]) -> Iterator[str]:
    """How backwards follow forwards that were in flight at the same time."""
    open_names: list[str] = []
    for operation in operations:
        if operation.kind == "forward" and operation.mode in ("", "autocast"):
            open_names.append(operation.name)
        elif operation.kind == "backward":
            for name in operation.names:
                if name in open_names and len(open_names) > 1 and len(operation.names) == 1:
                    yield "backward of the first" if name == open_names[0] else "of a later one"
                if name in open_names and not operation.flag:
                    open_names.remove(name)
        elif operation.kind in ("write", "step", "load", "load full") and open_names:
            yield "weights change"
