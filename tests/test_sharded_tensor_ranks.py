"""A sharded tensor never lies: what runs gives what the whole tensor gives, the rest is refused.

Over uneven and empty shards, one and two mesh axes, on two and four ranks. Every comparison is with
the same operation on plain whole tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from polyshard.errors import UnsupportedError
from polyshard.row_split import RowSplit
from polyshard.sharded_tensor import ShardedTensor
from polyshard.testing import run_ranks

aten = torch.ops.aten

# -- where rows lie ---------------------------------------------------------------------------

# name: (ranks, mesh, axes from slowest to fastest, rows by shard index). Axes that are not named
# are replicated. The permuted mesh numbers its ranks otherwise than its process groups do.
Layout = tuple[int, list[Any], tuple[int, ...], tuple[int, ...]]
LAYOUTS: dict[str, Layout] = {
    "uneven": (2, [0, 1], (0,), (4, 2)),
    "first_empty": (2, [0, 1], (0,), (0, 6)),
    "last_empty": (2, [0, 1], (0,), (6, 0)),
    "replicated": (2, [0, 1], (), (6,)),
    "uneven_four": (4, [0, 1, 2, 3], (0,), (2, 0, 3, 1)),
    "one_of_four": (4, [0, 1, 2, 3], (0,), (0, 0, 6, 0)),
    "hybrid": (4, [[0, 1], [2, 3]], (1,), (5, 1)),
    "both_axes": (4, [[0, 1], [2, 3]], (1, 0), (1, 3, 0, 2)),
    "permuted": (4, [[3, 1], [0, 2]], (1, 0), (1, 3, 0, 2)),
}


def on_world(size: int) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout[0] == size]


def mesh_of(layout: str) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(LAYOUTS[layout][1]))


def placements_of(layout: str, row_counts: tuple[int, ...] | None = None) -> list[Placement]:
    _, ranks, order, counts = LAYOUTS[layout]
    edges = [0, *accumulate(row_counts or counts)]
    placements: list[Placement] = [Replicate()] * torch.tensor(ranks).ndim
    for axis in order:
        placements[axis] = RowSplit(list(pairwise(edges)), order)
    return placements


def shard(
    full: Tensor,
    layout: str,
    mesh: DeviceMesh,
    name: str = "weight",
    row_counts: tuple[int, ...] | None = None,
) -> ShardedTensor:
    placements = placements_of(layout, row_counts)
    split = next((p for p in placements if isinstance(p, RowSplit)), None)
    rows = full.reshape(1) if full.dim() == 0 and split is not None else full
    if split is not None:
        index = 0
        for axis in split.axis_order:
            index = index * mesh.size(axis) + mesh.get_coordinate()[axis]
        rows = rows[slice(*split.ranges[index])]
    return ShardedTensor.wrap(
        rows.clone(), shape=full.shape, mesh=mesh, placements=placements, name=name
    )


def whole(value: Any) -> Any:
    """Results with every sharded tensor replaced by its full tensor."""
    if isinstance(value, ShardedTensor):
        return value.full_tensor()
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    return value


def differs(got: Any, expected: Any) -> str | None:
    """How a result differs from the expected whole: of a sharded tensor, this rank's rows."""
    if isinstance(got, list | tuple):
        if not isinstance(expected, list | tuple) or len(got) != len(expected):
            return f"{got} is not like {expected}"
        pairs = zip(got, expected, strict=True)
        return next((d for one, other in pairs if (d := differs(one, other))), None)
    if isinstance(got, ShardedTensor):
        if type(expected) is not Tensor or got.shape != expected.shape:
            return f"{got} is not like {expected}"
        if any(isinstance(placement, Partial) for placement in got.placements):
            got = got.full_tensor()
        else:
            if got.row_split is not None:
                expected = expected.reshape(1) if expected.dim() == 0 else expected
                expected = expected[slice(*got.rows)]
            got = got.to_local()
    try:
        torch.testing.assert_close(got, expected, equal_nan=True)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return None


# -- the operations ---------------------------------------------------------------------------

Operation = Callable[[Any, Any, Any, Any], Any]  # of x, y, a bool mask, and a 0-D plain tensor


def in_place(method: str, *args: Any, **kwargs: Any) -> Operation:
    def run(x: Any, y: Any, m: Any, s: Any) -> Any:
        chosen = {"y": y, "m": m, "s": s, "-y": -y}
        given = [chosen.get(a, a) if isinstance(a, str) else a for a in args]
        return getattr(x, method)(*given, **kwargs)

    return run


def foreach(name: str, *args: Any, **kwargs: Any) -> Operation:
    def run(x: Any, y: Any, m: Any, s: Any) -> Any:
        chosen = {"y": y, "s": s, "ys": [y, s, y.abs()]}
        given = [chosen.get(a, a) if isinstance(a, str) else a for a in args]
        return getattr(torch, name)([x, s.clone(), y.clone()], *given, **kwargs)

    return run


