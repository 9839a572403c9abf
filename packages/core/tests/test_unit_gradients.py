"""Gradients of one rank: accumulation, clearing, what users put into .grad, and divisors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from one_rank import (
    OneRank,
    Pair,
    assert_same_grads,
    assert_same_weights,
    batch,
    make_stack,
    twins,
    unit,
    units_in,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from polyshard import MixedPrecisionPolicy, Placements, UnsupportedError, fully_shard
from polyshard.sharded_tensor import ShardedTensor
from polyshard.testing.loopback import LoopbackBackend


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return model(batch(seed)).square().mean()


@pytest.fixture
def pair(world: OneRank) -> Pair:
    """A sharded model and its plain twin."""
    model, reference = twins(make_stack())
    world.shard(*units_in(model))
    return model, reference


class TestAccumulation:
    @pytest.mark.parametrize("backwards", [2, 5])
    def test_backwards_add_up(self, pair: Pair, backwards: int) -> None:
        """Without any scope, gradients of several backwards add up, and are final after each."""
        model, reference = pair
        for seed in range(backwards):
            for module in pair:
                loss_of(module, seed).backward()
            assert_same_grads(model, reference)

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_steps_of_several_backwards(self, pair: Pair, set_to_none: bool) -> None:
        """Accumulating, stepping and clearing, step after step, is plain training."""
        for module in pair:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
            for step in range(3):
                for micro in range(2):
                    loss_of(module, 2 * step + micro).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        assert_same_weights(*pair)

    def test_a_gradient_that_is_held(self, pair: Pair) -> None:
        """A gradient that someone took before goes on showing the sum, as a plain one does."""
        model, reference = pair
        for module in pair:
            loss_of(module, 0).backward()
        ours, theirs = model.last.weight.grad, reference.last.weight.grad
        for module in pair:
            loss_of(module, 1).backward()
        torch.testing.assert_close(ours.full_tensor(), theirs)
        assert model.last.weight.grad is ours

    def test_a_backward_that_fails_takes_nothing_away(self, pair: Pair) -> None:
        """Gradients of before are there after a backward that failed, with its part or without;
        plain PyTorch keeps the part that it came to."""

        def fail(_grad: Tensor) -> None:
            raise ZeroDivisionError

        for module in pair:
            loss_of(module, 0).backward()
        model, reference = pair
        before = {name: each.grad.clone() for name, each in reference.named_parameters()}
        for module in pair:
            module.first.register_forward_hook(
                lambda *given: given[-1].register_hook(fail) and None
            )
            with pytest.raises(ZeroDivisionError):
                loss_of(module, 1).backward()
        for (name, parameter), plain in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert parameter.grad is not None, name
            found = parameter.grad.full_tensor()
            kept = (before[name], plain.grad)
            assert any(torch.allclose(found, each, atol=1e-6) for each in kept), name

    def test_used_in_one_of_two_backwards(self, world: OneRank) -> None:
        """A parameter that only one of the backwards reaches has that one's gradient."""
        torch.manual_seed(0)
        model, reference = twins(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}))

        class Either(nn.Module):
            def __init__(self, branches: nn.ModuleDict) -> None:
                super().__init__()
                self.branches = branches

            def forward(self, name: str, x: Tensor) -> Tensor:
                return self.branches[name](x)

        modules = [Either(model), Either(reference)]
        world.shard(modules[0])
        for order in ("ab", "ba", "bb"):
            for module in modules:
                module.zero_grad()
                for seed, name in enumerate(order):
                    module(name, batch(seed)).square().sum().backward()
            assert_same_grads(*modules)


