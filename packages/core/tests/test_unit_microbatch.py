"""microbatch scopes on one rank: what accumulates, when gradients are final, how scopes nest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from one_rank import (
    OneRank,
    Pair,
    SpyBackend,
    assert_same_grads,
    assert_same_weights,
    batch,
    make_stack,
    twins,
    units_in,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial

from polyshard import MixedPrecisionPolicy, UnsupportedError, microbatch


@pytest.fixture
def pair(world: OneRank) -> Pair:
    """A sharded model and its plain twin."""
    model, reference = twins(make_stack())
    world.shard(*units_in(model))
    return model, reference


class Either(nn.Module):
    """Uses the one layer or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(batch(seed)).square().mean()


def is_partial(model: nn.Module) -> bool:
    """Whether gradients still wait for their reduction."""
    partial = {
        any(isinstance(placement, TorchPartial) for placement in parameter.grad.placements)
        for parameter in model.parameters()
        if parameter.grad is not None
    }
    assert len(partial) == 1
    return partial.pop()


def flags(model: nn.Module) -> list[bool]:
    return [unit.fsdp_context.is_last for unit in units_in(model)]


class TestAccumulation:
    @pytest.mark.parametrize("count", [1, 2, 4])
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_steps(self, pair: Pair, count: int, set_to_none: bool) -> None:
        """Steps of several microbatches are plain training on all of them."""
        model, reference = pair
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in pair]
        for step in range(3):
            for micro in range(count):
                seed = step * count + micro
                with microbatch(model, is_last=micro == count - 1):
                    loss_of(model, seed).backward()
                loss_of(reference, seed).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        assert_same_weights(model, reference)

    def test_final_on_the_last_one_only(self, world: OneRank, pair: Pair) -> None:
        """Gradients that are Partial stay so until the last microbatch; others never are."""
        model, reference = pair
        for micro in range(3):
            with microbatch(model, is_last=micro == 2):
                loss_of(model, micro).backward()
            loss_of(reference, micro).backward()
            assert is_partial(model) == (world.strategy == "ddp" and micro < 2)
        assert_same_grads(model, reference)

    def test_after_a_backward_without_scope(self, pair: Pair) -> None:
        """Scoped microbatches add to what a backward without scope left."""
        model, reference = pair
        loss_of(model, 0).backward()
        with microbatch(model, is_last=False):
            loss_of(model, 1).backward()
        with microbatch(model, is_last=True):
            loss_of(model, 2).backward()
        loss_of(model, 3).backward()
        for seed in range(4):
            loss_of(reference, seed).backward()
        assert_same_grads(model, reference)

    def test_without_the_last_one(self, pair: Pair) -> None:
        """A backward without scope finishes what scoped ones accumulated."""
        model, reference = pair
        with microbatch(model, is_last=False):
            loss_of(model, 0).backward()
        loss_of(model, 1).backward()
        for seed in range(2):
            loss_of(reference, seed).backward()
        assert not is_partial(model)
        assert_same_grads(model, reference)

    def test_a_step_in_the_middle(self, ddp: OneRank) -> None:
        """An optimizer step on sums that wait for the last microbatch is refused."""
        model = make_stack()
        ddp.shard(*units_in(model))
        with microbatch(model, is_last=False):
            loss_of(model, 0).backward()
        before = model.last.weight.full_tensor()
        with pytest.raises(UnsupportedError, match=r"SGD.step\(\): the gradient of"):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert torch.equal(model.last.weight.full_tensor(), before)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_clearing_in_the_middle(self, pair: Pair, set_to_none: bool) -> None:
        """zero_grad between microbatches drops those before it."""
        model, reference = pair
        with microbatch(model, is_last=False):
            loss_of(model, 0).backward()
            model.zero_grad(set_to_none=set_to_none)
            loss_of(model, 1).backward()
        with microbatch(model, is_last=True):
            loss_of(model, 2).backward()
        for seed in (1, 2):
            loss_of(reference, seed).backward()
        assert_same_grads(model, reference)

    def test_scaling_in_the_middle(self, pair: Pair) -> None:
        """A gradient scaled in place between microbatches stays scaled."""
        model, reference = pair
        with microbatch(model, is_last=False):
            loss_of(model, 0).backward()
        loss_of(reference, 0).backward()
        for module in pair:
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
        with microbatch(model, is_last=True):
            loss_of(model, 1).backward()
        loss_of(reference, 1).backward()
        assert_same_grads(model, reference)

    @pytest.mark.parametrize("used", ["abb", "bab", "bba", "bbb"])
    def test_used_in_one_microbatch_only(self, world: OneRank, used: str) -> None:
        """A parameter that one microbatch used has its gradient, whichever it was."""
        torch.manual_seed(0)
        model, reference = twins(Either())
        world.shard(model)
        for micro, name in enumerate(used):
            with microbatch(model, is_last=micro == 2):
                model(batch(micro), name).square().sum().backward()
            reference(batch(micro), name).square().sum().backward()
        assert_same_grads(model, reference)

    def test_bf16_gradients_in_fp32(self, world: OneRank) -> None:
        """bf16 contributions are accumulated without rounding the sum, and reduced once."""
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32)
        model, reference = twins(nn.Linear(4, 3, bias=False).bfloat16())
        world.shard(model, mixed_precision_policy=policy)
        expected = torch.zeros(3, 4)
        for micro in range(8):
            x = batch(micro).bfloat16()
            with microbatch(model, is_last=micro == 7):
                model(x).square().sum().backward()
            reference.zero_grad()
            reference(x).square().sum().backward()
            expected += reference.weight.grad.float()
        assert model.weight.grad.dtype == torch.float32
        torch.testing.assert_close(model.weight.grad.full_tensor(), expected)