def set_item(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return x


RIGHT: dict[str, Operation] = {
    # elementwise, out of place
    "add": lambda x, y, m, s: x + y,
    "add number": lambda x, y, m, s: 2 + x,
    "add 0-D": lambda x, y, m, s: x + s,
    "add one element": lambda x, y, m, s: x + s.reshape(1),
    "add 0-D float64": lambda x, y, m, s: x + s.double(),
    "add with alpha": lambda x, y, m, s: torch.add(x, y, alpha=3),
    "add into out": lambda x, y, m, s: torch.add(x, y, out=y),
    "rsub": lambda x, y, m, s: 1 - x,
    "mul": lambda x, y, m, s: x * y,
    "0-D times": lambda x, y, m, s: s * x,
    "div": lambda x, y, m, s: x / (y.abs() + 1),
    "div rounding": lambda x, y, m, s: torch.div(x, y, rounding_mode="floor"),
    "neg": lambda x, y, m, s: -x,
    "pow": lambda x, y, m, s: x**3,
    "pow of a number": lambda x, y, m, s: 2**x,
    "square": lambda x, y, m, s: x.square(),
    "exp": lambda x, y, m, s: x.exp(),
    "log": lambda x, y, m, s: x.log(),
    "sqrt": lambda x, y, m, s: x.abs().sqrt(),
    "rsqrt": lambda x, y, m, s: x.abs().rsqrt(),
    "reciprocal": lambda x, y, m, s: x.reciprocal(),
    "sign": lambda x, y, m, s: x.sign(),
    "tanh": lambda x, y, m, s: torch.tanh(x),
    "sigmoid": lambda x, y, m, s: torch.sigmoid(x),
    "relu": lambda x, y, m, s: torch.relu(x),
    "erf": lambda x, y, m, s: torch.erf(x),
    "round": lambda x, y, m, s: torch.round(x, decimals=1),
    "clamp": lambda x, y, m, s: x.clamp(-0.5, 0.5),
    "clamp by tensors": lambda x, y, m, s: torch.clamp(x, min=s),
    "maximum": lambda x, y, m, s: torch.maximum(x, y),
    "max of two": lambda x, y, m, s: torch.max(x, y),
    "min of two": lambda x, y, m, s: torch.min(x, y),
    "fmod": lambda x, y, m, s: torch.fmod(x, 0.3),
    "lerp": lambda x, y, m, s: torch.lerp(x, y, 0.25),
    "lerp 0-D weight": lambda x, y, m, s: torch.lerp(x, y, s),
    "addcmul": lambda x, y, m, s: torch.addcmul(x, y, y, value=0.5),
    "addcdiv": lambda x, y, m, s: torch.addcdiv(x, y, y.abs() + 1, value=-0.5),
    "where": lambda x, y, m, s: torch.where(m, x, y),
    "where number": lambda x, y, m, s: torch.where(m, x, 0.0),
    "where 0-D": lambda x, y, m, s: torch.where(m, s, x),
    "masked_fill": lambda x, y, m, s: x.masked_fill(m, 7.0),
    "nan_to_num": lambda x, y, m, s: x.log().nan_to_num(0.5),
    "eq": lambda x, y, m, s: x == y,
    "lt number": lambda x, y, m, s: x < 0.1,
    "isnan": lambda x, y, m, s: torch.isnan(x.log()),
    "isinf": lambda x, y, m, s: torch.isinf(x / 0),
    "isfinite": lambda x, y, m, s: torch.isfinite(x.log()),
    "isclose": lambda x, y, m, s: torch.isclose(x, y),
    "logical_and": lambda x, y, m, s: torch.logical_and(x > 0, m),
    "bitwise": lambda x, y, m, s: (m & (x > 0)) | ~m,
    "expression": lambda x, y, m, s: (x * 0.9 + y * 0.1) / (x.abs().sqrt() + 1e-8),
    # in place
    "add_": in_place("add_", "y", alpha=-2),
    "sub_": in_place("sub_", 1.5),
    "mul_": in_place("mul_", "y"),
    "mul_ 0-D": in_place("mul_", "s"),
    "div_": in_place("div_", 3),
    "lerp_": in_place("lerp_", "y", 0.1),
    "addcmul_": in_place("addcmul_", "y", "y", value=0.1),
    "clamp_": in_place("clamp_", min=0),
    "pow_": in_place("pow_", 2),
    "zero_": in_place("zero_"),
    "fill_": in_place("fill_", 3.0),
    "fill_ 0-D": in_place("fill_", "s"),
    "copy_ alike": in_place("copy_", "y"),
    "copy_ cast": lambda x, y, m, s: x.copy_(y.double()),
    "copy_ 0-D": in_place("copy_", "s"),
    "masked_fill_": in_place("masked_fill_", "m", -1.0),
    "set by mask": lambda x, y, m, s: set_item(x, m, 2.0),
    "set by the whole slice": lambda x, y, m, s: set_item(x, slice(None), 1.0),
    "set all": lambda x, y, m, s: set_item(x, ..., 2.0),
    "augmented": lambda x, y, m, s: x.__imul__(2).__iadd__(y),
    "through data": lambda x, y, m, s: (x.data.add_(1), x)[1],
    "through detach": lambda x, y, m, s: (x.detach().mul_(y), x)[1],
    # lists of tensors, plain ones among them
    "foreach add": foreach("_foreach_add", 2.0),
    "foreach add lists": foreach("_foreach_add", "ys", alpha=2),
    "foreach mul numbers": foreach("_foreach_mul", [1.0, 2.0, 3.0]),
    "foreach mul 0-D": foreach("_foreach_mul", "s"),
    "foreach div_": foreach("_foreach_div_", "ys"),
    "foreach sqrt": lambda x, y, m, s: torch._foreach_sqrt(torch._foreach_abs([x, y])),
    "foreach maximum_": lambda x, y, m, s: (torch._foreach_maximum_([x], [y]), x)[1],
    "foreach lerp_": lambda x, y, m, s: (torch._foreach_lerp_([x], [y], 0.3), x)[1],
    "foreach addcdiv_": lambda x, y, m, s: (
        torch._foreach_addcdiv_([x, y], [y, y], [y.abs() + 1, y.abs() + 1], [0.1, 0.2]),
        x,
        y,
    )[1:],
    "foreach copy_": lambda x, y, m, s: (torch._foreach_copy_([x], [y]), x)[1],
    "foreach zero_": lambda x, y, m, s: (torch._foreach_zero_([x, y]), x, y)[1:],
    "foreach norm": lambda x, y, m, s: torch._foreach_norm([x, y, s.reshape(1), x * y]),
    "foreach norm 1": lambda x, y, m, s: torch._foreach_norm([x, y], 1),
    "foreach norm inf": lambda x, y, m, s: torch._foreach_norm([x, y], float("inf")),
    # memory and casts
    "clone": lambda x, y, m, s: x.clone(),
    "detach": lambda x, y, m, s: x.detach(),
    "alias": lambda x, y, m, s: aten.alias(x),
    "double": lambda x, y, m, s: x.double(),
    "to bfloat16": lambda x, y, m, s: x.to(torch.bfloat16),
    "to bool": lambda x, y, m, s: x.bool(),
    "cpu": lambda x, y, m, s: x.cpu(),
    "type_as": lambda x, y, m, s: x.type_as(y.double()),
    "contiguous": lambda x, y, m, s: x.contiguous(),
    "zeros_like": lambda x, y, m, s: torch.zeros_like(x),
    "ones_like": lambda x, y, m, s: torch.ones_like(x, dtype=torch.int32),
    "full_like": lambda x, y, m, s: torch.full_like(x, 1.5),
    "empty_like": lambda x, y, m, s: torch.empty_like(x).zero_(),
    "new_zeros": lambda x, y, m, s: x.new_zeros(x.shape),
    "new_full": lambda x, y, m, s: x.new_full(x.shape, 2.5),
    "view of its shape": lambda x, y, m, s: x.view(x.shape),
    "view_as": lambda x, y, m, s: x.view_as(y),
    "expand_as": lambda x, y, m, s: x.expand_as(y),
    "view_as_complex": lambda x, y, m, s: torch.view_as_complex(x) * 1j,
    "deepcopy": lambda x, y, m, s: copy.deepcopy(x.detach()),
    # reductions over the whole tensor
    "sum": lambda x, y, m, s: x.sum(),
    "sum to float64": lambda x, y, m, s: x.sum(dtype=torch.float64),
    "sum of bools": lambda x, y, m, s: m.sum(),
    "sum over all dims": lambda x, y, m, s: x.sum(dim=(0, 1)),
    "sum keepdim": lambda x, y, m, s: x.sum(dim=(-1, -2), keepdim=True),
    "mean": lambda x, y, m, s: x.mean(),
    "mean of bfloat16": lambda x, y, m, s: x.bfloat16().mean(),
    "prod": lambda x, y, m, s: (x + 2).prod(),
    "max": lambda x, y, m, s: x.max(),
    "min": lambda x, y, m, s: x.min(),
    "amax": lambda x, y, m, s: x.amax(),
    "amin": lambda x, y, m, s: x.abs().amin(),
    "max of NaN": lambda x, y, m, s: x.log().max(),
    "all": lambda x, y, m, s: (x.abs() < 100).all(),
    "any": lambda x, y, m, s: (x > 1.9).any(),
    "isfinite all": lambda x, y, m, s: torch.isfinite(x.log()).all(),
    "isnan any": lambda x, y, m, s: torch.isnan(x.log()).any(),
    "count_nonzero": lambda x, y, m, s: torch.count_nonzero(torch.relu(x)),
    "norm": lambda x, y, m, s: x.norm(),
    "norm inf": lambda x, y, m, s: x.norm(float("inf")),
    "norm -inf": lambda x, y, m, s: torch.linalg.vector_norm(x, float("-inf")),
    "norm 0": lambda x, y, m, s: torch.linalg.vector_norm(torch.relu(x), 0),
    "norm 1": lambda x, y, m, s: torch.linalg.vector_norm(x, 1),
    "norm 3.5": lambda x, y, m, s: torch.linalg.vector_norm(x, 3.5),
    "norm -2": lambda x, y, m, s: torch.linalg.vector_norm(x, -2),
    "norm dtype": lambda x, y, m, s: torch.linalg.vector_norm(x, 2, dtype=torch.float64),
    "norm of bfloat16": lambda x, y, m, s: x.bfloat16().norm(),
    "norm keepdim": lambda x, y, m, s: torch.norm(x, dim=(0, 1), keepdim=True),
    "equal": lambda x, y, m, s: (torch.equal(x, x.clone()), torch.equal(x, y)),
    "allclose": lambda x, y, m, s: (torch.allclose(x, x + 1e-9), torch.allclose(x, y)),
    "item of a reduction": lambda x, y, m, s: x.sum().item(),
    "rms": lambda x, y, m, s: x.norm(2).item() / x.numel() ** 0.5,
    "numel and shape": lambda x, y, m, s: (x.numel(), tuple(x.shape), len(x), x.size(0), x.ndim),
}

REFUSED: dict[str, Operation] = {
    "index": lambda x, y, m, s: x[0],
    "slice": lambda x, y, m, s: x[1:],
    "index by mask": lambda x, y, m, s: x[m],
    "set a row": lambda x, y, m, s: set_item(x, 0, 1.0),
    "set by mask from a tensor": lambda x, y, m, s: set_item(x, m, y),
    "iterate": lambda x, y, m, s: list(x),
    "select": lambda x, y, m, s: x.select(0, 0),
    "narrow": lambda x, y, m, s: x.narrow(0, 0, 1),
    "torch.split": lambda x, y, m, s: torch.split(x, 2),
    "chunk": lambda x, y, m, s: x.chunk(2),
    "flatten": lambda x, y, m, s: x.flatten(),
    "view": lambda x, y, m, s: x.view(-1),
    "reshape": lambda x, y, m, s: x.reshape(2, -1),
    "unsqueeze": lambda x, y, m, s: x.unsqueeze(0),
    "transpose": lambda x, y, m, s: x.t(),
    "T": lambda x, y, m, s: x.T,
    "permute": lambda x, y, m, s: x.permute(1, 0),
    "expand": lambda x, y, m, s: x.expand(2, *x.shape),
    "as_strided": lambda x, y, m, s: x.as_strided((2,), (1,)),
    "view dtype": lambda x, y, m, s: x.view(torch.int32),
    "matmul": lambda x, y, m, s: x @ torch.ones(2, 2),
    "linear": lambda x, y, m, s: nn.functional.linear(torch.ones(1, 2), x),
    "embedding": lambda x, y, m, s: nn.functional.embedding(torch.tensor([1]), x),
    "einsum": lambda x, y, m, s: torch.einsum("ij,ij->", x, y),
    "cat": lambda x, y, m, s: torch.cat([x, y]),
    "stack": lambda x, y, m, s: torch.stack([x, y]),
    "softmax": lambda x, y, m, s: x.softmax(-1),
    "layer_norm": lambda x, y, m, s: nn.functional.layer_norm(x, (2,)),
    "sort": lambda x, y, m, s: x.sort(),
    "topk": lambda x, y, m, s: x.topk(1),
    "cumsum": lambda x, y, m, s: x.cumsum(0),
    "argmax": lambda x, y, m, s: x.argmax(),
    "median": lambda x, y, m, s: x.median(),
    "std": lambda x, y, m, s: x.std(),
    "sum of a dim": lambda x, y, m, s: x.sum(0),
    "mean of a dim": lambda x, y, m, s: x.mean(-1),
    "max of a dim": lambda x, y, m, s: x.max(dim=0),
    "amax of a dim": lambda x, y, m, s: x.amax(1),
    "norm of a dim": lambda x, y, m, s: torch.norm(x, dim=-1),
    "all of a dim": lambda x, y, m, s: m.all(0),
    "nonzero": lambda x, y, m, s: x.nonzero(),
    "unique": lambda x, y, m, s: x.unique(),
    "flip": lambda x, y, m, s: x.flip(0),
    "roll": lambda x, y, m, s: x.roll(1),
    "gather": lambda x, y, m, s: x.gather(0, torch.zeros(1, 1, dtype=torch.int64)),
    "index_select": lambda x, y, m, s: x.index_select(0, torch.tensor([0])),
    "index_add_": lambda x, y, m, s: x.index_add_(0, torch.tensor([0]), torch.ones(1, 2)),
    "scatter_": lambda x, y, m, s: x.scatter_(0, torch.zeros(1, 1, dtype=torch.int64), 1.0),
    "normal_": lambda x, y, m, s: x.normal_(),
    "uniform_": lambda x, y, m, s: nn.init.uniform_(x),
    "kaiming_": lambda x, y, m, s: nn.init.kaiming_uniform_(x),
    "bernoulli": lambda x, y, m, s: torch.bernoulli(torch.sigmoid(x)),
    "dropout": lambda x, y, m, s: nn.functional.dropout(x),
    "randn_like": lambda x, y, m, s: torch.randn_like(x),
    "rand_like": lambda x, y, m, s: torch.rand_like(x),
    "new_empty of another shape": lambda x, y, m, s: x.new_empty(3),
    "resize_": lambda x, y, m, s: x.detach().resize_(1),
    "set_": lambda x, y, m, s: x.detach().set_(torch.zeros(1)),
    "add a whole plain tensor": lambda x, y, m, s: x + torch.ones(x.shape),
    "add_ a whole plain tensor": lambda x, y, m, s: x.add_(torch.ones(x.shape)),
    "add_ to a plain tensor": lambda x, y, m, s: torch.ones(x.shape).add_(x),
    "copy_ into a plain tensor": lambda x, y, m, s: torch.ones(x.shape).copy_(x),
    "copy_ of another shape": lambda x, y, m, s: x.copy_(torch.ones(2)),
    "broadcast over rows": lambda x, y, m, s: x * torch.ones(2),
    "equal to a plain tensor": lambda x, y, m, s: torch.equal(x, torch.ones(x.shape)),
    "foreach with whole plain tensors": lambda x, y, m, s: torch._foreach_add_(
        [x], [torch.ones(x.shape)]
    ),
    "channels_last": lambda x, y, m, s: x.clone(memory_format=torch.channels_last),
    "to_sparse": lambda x, y, m, s: x.to_sparse(),
    "pickle": lambda x, y, m, s: copy.copy(x),
    "numpy": lambda x, y, m, s: x.detach().numpy(),
    "tolist": lambda x, y, m, s: x.tolist(),
    "data_ptr": lambda x, y, m, s: x.data_ptr(),
    "as_subclass": lambda x, y, m, s: x.as_subclass(Tensor),
    "share_memory_": lambda x, y, m, s: x.share_memory_(),
    "assign data": lambda x, y, m, s: setattr(x, "data", y),
}


def operands(layout: str, mesh: DeviceMesh) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """A parameter, a gradient and an optimizer state as x: sharded operands and whole ones."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 2, generator=generator)
    y = torch.randn(6, 2, generator=generator)
    scalar = torch.tensor(0.75)
    parameter = nn.Parameter(shard(x, layout, mesh))
    parameter.grad = shard(x, layout, mesh)
    optimizer = torch.optim.SGD([parameter], lr=0.0, momentum=0.9)
    optimizer.step()
    state = optimizer.state[parameter]["momentum_buffer"]
    for kind, tensor in (("parameter", parameter), ("gradient", parameter.grad), ("state", state)):
        other = shard(y, layout, mesh)
        sharded = [copy.deepcopy(tensor), other, other > 0, scalar.clone()]
        yield kind, sharded, [x.clone(), y.clone(), y > 0, scalar.clone()]


def check_operations(rank: int, layout: str) -> list[str]:
    """Run every operation on every kind of tensor; what went wrong, by name."""
    mesh = mesh_of(layout)
    wrong: list[str] = []
    with torch.no_grad():
        for name, operation in RIGHT.items():
            for kind, sharded, plain in operands(layout, mesh):
                expected = operation(*plain)
                try:
                    got = operation(*sharded)
                except UnsupportedError as error:
                    wrong.append(f"{name} on a {kind}: refused: {error}")
                    continue
                difference = differs(got, expected) or differs(sharded, plain)
                if difference:
                    wrong.append(f"{name} on a {kind}: {difference}")
        for name, operation in REFUSED.items():
            for kind, sharded, plain in operands(layout, mesh):
                try:
                    got = operation(*sharded)
                except UnsupportedError as error:
                    if "'weight'" not in str(error):
                        wrong.append(f"{name} on a {kind} does not name the tensor: {error}")
                    difference = differs(sharded, plain)
                else:
                    # Where every rank holds all rows, reads of them may be right.
                    split = sharded[0].row_split is not None
                    expected = "a refusal" if split else operation(*plain)
                    difference = differs(got, expected) or differs(sharded, plain)
                if difference:
                    wrong.append(f"{name} on a {kind}: {difference}")
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_are_right_or_refused(layout: str) -> None:
    """Each of many operations gives what it gives on the whole tensor, or is refused by name."""
    assert run_ranks(LAYOUTS[layout][0], check_operations, layout) == [[]] * LAYOUTS[layout][0]


# -- dtypes, shapes, meshes -------------------------------------------------------------------

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


# -- between splits and placements ------------------------------------------------------------


def check_different_splits(rank: int) -> list[str]:
    mesh = mesh_of("uneven")
    full = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    one, other = shard(full, "uneven", mesh, "one"), shard(full, "last_empty", mesh, "other")
    replicated = shard(full, "replicated", mesh, "replicated")
    plain = DTensor.from_local(one.to_local(), mesh, one.placements)
    wrong = []
    for name, operation in {
        "add": lambda a, b: a + b,
        "add_": lambda a, b: a.add_(b),
        "copy_": lambda a, b: a.copy_(b),
        "where": lambda a, b: torch.where(a > 0, a, b),
        "foreach": lambda a, b: torch._foreach_add_([a], [b]),
        "foreach mixed": lambda a, b: torch._foreach_mul([a, a], [a, b]),
        "equal": torch.equal,
        "fused": lambda a, b: torch._fused_sgd_(
            [a],
            [b],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        ),
    }.items():
        for second in (other, replicated, plain):
            for pair in ((one, second), (second, one)):
                if name == "copy_" and type(pair[1]) is DTensor:
                    continue
                try:
                    operation(*pair)
                except UnsupportedError as error:
                    if "'one'" not in str(error):
                        wrong.append(f"{name}: {error}")
                else:
                    wrong.append(f"{name} of {pair} was not refused")
    return wrong + [d for t in (one, other, replicated) if (d := differs(t, full))]


def test_tensors_that_lie_differently_do_not_mix() -> None:
    """Operands with other rows, other placements or of plain DTensor type are refused."""
    assert run_ranks(2, check_different_splits) == [[], []]


def check_redistribute(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    full = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    wrong = []
    targets = [placements_of(name) for name in LAYOUTS if LAYOUTS[name][1] == LAYOUTS[layout][1]]
    assert len(targets) >= 2
    for target in targets:
        tensor = shard(full, layout, mesh)
        moved = tensor.redistribute(placements=target)
        if list(moved.placements) != target or differs(moved, full):
            wrong.append(f"to {target}: {moved} {differs(moved, full)}")
        moved.zero_()
        if differs(tensor, full):
            wrong.append(f"to {target}: shares memory")
        full_of_partial = full * mesh.size(0)
        for operation, value in (("sum", full_of_partial), ("avg", full)):
            partial = ShardedTensor.wrap(
                full.clone(),
                shape=full.shape,
                mesh=mesh,
                placements=[Partial(operation), *[Replicate()] * (mesh.ndim - 1)],
                name="grad",
            )
            if difference := differs(partial.redistribute(placements=target), value):
                wrong.append(f"Partial({operation}) to {target}: {difference}")
            if difference := differs(partial.full_tensor(), value):
                wrong.append(f"Partial({operation}) full: {difference}")
    return wrong


@pytest.mark.parametrize("layout", ["uneven", "replicated", "hybrid", "both_axes"])
def test_redistribute_to_every_other_placement(layout: str) -> None:
    """redistribute gives the same values under any split, from any split or pending sum."""
    assert run_ranks(LAYOUTS[layout][0], check_redistribute, layout) == [[]] * LAYOUTS[layout][0]


PARTIAL_RIGHT: dict[str, Callable[[Any, Any], Any]] = {
    "zero_": lambda g, h: g.zero_(),
    "clone": lambda g, h: g.clone(),
    "detach": lambda g, h: g.detach(),
    "zeros_like": lambda g, h: torch.zeros_like(g),
    "new_zeros": lambda g, h: g.new_zeros(g.shape),
    "neg": lambda g, h: -g,
    "mul": lambda g, h: 0.5 * g,
    "mul_ 0-D": lambda g, h: g.mul_(torch.tensor(3.0)),
    "div_": lambda g, h: g.div_(4),
    "add": lambda g, h: g + h,
    "add_": lambda g, h: g.add_(h, alpha=2),
    "sub_": lambda g, h: g.sub_(h),
    "copy_": lambda g, h: g.copy_(h),
    "foreach mul_": lambda g, h: (torch._foreach_mul_([g, h], 2.0), g, h)[1:],
    "foreach add_": lambda g, h: (torch._foreach_add_([g], [h]), g)[1],
    "foreach zero_": lambda g, h: (torch._foreach_zero_([g]), g)[1],
}
PARTIAL_REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "add number": lambda g, h: g + 1,
    "add_ 0-D": lambda g, h: g.add_(torch.tensor(1.0)),
    "foreach add number": lambda g, h: torch._foreach_add_([g], 1.0),
    "product": lambda g, h: g * h,
    "divided into": lambda g, h: 1 / g,
    "quotient": lambda g, h: g / h,
    "rounded quotient": lambda g, h: torch.div(g, 2, rounding_mode="floor"),
    "abs": lambda g, h: g.abs(),
    "square": lambda g, h: g.square(),
    "sqrt_": lambda g, h: g.sqrt_(),
    "clamp_": lambda g, h: g.clamp_(-1, 1),
    "compare": lambda g, h: g > 0,
    "isnan": lambda g, h: torch.isnan(g),
    "cast": lambda g, h: g.bfloat16(),
    "fill_": lambda g, h: g.fill_(1.0),
    "ones_like": lambda g, h: torch.ones_like(g),
    "new_ones": lambda g, h: g.new_ones(g.shape),
    "copy_ plain": lambda g, h: g.copy_(torch.ones(g.shape)),
    "sum": lambda g, h: g.sum(),
    "norm": lambda g, h: g.norm(),
    "foreach norm": lambda g, h: torch._foreach_norm([g]),
    "equal": lambda g, h: torch.equal(g, h),
    "clip": lambda g, h: nn.utils.get_total_norm([g]),
    "lerp_": lambda g, h: g.lerp_(h, 0.5),
    "unscale": lambda g, h: torch._amp_foreach_non_finite_check_and_unscale_(
        [g], torch.zeros(1), torch.ones(1)
    ),
    "checkpoint": lambda g, h: g.__create_write_items__("g", g),
}


def check_partial(rank: int, operation: str) -> list[str]:
    mesh = mesh_of("hybrid")
    split = placements_of("hybrid")[1]
    # Two ranks along the first axis contribute to the rows that their second coordinate holds.
    parts = [torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    totals = [part.sum(0) if operation == "sum" else part.mean(0) for part in parts]
    outer, inner = mesh.get_coordinate()

    def contributions() -> list[ShardedTensor]:
        return [
            ShardedTensor.wrap(
                part[outer, slice(*split.ranges[inner])].clone(),
                shape=(6, 2),
                mesh=mesh,
                placements=[Partial(operation), split],
                name="grad",
            )
            for part in parts
        ]

    wrong = []
    for name, run in PARTIAL_RIGHT.items():
        if difference := differs(run(*contributions()), run(*[t.clone() for t in totals])):
            wrong.append(f"{name}: {difference}")
    for name, run in PARTIAL_REFUSED.items():
        given = contributions()
        try:
            run(*given)
        except UnsupportedError as error:
            if "'grad'" not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"{name} was not refused")
        if differs(given, totals):
            wrong.append(f"{name} was refused after a change")
    return wrong


@pytest.mark.parametrize("operation", ["sum", "avg"])
def test_pending_sums_allow_linear_operations_only(operation: str) -> None:
    """What runs on a gradient placed Partial keeps its sum right; the rest is refused."""
    assert run_ranks(4, check_partial, operation) == [[]] * 4


def check_plain_dtensor(rank: int) -> list[str]:
    mesh = mesh_of("uneven")
    tensor = shard(torch.randn(6, 2), "uneven", mesh)
    wrong = []
    for name, run in {
        "full_tensor": lambda: DTensor.from_local(
            tensor.to_local(), mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        ).full_tensor(),
        "matmul": lambda: tensor.T @ distribute_tensor(torch.ones(6, 2), mesh, [Replicate()]),
    }.items():
        try:
            run()
        except UnsupportedError:
            continue
        wrong.append(f"{name} was not refused")
    # What distribute_tensor makes of the same placements is chunked, and says so.
    chunked = distribute_tensor(torch.ones(6, 2), mesh, tensor.placements)
    if chunked.placements != (Shard(0),) or type(chunked.placements[0]) is not Shard:
        wrong.append(f"distribute_tensor gave {chunked.placements}")
    return wrong


def test_plain_dtensors_cannot_carry_a_row_split() -> None:
    """PyTorch's DTensor, given the placements of a sharded tensor, refuses instead of chunking."""
    assert run_ranks(2, check_plain_dtensor) == [[], []]


def check_whole_copy(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    full = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
    target = nn.Parameter(shard(torch.zeros(6, 2), layout, mesh))
    epoch = target.epoch
    with torch.no_grad():
        target.copy_(full.double())
    problems = [
        differs(target.detach(), full),
        None if target.epoch > epoch else "epoch stood still",
    ]
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(shard(torch.zeros(6, 2), layout, mesh)))
    module.load_state_dict({"weight": full})
    return [p for p in (*problems, differs(module.weight.detach(), full)) if p]


@pytest.mark.parametrize("layout", ["uneven", "replicated", "both_axes"])
def test_copy_takes_in_a_whole_tensor(layout: str) -> None:
    """copy_ and load_state_dict from a plain whole tensor give every rank its rows."""
    assert run_ranks(LAYOUTS[layout][0], check_whole_copy, layout) == [[]] * LAYOUTS[layout][0]


def check_torch_state_dicts(rank: int, layout: str) -> list[str]:
    """PyTorch's own whole state dicts, read and written."""
    mesh = mesh_of(layout)
    full = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(shard(full, layout, mesh)))
    options = StateDictOptions(full_state_dict=True)
    wrong = [differs(get_model_state_dict(module, options=options)["weight"], full)]
    set_model_state_dict(module, {"weight": full * 2}, options=options)
    wrong.append(differs(module.weight.detach(), full * 2))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    given = {"weight": full * 3} if rank == 0 else {}
    try:
        set_model_state_dict(module, given, options=options)
    except UnsupportedError as error:
        wrong.append(None if layout == "both_axes" else str(error))
    else:
        wrong.append(differs(module.weight.detach(), full * 3))
    return [problem for problem in wrong if problem]


