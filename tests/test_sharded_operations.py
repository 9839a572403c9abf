"""A sharded tensor never lies: what runs gives what the whole tensor gives, the rest is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sharded_layouts import (
    LAYOUTS,
    aten,
    differs,
    mesh_of,
    shard,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyshard.errors import UnsupportedError
from polyshard.testing import run_ranks

Operation = Callable[[Any, Any, Any, Any], Any]  # of x, y, a bool mask, and a 0-D plain tensor


def in_place(method: str, *args: Any, **kwargs: Any) -> Operation:
    def run(x: Any, y: Any, m: Any, s: Any) -> Any:
        chosen = {"y": y, "m": m, "s": s, "-y": -y}
        given = [chosen.get(a, a) if isinstance(a, str) else a for a in args]
        return getattr(x, method)(*given, **kwargs)

    return run


def seeded(draw: Callable[[Any], Any]) -> Operation:
    """A random operation on x, and what the generator gives after it."""

    def run(x: Any, y: Any, m: Any, s: Any) -> Any:
        torch.manual_seed(11)
        return draw(x), torch.rand(2)

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
    # numbers drawn for the whole tensor, by generators that stand alike
    "normal_": seeded(lambda x: x.normal_()),
    "uniform_": seeded(nn.init.uniform_),
    "random_": seeded(lambda x: x.random_(7)),
    "bernoulli_": seeded(lambda x: x.bernoulli_(0.5)),
    "exponential_": seeded(lambda x: x.exponential_()),
    "kaiming_uniform_": seeded(nn.init.kaiming_uniform_),
    "xavier_normal_": seeded(nn.init.xavier_normal_),
    "trunc_normal_": seeded(nn.init.trunc_normal_),
    "dropout": seeded(nn.functional.dropout),
    "randn_like": seeded(torch.randn_like),
    "rand_like": seeded(lambda x: torch.rand_like(x, dtype=torch.float64)),
    "randint_like": seeded(lambda x: torch.randint_like(x, 9)),
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
    "bernoulli": lambda x, y, m, s: torch.bernoulli(torch.sigmoid(x)),
    "bernoulli_ of tensors": lambda x, y, m, s: x.bernoulli_(torch.sigmoid(y)),
    "normal of tensors": lambda x, y, m, s: torch.normal(x, 1.0),
    "orthogonal_": lambda x, y, m, s: nn.init.orthogonal_(x),
    "eye_": lambda x, y, m, s: nn.init.eye_(x),
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


@pytest.mark.behaviour(7)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_are_right_or_refused(layout: str) -> None:
    """Each of many operations gives what it gives on the whole tensor, or is refused by name."""
    assert run_ranks(LAYOUTS[layout][0], check_operations, layout) == [[]] * LAYOUTS[layout][0]