class TestTheFlagTravels:
    def test_with_the_forward(self, world: OneRank, pair: Pair) -> None:
        """The flag is read at the forward: a backward outside its scope is no last one."""
        model, reference = pair
        with microbatch(model, is_last=False):
            loss = loss_of(model, 0)
        loss.backward()
        assert is_partial(model) == (world.strategy == "ddp")
        with microbatch(model, is_last=True):
            loss = loss_of(model, 1)
        with microbatch(model, is_last=False):
            loss.backward()
        assert not is_partial(model)
        for seed in range(2):
            loss_of(reference, seed).backward()
        assert_same_grads(model, reference)

    @pytest.mark.parametrize("lasts", [(False, True), (True, False), (False, False), (True, True)])
    def test_one_backward_over_two_forwards(
        self, world: OneRank, pair: Pair, lasts: Sequence[bool]
    ) -> None:
        """A backward that covers several forwards is final if any of them is a last one."""
        model, reference = pair
        losses = []
        for seed, is_last in enumerate(lasts):
            with microbatch(model, is_last=is_last):
                losses.append(loss_of(model, seed))
        sum(losses).backward()
        sum(loss_of(reference, seed) for seed in range(2)).backward()
        assert is_partial(model) == (world.strategy == "ddp" and not any(lasts))
        if any(lasts):
            assert_same_grads(model, reference)

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_backwards_in_both_orders(
        self, world: OneRank, pair: Pair, order: Sequence[int]
    ) -> None:
        """Of two forwards before their backwards, each backward has its own forward's flag."""
        model, reference = pair
        losses = []
        for seed in range(2):
            with microbatch(model, is_last=seed == 1):
                losses.append(loss_of(model, seed))
        for seed in order:
            losses[seed].backward()
            loss_of(reference, seed).backward()
            assert is_partial(model) == (world.strategy == "ddp" and seed == 0)
            # One rank's contribution is the value, reduced or not.
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad.to_local(), theirs.grad)

    @pytest.mark.parametrize("first_is_last", [True, False])
    def test_one_backward_over_forwards_of_different_units(
        self, world: OneRank, first_is_last: bool
    ) -> None:
        """A unit that completes before backward reaches the last forward is finished, too."""
        torch.manual_seed(0)
        model, reference = twins(Either())
        world.shard(model.a, model.b, model)
        losses = []
        for name, is_last in (("a", first_is_last), ("b", not first_is_last)):
            with microbatch(model, is_last=is_last):
                losses.append(model(batch(), name).square().sum())
        sum(losses).backward()
        sum(reference(batch(), name).square().sum() for name in "ab").backward()
        assert not is_partial(model)
        assert_same_grads(model, reference)

    def test_evaluations_take_no_part(self, pair: Pair) -> None:
        """No-grad forwards in a scope, in and between microbatches, change nothing."""
        model, reference = pair
        for micro in range(2):
            with microbatch(model, is_last=micro == 1):
                with torch.no_grad():
                    model(batch(9))
                loss = loss_of(model, micro)
                with torch.no_grad():
                    model(batch(9))
                loss.backward()
            loss_of(reference, micro).backward()
        assert_same_grads(model, reference)