class TestClearing:
    def test_to_none(self, pair: Pair) -> None:
        """Nothing of what was cleared comes back."""
        for module in pair:
            loss_of(module, 0).backward()
            module.zero_grad(set_to_none=True)
            assert all(parameter.grad is None for parameter in module.parameters())
            loss_of(module, 1).backward()
        assert_same_grads(*pair)

    def test_to_zero(self, pair: Pair) -> None:
        """Zeroed gradients stay where they are and are added to."""
        model, _ = pair
        for module in pair:
            loss_of(module, 0).backward()
        before = model.last.weight.grad
        for module in pair:
            module.zero_grad(set_to_none=False)
        assert model.last.weight.grad is before
        assert all((p.grad.full_tensor() == 0).all() for p in model.parameters())
        for module in pair:
            loss_of(module, 1).backward()
        assert_same_grads(*pair)

    @pytest.mark.parametrize("name", ["last.weight", "first.bias", "blocks.1.widen.weight"])
    def test_one_parameter_only(self, pair: Pair, name: str) -> None:
        """Clearing one gradient of a group leaves the others."""
        for module in pair:
            loss_of(module, 0).backward()
            module.get_parameter(name).grad = None
            loss_of(module, 1).backward()
        assert_same_grads(*pair)

    @pytest.mark.parametrize("name", ["last.weight", "first.bias"])
    def test_and_freezing(self, world: OneRank, name: str) -> None:
        """A parameter that was cleared and frozen gets no gradient, the others go on adding up."""
        model, reference = twins(make_stack())
        world.shard(model)
        for module in (model, reference):
            loss_of(module, 0).backward()
            module.get_parameter(name).grad = None
            module.get_parameter(name).requires_grad_(False)
            loss_of(module, 1).backward()
        assert model.get_parameter(name).grad is None
        assert_same_grads(model, reference)


class TestWhatUsersPutThere:
    @pytest.mark.parametrize(
        "change",
        [
            lambda grad: grad.mul_(0.5),
            lambda grad: grad.copy_(torch.ones_like(grad)),
            lambda grad: grad.zero_(),
        ],
    )
    def test_in_place_changes(self, pair: Pair, change: Callable[[Tensor], object]) -> None:
        """A gradient that was changed in place is what the next backward adds to."""
        for module in pair:
            loss_of(module, 0).backward()
            for parameter in module.parameters():
                change(parameter.grad)
            loss_of(module, 1).backward()
        assert_same_grads(*pair)

    @pytest.mark.parametrize("names", [["last.weight"], ["first.weight", "first.bias"], None])
    def test_another_tensor(self, pair: Pair, names: list[str] | None) -> None:
        """A tensor put in a gradient's place is what the next backward adds to."""
        for module in pair:
            loss_of(module, 0).backward()
            for name, parameter in module.named_parameters():
                if names is None or name in names:
                    parameter.grad = parameter.grad * 3
            loss_of(module, 1).backward()
        assert_same_grads(*pair)

    def test_before_any_backward(self, pair: Pair) -> None:
        """A gradient given before the first backward is added to."""
        for module in pair:
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter).detach()
            loss_of(module, 0).backward()
        assert_same_grads(*pair)

    def test_it_is_copied_from(self, pair: Pair) -> None:
        """A tensor that stood in for a gradient keeps its memory to itself once taken up."""
        model, _ = pair
        loss_of(model, 0).backward()
        mine = model.last.weight.grad.clone()
        model.last.weight.grad = mine
        before = mine.full_tensor()
        loss_of(model, 1).backward()
        assert isinstance(model.last.weight.grad, ShardedTensor)
        assert model.last.weight.grad is not mine
        assert torch.equal(mine.full_tensor(), before)

    def test_a_plain_tensor_is_refused(self, pair: Pair) -> None:
        """A gradient of another kind is named at the next backward, and the model goes on."""
        model, reference = pair
        model.last.weight.grad = torch.ones(3, 6)
        with pytest.raises(UnsupportedError, match=r"\.grad given to 'last.weight' does not lie"):
            loss_of(model, 0).backward()
        model.zero_grad()
        for module in pair:
            loss_of(module, 1).backward()
        assert_same_grads(model, reference)

    def test_post_accumulate_hooks_are_refused(self, pair: Pair) -> None:
        """A hook that autograd would never call is refused when it is registered."""
        model, _ = pair
        with pytest.raises(UnsupportedError, match=r"register_post_accumulate_grad_hook.* refused"):
            model.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class TestDivisor:
    def test_divides_every_contribution_once(self, world: OneRank) -> None:
        """grad_divisor divides gradients, and what was accumulated no second time."""
        model, reference = twins(make_stack())
        world.shard(*units_in(model), grad_divisor=4.0)
        for seed in range(3):
            loss_of(model, seed).backward()
            (loss_of(reference, seed) / 4).backward()
        assert_same_grads(model, reference)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_with_gradients_of_another_dtype(self, world: OneRank, dtype: torch.dtype) -> None:
        """Contributions are divided, rounded once, and added to what was there."""
        policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=dtype)
        model, reference = twins(nn.Linear(4, 3, bias=False))
        world.shard(model, mixed_precision_policy=policy, grad_divisor=3.0)
        expected = torch.zeros(3, 4)
        for seed in range(3):
            model(batch(seed)).square().sum().backward()
            reference.zero_grad()
            reference(batch(seed)).square().sum().backward()
            expected += (reference.weight.grad / 3).to(dtype).float()
        torch.testing.assert_close(model.weight.grad.full_tensor(), expected, rtol=1e-6, atol=1e-6)


