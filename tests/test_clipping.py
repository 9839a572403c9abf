"""clip_grad_norm_ finds the norm that one process would find, and scales as it would."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from strategies import STRATEGIES, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from training import OddModel, loss_of, make_batches, make_mesh, make_model, shard

from polyshard import (
    MixedPrecisionPolicy,
    Placements,
    UnsupportedError,
    clip_grad_norm_,
    fully_shard,
    microbatch,
)
from polyshard.row_split import Geometry, RowSplit
from polyshard.sharded_tensor import ShardedTensor
from polyshard.testing import run_ranks

ORDERS = (2.0, 1.0, 0.5, 3, 0, -1.0, math.inf, -math.inf)
CASES = [
    pytest.param(name, shape, id=f"{name}-{shape}")
    for name, shape in (
        ("ddp", (2,)),
        ("zero1", (2,)),
        ("zero3", (2,)),
        ("hsdp", (2, 1)),
        ("hsdp", (2, 2)),
        ("hfsdp", (2, 2)),
    )
]


def whole(value: Tensor | None) -> Tensor | None:
    """A gradient whole, and of its own."""
    if value is None:
        return None
    return value.full_tensor() if isinstance(value, ShardedTensor) else value.clone()


def whole_grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def plain_model(ranks: int, microbatches: int = 1) -> tuple[OddModel, Tensor, Tensor]:
    tokens, targets = make_batches(1, microbatches, ranks)
    return make_model(), tokens[0], targets[0]


def sharded_model(strategy: Strategy, shape: tuple[int, ...]) -> OddModel:
    model = make_model()
    shard(model, strategy.mesh(shape), strategy.placements)
    return model


# -- every order -------------------------------------------------------------------------------


def clipped_in_every_way(model: nn.Module, clip: Callable[..., Tensor]) -> dict[str, Any]:
    """The norm and the clipped gradients of each order, from the same gradients."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    saved = [grad.clone() for grad in grads]
    found: dict[str, Any] = {}
    for order in ORDERS:
        for foreach in (None, False):
            norm = clip(model.parameters(), 0.05, order, foreach=foreach)
            assert type(norm) is Tensor
            assert norm.shape == ()
            found[f"{order} {foreach}"] = (norm, whole_grads(model))
            for grad, value in zip(grads, saved, strict=True):
                grad.copy_(value)
    return found


def _every_order(rank: int, strategy: Strategy, shape: tuple[int, ...]) -> dict[str, Any]:
    model = sharded_model(strategy, shape)
    _, tokens, targets = plain_model(dist.get_world_size())
    loss_of(model, tokens[0, rank], targets[0, rank]).backward()
    return clipped_in_every_way(model, clip_grad_norm_)


@pytest.mark.behaviour(22)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_order(name: str, shape: tuple[int, ...]) -> None:
    """Norm and clipped gradients are those of a plain process, by any order of the norm."""
    ranks = math.prod(shape)
    model, tokens, targets = plain_model(ranks)
    loss_of(model, tokens[0].flatten(0, 1), targets[0].flatten(0, 1)).backward()
    expected = clipped_in_every_way(model, torch.nn.utils.clip_grad_norm_)
    results = run_ranks(ranks, _every_order, STRATEGIES[name], shape)
    for found in results:
        for way, (norm, grads) in expected.items():
            torch.testing.assert_close(found[way][0], norm, rtol=1e-4, atol=1e-6, msg=way)
            assert_same(found[way][1], grads)
            assert torch.equal(found[way][0], results[0][way][0])
    assert expected["0 None"][0] > 1
    assert expected["2.0 None"][0] > 0.05


# -- gradients that are still Partial ----------------------------------------------------------


def _between(rank: int, strategy: Strategy, shape: tuple[int, ...]) -> dict[str, Any]:
    model = sharded_model(strategy, shape)
    _, tokens, targets = plain_model(dist.get_world_size(), 2)
    with microbatch(model, is_last=False):
        loss_of(model, tokens[0, rank], targets[0, rank]).backward()
    norm, calls = counting(lambda: clip_grad_norm_(model.parameters(), 0.05))
    clipped = whole_grads(model)
    with microbatch(model, is_last=True):
        loss_of(model, tokens[1, rank], targets[1, rank]).backward()
    return {"norm": norm, "clipped": clipped, "calls": calls, "both": whole_grads(model)}