class TestHowOftenUnitsAreReduced:
    """Where several forwards wait for their backwards."""

    @staticmethod
    def reductions(backend: SpyBackend) -> list[str]:
        """The units whose gradients were reduced since this was last asked, in order."""
        found = [label.partition(" (")[0] for label in backend.labels if "reduce grad" in label]
        backend.labels.clear()
        return found

    def test_once_for_all(self, mesh: DeviceMesh) -> None:
        """One backward over two forwards reduces each unit once; so does the next one."""
        backend, model = SpyBackend(), make_stack()
        OneRank(mesh, "zero3", backend).shard(*units_in(model))
        for _ in range(3):
            losses = [loss_of(model, seed) for seed in range(2)]
            self.reductions(backend)
            sum(losses).backward()
            assert sorted(self.reductions(backend)) == sorted(
                ["Stack", *(f"blocks.{index}" for index in range(3))]
            )

    def test_once_for_each(self, mesh: DeviceMesh) -> None:
        """A backward for each of two forwards reduces each unit once in each; from the second pair
        on, while it goes on to the others."""
        backend, model = SpyBackend(), make_stack()
        OneRank(mesh, "zero3", backend).shard(*units_in(model))
        early: list[int] = []

        def look(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            output.register_hook(
                lambda _grad: early.append(sum("reduce grad" in each for each in backend.labels))
            )

        model.first.register_forward_hook(look)
        for pair in range(3):
            losses = [loss_of(model, seed) for seed in range(2)]
            for loss in losses:
                self.reductions(backend)
                loss.backward()
                assert len(self.reductions(backend)) == 4
            if pair > 0:
                assert min(early[-2:]) > 0


class TestScopes:
    def test_nest_and_come_back(self, pair: Pair) -> None:
        """The innermost scope counts, and each gives back what was before it."""
        model, _ = pair
        assert flags(model) == [True] * 4
        with microbatch(model, is_last=False):
            assert flags(model) == [False] * 4
            with microbatch(model.blocks[0], is_last=True):
                assert flags(model) == [True, False, False, False]
            assert flags(model) == [False] * 4
        assert flags(model) == [True] * 4

    def test_after_an_exception(self, pair: Pair) -> None:
        """A scope that was left by an exception gives back the flag, too."""
        model, _ = pair
        with pytest.raises(ZeroDivisionError), microbatch(model, is_last=False):
            raise ZeroDivisionError
        assert flags(model) == [True] * 4

    def test_around_the_first_forward(self, world: OneRank, pair: Pair) -> None:
        """The first forward, at which contexts become one, keeps the flag of its scope."""
        model, reference = pair
        with microbatch(model, is_last=False):
            loss_of(model, 0).backward()
            assert flags(model) == [False] * 4
        assert is_partial(model) == (world.strategy == "ddp")
        assert flags(model) == [True] * 4
        with microbatch(model, is_last=True):
            loss_of(model, 1).backward()
        for seed in range(2):
            loss_of(reference, seed).backward()
        assert_same_grads(model, reference)

    def test_of_a_container(self, world: OneRank) -> None:
        """A scope may be opened on a module that is no unit but contains some."""
        model = make_stack()
        world.shard(*model.blocks)
        with microbatch(model, is_last=False):
            model(batch()).sum().backward()
        assert is_partial(model.blocks) == (world.strategy == "ddp")
        with microbatch(model, is_last=True):
            model(batch()).sum().backward()
        assert not is_partial(model.blocks)

    def test_without_units(self) -> None:
        """A module without units is refused, with what to do first."""
        with (
            pytest.raises(UnsupportedError, match="Stack has no units; call fully_shard"),
            microbatch(make_stack(), is_last=True),
        ):
            pass
