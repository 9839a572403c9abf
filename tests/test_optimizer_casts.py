"""fully_shard_optimizer: steps of fp32 main weights on bf16 gradients."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import STRATEGIES, Strategy
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from training import OddModel, loss_of, make_batches, make_model, shard

from polyshard import UnsupportedError, full_state_dict, fully_shard_optimizer, microbatch
from polyshard.testing import run_ranks

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (AdamW, {"lr": 1e-2, "foreach": False}),
    "adamw-foreach": (AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-fused": (AdamW, {"lr": 1e-2, "fused": True}),
}


# -- on several ranks --------------------------------------------------------------------------


def bf16_model(strategy: Strategy, shape: tuple[int, ...]) -> OddModel:
    """bf16 in forward, backward and gradients; fp32 main weights."""
    model = make_model(torch.bfloat16)
    shard(model, strategy.mesh(shape), strategy.placements)
    return model


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    tokens, targets = make_batches(step + 1, 1, dist.get_world_size())
    return tokens[step, 0, rank], targets[step, 0, rank]


def _follow(rank: int, strategy: Strategy, shape: tuple[int, ...]) -> dict[str, Any]:
    """Steps beside a plain optimizer that is given the whole gradients, cast."""
    final: dict[str, Any] = {}
    for name, (kind, options) in OPTIMIZERS.items():
        model = bf16_model(strategy, shape)
        twins = {key: p.detach().full_tensor() for key, p in model.named_parameters()}
        optimizer, plain = kind(model.parameters(), **options), kind(twins.values(), **options)
        fully_shard_optimizer(optimizer)
        seen: set[torch.dtype] = set()
        optimizer.register_step_pre_hook(
            lambda opt, *_, seen=seen: seen.update(
                p.grad.dtype
                for group in opt.param_groups
                for p in group["params"]
                if p.grad is not None
            )
        )
        for step in range(3):
            loss_of(model, *batch_of(rank, step)).backward()
            grads = {key: p.grad for key, p in model.named_parameters()}
            for key, grad in grads.items():
                twins[key].grad = None if grad is None else grad.full_tensor().float()
            optimizer.step()
            plain.step()
            for key, parameter in model.named_parameters():
                assert parameter.grad is grads[key]
                assert grads[key] is None or grads[key].dtype == torch.bfloat16
                # The rows of a rank and the whole tensor end in different vector remainders.
                torch.testing.assert_close(
                    parameter.detach().full_tensor(), twins[key], rtol=1e-6, atol=1e-8
                )
            optimizer.zero_grad()
        assert seen == {torch.float32}
        final[name] = full_state_dict(model)
    return final


@pytest.mark.parametrize(
    ("name", "shape"), [("zero3", (2,)), ("zero1", (2,)), ("ddp", (2,)), ("hfsdp", (2, 2))]
)
def test_steps_are_those_of_cast_gradients(name: str, shape: tuple[int, ...]) -> None:
    """Every step equals a plain one on the whole gradients in fp32; they are bf16 again after."""
    results = run_ranks(math.prod(shape), _follow, STRATEGIES[name], shape)
    start = make_model(torch.bfloat16).head.weight.float()
    for found in results:
        for kind, weights in found.items():
            assert not torch.equal(weights["head.weight"], start), kind
            for key, value in weights.items():
                assert torch.equal(value, results[0][kind][key]), (kind, key)


def _refusals(rank: int) -> None:
    model = bf16_model(STRATEGIES["ddp"], (2,))
    optimizer = SGD(model.parameters(), lr=0.1)
    before = full_state_dict(model)
    with microbatch(model, is_last=False):
        loss_of(model, *batch_of(rank, 0)).backward()
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(UnsupportedError, match="last microbatch"):
        optimizer.step()
    fully_shard_optimizer(optimizer)
    with pytest.raises(UnsupportedError, match="last microbatch"):
        optimizer.step()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, before[name])
    with microbatch(model, is_last=True):
        loss_of(model, *batch_of(rank, 1)).backward()
    with pytest.raises(UnsupportedError, match=r"fully_shard_optimizer\(optimizer\)"):
        SGD(model.parameters(), lr=0.1).step()
    optimizer.step()
    assert not torch.equal(full_state_dict(model)["head.weight"], before["head.weight"])


def test_what_a_step_refuses() -> None:
    """Unprepared steps name the remedy; between microbatches nothing is stepped or left cast."""
    run_ranks(2, _refusals)


class PrecisionAware(Optimizer):
    """Descends on gradients as they are; notes their dtypes."""

    def __init__(self, parameters: Any, lr: float, *, foreach: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.foreach = foreach
        self.seen: set[torch.dtype] = set()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            self.seen.update(p.grad.dtype for p in parameters)
            if self.foreach:
                torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-group["lr"])
            else:
                for p in parameters:
                    p.add_(p.grad, alpha=-group["lr"])


def _precision_aware(rank: int) -> None:
    for foreach in (False, True):
        model = bf16_model(STRATEGIES["zero3"], (2,))
        optimizer = PrecisionAware(model.parameters(), 0.5, foreach=foreach)
        loss_of(model, *batch_of(rank, 0)).backward()
        with pytest.raises(UnsupportedError, match="fully_shard_optimizer"):
            optimizer.step()
        assert not optimizer.seen
        fully_shard_optimizer(optimizer, precision_aware=True)
        expected = {
            name: p.detach().full_tensor() - 0.5 * p.grad.full_tensor().float()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        optimizer.step()
        assert optimizer.seen == {torch.bfloat16}
        weights = full_state_dict(model)
        torch.testing.assert_close({name: weights[name] for name in expected}, expected)
        parameter = next(p for p in model.parameters() if p.grad is not None)
        with pytest.raises(UnsupportedError, match="precision"), torch.no_grad():
            parameter.add_(parameter.grad)


def test_precision_aware() -> None:
    """Such an optimizer gets bf16 gradients and may combine them; outside its step nobody may."""
    run_ranks(2, _precision_aware)


# -- on plain parameters -----------------------------------------------------------------------


def make_parameter() -> nn.Parameter:
    """fp32, with a bf16 gradient."""
    parameter = nn.Parameter(torch.tensor([1.0, 2.0]))
    parameter.grad_dtype = torch.bfloat16
    parameter.grad = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    return parameter


def prepared(kind: type[Optimizer] = SGD, **options: Any) -> tuple[nn.Parameter, Optimizer]:
    parameter = make_parameter()
    optimizer = kind([parameter], **{"lr": 0.5, **options})
    fully_shard_optimizer(optimizer)
    return parameter, optimizer


class Failing(SGD):
    """Fails after it has looked at the gradients."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].grad.dtype == torch.float32
        raise OverflowError("in the step")


