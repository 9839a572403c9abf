"""explain against what is there: bytes that buffers hold, orders that run, state that stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rank import (
    OneRank,
    SpyBackend,
    Stack,
    batch,
    groups,
    make_stack,
    unit,
    units_in,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import (
    MixedPrecisionPolicy,
    SchedulePolicy,
    explain,
    full_state_dict,
    microbatch,
    unsharded,
)
from polyshard.spi import Buffer, Capabilities, Role, StorageBuffer, Use
from polyshard.testing.loopback import LoopbackBackend

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(
        compute_dtype=torch.bfloat16,
        main_grads_dtype=torch.float64,
        grad_comm_dtype=torch.bfloat16,
    ),
}


def buffer_bytes(module: nn.Module) -> int:
    """Bytes that the weights of one unit hold now."""
    storages = {
        id(buffer): buffer.flat.untyped_storage().nbytes()
        for group in unit(module).groups
        for buffer in (group.main, group.model, group.full)
    }
    return sum(storages.values())


class Watched(Stack):
    """Notes something while each block computes, forward and backward."""

    def __init__(self, note: Callable[[nn.Module, str], None]) -> None:
        super().__init__()
        self.note = note
        for block in self.blocks:
            block.widen.register_forward_hook(self.noticed)

    def noticed(self, layer: nn.Module, _inputs: object, output: Tensor) -> None:
        block = next(block for block in self.blocks if block.widen is layer)
        self.note(block, "forward")
        output.register_hook(lambda _grad: self.note(block, "backward"))


class GatherMeter(LoopbackBackend):
    """Measures what buffers that are gathered into hold together."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def allocate(self, uses: Sequence[Use], *args: Any) -> Buffer:
        if uses[0].role is not Role.GATHER_OUTPUT:
            return super().allocate(uses, *args)
        return MeteredBuffer(self, *args)

    def restart(self) -> int:
        """The most since the last time; starts anew from what is held now."""
        most, self.most = self.most, self.now
        return most


class MeteredBuffer(StorageBuffer):
    """Tells a meter what it holds."""

    def __init__(self, meter: GatherMeter, *args: Any) -> None:
        super().__init__(*args)
        self.meter = meter

    def acquire(self) -> None:
        before = self.tensor.untyped_storage().nbytes()
        super().acquire()
        self.meter.now += self.tensor.untyped_storage().nbytes() - before
        self.meter.most = max(self.meter.most, self.meter.now)

    def release(self) -> None:
        self.meter.now -= self.tensor.untyped_storage().nbytes()
        super().release()


