"""PyTorch's optimizers, gradient scaling and clipping over sharded tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sharded_layouts import (
    LAYOUTS,
    differs,
    mesh_of,
    shard,
    whole,
)
from torch import Tensor, nn

from polyshard.errors import UnsupportedError
from polyshard.testing import run_ranks

# -- optimizers -------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.1, "centered": True},
    "Rprop": {},
    "Adagrad": {},
    "Adadelta": {"lr": 1.0},
    "ASGD": {},
}
WITH_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
WAYS = [
    *((name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (False, True)),
    *((name, {"fused": True}) for name in WITH_FUSED),
]
PARAMETERS = [((6, 2), torch.float32), ((6,), torch.float64), ((6, 1, 3), torch.complex64)]


def build(name: str, way: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        parameters, **OPTIMIZERS.get(name, {}), **way
    )
    return optimizer


def train(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    steps: range,
    place: Callable[[Tensor, int], Tensor],
) -> None:
    for step in steps:
        for index, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(100 * step + index)
            grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.grad = place(grad, index)
        optimizer.step()


def check_optimizer(rank: int, layout: str, name: str, way: dict[str, Any]) -> list[str]:
    mesh = mesh_of(layout)
    counts = LAYOUTS[layout][3]
    scalar_counts = tuple(int(index == 0) for index in range(len(counts)))
    specs = [p for p in PARAMETERS if not (way.get("fused") and p[1].is_complex)]
    specs = [*specs, ((), torch.float32)]
    held = [counts if shape else scalar_counts for shape, _ in specs]
    start = [
        torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(index))
        for index, (shape, dtype) in enumerate(specs)
    ]

    def place(full: Tensor, index: int) -> Tensor:
        return shard(full, layout, mesh, f"p{index}", held[index])

    plain = [nn.Parameter(full.clone()) for full in start]
    sharded = [nn.Parameter(place(full, index)) for index, full in enumerate(start)]
    optimizers = [build(name, way, plain), build(name, way, sharded)]
    epochs = [parameter.epoch for parameter in sharded]
    train(optimizers[0], plain, range(3), lambda full, index: full)
    train(optimizers[1], sharded, range(3), place)
    wrong = [
        f"p{index} moved unseen" for index, p in enumerate(sharded) if p.epoch <= epochs[index]
    ]
    # The state goes on in another optimizer over copies of the parameters.
    resumed = []
    for parameters, optimizer in zip((plain, sharded), optimizers, strict=True):
        parameters[:] = [copy.deepcopy(parameter) for parameter in parameters]
        resumed.append(build(name, way, parameters))
        resumed[-1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(resumed[0], plain, range(3, 5), lambda full, index: full)
    train(resumed[1], sharded, range(3, 5), place)
    for index, (one, other) in enumerate(zip(sharded, plain, strict=True)):
        if difference := differs(one.detach(), other.detach()):
            wrong.append(f"p{index}: {difference}")
        for key, value in resumed[0].state[other].items():
            if difference := differs(resumed[1].state[one][key], value):
                wrong.append(f"{key} of p{index}: {difference}")
    return wrong


@pytest.mark.behaviour(7, 33)
@pytest.mark.parametrize(("name", "way"), WAYS)
@pytest.mark.parametrize("layout", ["last_empty", "both_axes"])
def test_elementwise_optimizers(layout: str, name: str, way: dict[str, Any]) -> None:
    """Every elementwise optimizer, in every implementation, steps and resumes as one process."""
    ranks = LAYOUTS[layout][0]
    assert run_ranks(ranks, check_optimizer, layout, name, way) == [[]] * ranks


def check_other_optimizers(rank: int) -> list[str]:
    mesh = mesh_of("uneven")
    wrong = []
    for name in ("Adafactor", "LBFGS", "Muon"):
        full = torch.randn(6, 2)
        parameter = nn.Parameter(shard(full, "uneven", mesh))
        parameter.grad = shard(torch.ones(6, 2), "uneven", mesh)
        optimizer = build(name, {}, [parameter])
        try:
            optimizer.step(*([lambda: torch.tensor(1.0)] if name == "LBFGS" else []))
        except UnsupportedError as error:
            if "'weight'" not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"{name} was not refused")
        if differs(parameter.detach(), full):
            wrong.append(f"{name} was refused after a change")
    # Of vectors, Adafactor asks for norms and means of the whole only.
    start = torch.randn(6, generator=torch.Generator().manual_seed(0))
    plain, sharded = nn.Parameter(start.clone()), nn.Parameter(shard(start, "uneven", mesh))
    train(build("Adafactor", {}, [plain]), [plain], range(3), lambda full, index: full)
    train(
        build("Adafactor", {}, [sharded]),
        [sharded],
        range(3),
        lambda full, index: shard(full, "uneven", mesh),
    )
    if difference := differs(sharded.detach(), plain.detach()):
        wrong.append(f"Adafactor on vectors: {difference}")
    return wrong


def test_optimizers_that_need_whole_matrices() -> None:
    """Adafactor on vectors is right; on matrices it, LBFGS and Muon are refused by name."""
    assert run_ranks(2, check_other_optimizers) == [[], []]


# -- gradient scaling and clipping ------------------------------------------------------------


def check_grad_scaler(rank: int, layout: str, way: dict[str, Any]) -> list[str]:
    mesh = mesh_of(layout)
    start = torch.ones(6, 2)
    wrong = []
    for bad_row in (None, 0, 5):
        grad = torch.full((6, 2), 64.0)
        if bad_row is not None:
            grad[bad_row, 0] = float("inf")
        results = []
        for place in (lambda full: full.clone(), lambda full: shard(full, layout, mesh)):
            parameter = nn.Parameter(place(start))
            optimizer = torch.optim.AdamW([parameter], **way)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            scaler.scale(torch.tensor(1.0))
            parameter.grad = place(grad)
            scaler.step(optimizer)
            scaler.update()
            results.append([whole(parameter.detach()), scaler.get_scale()])
        if difference := differs(*results):
            wrong.append(f"inf in row {bad_row}: {difference}")
        if bool((results[1][0] == start).all()) == (bad_row is None):
            wrong.append(f"inf in row {bad_row}: stepped or skipped wrongly")
    return wrong


@pytest.mark.behaviour(33)
@pytest.mark.parametrize("way", [{}, {"fused": True}], ids=["default", "fused"])
@pytest.mark.parametrize("layout", ["last_empty", "hybrid", "both_axes"])
def test_grad_scaler_agrees_over_ranks(layout: str, way: dict[str, Any]) -> None:
    """An infinity in one rank's rows makes every rank skip the step and halve the scale."""
    assert (
        run_ranks(LAYOUTS[layout][0], check_grad_scaler, layout, way) == [[]] * (LAYOUTS[layout][0])
    )


