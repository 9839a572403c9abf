"""Every forward uses the weights as they are, and a backward whose saved weights changed raises."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from one_rank import OneRank, batch, make_stack, twins, units_in
from torch import Tensor, nn

from polyshard import (
    FsdpModule,
    MixedPrecisionPolicy,
    UnsupportedError,
    full_state_dict,
    microbatch,
    unsharded,
)

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(compute_dtype=torch.bfloat16),
}


class Pair:
    """A sharded model and a plain twin to which the same is done."""

    def __init__(self, world: OneRank, policy: str, reshard: bool) -> None:
        self.model, self.reference = twins(make_stack())
        self.compute = POLICIES[policy].compute_dtype or torch.float32
        world.shard(
            *units_in(self.model),
            mixed_precision_policy=POLICIES[policy],
            reshard_after_forward=reshard,
        )

    def change(self, seed: int) -> dict[str, Tensor]:
        """New weights, already the twin's."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.reference.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return dict(self.reference.named_parameters())

    def check(self) -> None:
        """The next forward computes with the weights that the twin has."""
        expected = copy.deepcopy(self.reference).to(self.compute)(batch().to(self.compute))
        with torch.no_grad():
            torch.testing.assert_close(self.model(batch()), expected)
        torch.testing.assert_close(self.model(batch()), expected)


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[True, False], ids=["reshard", "keep"])
def reshard(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def pair(world: OneRank, policy: str, reshard: bool) -> Pair:
    return Pair(world, policy, reshard)


def copy_one_by_one(pair: Pair, seed: int) -> None:
    new = pair.change(seed)
    with torch.no_grad():
        for name, parameter in pair.model.named_parameters():
            parameter.copy_(new[name])


def copy_all_at_once(pair: Pair, seed: int) -> None:
    new = pair.change(seed)
    with torch.no_grad():
        ours = [parameter.to_local() for parameter in pair.model.parameters()]
        torch._foreach_mul_(list(pair.model.parameters()), 0.0)
        for local, value in zip(ours, new.values(), strict=True):
            local.add_(value)


def copy_into_local(pair: Pair, seed: int) -> None:
    new = pair.change(seed)
    for name, parameter in pair.model.named_parameters():
        parameter.to_local().detach().copy_(new[name])


def copy_into_data(pair: Pair, seed: int) -> None:
    new = pair.change(seed)
    for name, parameter in pair.model.named_parameters():
        parameter.data.copy_(new[name])


def copy_in_inference_mode(pair: Pair, seed: int) -> None:
    new = pair.change(seed)
    with torch.inference_mode():
        for name, parameter in pair.model.named_parameters():
            parameter.copy_(new[name])


def load_state_dict(pair: Pair, seed: int) -> None:
    pair.model.load_state_dict(pair.change(seed))


def write_unsharded(pair: Pair, seed: int) -> None:
    new = pair.change(seed)
    with unsharded(pair.model), torch.no_grad():
        for name, parameter in pair.model.named_parameters():
            parameter.copy_(new[name])


WRITES = [
    copy_one_by_one,
    copy_all_at_once,
    copy_into_local,
    copy_into_data,
    copy_in_inference_mode,
    load_state_dict,
    write_unsharded,
]
Write = Callable[[Pair, int], None]


@pytest.mark.parametrize("write", WRITES)
class TestWritesAreSeen:
    def test_between_evaluations(self, pair: Pair, write: Write) -> None:
        """An evaluation after a swap of the weights uses the new ones."""
        pair.model.eval()
        pair.check()
        for seed in range(2):
            write(pair, seed)
            pair.check()

    def test_after_a_backward_and_an_evaluation(self, pair: Pair, write: Write) -> None:
        """A backward, an evaluation, a write, a forward: the last one uses the new weights."""
        for seed in range(2):
            pair.model(batch()).sum().backward()
            with torch.no_grad():
                pair.model(batch())
            write(pair, seed)
            pair.check()

    def test_inside_a_window(self, pair: Pair, write: Write) -> None:
        """Between microbatches, and between a forward and the next, new weights are used."""
        with microbatch(pair.model, is_last=False):
            pair.model(batch()).sum().backward()
            write(pair, 0)
            pair.check()
            write(pair, 1)
            pair.check()

    def test_in_inference_mode_before_training(self, pair: Pair, write: Write) -> None:
        """Forwards in inference mode, before any training and between writes, are fresh, and the
        training that follows works."""
        for seed in range(2):
            with torch.inference_mode():
                pair.model(batch())
            write(pair, seed)
            pair.check()
            pair.model(batch()).sum().backward()
            assert all(parameter.grad is not None for parameter in pair.model.parameters())


class TestSteps:
    @pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}])
    def test_optimizer_steps(self, pair: Pair, options: dict[str, bool]) -> None:
        """After every kind of step, evaluation and training use the stepped weights."""
        parameters = pair.model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
        for step in range(3):
            pair.model(batch(step)).square().sum().backward()
            with torch.no_grad():
                pair.model(batch(step))
            optimizer.step()
            optimizer.zero_grad()
            pair.reference.load_state_dict(full_state_dict(pair.model))
            pair.check()