@pytest.mark.parametrize("layout", ["uneven", "first_empty", "hybrid", "both_axes"])
def test_torch_state_dict_functions(layout: str) -> None:
    """PyTorch's get and set_model_state_dict handle whole state dicts, or are refused."""
    ranks = LAYOUTS[layout][0]
    assert run_ranks(ranks, check_torch_state_dicts, layout) == [[]] * ranks


def check_no_communication(rank: int) -> str:
    tensor = nn.Parameter(shard(torch.ones(6, 2), "uneven", mesh_of("uneven")))
    # A collective that only one rank entered would hang.
    return repr(tensor) if rank == 1 else ""


def test_repr_is_local() -> None:
    """repr names the tensor, its shape, rows and placement without any communication."""
    _, text = run_ranks(2, check_no_communication, timeout=30)
    assert text == (
        "ShardedTensor('weight', shape=(6, 2), rows 4:6, placements=(RowSplit([0:4, 4:6], "
        "axis_order=(0,)),), dtype=torch.float32, device=cpu, requires_grad=True)"
    )


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


# -- checkpoints ------------------------------------------------------------------------------


def checkpointed(layout: str, fill: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    mesh = mesh_of(layout)
    counts = LAYOUTS[layout][3]
    first = tuple(int(index == 0) for index in range(len(counts)))
    none = (0,) * len(counts)
    wide = torch.arange(12.0).reshape(6, 2)
    return {
        "weight": shard(fill(wide), layout, mesh),
        "half": shard(fill(wide).bfloat16(), layout, mesh),
        "number": shard(fill(torch.tensor(3.0)), layout, mesh, row_counts=first),
        "row": shard(fill(torch.ones(1, 4)), layout, mesh, row_counts=first),
        "no_rows": shard(fill(torch.ones(0, 4)), layout, mesh, row_counts=none),
        "plain": fill(torch.ones(3)),
        "parameter": nn.Parameter(shard(fill(wide), layout, mesh)),
    }


def save(rank: int, layout: str, path: str) -> None:
    dcp.save(checkpointed(layout, lambda full: full), checkpoint_id=path)


def load(rank: int, layout: str, path: str) -> list[str]:
    state = checkpointed(layout, torch.zeros_like)
    epochs = {name: t.epoch for name, t in state.items() if isinstance(t, ShardedTensor)}
    dcp.load(state, checkpoint_id=path)
    wrong = [
        f"{name}: {difference}"
        for name, expected in checkpointed(layout, lambda full: full).items()
        if (difference := differs(whole(state[name]), whole(expected)))
    ]
    if state["weight"].to_local().numel() and state["weight"].epoch <= epochs["weight"]:
        wrong.append("loaded unseen")
    return wrong


@pytest.mark.parametrize("target", ["last_empty", "replicated", "both_axes", "one_of_four"])
@pytest.mark.parametrize("source", ["uneven", "hybrid", "permuted"])
def test_checkpoints_move_between_splits(source: str, target: str, tmp_path: Path) -> None:
    """What one split saved is loaded under another, on another number of ranks."""
    run_ranks(LAYOUTS[source][0], save, source, str(tmp_path))
    ranks = LAYOUTS[target][0]
    assert run_ranks(ranks, load, target, str(tmp_path)) == [[]] * ranks


# -- autograd and copies ----------------------------------------------------------------------


def check_autograd(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    full = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    wrong = []
    for name, penalty in {
        "squares": lambda p: (p**2).sum(),
        "norm": lambda p: p.norm(),
        "absolute": lambda p: p.abs().sum(),
        "maximum": lambda p: p.max(),
        "product": lambda p: (p * p.detach()).sum() * 0.1,
    }.items():
        plain, sharded = nn.Parameter(full.clone()), nn.Parameter(shard(full, layout, mesh))
        for parameter in (plain, sharded):
            for _ in range(2):
                penalty(parameter).backward()
        if difference := differs(sharded.grad, plain.grad):
            wrong.append(f"{name}: {difference}")
    sharded = nn.Parameter(shard(full, layout, mesh))
    for name, read in {
        "to_local": lambda p: p.to_local(),
        "full_tensor": lambda p: p.full_tensor(),
        "redistribute": lambda p: p.redistribute(placements=p.placements),
    }.items():
        try:
            read(sharded).sum().backward()
        except UnsupportedError as error:
            if name not in str(error):
                wrong.append(f"{name}: {error}")
        else:
            wrong.append(f"a gradient through {name} was not refused")
    return wrong


@pytest.mark.parametrize("layout", ["uneven", "last_empty", "both_axes"])
def test_penalties_on_weights_are_differentiable(layout: str) -> None:
    """Penalties give sharded gradients; gradients through plain tensors are refused."""
    assert run_ranks(LAYOUTS[layout][0], check_autograd, layout) == [[]] * LAYOUTS[layout][0]


def check_world(rank: int) -> int:
    return dist.get_world_size()


def test_worlds_have_the_ranks_of_their_layouts() -> None:
    """The layouts above are run on as many ranks as they are written for."""
    for size in (2, 4):
        assert run_ranks(size, check_world) == [size] * size
        assert on_world(size)