def test_after_an_exception() -> None:
    """A step or a hook that raises leaves the original gradient and its dtype behind."""

    def fail(*_: Any) -> None:
        raise OverflowError("in a hook")

    failing, optimizer = prepared(Failing)
    hooked, other = prepared()
    other.register_step_post_hook(fail)
    for parameter, step in ((failing, optimizer.step), (hooked, other.step)):
        grad = parameter.grad
        with pytest.raises(OverflowError):
            step()
        assert parameter.grad is grad
        assert parameter.grad_dtype == torch.bfloat16


@pytest.mark.parametrize("by_name", [False, True])
def test_closures(by_name: bool) -> None:
    """A closure sees the original gradients, and each of its evaluations is cast anew."""
    parameter, optimizer = prepared()
    original, seen = parameter.grad, []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        assert parameter.grad is original
        optimizer.zero_grad()
        (3 * parameter).sum().backward()
        seen.append(parameter.grad)
        return torch.tensor(7.0)

    loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss == 7
    assert parameter.detach().tolist() == [-0.5, 0.5]
    assert parameter.grad is seen[0]
    assert parameter.grad.dtype == torch.bfloat16


def test_a_closure_that_raises() -> None:
    """Its exception comes through, and the gradient it left stays."""
    parameter, optimizer = prepared()
    grad = parameter.grad

    def closure() -> float:
        raise OverflowError("in the closure")

    with pytest.raises(OverflowError):
        optimizer.step(closure)
    assert parameter.grad is grad