# -- weights changed between a forward and its backward ---------------------------------------


class TwoHeads(nn.Module):
    """A trunk, a frozen layer before it, an embedding, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.trunk = nn.Linear(4, 6)
        self.one = nn.Linear(6, 3)
        self.two = nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.trunk(self.frozen(torch.ones(1, 4)) + self.embedding(tokens)))
        return self.one(x), self.two(x)


TOKENS = torch.tensor([1, 5, 5, 2])
UNITS: dict[str, Callable[[nn.Module], list[nn.Module]]] = {
    "one unit": lambda model: [model],
    "a unit each": lambda model: [model.trunk, model.one, model.two, model.frozen, model],
}


def outcome(model: nn.Module, changed: str, how: Callable[[nn.Module, str], None]) -> str:
    """Whether a backward through the second head raises after a change of one parameter."""
    _, two = model(TOKENS)
    how(model, changed)
    try:
        two.square().sum().backward()
    except RuntimeError as error:
        return "raised" if "has been modified by an inplace operation" in str(error) else str(error)
    return "passed"


def write(model: nn.Module, name: str) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(2.0)


def step(model: nn.Module, name: str) -> None:
    parameter = model.get_parameter(name)
    parameter.grad = torch.ones_like(parameter).detach()
    torch.optim.SGD([parameter], lr=0.1).step()
    parameter.grad = None


def write_whole(model: nn.Module, name: str) -> None:
    if isinstance(model, FsdpModule):
        with unsharded(model):
            write(model, name)
    else:
        write(model, name)


NAMES = [name for name, _ in TwoHeads().named_parameters()]


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("how", [write, step, write_whole])
@pytest.mark.parametrize("name", NAMES)
def test_raises_where_plain_pytorch_does(
    world: OneRank, reshard: bool, units: str, how: Callable[[nn.Module, str], None], name: str
) -> None:
    """A changed weight is an error exactly if the backward needs what it was, and the gradients
    are plain PyTorch's otherwise."""
    torch.manual_seed(0)
    model, reference = twins(TwoHeads())
    world.shard(*UNITS[units](model), reshard_after_forward=reshard)
    expected = outcome(reference, name, how)
    assert expected == ("raised" if name in ("trunk.weight", "two.weight") else "passed")
    assert outcome(model, name, how) == expected
    for module in (model, reference):
        module.zero_grad()
        sum(out.square().sum() for out in module(TOKENS)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("units", UNITS)
def test_heads_with_their_own_optimizers(world: OneRank, reshard: bool, units: str) -> None:
    """A head may be stepped before the other head's backward."""
    torch.manual_seed(0)
    model, reference = twins(TwoHeads())
    world.shard(*UNITS[units](model), reshard_after_forward=reshard)
    for module in (model, reference):
        heads = (module.one, module.two)
        optimizers = [torch.optim.SGD(head.parameters(), lr=0.1) for head in heads]
        for _ in range(3):
            outputs = module(TOKENS)
            for head, (output, optimizer) in enumerate(zip(outputs, optimizers, strict=True)):
                output.square().sum().backward(retain_graph=head == 0)
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())


@pytest.mark.parametrize("units", UNITS)
def test_looking_is_no_change(world: OneRank, reshard: bool, units: str) -> None:
    """Reading whole weights between a forward and its backward is no error."""
    model = TwoHeads()
    world.shard(*UNITS[units](model), reshard_after_forward=reshard)
    outputs = model(TOKENS)
    full_state_dict(model)
    with unsharded(model):
        pass
    with torch.no_grad():
        model(TOKENS)
    sum(output.sum() for output in outputs).backward()


@pytest.mark.behaviour(35)
class TestForwardsThatWrite:
    @pytest.mark.parametrize("grad", [True, False])
    def test_max_norm_is_refused(self, world: OneRank, grad: bool) -> None:
        """A forward that rewrites its weight is refused, with the unit, the parameter and a way."""
        model = nn.Sequential(nn.Embedding(5, 3))
        world.shard(model)
        model[0].max_norm = 0.1
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(UnsupportedError, match=r"unit 'Sequential' wrote .*'0.weight'.*unshard"),
        ):
            model(torch.tensor([1, 2]))

    def test_max_norm_that_changes_nothing(self, zero3: OneRank) -> None:
        """After the refusal, weights and model are as before."""
        model, reference = twins(nn.Sequential(nn.Embedding(5, 3)))
        zero3.shard(model)
        model[0].max_norm = 0.1
        with pytest.raises(UnsupportedError):
            model(torch.tensor([1, 2]))
        assert torch.equal(model[0].weight.full_tensor(), reference[0].weight)
        model[0].max_norm = None
        model(torch.tensor([1, 2])).sum().backward()
        assert model[0].weight.grad is not None