class TestBytes:
    @pytest.mark.parametrize("policy", POLICIES)
    def test_weights_are_what_is_said(self, world: OneRank, policy: str) -> None:
        """Between steps and while a unit is gathered its buffers have the bytes that are told."""
        seen: list[str] = []

        def note(block: nn.Module, moment: str) -> None:
            told = explain(block).bytes
            assert buffer_bytes(block) == told.between_steps + told.copies + told.gathered
            seen.append(moment)

        model = Watched(note)
        world.shard(*units_in(model), mixed_precision_policy=POLICIES[policy])
        for _ in range(2):
            assert sum(map(buffer_bytes, units_in(model))) == explain(model).bytes.between_steps
            model(batch()).sum().backward()
        assert seen == (["forward"] * 3 + ["backward"] * 3) * 2

    @pytest.mark.parametrize("policy", POLICIES)
    def test_all_that_is_held(self, world: OneRank, policy: str) -> None:
        """With gradients, or between microbatches, all buffers have the bytes that are told."""
        backend = SpyBackend()
        model = make_stack()
        model.blocks[1].requires_grad_(False)
        OneRank(world.mesh, world.strategy, backend).shard(
            *units_in(model), mixed_precision_policy=POLICIES[policy]
        )
        told = explain(model).bytes
        assert backend.live_bytes == told.between_steps
        model(batch()).sum().backward()
        assert backend.live_bytes == told.between_steps + told.gradients
        model.zero_grad()
        with microbatch(model, is_last=False):
            model(batch()).sum().backward()
        window = told.accumulators or told.gradients
        assert backend.live_bytes == told.between_steps + told.copies + window

    @pytest.mark.parametrize(
        "kept",
        [{Role.GATHER_OUTPUT}, {Role.REDUCE_INPUT}, {Role.GATHER_INPUT}, set(Role) - {
            Role.REDUCE_OUTPUT
        }],
        ids=["gather-output", "reduce-input", "gather-input", "all"],
    )  # fmt: skip
    @pytest.mark.parametrize("policy", POLICIES)
    def test_what_the_backend_keeps(self, world: OneRank, policy: str, kept: set[Role]) -> None:
        """Buffers that a backend wants kept count as held between steps, and are not added."""

        class Keeping(SpyBackend):
            capabilities = Capabilities(
                device_types=frozenset({"cpu"}),
                reduce_dtypes=LoopbackBackend.capabilities.reduce_dtypes,
                fp32_accumulation=True,
                persistent_roles=frozenset(kept),
            )

        backend = Keeping()
        model = make_stack()
        OneRank(world.mesh, world.strategy, backend).shard(
            *units_in(model), mixed_precision_policy=POLICIES[policy]
        )
        for _ in range(2):
            told = explain(model).bytes
            assert backend.live_bytes == told.between_steps == told.main + told.kept
            model(batch()).sum().backward()
            assert backend.live_bytes == told.between_steps + told.gradients
            model.zero_grad()
        full_state_dict(model)  # may need one more, which is kept then
        told = explain(model).bytes
        assert backend.live_bytes == told.between_steps == told.main + told.kept

    @pytest.mark.parametrize(
        "schedule",
        [
            SchedulePolicy(),
            SchedulePolicy(forward_units=0, backward_units=0),
            SchedulePolicy(forward_units=2, backward_units=0),
            SchedulePolicy(forward_elements=400, backward_elements=100),
        ],
    )
    @pytest.mark.parametrize("inner", ["alike", "not ahead", "far ahead"])
    @pytest.mark.parametrize("reshard", [True, False])
    def test_most_gathered(
        self, zero3: OneRank, schedule: SchedulePolicy, reshard: bool, inner: str
    ) -> None:
        """What is gathered at one time is at most, and at some time, what is told."""
        backend = GatherMeter()
        model = make_stack()
        inside = {
            "alike": schedule,
            "not ahead": SchedulePolicy(forward_units=0, backward_units=0),
            "far ahead": SchedulePolicy(forward_units=4, backward_units=3),
        }[inner]
        world = OneRank(zero3.mesh, "zero3", backend)
        for block in model.blocks:
            world.shard(block.narrow, schedule_policy=inside)
            world.shard(block, schedule_policy=schedule, reshard_after_forward=reshard)
        world.shard(model, schedule_policy=schedule)
        for step in range(3):
            (order,) = explain(model).orders
            loss = model(batch()).sum()
            assert backend.restart() == order.most_gathered_forward
            loss.backward()
            assert order.most_gathered_backward in (backend.restart(), None)
            assert (order.most_gathered_backward is None) is (step == 0)


