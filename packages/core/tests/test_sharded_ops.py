"""The tables of operations on sharded tensors, and a torch that does not let them be reached."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from wrapped_tensors import aten, wrap

import polyshard.sharded_tensor as sharded_tensor_module
from polyshard.errors import UnsupportedError
from polyshard.sharded_elementwise import ELEMENTWISE, ELEMENTWISE_OVERLOADS, FOREACH, FUSED
from polyshard.sharded_fallback import dispatch_is_honoured
from polyshard.sharded_memory_ops import MEMORY_OPERATIONS
from polyshard.sharded_ops import choose
from polyshard.sharded_random import IN_PLACE, LIKE, REFUSED
from polyshard.sharded_reductions import _OTHERS, _REDUCTIONS
from polyshard.sharded_tensor import ShardedTensor

# -- the tables -------------------------------------------------------------------------------


def test_every_named_operation_exists() -> None:
    """A name in the tables is an operation of this version of PyTorch, and is handled."""
    packets = {
        *(f"{name}" for name in ELEMENTWISE),
        *(f"_foreach_{name}" for name in FOREACH),
        *FUSED,
        *IN_PLACE,
        *LIKE,
        *REFUSED,
        *(name.partition(".")[0] for name in {**MEMORY_OPERATIONS, **_REDUCTIONS, **_OTHERS}),
        *(name.partition(".")[0] for name in ELEMENTWISE_OVERLOADS),
    }
    missing = sorted(
        name for name in packets if not (hasattr(aten, name) or hasattr(aten, f"{name}_"))
    )
    assert missing == []


def test_elementwise_operations_take_no_dims_or_indices() -> None:
    """No overload that an elementwise name stands for works on a dim or an index."""
    suspicious = {"dim", "dims", "index", "indices", "axis", "keepdim", "size", "generator"}
    packets = [*ELEMENTWISE, *(f"{n}_" for n in ELEMENTWISE), *(f"_foreach_{n}" for n in FOREACH)]
    for name in packets:
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            operation = getattr(packet, overload)
            names = {argument.name for argument in operation._schema.arguments}
            assert not names & suspicious, operation


def test_step_counts_are_where_fused_optimizers_take_them() -> None:
    """The argument that may be plain in a fused step is the list of step counts."""
    for name, position in FUSED.items():
        arguments = [a.name for a in getattr(aten, name).default._schema.arguments]
        assert (
            arguments.index("state_steps") == position
            if position
            else ("state_steps" not in arguments)
        )


def test_operations_of_others_are_refused(mesh: DeviceMesh) -> None:
    """A custom operation is not taken for elementwise, whatever its name."""
    library = torch.library.Library("polyshard_test", "DEF")
    library.define("add(Tensor x) -> Tensor")
    library.impl("add", lambda x: x + 1, "CompositeExplicitAutograd")
    with pytest.raises(UnsupportedError, match="'weight'"):
        torch.ops.polyshard_test.add(wrap(torch.ones(3, 2), mesh))


def test_handlers_exist_for_every_overload() -> None:
    """Choosing a handler never fails, also for overloads that write lists to out."""
    for name in ("_foreach_add", "add", "sum", "max", "norm", "copy_", "_fused_adamw_"):
        packet = getattr(aten, name)
        assert all(callable(choose(getattr(packet, o))) for o in packet.overloads())


# -- where dispatch is not honoured -----------------------------------------------------------


def test_this_torch_honours_dispatch() -> None:
    """The probe finds what torch 2.12 and later do: run a subclass's own dispatch."""
    assert dispatch_is_honoured()


def test_the_probe_notices_a_torch_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that sends every DTensor to its own dispatch is recognised."""
    made = Tensor._dtensor__new__

    def always_dtensor(cls: type, *args: Any, **kwargs: Any) -> DTensor:
        return made(DTensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "_dtensor__new__", always_dtensor)
    dispatch_is_honoured.cache_clear()
    try:
        assert not dispatch_is_honoured()
    finally:
        monkeypatch.undo()
        dispatch_is_honoured.cache_clear()


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch whose dispatch is not honoured: reaching it at all is a failure."""

    def reached(cls: type, func: Any, *args: Any) -> None:
        raise AssertionError(f"{func} reached a dispatch that is not there")

    monkeypatch.setattr(sharded_tensor_module, "dispatch_is_honoured", lambda: False)
    monkeypatch.setattr(ShardedTensor, "__torch_dispatch__", classmethod(reached))
    yield
    if "__torch_function__" in vars(ShardedTensor):
        del ShardedTensor.__torch_function__


@pytest.mark.parametrize(
    "way",
    [{"foreach": False}, {"foreach": True}, {"fused": True}],
    ids=["single", "foreach", "fused"],
)
@pytest.mark.parametrize(
    "name",
    [
        "SGD",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "ASGD",
    ],
)
@pytest.mark.usefixtures("blind")
def test_optimizers_without_dispatch(mesh: DeviceMesh, name: str, way: dict[str, Any]) -> None:
    """Where dispatch is not honoured, elementwise optimizers step and resume as always."""
    kind = getattr(torch.optim, name)
    given = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    if not set(way) <= set(inspect.signature(kind).parameters):
        with pytest.raises(TypeError):
            kind([torch.ones(1)], **way)
        return
    start = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    plain, sharded = nn.Parameter(start.clone()), nn.Parameter(wrap(start.clone(), mesh))
    assert "__torch_function__" in vars(ShardedTensor)
    results = []
    for weight, place in ((plain, Tensor.clone), (sharded, lambda t: wrap(t.clone(), mesh))):
        optimizer = kind([weight], **given, **way)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            weight.grad = place(torch.randn(3, 2, generator=generator))
            optimizer.step()
            if step == 1:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = kind([weight], **given, **way)
                optimizer.load_state_dict(state)
            optimizer.zero_grad(set_to_none=False)
        results.append(weight.detach())
    assert sharded.epoch > 0
    torch.testing.assert_close(results[1].to_local(), results[0])


@pytest.mark.usefixtures("blind")
def test_without_dispatch_the_rest_is_refused(mesh: DeviceMesh) -> None:
    """Where dispatch is not honoured, nothing else runs, nor anything that needs gradients."""
    made = nn.Parameter(wrap(torch.ones(3, 2), mesh))
    full = made.detach()
    for operation in (
        lambda t: t.sum(),
        lambda t: t[0],
        lambda t: t.T,
        lambda t: t @ torch.ones(2, 2),
        lambda t: t.normal_(),
        lambda t: torch.where(t),
        lambda t: t + torch.ones(3, 2),
        lambda t: torch.ones(3, 2).type_as(t),
        lambda t: torch._foreach_norm([t]),
        lambda t: t.__setitem__(0, 1.0),
    ):
        with pytest.raises(UnsupportedError, match="'weight'"):
            operation(full)
    with pytest.raises(UnsupportedError, match="gradients"):
        made * 2
    assert made.shape == (3, 2)
    assert full.full_tensor().sum() == 6
    assert torch.where(full.gt(0), full, 0.0).to_local().sum() == 6
    assert torch.add(full, 1, out=full.clone()).to_local().sum() == 12
    assert full.to(torch.float64).dtype == torch.float64
    assert full.to(torch.float32) is full
    assert "'weight'" in repr(made)
    assert copy.deepcopy(made).to_local().sum() == 6
