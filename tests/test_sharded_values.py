"""Values of sharded tensors of every dtype and shape: whole, reduced, special."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_layouts import (
    LAYOUTS,
    differs,
    mesh_of,
    shard,
)
from torch import Tensor

from polyshard.errors import UnsupportedError
from polyshard.testing import run_ranks

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def check_full_tensor(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    counts = LAYOUTS[layout][3]
    rows = sum(counts)
    wrong = []
    for dtype in DTYPES:
        for rest in ((), (1,), (3,), (2, 3), (0,)):
            full = (torch.arange(rows * 6)[: rows * torch.Size(rest).numel()] % 5).to(dtype)
            full = full.reshape(rows, *rest)
            tensor = shard(full, layout, mesh)
            got = tensor.full_tensor()
            if type(got) is not Tensor or got.dtype != dtype or not same_bits(got, full):
                wrong.append(f"{dtype} {tuple(full.shape)}: {got}")
    for full in (torch.tensor(3.5), torch.ones(0, 2), torch.ones(1, 2)):
        one = full.shape[0] if full.dim() else 1
        held = tuple(one if index == len(counts) - 1 else 0 for index in range(len(counts)))
        got = shard(full, layout, mesh, row_counts=held).full_tensor()
        if not same_bits(got, full):
            wrong.append(f"{tuple(full.shape)} on the last shard: {got}")
    return wrong


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(*flat)


@pytest.mark.behaviour(7, 10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_tensor_of_every_dtype_and_shape(layout: str) -> None:
    """full_tensor gives the bits of the whole, for uneven and empty shards of every dtype."""
    assert run_ranks(LAYOUTS[layout][0], check_full_tensor, layout) == [[]] * LAYOUTS[layout][0]


SCALAR_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, s: x + s,
    "times float64": lambda x, s: x * s.double(),
    "times number": lambda x, s: 2.5 * x,
    "mul_": lambda x, s: x.mul_(s),
    "copy_": lambda x, s: x.copy_(s),
    "sum": lambda x, s: x.sum(),
    "norm": lambda x, s: x.norm(),
    "max": lambda x, s: x.max(),
    "item": lambda x, s: x.item(),
    "bool": lambda x, s: bool(x > 0),
    "new_zeros": lambda x, s: x.new_zeros(()),
    "sum keepdim": lambda x, s: x.sum(dim=(), keepdim=True),
}


def check_scalars(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    shards = len(LAYOUTS[layout][3])
    wrong = []
    for owner in range(shards):
        held = tuple(int(index == owner) for index in range(shards))
        for name, operation in SCALAR_OPERATIONS.items():
            full, scalar = torch.tensor(1.5), torch.tensor(3.0)
            difference = differs(
                operation(shard(full, layout, mesh, row_counts=held), scalar),
                operation(full.clone(), scalar),
            )
            if difference:
                wrong.append(f"{name}, row on shard {owner}: {difference}")
    return wrong


@pytest.mark.behaviour(7, 10)
@pytest.mark.parametrize("layout", ["uneven", "both_axes"])
def test_tensors_without_dims(layout: str) -> None:
    """A 0-D tensor behaves as one, whichever rank holds it."""
    assert run_ranks(LAYOUTS[layout][0], check_scalars, layout) == [[]] * LAYOUTS[layout][0]


def check_reductions_by_dtype(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    wrong = []
    values = torch.tensor([[3, -1], [0, 2], [5, 5], [-4, 1], [2, 0], [1, 1]])
    for dtype in DTYPES:
        if dtype == torch.float8_e4m3fn:
            continue
        full = values.to(dtype)
        for name in ("sum", "mean", "prod", "max", "min", "amax", "all", "any", "norm"):
            outcomes = []
            for tensor in (full, shard(full, layout, mesh)):
                try:
                    outcomes.append(getattr(tensor, name)())
                except UnsupportedError:
                    raise
                except RuntimeError:
                    outcomes.append("raised")
            if isinstance(outcomes[0], str) or isinstance(outcomes[1], str):
                difference = None if type(outcomes[0]) is type(outcomes[1]) else f"{outcomes}"
            else:
                difference = differs(outcomes[1], outcomes[0])
            if difference:
                wrong.append(f"{name} of {dtype}: {difference}")
    return wrong


@pytest.mark.behaviour(7)
@pytest.mark.parametrize("layout", ["uneven", "last_empty", "both_axes"])
def test_reductions_of_every_dtype(layout: str) -> None:
    """Reductions give the plain result and dtype, or on every rank the plain error."""
    ranks = LAYOUTS[layout][0]
    assert run_ranks(ranks, check_reductions_by_dtype, layout) == [[]] * ranks


def check_special_values(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    wrong = []
    for row in range(6):
        for value in (float("nan"), float("inf"), float("-inf")):
            full = torch.linspace(-1, 1, 12).reshape(6, 2)
            full[row, 1] = value
            tensor = shard(full, layout, mesh)
            for name in ("sum", "mean", "max", "min", "amax", "amin", "norm", "prod"):
                difference = differs(getattr(tensor, name)(), getattr(full, name)())
                if difference:
                    wrong.append(f"{name} with {value} in row {row}: {difference}")
            for order in (float("inf"), float("-inf"), 1, 0):
                difference = differs(
                    [
                        torch.linalg.vector_norm(tensor, order),
                        *torch._foreach_norm([tensor], order),
                    ],
                    [torch.linalg.vector_norm(full, order)] * 2,
                )
                if difference:
                    wrong.append(f"norm {order} with {value} in row {row}: {difference}")
    return wrong


@pytest.mark.parametrize("layout", ["uneven", "first_empty", "both_axes"])
def test_nan_and_infinity_anywhere_reach_every_rank(layout: str) -> None:
    """NaN and infinities in one rank's rows are seen by reductions on all."""
    assert run_ranks(LAYOUTS[layout][0], check_special_values, layout) == [[]] * LAYOUTS[layout][0]