@pytest.mark.parametrize(
    ("name", "shape", "calls"),
    [
        ("ddp", (2,), {"all_reduce": 1}),
        ("zero1", (2,), {"all_reduce": 1}),
        ("zero3", (2,), {"all_gather": 1}),
        ("hfsdp", (2, 2), {"all_reduce": 1, "all_gather": 1}),
    ],
)
def test_between_microbatches(name: str, shape: tuple[int, ...], calls: dict[str, int]) -> None:
    """Contributions to a gradient are clipped by what the finished gradient would be clipped by."""
    ranks = math.prod(shape)
    model, tokens, targets = plain_model(ranks, 2)
    loss_of(model, tokens[0].flatten(0, 1), targets[0].flatten(0, 1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    clipped = whole_grads(model)
    loss_of(model, tokens[1].flatten(0, 1), targets[1].flatten(0, 1)).backward()
    expected = {"norm": norm, "clipped": clipped, "both": whole_grads(model)}
    for found in run_ranks(ranks, _between, STRATEGIES[name], shape):
        assert found.pop("calls") == calls
        assert_same(found, expected)


# -- several meshes ----------------------------------------------------------------------------


def counting(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """A result, and the collectives that it took."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        function = getattr(dist, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return patch.object(dist, name, run)

    with counted("all_gather"), counted("all_reduce"), counted("broadcast"):
        result = call()
    return result, dict(counts)


class Mixed(nn.Module):
    """Layers for one mesh, for another, and for none."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.other = nn.Linear(5, 3)
        self.plain = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.one:
            x = torch.tanh(layer(x))
        return self.other(x)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean() + (self.plain**3).sum()


def make_mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def mixed_inputs() -> Tensor:
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1))


def _several_meshes(rank: int) -> tuple[Tensor, dict[str, int], dict[str, Tensor | None]]:
    model = make_mixed()
    line, grid = make_mesh((4,)), make_mesh((2, 2), ("outer", "inner"))
    for layer in model.one:
        fully_shard(layer, line, Placements.zero3("dp"))
    fully_shard(model.other, grid, Placements.hsdp("outer", "inner"))
    model.loss(mixed_inputs()[rank]).backward()
    norm, calls = counting(lambda: clip_grad_norm_(list(model.parameters()), 0.1))
    return norm, calls, whole_grads(model)


@pytest.mark.behaviour(22)
def test_several_meshes() -> None:
    """Sharded, replicated and plain gradients count together, in one collective for each mesh."""
    model = make_mixed()
    model.loss(mixed_inputs().flatten(0, 1)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for found, calls, grads in run_ranks(4, _several_meshes):
        torch.testing.assert_close(found, norm)
        assert_same(grads, whole_grads(model))
        assert calls == {"all_gather": 2}


def expert(index: int) -> nn.Linear:
    torch.manual_seed(10 + index)
    return nn.Linear(5, 5)


def _experts(rank: int, order: float) -> tuple[Tensor, list[Tensor]]:
    dense, mine = make_mixed().other, expert(rank // 2)
    grid = make_mesh((2, 2), ("group", "dp"))
    fully_shard(dense, make_mesh((4,)), Placements.zero3("dp"))
    fully_shard(mine, grid, Placements.zero3("dp"))
    x = mixed_inputs()[rank]
    (dense(x).square().mean() + mine(x).square().mean()).backward()
    norm = clip_grad_norm_([*dense.parameters(), *mine.parameters()], 0.1, order)
    return norm, [p.grad.full_tensor() for p in (*dense.parameters(), *mine.parameters())]


@pytest.mark.parametrize("order", [2.0, 0.0, math.inf, -1.0])
def test_experts_on_a_part_of_the_ranks(order: float) -> None:
    """Parameters that live on a part of the ranks count on all, each copy of their mesh once."""
    dense, experts = make_mixed().other, [expert(0), expert(1)]
    x = mixed_inputs()
    dense(x.flatten(0, 1)).square().mean().backward()
    for index, module in enumerate(experts):
        module(x[2 * index : 2 * index + 2].flatten(0, 1)).square().mean().backward()
    everything = [p for module in (dense, *experts) for p in module.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(everything, 0.1, order)
    for rank, (found, grads) in enumerate(run_ranks(4, _experts, order)):
        torch.testing.assert_close(found, norm)
        expected = [p.grad for p in (*dense.parameters(), *experts[rank // 2].parameters())]
        torch.testing.assert_close(grads, expected)


def _crossing_meshes(rank: int) -> str:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    grid = make_mesh((2, 2), ("outer", "inner"))
    fully_shard(model, grid, Placements.zero3("outer"))
    fully_shard(other, grid, Placements.zero3("inner"))
    (model(torch.ones(1, 3)) + other(torch.ones(1, 3))).sum().backward()
    parameters = [*model.parameters(), *other.parameters()]
    before = [p.grad.to_local().clone() for p in parameters]
    with pytest.raises(UnsupportedError, match="neither holds the other") as raised:
        clip_grad_norm_(parameters, 0.1)
    for parameter, value in zip(parameters, before, strict=True):
        assert torch.equal(parameter.grad.to_local(), value)
    clip_grad_norm_(model.parameters(), 0.1)
    clip_grad_norm_(other.parameters(), 0.1)
    return str(raised.value)


def test_meshes_that_cross_are_refused() -> None:
    """Where ranks would disagree on the norm nothing is scaled; apart, each mesh is clipped."""
    assert len(set(run_ranks(4, _crossing_meshes))) == 4


def _beside_tensor_parallelism(rank: int, order: float) -> tuple[Tensor, list[Tensor]]:
    grid = make_mesh((2, 2), ("dp", "tp"))
    rows = RowSplit([(0, 1), (1, 4)], (0,))
    lies: list[tuple[DeviceMesh, list[Placement]]] = [
        (grid, [rows, Shard(1)]),
        (grid, [rows, Replicate()]),
        (grid["dp"], [rows]),
    ]
    parameters = []
    for value, (mesh, placements) in zip(wholes(), lies, strict=False):
        local = Geometry.of(value.shape, mesh, placements).local_of(value).contiguous()
        where = {"shape": value.shape, "mesh": mesh, "placements": placements, "name": "weight"}
        parameters.append(ShardedTensor.wrap(torch.zeros_like(local), **where).requires_grad_())
        parameters[-1].grad = ShardedTensor.wrap(local, **where)
    for value, placement in zip(wholes()[3:], (Shard(0), Replicate()), strict=True):
        parameters.append(distribute_tensor(torch.zeros(4, 6), grid["tp"], [placement]))
        parameters[-1].requires_grad_().grad = distribute_tensor(value, grid["tp"], [placement])
    norm = clip_grad_norm_(parameters, 0.1, order)
    return norm, [parameter.grad.full_tensor() for parameter in parameters]


def wholes() -> list[Tensor]:
    return list(torch.randn(5, 4, 6, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("order", [2.0, 0.0, math.inf])
def test_beside_tensor_parallelism(order: float) -> None:
    """What other parallelism chunks counts whole, and what it does not chunk counts once."""
    parameters = with_grads(*wholes())
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1, order)
    for found, grads in run_ranks(4, _beside_tensor_parallelism, order):
        torch.testing.assert_close(found, norm)
        torch.testing.assert_close(grads, [parameter.grad for parameter in parameters])


# -- what is not finite, and precision ---------------------------------------------------------


def _not_finite(rank: int, bad: float) -> None:
    model = sharded_model(STRATEGIES["zero3"], (2,))
    _, tokens, targets = plain_model(2)
    loss_of(model, tokens[0, rank], targets[0, rank]).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if rank == 1:
        next(rows for g in grads if (rows := g.to_local()).numel()).view(-1)[0] = bad
    before = [grad.clone() for grad in grads]
    with pytest.raises(RuntimeError, match=r"order 2\.0 is non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    for grad, value in zip(grads, before, strict=True):
        assert torch.equal(grad.to_local().nan_to_num(), value.to_local().nan_to_num())
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert torch.equal(norm.nan_to_num(nan=-1), torch.tensor(bad).nan_to_num(nan=-1))
    # As in PyTorch: scaled by zero where the norm is infinite, by nan where it is nan.
    first = grads[0].full_tensor().flatten()[-1]
    assert first.isnan() if math.isnan(bad) else first == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_not_finite(bad: float) -> None:
    """What one rank alone holds makes the norm non-finite on all; asked to raise, all do."""
    run_ranks(2, _not_finite, bad)


def _low_precision(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(40, 40).bfloat16()
    policy = MixedPrecisionPolicy(main_params_dtype=None)
    fully_shard(model, make_mesh(), Placements.zero3("dp"), policy)
    (model(torch.randn(8, 40, dtype=torch.bfloat16)) * 1e3).square().sum().backward()
    exact = [p.grad.full_tensor().double() for p in model.parameters()]
    expected = torch.nn.utils.get_total_norm(exact)
    return clip_grad_norm_(model.parameters(), 1.0), expected, model.weight.grad.full_tensor()


def test_low_precision() -> None:
    """The norm of bf16 gradients is computed and returned in fp32; gradients stay bf16."""
    for norm, expected, grad in run_ranks(2, _low_precision):
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm.double(), expected, rtol=1e-5, atol=0)
        assert grad.dtype == torch.bfloat16


# -- arguments ---------------------------------------------------------------------------------


def with_grads(*values: Tensor) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()
    return parameters


def test_what_parameters_may_be() -> None:
    """A tensor, a generator, none at all, and parameters without gradient are all taken."""
    assert torch.equal(clip_grad_norm_([], 1.0), torch.tensor(0.0))
    assert torch.equal(clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0), torch.tensor(0.0))
    (single,) = with_grads(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(single, 1.0) == 5
    torch.testing.assert_close(single.grad, torch.tensor([0.6, 0.8]))
    many = with_grads(torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64), torch.ones(0))
    norm = clip_grad_norm_((p for p in [*many, nn.Parameter(torch.ones(1))]), math.inf)
    assert norm == 5
    assert norm.dtype == torch.float64
    assert [p.grad.tolist() for p in many] == [[3.0], [4.0], []]


def test_what_is_refused() -> None:
    """A negative bound and what is no parameter are errors, before anything is scaled."""
    (parameter,) = with_grads(torch.tensor([3.0, 4.0]))
    with pytest.raises(ValueError, match="at least 0, got -1"):
        clip_grad_norm_([parameter], -1)
    with pytest.raises(ValueError, match="got a str"):
        clip_grad_norm_([parameter, "weight"], 1.0)  # type: ignore[list-item]
    assert parameter.grad.tolist() == [3.0, 4.0]