class Backwards(Stack):
    """Runs its blocks from the last to the first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.last(x)


class TestOrders:
    def test_from_the_first_forward_on(self, zero3: OneRank) -> None:
        """As registered, then as units came, and backward once one has run."""
        model = Backwards()
        zero3.shard(*units_in(model))
        (order,) = explain(model).orders
        assert not order.has_run
        assert order.forward == ("", "blocks.0", "blocks.1", "blocks.2")
        assert order.backward is None
        assert "as registered: no forward has run yet" in str(explain(model))
        loss = model(batch()).sum()
        (order,) = explain(model).orders
        assert order.has_run
        assert order.forward == ("", "blocks.2", "blocks.1", "blocks.0")
        assert order.backward is None
        assert "not known before the first backward" in str(explain(model))
        loss.backward()
        (order,) = explain(model).orders
        assert order.backward == ("", "blocks.0", "blocks.1", "blocks.2")
        assert "registered" not in str(explain(model))
        assert "not known" not in str(explain(model))

    def test_it_is_what_is_prefetched(self, mesh: DeviceMesh) -> None:
        """Gathers come in the order that is told."""
        backend = SpyBackend()
        model = Backwards()
        OneRank(mesh, "zero3", backend).shard(*units_in(model))
        model(batch()).sum().backward()
        (order,) = explain(model).orders
        backend.gathers()
        loss = model(batch()).sum()
        assert tuple(backend.gathers()) == tuple(name or "Backwards" for name in order.forward)
        loss.backward()
        assert order.backward is not None
        assert tuple(backend.gathers()) == tuple(name or "Backwards" for name in order.backward)

    def test_several_roots(self, zero3: OneRank) -> None:
        """Units that nothing contains have orders of their own, before and after they ran."""
        model = nn.Module()
        model.left, model.right = make_stack(), make_stack()
        zero3.shard(*units_in(model.left), *units_in(model.right))
        model.left(batch())
        left, right = explain(model).orders
        assert (left.has_run, right.has_run) == (True, False)
        assert left.forward == ("left", "left.blocks.0", "left.blocks.1", "left.blocks.2")
        assert right.forward == ("right", "right.blocks.0", "right.blocks.1", "right.blocks.2")

    def test_units_outside(self, zero3: OneRank) -> None:
        """The order of a part of a model has the units around it, and no sum that lacks them."""
        model = make_stack()
        zero3.shard(*units_in(model))
        model(batch())
        (order,) = explain(model.blocks).orders
        assert order.forward == ("Stack", "0", "1", "2")
        assert order.most_gathered_forward is order.most_gathered_backward is None


def state(model: nn.Module, backend: SpyBackend) -> list[object]:
    """All that a look could change."""
    context = model.fsdp_context  # type: ignore[union-attr]
    return [
        list(backend.labels),
        backend.live_bytes,
        [id(parameter) for parameter in model.parameters()],
        [(group.residence, group.epochs()) for group in groups(model)],
        [parameter.full._version for group in groups(model) for parameter in group.parameters],
        [id(parameter.grad) for parameter in model.parameters()],
        (context.forward_order, context.backward_order, context.window_open, context.traffic()),
    ]


class TestLooking:
    @pytest.mark.parametrize("strategy", ["zero3", "ddp"])
    def test_changes_nothing(self, mesh: DeviceMesh, strategy: str, tmp_path: Path) -> None:
        """At rest, in a forward, in a backward and in `unsharded`, all stays as it was."""
        backend = SpyBackend()
        looks = 0

        def look(*_args: object) -> None:
            nonlocal looks
            before = state(model, backend)
            str(explain(model, picture=tmp_path / "layout.svg"))
            assert state(model, backend) == before
            looks += 1

        model = Watched(look)
        OneRank(mesh, strategy, backend).shard(*units_in(model))
        look()
        with microbatch(model, is_last=False):
            model(batch()).sum().backward()
        look()
        model(batch()).sum().backward()
        look()
        with unsharded(model):
            look()
        assert looks == 4 + 2 * 6

    def test_the_same_inside_a_forward(self, world: OneRank) -> None:
        """What is told does not depend on which faces parameters show."""
        seen = []
        model = Watched(lambda *_args: seen.append(explain(model).units))
        world.shard(*units_in(model))
        model(batch()).sum().backward()
        assert all(units == explain(model).units for units in seen)
        assert len(seen) == 6

    def test_keeps_nothing_alive(self, zero3: OneRank) -> None:
        """An explanation outlives its model, which is freed as if it were not there."""
        model = make_stack()
        zero3.shard(*units_in(model))
        model(batch()).sum().backward()
        found = explain(model)
        watched = [weakref.ref(model), weakref.ref(unit(model)), weakref.ref(groups(model)[0])]
        gc.disable()
        try:
            del model
            assert [reference() for reference in watched] == [None] * 3
        finally:
            gc.enable()
        assert "Stack" in str(found)
        assert found.svg()
