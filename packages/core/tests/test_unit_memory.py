"""What units hold and for how long: gathered weights, gradients, and everything once deleted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from one_rank import (
    Block,
    OneRank,
    SpyBackend,
    Stack,
    batch,
    gathered_bytes,
    groups,
    make_stack,
    train,
    unit,
    units_in,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard import MixedPrecisionPolicy, SchedulePolicy, full_state_dict, microbatch, unsharded

BLOCK_BYTES = 4 * sum(parameter.numel() for parameter in Block().parameters())
ROOT_BYTES = 4 * (4 * 6 + 6 + 6 * 3)


class Sampled(Stack):
    """Notes what is gathered while a block computes, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_bytes: list[list[int]] = []
        self.backward_bytes: list[list[int]] = []
        for block in self.blocks:
            block.widen.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.forward_bytes.append(self.gathered())
        output.register_hook(lambda _grad: self.backward_bytes.append(self.gathered()))

    def gathered(self) -> list[int]:
        return [gathered_bytes(block) for block in self.blocks]


class TestGathered:
    def test_released_after_forward_and_after_backward(self, zero3: OneRank) -> None:
        """Between passes nothing gathered holds memory."""
        model = make_stack()
        zero3.shard(*units_in(model))
        assert gathered_bytes(model) == 0
        loss = model(batch()).sum()
        assert gathered_bytes(model) == 0
        loss.backward()
        assert gathered_bytes(model) == 0

    def test_one_storage_for_life(self, zero3: OneRank) -> None:
        """Gathering again refills the storage that autograd saved views of."""
        model = make_stack()
        zero3.shard(*units_in(model))
        storages = [group.full.flat.untyped_storage()._cdata for group in groups(model)]
        train(model)
        assert [group.full.flat.untyped_storage()._cdata for group in groups(model)] == storages

    def test_in_forward_and_in_backward(self, zero3: OneRank) -> None:
        """Without prefetch a block is gathered while it computes, and no other one is."""
        model = Sampled()
        off = SchedulePolicy(forward_units=0, backward_units=0)
        zero3.shard(*units_in(model), schedule_policy=off)
        model(batch()).sum().backward()
        b = BLOCK_BYTES
        assert model.forward_bytes == [[b, 0, 0], [0, b, 0], [0, 0, b]]
        assert model.backward_bytes == [[0, 0, b], [0, b, 0], [b, 0, 0]]

    def test_prefetched(self, zero3: OneRank) -> None:
        """With prefetch the next block is there too, in forward and in backward, and no third."""
        model = Sampled()
        zero3.shard(*units_in(model))
        for _ in range(2):
            model.forward_bytes.clear()
            model.backward_bytes.clear()
            model(batch()).sum().backward()
        b = BLOCK_BYTES
        assert model.forward_bytes == [[b, b, 0], [0, b, b], [0, 0, b]]
        assert model.backward_bytes == [[0, b, b], [b, b, 0], [b, 0, 0]]

    def test_kept_between_forward_and_backward(self, zero3: OneRank) -> None:
        """Without resharding, weights stay from forward to backward and no longer."""
        model = make_stack()
        zero3.shard(*units_in(model), reshard_after_forward=False)
        loss = model(batch()).sum()
        assert gathered_bytes(model) == 3 * BLOCK_BYTES + ROOT_BYTES
        loss.backward()
        assert gathered_bytes(model) == 0

    def test_kept_until_the_window_ends(self, zero3: OneRank) -> None:
        """Without resharding a forward gathered in an open window stays until its backward; the
        window ends with the backward of the last microbatch, and then nothing is left."""
        model = make_stack()
        zero3.shard(*units_in(model), reshard_after_forward=False)
        with microbatch(model, is_last=False):
            model(batch()).sum().backward()
        with microbatch(model, is_last=True):
            loss = model(batch(1)).sum()
        assert gathered_bytes(model) == 3 * BLOCK_BYTES + ROOT_BYTES
        loss.backward()
        assert gathered_bytes(model) == 0

    @pytest.mark.parametrize("reshard", [True, False])
    def test_without_gradients(self, zero3: OneRank, reshard: bool) -> None:
        """A no-grad forward leaves nothing gathered, whatever the resharding."""
        model = make_stack()
        zero3.shard(*units_in(model), reshard_after_forward=reshard)
        with torch.no_grad():
            model(batch())
        assert gathered_bytes(model) == 0

    @pytest.mark.parametrize("reshard", [True, False])
    def test_an_evaluation_inside_a_window(self, zero3: OneRank, reshard: bool) -> None:
        """A no-grad forward between a forward and its backward leaves nothing gathered at the end
        of the window."""
        model = make_stack()
        zero3.shard(*units_in(model), reshard_after_forward=reshard)
        loss = model(batch()).sum()
        with torch.no_grad():
            model(batch(1))
        loss.backward()
        assert gathered_bytes(model) == 0

    def test_partly_frozen_units(self, zero3: OneRank) -> None:
        """A unit whose parameters are partly or wholly frozen is released as well."""
        model = make_stack()
        model.blocks[0].widen.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        zero3.shard(*units_in(model))
        for _ in range(3):
            loss = model(batch()).sum()
            assert gathered_bytes(model) == 0
            loss.backward()
            assert gathered_bytes(model) == 0

    @pytest.mark.parametrize("reshard", [True, False])
    def test_an_interrupted_forward(self, zero3: OneRank, reshard: bool) -> None:
        """After an exception in forward nothing stays gathered."""
        model = make_stack()
        zero3.shard(*units_in(model), reshard_after_forward=reshard)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(batch(width=5))
        # What an open window may keep goes with the next pass that ends one.
        model(batch()).sum().backward()
        assert gathered_bytes(model) == 0

    def test_copies_of_another_dtype(self, world: OneRank) -> None:
        """Copies cast for compute are dropped when their window ends."""
        policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
        model = make_stack()
        world.shard(*units_in(model), mixed_precision_policy=policy)
        loss = model(batch()).sum()
        if world.strategy == "ddp":
            assert gathered_bytes(model) == (3 * BLOCK_BYTES + ROOT_BYTES) // 2
        loss.backward()
        assert gathered_bytes(model) == 0
        with torch.no_grad():
            model(batch())
        assert gathered_bytes(model) == 0


