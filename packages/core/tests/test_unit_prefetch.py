"""What is gathered ahead of compute: recorded as it is submitted, in forward and in backward."""

from __future__ import annotations

import pytest
import torch
from one_rank import (
    OneRank,
    SpyBackend,
    Stack,
    assert_same_grads,
    batch,
    gathered_bytes,
    twins,
    units_in,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import SchedulePolicy


class Chosen(Stack):
    """Runs the blocks that it is told to, in that order, and notes when they compute."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.order = [0, 1, 2, 3]
        self.log: list[str] = []
        for index, block in enumerate(self.blocks):
            block.narrow.register_forward_hook(
                lambda *arguments, name=str(index): self.note(name, arguments[-1])
            )

    def note(self, name: str, output: Tensor) -> None:
        self.log.append(f"run {name}")
        if output.requires_grad:
            output.register_hook(lambda _grad: self.log.append(f"back {name}"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.last(x)


def build(mesh: DeviceMesh, **options: object) -> Chosen:
    """A sharded model whose gathers go to its log, by the last part of the unit's name."""
    torch.manual_seed(0)
    model = Chosen()
    backend = SpyBackend()
    backend.labels = _Gathers(model.log)
    for lane in backend._lanes.values():
        lane._labels = backend.labels
    OneRank(mesh, "zero3", backend).shard(*units_in(model), **options)
    return model


class _Gathers(list[str]):
    """Keeps of all labels those of gathers, in the log of a model."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def append(self, label: str) -> None:
        if ": gather for " in label:
            name = label.partition(" (")[0].removeprefix("blocks.")
            self._log.append(f"gather {'root' if name == 'Chosen' else name}")


def forward(model: Chosen, *, grad: bool = True) -> tuple[list[str], Tensor]:
    """What happens in one forward, and its loss."""
    model.log.clear()
    with torch.set_grad_enabled(grad):
        loss = model(batch()).sum()
    return list(model.log), loss


def backward(model: Chosen, loss: Tensor) -> list[str]:
    """What happens in one backward."""
    model.log.clear()
    loss.backward()
    return list(model.log)


def words(text: str) -> list[str]:
    """ "root 0 *0" is: gather root, gather 0, run 0; "<0" is: backward of 0."""
    steps = {"*": "run", "<": "back"}
    return [
        f"{steps[word[0]]} {word[1:]}" if word[0] in steps else f"gather {word}"
        for word in text.split()
    ]


def policy(units: int) -> SchedulePolicy:
    return SchedulePolicy(forward_units=units, backward_units=units)


class TestUnchangingOrder:
    def test_off(self, mesh: DeviceMesh) -> None:
        """With 0 units each is gathered when it is entered."""
        model = build(mesh, schedule_policy=policy(0))
        for _ in range(2):
            log, loss = forward(model)
            assert log == words("root 0 *0 1 *1 2 *2 3 *3")
            assert backward(model, loss) == words("root 3 <3 2 <2 1 <1 0 <0")

    def test_one_ahead(self, mesh: DeviceMesh) -> None:
        """By default the next unit is submitted before the current one computes, in the first
        passes already: forward in registration order, backward in the reverse of the forward's."""
        model = build(mesh)
        for _ in range(3):
            log, loss = forward(model)
            assert log == words("root 0 1 *0 2 *1 3 *2 *3")
            assert backward(model, loss) == words("root 3 2 <3 1 <2 0 <1 <0")

    def test_two_ahead(self, mesh: DeviceMesh) -> None:
        """With 2 units there are always two on their way."""
        model = build(mesh, schedule_policy=policy(2))
        for _ in range(2):
            log, loss = forward(model)
            assert log == words("root 0 1 2 *0 3 *1 *2 *3")
            loss.backward()
        _, loss = forward(model)
        assert backward(model, loss) == words("root 3 2 1 <3 0 <2 <1 <0")

    def test_by_elements(self, mesh: DeviceMesh) -> None:
        """A limit in elements takes as many units as fit."""
        numel = sum(parameter.numel() for parameter in Chosen().blocks[0].parameters())
        limits = SchedulePolicy(forward_elements=3 * numel, backward_elements=0)
        model = build(mesh, schedule_policy=limits)
        log, loss = forward(model)
        assert log == words("root 0 1 2 3 *0 *1 *2 *3")
        assert backward(model, loss) == words("root 3 <3 2 <2 1 <1 0 <0")

    def test_without_gradients(self, mesh: DeviceMesh) -> None:
        """Evaluations prefetch alike."""
        model = build(mesh)
        for _ in range(2):
            log, _ = forward(model, grad=False)
            assert log == words("root 0 1 *0 2 *1 3 *2 *3")

    def test_gathered_units_cost_nothing(self, mesh: DeviceMesh) -> None:
        """Without resharding, a backward gathers nothing."""
        model = build(mesh, reshard_after_forward=False)
        _, loss = forward(model)
        assert backward(model, loss) == words("<3 <2 <1 <0")


class TestChangingOrder:
    @pytest.mark.behaviour(15)
    def test_another_order(self, mesh: DeviceMesh) -> None:
        """A new order is followed as it comes, and expected from the next pass on."""
        model = build(mesh)
        forward(model)
        model.order = [3, 1, 0, 2]
        log, loss = forward(model)
        assert [word for word in log if word.startswith("run")] == words("*3 *1 *0 *2")
        loss.backward()
        log, loss = forward(model)
        assert log == words("root 3 1 *3 0 *1 2 *0 *2")
        assert gathered_bytes(model) == 0

    def test_a_backward_gathers_each_unit_once(self, mesh: DeviceMesh) -> None:
        """A unit that backward was in already is not gathered ahead again, whatever order came."""
        model = build(mesh)
        for order in ([3, 2, 1, 0], [0, 1, 2, 3], [2, 0, 3, 1]):
            model.order = order
            _, loss = forward(model)
            gathers = [word for word in backward(model, loss) if word.startswith("gather")]
            assert sorted(gathers) == sorted(words("root 0 1 2 3"))

    @pytest.mark.behaviour(15)
    def test_a_skipped_unit(self, mesh: DeviceMesh) -> None:
        """A unit that was gathered ahead and then skipped is let go at the end of the pass."""
        model = build(mesh)
        forward(model)
        model.order = [0, 2, 3]
        log, loss = forward(model)
        assert log == words("root 0 1 *0 2 3 *2 *3")
        assert gathered_bytes(model) == 0
        loss.backward()
        assert gathered_bytes(model) == 0
        log, _ = forward(model)
        assert log == words("root 0 2 *0 3 *2 *3")

    @pytest.mark.behaviour(15)
    @pytest.mark.parametrize("reshard", [True, False])
    def test_plain_gradients_whatever_the_order(self, mesh: DeviceMesh, reshard: bool) -> None:
        """Orders that change from step to step, units that are skipped or repeated: gradients
        are plain, and nothing stays gathered."""
        torch.manual_seed(0)
        model, reference = twins(Chosen())
        world = OneRank(mesh, "zero3", SpyBackend())
        world.shard(*units_in(model), reshard_after_forward=reshard)
        for order in ([0, 1, 2, 3], [3, 2], [1, 1, 0], [], [2, 0, 1, 3], [0, 1, 2, 3]):
            for module in (model, reference):
                module.zero_grad()
                module.order = order
                module(batch()).square().sum().backward()
            assert_same_grads(model, reference)
            assert gathered_bytes(model) == 0

    def test_units_of_nothing_are_passed_over(self, mesh: DeviceMesh) -> None:
        """A unit without parameters does not use up the allowance."""
        torch.manual_seed(0)
        backend = SpyBackend()
        layers = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()), nn.Linear(4, 4))
        OneRank(mesh, "zero3", backend).shard(layers[0], layers[1], layers[2], layers)
        layers(batch())
        backend.gathers()
        seen: list[list[str]] = []
        layers[0].register_forward_pre_hook(lambda *_: seen.append(backend.gathers()))
        layers(batch())
        assert seen == [["0", "2"]]