def test_copies_are_freed() -> None:
    """After a step the cast copy is gone, and nothing but its owner keeps the optimizer."""
    _, optimizer = prepared()
    copies: list[weakref.ref[Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda opt, *_: copies.append(weakref.ref(opt.param_groups[0]["params"][0].grad))
    )
    optimizer.step()
    assert copies[0]() is None
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None


def test_gradients_cleared_in_the_step() -> None:
    """What a hook clears stays cleared, and the next gradient has its dtype."""
    parameter, optimizer = prepared()
    optimizer.register_step_post_hook(lambda opt, *_: opt.zero_grad())
    optimizer.step()
    assert parameter.grad is None
    parameter.sum().backward()
    assert parameter.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_schedulers_before_and_after(scheduler_first: bool) -> None:
    """A scheduler notices steps and sets their rate, whichever of the two came first."""
    parameter = make_parameter()
    optimizer = SGD([parameter], lr=0.5)
    if not scheduler_first:
        fully_shard_optimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    if scheduler_first:
        fully_shard_optimizer(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for expected in ([0.5, 1.0], [0.25, 0.5]):
            optimizer.step()
            scheduler.step()
            assert parameter.detach().tolist() == expected
    StepLR(optimizer, step_size=1)
    optimizer.step()
    assert parameter.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_grad_scaler(options: dict[str, Any]) -> None:
    """GradScaler unscales, steps and skips as with an fp32 gradient."""
    plain = nn.Parameter(torch.tensor([1.0, 2.0]))
    reference = AdamW([plain], lr=0.5, **options)
    parameter, optimizer = prepared(AdamW, **options)
    for value in (8.0, math.inf, 16.0):
        for each, stepping in ((plain, reference), (parameter, optimizer)):
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))  # makes the scale
            each.grad = torch.full((2,), value, dtype=each.grad_dtype)
            scaler.step(stepping)
            scaler.update()
            assert scaler.get_scale() == (2.0 if value == math.inf else 4.0)
        assert torch.equal(parameter, plain)
    assert parameter.grad.dtype == torch.bfloat16


def test_state_and_pickles() -> None:
    """State dicts and copies are those of an optimizer that was never prepared."""
    parameter, optimizer = prepared(AdamW)
    plain = nn.Parameter(parameter.detach().clone())
    plain.grad = parameter.grad.float()
    reference = AdamW([plain], lr=0.5)
    optimizer.step()
    reference.step()
    assert repr(optimizer.state_dict()) == repr(reference.state_dict())
    assert type(optimizer) is AdamW
    for twin in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert repr(twin.state_dict()) == repr(reference.state_dict())
        assert "step" not in vars(twin)
    optimizer.load_state_dict(reference.state_dict())
    optimizer.step()


def test_twice() -> None:
    """The same choice twice changes nothing; another choice is an error."""
    parameter, optimizer = prepared()
    step = optimizer.step
    fully_shard_optimizer(optimizer, flat=False)
    assert optimizer.step is step
    with pytest.raises(ValueError, match="prepared with precision_aware=False"):
        fully_shard_optimizer(optimizer, precision_aware=True)
    optimizer.step()
    assert parameter.detach().tolist() == [0.5, 1.0]


def test_what_is_refused() -> None:
    """flat=True is not built, and what is no optimizer is named."""
    parameter = make_parameter()
    optimizer = SGD([parameter], lr=0.5)
    with pytest.raises(UnsupportedError, match="flat=True is not built"):
        fully_shard_optimizer(optimizer, flat=True)
    assert "step" not in vars(optimizer)
    with pytest.raises(ValueError, match="got a list"):
        fully_shard_optimizer([parameter])  # type: ignore[arg-type]