def check_clipping(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    wrong = []
    for norm_type in (2.0, 1.0, float("inf"), 0.5):
        for foreach_ in (None, False):
            results = []
            for place in (lambda full: full.clone(), lambda full: shard(full, layout, mesh)):
                generator = torch.Generator().manual_seed(0)
                parameters = []
                for shape in ((6, 2), (6,)):
                    parameters.append(nn.Parameter(place(torch.zeros(shape))))
                    parameters[-1].grad = place(torch.randn(shape, generator=generator))
                parameters.append(nn.Parameter(torch.zeros(3)))  # a plain one among them
                parameters[-1].grad = torch.randn(3, generator=generator)
                norm = nn.utils.clip_grad_norm_(parameters, 0.1, norm_type, foreach=foreach_)
                grads = [p.grad for p in parameters]
                results.append([norm, *whole(grads), nn.utils.get_total_norm(grads, norm_type)])
            if difference := differs(*results):
                wrong.append(f"norm {norm_type}, foreach {foreach_}: {difference}")
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_clip_grad_norm(layout: str) -> None:
    """PyTorch's own clip_grad_norm_ clips by the norm over all ranks' rows, of any order."""
    assert run_ranks(LAYOUTS[layout][0], check_clipping, layout) == [[]] * LAYOUTS[layout][0]


def check_norm_messages(rank: int) -> int:
    mesh = mesh_of("uneven")
    grads = [
        shard(torch.ones(6, width), layout, mesh)
        for width in range(1, 6)
        for layout in ("uneven", "last_empty")
    ]
    with patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather:
        torch._foreach_norm(grads)
    return all_gather.call_count


def test_norms_of_many_tensors_travel_together() -> None:
    """The norms of a list of gradients cost one collective, however they are split."""
    assert run_ranks(2, check_norm_messages) == [1, 1]