@pytest.fixture(params=["zero3", "ddp"])
def spied(request: pytest.FixtureRequest, mesh: DeviceMesh) -> tuple[OneRank, SpyBackend]:
    """A world whose buffers are counted."""
    backend = SpyBackend()
    return OneRank(mesh, request.param, backend), backend


class TestBuffers:
    def test_between_steps(self, spied: tuple[OneRank, SpyBackend]) -> None:
        """At rest there are the main weights and, until cleared, the gradients: nothing else."""
        world, backend = spied
        model = make_stack()
        world.shard(*units_in(model))
        weights = backend.live_bytes
        assert weights >= sum(4 * parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(batch(step)).sum().backward()
            assert backend.live_bytes == 2 * weights
            optimizer.step()
            optimizer.zero_grad()
            assert backend.live_bytes == weights

    def test_gradients_die_with_their_owners(self, spied: tuple[OneRank, SpyBackend]) -> None:
        """A unit's gradient memory goes when the last .grad that shows it goes."""
        world, backend = spied
        model = nn.Linear(4, 3)
        world.shard(model)
        weights = backend.live_bytes
        model(batch()).sum().backward()
        held = model.bias.grad
        model.zero_grad()
        assert backend.live_bytes == 2 * weights
        del held
        assert backend.live_bytes == weights

    def test_reading_whole_weights(self, spied: tuple[OneRank, SpyBackend]) -> None:
        """unsharded and full_state_dict leave nothing behind."""
        world, backend = spied
        model = make_stack()
        world.shard(*units_in(model))
        weights = backend.live_bytes
        with unsharded(model):
            pass
        full_state_dict(model)
        assert backend.live_bytes == weights


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """References alone decide what lives."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def raise_in_backward(model: nn.Module) -> None:
    def fail(grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    output = model(batch())
    output.register_hook(fail)
    output.sum().backward()


def raise_in_forward(model: nn.Module) -> None:
    model(batch(width=5))


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch())


def look_inside(model: nn.Module) -> None:
    with unsharded(model):
        pass
    full_state_dict(model)


HISTORIES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "a forward": lambda model: model(batch()),
    "training": train,
    "gradients left": lambda model: model(batch()).sum().backward(),
    "an evaluation": evaluate,
    "a look inside": look_inside,
    "a failed forward": raise_in_forward,
    "a failed backward": raise_in_backward,
}


@pytest.mark.usefixtures("no_garbage_collection")
class TestDeletion:
    @pytest.mark.parametrize("history", HISTORIES)
    def test_frees_everything_at_once(
        self, spied: tuple[OneRank, SpyBackend], history: str
    ) -> None:
        """With the last reference, modules, units, groups and storage go, whatever ran before."""
        world, backend = spied
        model = make_stack()
        model.blocks[1].requires_grad_(False)
        world.shard(*units_in(model))
        watched = [weakref.ref(module) for module in model.modules()]
        watched += [weakref.ref(unit(module)) for module in units_in(model)]
        for group in groups(model):
            watched += [weakref.ref(group), weakref.ref(group.gradients), weakref.ref(group.layout)]
            watched += [weakref.ref(group.main), weakref.ref(group.full)]
            watched += [weakref.ref(parameter.full) for parameter in group.parameters]
            watched += [weakref.ref(parameter.sharded) for parameter in group.parameters]
        watched.append(weakref.ref(model.fsdp_context))
        with suppress(RuntimeError):
            HISTORIES[history](model)
        del group, model
        assert [reference() for reference in watched if reference() is not None] == []
        assert backend.live_bytes == 0

    def test_a_class_that_holds_its_layers_goes(self, world: OneRank) -> None:
        """So does, with the next garbage collection, a model whose class was made in a function and
        refers to its layers."""

        def make() -> nn.Module:
            layer = nn.Linear(3, 3)

            class Local(nn.Module):
                def forward(self, x: Tensor) -> Tensor:
                    return layer(x)

            local = Local()
            local.layer = layer
            return local

        model = make()
        world.shard(model)
        watched = weakref.ref(model)
        del model
        gc.collect()
        assert watched() is None

    def test_a_graph_outlives_its_model(self, world: OneRank) -> None:
        """A backward after its model was deleted runs, as plain PyTorch's does."""
        model = make_stack()
        world.shard(*units_in(model))
        x = batch().requires_grad_()
        loss = model(x).square().sum()
        del model
        loss.backward()
        reference = make_stack()
        y = batch().requires_grad_()
        reference(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)

    def test_a_parameter_outlives_its_model(self, world: OneRank) -> None:
        """A parameter that someone kept still has its values."""
        model = make_stack()
        world.shard(*units_in(model))
        kept = model.last.weight
        values = kept.full_tensor()
        module = weakref.ref(model)
        del model
        assert module() is None
        assert torch.equal(kept.full_tensor(), values)
