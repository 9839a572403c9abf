"""Orders of passes: failures, repeated and interleaved ones, recomputation, units called alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from one_rank import (
    Block,
    OneRank,
    Pair,
    Stack,
    assert_same_grads,
    assert_same_weights,
    backward_each,
    batch,
    gathered_bytes,
    make_stack,
    train,
    twins,
    unit,
    units_in,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyshard import microbatch
from polyshard.sharded_tensor import ShardedTensor


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(batch(seed)).square().mean()


def assert_at_rest(model: nn.Module) -> None:
    """Parameters show their sharded face and nothing is gathered."""
    assert all(isinstance(parameter, ShardedTensor) for parameter in model.parameters())
    assert gathered_bytes(model) == 0
    assert all(unit(module).depth == 0 for module in units_in(model))


class Failure(Exception):
    """Raised on purpose."""


def fail_in(module: nn.Module, when: str) -> list[torch.utils.hooks.RemovableHandle]:
    """Make a module raise before or after its forward, or before or after its backward."""

    def fail(*_: object) -> None:
        raise Failure

    def fail_in_backward(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(fail)

    if when == "before forward":
        return [module.register_forward_pre_hook(fail)]
    if when == "after forward":
        return [module.register_forward_hook(fail)]
    if when == "in backward":
        return [module.register_forward_hook(fail_in_backward)]
    return [module.register_full_backward_hook(fail)]


PLACES: dict[str, Callable[[Stack], nn.Module]] = {
    "root": lambda model: model,
    "unit": lambda model: model.blocks[1],
    "inside a unit": lambda model: model.blocks[1].narrow,
    "first layer": lambda model: model.first,
}


@pytest.mark.behaviour(19)
class TestFailures:
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize(
        "when", ["before forward", "after forward", "in backward", "after backward"]
    )
    @pytest.mark.parametrize("steps_before", [0, 1])
    def test_then_a_good_step(self, pair: Pair, place: str, when: str, steps_before: int) -> None:
        """After an exception in forward or backward, training goes on as if nothing had been."""
        model, reference = pair
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in pair]
        for step in range(steps_before + 3):
            if step == steps_before:
                handles = fail_in(PLACES[place](model), when)
                with pytest.raises(Failure):
                    loss_of(model, 9).backward()
                for handle in handles:
                    handle.remove()
                assert all(isinstance(shown, ShardedTensor) for shown in model.parameters())
                model.zero_grad()
                assert all(parameter.grad is None for parameter in model.parameters())
            for module, optimizer in zip(pair, optimizers, strict=True):
                loss_of(module, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_at_rest(model)
        assert_same_weights(model, reference)

    @pytest.mark.parametrize("when", ["after forward", "in backward"])
    def test_accumulated_gradients_survive(self, pair: Pair, when: str, reshard: bool) -> None:
        """What earlier backwards accumulated is still there after one that failed."""
        model, reference = pair
        for module in pair:
            loss_of(module, 0).backward()
        handles = fail_in(model.last, when)
        with pytest.raises(Failure):
            loss_of(model, 9).backward()
        for handle in handles:
            handle.remove()
        if when == "in backward" and reshard:
            assert_at_rest(model)
        assert_same_grads(model, reference)
        for module in pair:
            loss_of(module, 1).backward()
        assert_same_grads(model, reference)

    def test_several_in_a_row(self, pair: Pair) -> None:
        """Failures pile nothing up."""
        model, reference = pair
        for when in ("in backward", "after forward", "after backward", "before forward") * 2:
            handles = fail_in(model.blocks[0], when)
            with pytest.raises(Failure):
                loss_of(model, 9).backward()
            for handle in handles:
                handle.remove()
        model.zero_grad()
        for module in pair:
            loss_of(module, 0).backward()
        assert_same_grads(model, reference)

    def test_that_the_caller_handles(self, world: OneRank) -> None:
        """A unit whose exception its parent catches is at rest, and the parent goes on."""

        class Catching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.good, self.bad = Block(4), Block(4)

            def forward(self, x: Tensor) -> Tensor:
                try:
                    return self.bad(x[:, :3])
                except RuntimeError:
                    return self.good(x)

        torch.manual_seed(0)
        model, reference = twins(Catching())
        world.shard(model.good, model.bad, model)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
        assert_same_weights(model, reference)

    def test_at_the_end_of_a_backward(
        self, world: OneRank, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the end of a backward fails in one root, the others of it are at rest as well."""
        failing, other, plain = make_stack(), make_stack(), make_stack()
        world.shard(*units_in(failing))
        world.shard(*units_in(other))

        def fail() -> None:
            raise Failure

        loss = loss_of(other, 1) + loss_of(failing, 1)  # the root that ran last ends first
        with monkeypatch.context() as patch:
            patch.setattr(failing.fsdp_context, "_settle", fail)
            with pytest.raises(Failure):
                loss.backward()
        assert failing.fsdp_context.backward is other.fsdp_context.backward is None
        for model in (failing, other):
            assert_at_rest(model)
            model.zero_grad()
            loss_of(model, 2).backward()
        loss_of(plain, 2).backward()
        assert_same_grads(failing, plain)
        assert_same_grads(other, plain)