class Scaling(nn.Module):
    """A small weight in two reentrant checkpoints, between layers, of which one is large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 40)
        self.scale = nn.Parameter(torch.randn(4))

    def scaled(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.scaled, x, use_reentrant=True)
        return self.layer(x)


class TestSmallBatchesOfGradients:
    def test_packed_before_the_group_is_complete(self, zero3: OneRank) -> None:
        """Gradients are taken over in batches: no unit holds all of them twice."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8)))
        zero3.shard(model)
        gradients = unit(model).groups[0].gradients
        pending: list[int] = []
        for layer in model[1:]:
            layer.register_full_backward_pre_hook(
                lambda *_: pending.append(sum(grad.numel() for _, grad in gradients._pending))
            )
        model(batch()).sum().backward()
        assert max(pending) <= 2 * 16  # a quarter of eight layers
        assert len(pending) == 7

    def test_no_gradient_is_kept_on_full_parameters(self, world: OneRank) -> None:
        """After a backward the full parameters hold no gradients."""
        model = make_stack()
        full = list(model.parameters())
        world.shard(*units_in(model))
        loss_of(model, 0).backward()
        assert all(parameter.grad is None for parameter in full)

    def test_several_gradients_of_a_weight_at_once(self, zero3: OneRank) -> None:
        """A small weight whose gradient comes several times before any is packed gets their sum."""
        torch.manual_seed(0)
        model, reference = twins(Scaling())
        zero3.shard(model)
        for module in (model, reference):
            module(batch()).square().sum().backward()
        assert_same_grads(model, reference)

    def test_sparse_gradients(self, world: OneRank) -> None:
        """A sparse gradient becomes a dense one with the same values."""
        torch.manual_seed(0)
        model, reference = twins(nn.Sequential(nn.Embedding(5, 3, sparse=True)))
        world.shard(model)
        for module in (model, reference):
            module(torch.tensor([1, 1, 3])).square().sum().backward()
        torch.testing.assert_close(
            model[0].weight.grad.full_tensor(), reference[0].weight.grad.to_dense()
        )


def test_a_scalars_gradient_is_replaced(mesh: DeviceMesh) -> None:
    """What stands in for the gradient of a 0-D parameter is taken up where its row is split over an
    axis of one rank."""

    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    model, reference = twins(Scaled())
    two_axes = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    fully_shard(model, two_axes, Placements.hsdp("outer", "inner"), backend=LoopbackBackend())
    for each in (model, reference):
        each(batch(0)).sum().backward()
        for parameter in each.parameters():
            parameter.grad = parameter.grad * 0.5
        each(batch(1)).sum().backward()
    assert_same_grads(model, reference)
