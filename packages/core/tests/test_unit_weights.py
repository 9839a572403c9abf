"""Whole weights from outside a forward: unsharded scopes and full state dicts, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_rank import (
    OneRank,
    assert_same_weights,
    batch,
    gathered_bytes,
    make_stack,
    plain,
    train,
    twins,
    units_in,
)
from torch import Tensor, nn

from polyshard import MixedPrecisionPolicy, full_state_dict, unsharded
from polyshard.sharded_tensor import ShardedTensor

BF16 = MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
Pair = tuple[nn.Module, nn.Module]


@pytest.fixture(params=[None, BF16], ids=["fp32", "bf16"])
def policy(request: pytest.FixtureRequest) -> MixedPrecisionPolicy | None:
    return request.param


@pytest.fixture
def pair(world: OneRank) -> Pair:
    """A sharded model and its plain twin."""
    model, reference = twins(make_stack())
    world.shard(*units_in(model))
    return model, reference


def faces(model: nn.Module) -> set[type]:
    return {type(parameter) for parameter in model.parameters()}


class TestUnsharded:
    def test_inside_and_outside(self, pair: Pair) -> None:
        """Inside, parameters are plain and whole; outside, they are what they were."""
        model, reference = pair
        before = list(model.parameters())
        with unsharded(model):
            assert faces(model) == {nn.Parameter}
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours, theirs)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        assert gathered_bytes(model) == 0

    def test_one_unit_alone(self, pair: Pair) -> None:
        """Without recursion only the unit itself is whole."""
        model, _ = pair
        with unsharded(model, recurse=False):
            assert faces(model.blocks) == {ShardedTensor}
            assert type(model.first.weight) is nn.Parameter
        with unsharded(model.blocks):
            assert faces(model.blocks) == {nn.Parameter}
            assert type(model.first.weight) is ShardedTensor
        with unsharded(model.blocks, recurse=False):
            assert faces(model) == {ShardedTensor}

    def test_nested_scopes(self, pair: Pair) -> None:
        """Parameters are whole until the outermost scope ends."""
        model, _ = pair
        with unsharded(model):
            with unsharded(model.blocks[0]):
                pass
            assert faces(model) == {nn.Parameter}
            assert torch.isfinite(model.blocks[0].widen.weight).all()
        assert faces(model) == {ShardedTensor}

    def test_changes_are_kept(self, pair: Pair) -> None:
        """What is changed inside is what the next forward, and training, start from."""
        model, reference = pair
        with unsharded(model):
            for module in pair:
                torch.manual_seed(1)
                for parameter in module.parameters():
                    nn.init.normal_(parameter)
        assert_same_weights(model, reference)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)

    def test_changes_through_data(self, pair: Pair) -> None:
        """Writes that autograd does not see are kept, too."""
        model, reference = pair
        model(batch())
        with unsharded(model):
            for module in pair:
                for parameter in module.parameters():
                    parameter.data.mul_(0.5)
        assert_same_weights(model, reference)
        torch.testing.assert_close(model(batch()), reference(batch()))

    def test_without_writing_back(self, zero3: OneRank) -> None:
        """Told so, changes to gathered weights are dropped."""
        model, reference = twins(make_stack())
        zero3.shard(*units_in(model))
        with unsharded(model, writeback=False), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_same_weights(model, reference)

    def test_after_an_exception(self, zero3: OneRank) -> None:
        """After an exception nothing is copied, and everything is at rest."""
        model, reference = twins(make_stack())
        zero3.shard(*units_in(model))

        def change_and_fail() -> None:
            with unsharded(model), torch.no_grad():
                model.first.weight.zero_()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            change_and_fail()
        assert faces(model) == {ShardedTensor}
        assert gathered_bytes(model) == 0
        assert_same_weights(model, reference)

    def test_exact_weights_survive(self, world: OneRank) -> None:
        """Where compute is less precise, weights that were not changed keep their exact values,
        also next to some that were."""
        model = nn.Linear(4, 3)
        exact = model.weight.detach().clone()
        assert not torch.equal(exact, exact.bfloat16().float())
        world.shard(model, mixed_precision_policy=BF16)
        with unsharded(model), torch.no_grad():
            assert model.weight.dtype == torch.bfloat16
            model.weight[1] = 2.0
        expected = exact.clone()
        expected[1] = 2.0
        assert torch.equal(model.weight.full_tensor(), expected)

    def test_a_forward_inside(self, world: OneRank, policy: MixedPrecisionPolicy | None) -> None:
        """A forward inside a scope uses what was written there, before and after it."""
        model, reference = twins(make_stack())
        world.shard(*units_in(model), mixed_precision_policy=policy)
        dtype = torch.float32 if policy is None else torch.bfloat16
        reference.to(dtype)
        with unsharded(model):
            for module in (model, reference):
                with torch.no_grad():
                    module.blocks[1].widen.weight.mul_(2.0)
                    module.last.weight.add_(1.0)
            assert torch.equal(model(batch()), reference(batch().to(dtype)))
            assert faces(model) == {nn.Parameter}
        assert torch.equal(model(batch()), reference(batch().to(dtype)))
        assert faces(model) == {ShardedTensor}

    def test_a_backward_inside(self, pair: Pair) -> None:
        """A whole step inside a scope gives plain gradients once the scope has ended."""
        model, reference = pair
        with unsharded(model):
            model(batch()).square().sum().backward()
            assert faces(model) == {nn.Parameter}
        reference(batch()).square().sum().backward()
        assert_same_weights(model, reference)

    def test_a_backward_after_it(self, pair: Pair) -> None:
        """A backward whose forward ran inside the scope may run outside."""
        model, reference = pair
        with unsharded(model):
            for module in pair:
                with torch.no_grad():
                    module.last.weight.mul_(2.0).add_(1.0)
            loss = model(batch()).square().sum()
        loss.backward()
        reference(batch()).square().sum().backward()
        assert_same_weights(model, reference)

    def test_parameters_of_odd_kinds(self, world: OneRank) -> None:
        """0-D, empty, integer and complex parameters can be read and written whole."""
        values = [
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.arange(3),
            torch.randn(2, dtype=torch.complex64),
            torch.tensor([True, False]),
        ]

        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for index, value in enumerate(values):
                    floating = value.is_floating_point() or value.is_complex()
                    self.register_parameter(f"p{index}", nn.Parameter(value.clone(), floating))

            def forward(self) -> None: ...

        odd = Odd()
        world.shard(odd)
        with unsharded(odd), torch.no_grad():
            for parameter, value in zip(odd.parameters(), values, strict=True):
                assert torch.equal(parameter, value)
                parameter.copy_(torch.ones_like(parameter))
        for parameter, value in zip(odd.parameters(), values, strict=True):
            assert torch.equal(plain(parameter), torch.ones_like(value))

    def test_a_module_without_units(self) -> None:
        """Without units there is nothing to do."""
        model = make_stack()
        with unsharded(model):
            assert faces(model) == {nn.Parameter}


class Stateful(nn.Module):
    """Tied weights, buffers that persist and one that does not, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.into(x))) * self.scale