@pytest.mark.behaviour(14)
class TestRepeated:
    def test_backward_twice(self, pair: Pair) -> None:
        """A graph that was kept may be run again, and its gradients add up."""
        model, reference = pair
        for module in pair:
            loss = loss_of(module, 0)
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        assert_same_grads(model, reference)

    def test_backward_twice_without_keeping_the_graph(self, pair: Pair) -> None:
        """A freed graph gives the error that plain PyTorch gives, and the model goes on."""
        model, reference = pair
        loss = loss_of(model, 0)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        loss_of(reference, 0).backward()
        for module in pair:
            loss_of(module, 1).backward()
        assert_same_grads(model, reference)

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
    def test_forwards_before_their_backwards(self, pair: Pair, order: Sequence[int]) -> None:
        """Several forwards, then their backwards in any order: gradients add up."""
        model, reference = pair
        for module in pair:
            losses = [loss_of(module, seed) for seed in range(3)]
            backward_each([losses[index] for index in order])
        assert_same_grads(model, reference)
        assert gathered_bytes(model) == 0

    def test_one_backward_over_several_forwards(self, pair: Pair) -> None:
        """One backward may cover several forwards."""
        model, reference = pair
        for module in pair:
            sum(loss_of(module, seed) for seed in range(3)).backward()
        assert_same_grads(model, reference)

    def test_a_forward_whose_backward_never_comes(self, pair: Pair) -> None:
        """A forward that is dropped changes nothing."""
        model, reference = pair
        for step in range(3):
            model(batch(9))
            for module in pair:
                module.zero_grad()
                loss_of(module, step).backward()
        assert_same_grads(model, reference)

    def test_an_output_fed_back(self, pair: Pair) -> None:
        """The root may be called on its own output."""
        model, reference = pair
        for module in pair:
            x = module(batch())
            module(torch.cat([x, x[:, :1]], dim=1)).square().sum().backward()
        assert_same_grads(model, reference)

    def test_gradients_of_the_input(self, pair: Pair) -> None:
        """autograd.grad for an input leaves no gradient on any parameter, and backward after it
        is plain."""
        grads = []
        for module in pair:
            x = batch().requires_grad_()
            output = module(x)
            grads += torch.autograd.grad(output.square().sum(), x, retain_graph=True)
            assert all(parameter.grad is None for parameter in module.parameters())
            output.square().sum().backward()
        torch.testing.assert_close(grads[0], grads[1])
        assert_same_grads(*pair)


@pytest.mark.behaviour(29)
class TestAlone:
    def test_a_child_then_its_parent(self, pair: Pair) -> None:
        """A unit that ran alone first runs under its parent afterwards."""
        model, reference = pair
        for module in pair:
            module.blocks[1](batch(width=6)).sum().backward()
            loss_of(module, 0).backward()
        assert_same_grads(model, reference)

    def test_a_parent_then_its_child(self, pair: Pair) -> None:
        """A unit that ran under its parent runs alone afterwards, and again under it."""
        model, reference = pair
        for module in pair:
            loss_of(module, 0).backward()
            module.blocks[1](batch(width=6)).sum().backward()
            loss_of(module, 1).backward()
        assert_same_grads(model, reference)

    def test_a_child_inside_its_parents_window(self, pair: Pair) -> None:
        """A unit may run alone between its parent's forward and backward."""
        model, reference = pair
        for module in pair:
            loss = loss_of(module, 0)
            module.blocks[1](batch(width=6)).sum().backward()
            loss.backward()
        assert_same_grads(model, reference)

    def test_two_models(self, world: OneRank) -> None:
        """Two models trained on one loss, in one backward, do not mix."""
        torch.manual_seed(0)
        first, plain_first = twins(make_stack())
        second, plain_second = twins(nn.Sequential(Block(3), Block(3)))
        world.shard(*units_in(first), second[0], second)
        for _ in range(2):
            for one, other in ((first, second), (plain_first, plain_second)):
                other(one(batch())).square().sum().backward()
        assert_same_grads(first, plain_first)
        assert_same_grads(second, plain_second)


