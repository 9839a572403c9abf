"""Sharded tensors beside others: of other splits, placements, pending sums, plain, in autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_layouts import (
    LAYOUTS,
    differs,
    mesh_of,
    on_world,
    placements_of,
    shard,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)

from polyshard.errors import UnsupportedError
from polyshard.sharded_tensor import ShardedTensor
from polyshard.testing import run_ranks

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


@pytest.mark.behaviour(7)
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


@pytest.mark.behaviour(7)
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


@pytest.mark.behaviour(7)
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


@pytest.mark.behaviour(7)
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


@pytest.mark.behaviour(33)
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


# -- autograd and copies ----------------------------------------------------------------------


def check_autograd(rank: int, layout: str) -> list[str]:
    mesh = mesh_of(layout)
    full = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    wrong = []
    for name, penalty in {
        "squares": lambda p: (p**2).sum(),
        "mean of squares": lambda p: p.square().mean(),
        "divided squares": lambda p: p.square().sum() / 3,
        "scaled mean": lambda p: (2 * (p * 3).square()).mean() * 0.5,
        "not a number": lambda p: p.square().mean() * float("nan"),
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