class TestFullStateDict:
    def test_is_that_of_the_plain_model(self, world: OneRank) -> None:
        """Keys in order, buffers, tied names, extra state and values are the plain model's, after
        training as well; and a plain model loads it."""
        torch.manual_seed(0)
        model, reference = twins(Stateful())
        world.shard(model)
        for _ in range(2):
            ours, theirs = full_state_dict(model), reference.state_dict()
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                if isinstance(value, Tensor):
                    assert type(ours[name]) is Tensor, name
                    torch.testing.assert_close(ours[name], value)
                else:
                    assert ours[name] == value
            train(model)
            train(reference)
        fresh = Stateful()
        fresh.load_state_dict(full_state_dict(model))
        torch.testing.assert_close(fresh(batch()), reference(batch()))

    @pytest.mark.parametrize("cpu_offload", [True, False])
    def test_shares_nothing(self, world: OneRank, cpu_offload: bool) -> None:
        """Neither weights nor buffers of the result are the model's memory."""
        model = Stateful()
        world.shard(model)
        state = full_state_dict(model, cpu_offload=cpu_offload)
        before = {name: plain(value).clone() for name, value in model.named_parameters()}
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
        assert torch.equal(model.table, torch.arange(3.0))
        for name, parameter in model.named_parameters():
            assert torch.equal(plain(parameter), before[name])

    def test_in_main_precision(self, world: OneRank) -> None:
        """Weights come as exact as the optimizer has them."""
        model = nn.Linear(4, 3)
        exact = model.weight.detach().clone()
        world.shard(model, mixed_precision_policy=BF16)
        assert torch.equal(full_state_dict(model)["weight"], exact)
        low = nn.Linear(4, 3).bfloat16()
        world.shard(low)
        assert full_state_dict(low)["weight"].dtype == torch.float32

    def test_units_below_a_plain_module(self, world: OneRank) -> None:
        """Parameters that no unit owns are in it as they are."""
        model, reference = twins(make_stack())
        world.shard(*model.blocks)
        state = full_state_dict(model)
        for name, value in reference.state_dict().items():
            assert torch.equal(state[name], value)
            assert not state[name].requires_grad

    def test_on_rank_0_only(self, pair: Pair) -> None:
        """Rank 0 has everything even if only it is to."""
        model, reference = pair
        assert list(full_state_dict(model, rank0_only=True)) == list(reference.state_dict())

    def test_inside_a_scope(self, pair: Pair) -> None:
        """Taken inside an unsharded scope it has the weights from before the scope: changes are
        taken in at its end."""
        model, reference = pair
        with unsharded(model):
            state = full_state_dict(model)
        assert list(state) == list(reference.state_dict())
        for name, value in reference.state_dict().items():
            assert torch.equal(state[name], value)

    def test_leaves_nothing_behind(self, zero3: OneRank) -> None:
        """Afterwards nothing is gathered, and training is plain training."""
        model, reference = twins(make_stack())
        zero3.shard(*units_in(model))
        full_state_dict(model)
        assert gathered_bytes(model) == 0
        assert train(model) == pytest.approx(train(reference), rel=1e-5)