class Checkpointed(nn.Module):
    """Blocks under activation checkpointing, around units or inside them."""

    def __init__(self, reentrant: bool, inside: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            (CheckpointingBlock(reentrant) if inside else Block(6)) for _ in range(3)
        )
        self.last = nn.Linear(6, 3)
        self.reentrant, self.inside = reentrant, inside

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.inside:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointingBlock(Block):
    """Recomputes its own inner layers, and uses a parameter of its own there."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(6)
        self.scale = nn.Parameter(torch.randn(6))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return self.narrow(torch.relu(self.widen(x))) * self.scale


@pytest.mark.behaviour(16)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
class TestCheckpointing:
    @pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
    def test_trains(self, world: OneRank, reshard: bool, reentrant: bool, inside: bool) -> None:
        """Recomputed activations give plain training, and leave nothing gathered."""
        torch.manual_seed(0)
        model, reference = twins(Checkpointed(reentrant, inside))
        world.shard(*units_in(model), reshard_after_forward=reshard)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
        assert_same_weights(model, reference)
        assert_at_rest(model)

    @pytest.mark.parametrize("inner", [True, False], ids=["reentrant-inside", "inside"])
    def test_nested(self, world: OneRank, reshard: bool, reentrant: bool, inner: bool) -> None:
        """A region that is recomputed may hold another one."""

        class Nested(Block):
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(super().forward, x, use_reentrant=inner)

        class Around(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.block = nn.Linear(4, 6), Nested(6)

            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

        torch.manual_seed(0)
        model, reference = twins(Around())
        world.shard(model.block, model, reshard_after_forward=reshard)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
        assert_same_weights(model, reference)
        assert all(isinstance(shown, ShardedTensor) for shown in model.parameters())

    def test_with_microbatches(self, world: OneRank, reshard: bool, reentrant: bool) -> None:
        """Recomputation and accumulation go together."""
        torch.manual_seed(0)
        model, reference = twins(Checkpointed(reentrant, inside=False))
        world.shard(*units_in(model), reshard_after_forward=reshard)
        for micro in range(3):
            with microbatch(model, is_last=micro == 2):
                loss_of(model, micro).backward()
            loss_of(reference, micro).backward()
        assert_same_grads(model, reference)

    @pytest.mark.behaviour(32)
    def test_a_module_used_twice(self, world: OneRank, reshard: bool, reentrant: bool) -> None:
        """Gradients of a module that is checkpointed at both of its uses add up once each."""

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.block = nn.Linear(4, 6), Block(6)

            def forward(self, x: Tensor) -> Tensor:
                x = self.first(x)
                for _ in range(2):
                    x = checkpoint(self.block, x, use_reentrant=reentrant)
                return x

        torch.manual_seed(0)
        model, reference = twins(Twice())
        world.shard(model.block, model, reshard_after_forward=reshard)
        for _ in range(2):
            for module in (model, reference):
                loss_of(module, 0).backward()
        assert_same_grads(model, reference)

    def test_around_the_whole_model(self, world: OneRank, reshard: bool, reentrant: bool) -> None:
        """The root itself may be recomputed."""
        model, reference = twins(make_stack())
        world.shard(*units_in(model), reshard_after_forward=reshard)
        for _ in range(2):
            for module in (model, reference):
                x = batch().requires_grad_()
                checkpoint(module, x, use_reentrant=reentrant).square().sum().backward()
        assert_same_grads(model, reference)
        assert gathered_bytes(model) == 0

    def test_a_failed_recomputation(self, world: OneRank, reshard: bool, reentrant: bool) -> None:
        """After an exception in a recomputed forward, the next step is as if nothing had been."""
        torch.manual_seed(0)
        model, reference = twins(Checkpointed(reentrant, inside=False))
        world.shard(*units_in(model), reshard_after_forward=reshard)
        loss = loss_of(model, 9)
        handles = fail_in(model.blocks[1].widen, "after forward")
        with pytest.raises(Failure):
            loss.backward()
        assert_at_rest(model)
        handles[0].remove()
        model.zero_grad()
        for module in (model, reference):
            loss_of(module, 0).backward()
        assert_same_grads(model, reference)
        assert_at_rest(model)
