"""Operations on a drawn model that make sense one after the other. Knows no sharding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from random_case import LAYERS, ROOT, Case, Operation
from random_rules import always_trains

#: Strategies under which gradients are finished in every backward.
ALWAYS_FINAL = ("zero3", "zero2")


class OperationsDraw:
    """Draws operations that make sense one after the other."""

    def __init__(self, draw: random.Random, case: Case) -> None:
        self.draw, self.case = draw, case
        parameters = list(case.parameters())
        self.parameters = [name for name, _ in parameters]
        self.floating = [n for n, layer in parameters if LAYERS[layer.kind].is_trainable]
        self.children = [
            case.path(block.name)
            for block in case.blocks[1:]
            if block.unit and case.parents(block.name) and always_trains(block)
        ]
        self.modules = [
            "",
            *(case.path(block.name) for block in case.blocks[1:] if case.parents(block.name)),
            *(
                f"{case.path(block.name)}.{layer.name}".lstrip(".")
                for block in case.blocks
                if block.name == ROOT or case.parents(block.name)
                for layer in block.layers
                if LAYERS[layer.kind].made.startswith(("nn.Linear", "nn.Seq", "nn.Conv"))
            ),
        ]
        self.may_change = not (case.checkpoints or case.guards & {"rank", "data"})
        self.number = 0
        self.final = True
        self.open: dict[str, bool] = {}  # forwards that wait for their backward; are they last
        self.saved: dict[str, list[str]] = {"save": [], "save full": []}

    def drawn(self) -> Iterator[Operation]:
        """A few dozen at most, trained at the start and at the end."""
        parts = [
            (self.train, 6),
            (self.two, 3),
            (self.kept_graph, 1),
            (self.evaluate, 2),
            (self.step, 5),
            (self.zero, 2),
            (self.gradients, 2),
            (self.freeze, 1.5),
            (self.child, 1),
            (self.write, 2),
            (self.change_between, 1.5),
            (self.save_or_load, 2),
            (self.mishap, 1.5),
            (self.switch, 0.5),
        ]
        chosen = self.draw.choices(
            [part for part, _ in parts],
            [weight for _, weight in parts],
            k=self.draw.choice((3, 5, 7, 9)),
        )
        for part in (self.train, *chosen, self.train, self.step):
            yield from part()

    def maybe(self, chance: float) -> bool:
        return self.draw.random() < chance

    def forward(self, *, target: str = "") -> Operation:
        self.number += 1
        name = f"loss{self.number}"
        last = bool(target) or not self.case.root.unit or self.maybe(0.7)
        self.open[name] = last
        autocast = self.case.precision == "float32" and self.maybe(0.4)
        mode = "autocast" if autocast else "unsharded" if self.maybe(0.03) else ""
        return Operation(
            "forward",
            name,
            data=self.number,
            route=self.draw.choice((3, 3, 3, 0, 1, 2)),
            last=last,
            mode=mode,
            target=target,
        )

    def backward(self, *names: str, keep: bool = False) -> Operation:
        self.final = any(self.open[name] for name in names)
        self.final = self.final or self.case.strategy in ALWAYS_FINAL
        if not keep:
            for name in names:
                del self.open[name]
        return Operation("backward", names=names, flag=keep)

    def train(self) -> Iterator[Operation]:
        forward = self.forward()
        yield forward
        yield self.backward(forward.name)

    def two(self) -> Iterator[Operation]:
        one, other = self.forward(), self.forward()
        yield from (one, other)
        order = self.draw.choice(("together", "in order", "in reverse"))
        if order == "together":
            yield self.backward(one.name, other.name)
        else:
            names = [one.name, other.name]
            for name in names if order == "in order" else reversed(names):
                yield self.backward(name)

    def kept_graph(self) -> Iterator[Operation]:
        forward = self.forward()
        yield forward
        yield self.backward(forward.name, keep=True)
        if self.maybe(0.4):
            yield from self.train()
        yield self.backward(forward.name)

    def evaluate(self) -> Iterator[Operation]:
        self.number += 1
        mode = self.draw.choice(("no_grad", "inference", "no_grad", "given up"))
        target = self.draw.choice(["", "", *self.children])
        yield Operation("forward", "eval", data=self.number, mode=mode, target=target)

    def step(self) -> Iterator[Operation]:
        if self.final:
            yield Operation("step")
        if self.maybe(0.7):
            yield from self.zero()

    def zero(self) -> Iterator[Operation]:
        if self.maybe(0.2):
            yield Operation("zero one", target=self.draw.choice(self.parameters))
        else:
            yield Operation("zero", flag=self.maybe(0.6))

    def gradients(self) -> Iterator[Operation]:
        if self.final:
            kind = self.draw.choice(("clip", "scale gradients", "set gradient"))
            target = self.draw.choice(self.parameters) if kind == "set gradient" else ""
            yield Operation(kind, target=target, flag=self.maybe(0.5))

    def freeze(self) -> Iterator[Operation]:
        if self.final and not self.open and self.floating:
            target = self.draw.choice(self.floating)
            yield Operation("freeze", target=target, flag=self.maybe(0.6))

    def child(self) -> Iterator[Operation]:
        if self.children:
            forward = self.forward(target=self.draw.choice(self.children))
            yield forward
            yield self.backward(forward.name)

    def write(self) -> Iterator[Operation]:
        if self.floating:
            modes = ["in place", "in place", "foreach", "unsharded", "copy"]
            if not self.open:
                modes.append("data")
            mode, target = self.draw.choice(modes), self.draw.choice(self.floating)
            yield Operation("write", mode=mode, target="" if mode == "foreach" else target)

    def change_between(self) -> Iterator[Operation]:
        """Weights change between forward and backward: an error where one process has one."""
        if not self.may_change:
            return
        forward = self.forward()
        yield forward
        changes = [self.write, self.write, self.save_or_load]
        if self.case.optimizer != "adamw fused":
            changes.append(self.step)
        change = self.draw.choice(changes)
        yield from change()
        yield self.backward(forward.name)

    def save_or_load(self) -> Iterator[Operation]:
        has_buffers = "batch norm" in self.case.kinds
        kind = "save" if has_buffers else self.draw.choice(("save", "save full"))
        known = self.saved[kind]
        if not known or self.maybe(0.2):
            self.number += 1
            known.append(f"saved{self.number}")
            yield Operation(kind, known[-1])
            if self.open or self.maybe(0.3):
                return
            yield from self.draw.choice((self.train, self.step, self.write))()
        yield Operation(kind.replace("save", "load"), names=(self.draw.choice(known),))

    def mishap(self) -> Iterator[Operation]:
        mode = self.draw.choice(("forward", "backward"))
        operation = self.forward()
        del self.open[operation.name]
        if mode == "backward":
            self.final = True
        target = self.draw.choice(self.modules)
        yield replace(operation, kind="mishap", mode=mode, target=target, last=True)

    def switch(self) -> Iterator[Operation]:
        yield Operation("mode", flag=self.maybe(0.4))
