"""fully_shard on what it cannot manage, or interrupted half-way: an error, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_rank import OneRank, Stack, assert_same_weights, batch, make_stack, train, twins, units_in
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.two_tensor import TwoTensor

import polyshard.api
from polyshard import (
    BackendError,
    MixedPrecisionPolicy,
    PlacementError,
    Placements,
    UnsupportedError,
    fully_shard,
)
from polyshard.examination import examine_parameter
from polyshard.group import ParameterGroup
from polyshard.parameter import ManagedParameter, Slot
from polyshard.testing.loopback import LoopbackBackend
from polyshard.unit import Unit

HOOKS = [name for name in vars(nn.Linear(1, 1)) if name.endswith(("hooks", "hooks_with_kwargs"))]


def picture(model: nn.Module) -> list[Any]:
    """Everything that fully_shard might change, with identities where objects must stay."""
    seen: list[Any] = []
    for module in model.modules():
        seen += [id(module), type(module), sorted(vars(module)), list(module._parameters)]
        seen += [sorted(map(id, getattr(module, name).values())) for name in HOOKS]
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            seen += [id(parameter), type(parameter), parameter.requires_grad, id(parameter.grad)]
            seen += [
                sorted(vars(parameter)),
                parameter._version,
                len(parameter._backward_hooks or ()),
            ]
            seen += [len(parameter._post_accumulate_grad_hooks or ())]
            if has_memory(parameter):
                seen += [parameter.data_ptr(), parameter.stride(), parameter.tolist()]
    return seen


def has_memory(parameter: nn.Parameter) -> bool:
    """Not meta, not uninitialised, and not another unit's full parameter that was released."""
    if parameter.is_meta or isinstance(parameter, nn.UninitializedParameter):
        return False
    return parameter.untyped_storage().nbytes() > 0


class Unbuilt(nn.Module):
    """Parameters of a kind given, behind a forward."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        super().__init__()
        for index, parameter in enumerate((nn.Parameter(torch.ones(2, 2)), *parameters)):
            self.register_parameter(f"p{index}", parameter)

    def forward(self) -> None: ...


def sparse() -> nn.Module:
    return Unbuilt(nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False))


class TestModules:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (
                lambda: nn.Sequential(nn.LazyLinear(3)),
                "'0.weight' of Sequential is not initialised",
            ),
            (lambda: nn.ModuleList([nn.Linear(2, 2)]), "ModuleList has no forward.*its children"),
            (lambda: nn.ModuleDict(), "ModuleDict has no forward"),
            (lambda: nn.ParameterList([torch.ones(2)]), "ParameterList has no forward"),
        ],
    )
    def test_refused(self, world: OneRank, make: Callable[[], nn.Module], message: str) -> None:
        """A module that cannot be a unit is refused by name, with a remedy, and stays as it was."""
        model = make()
        before = picture(model)
        with pytest.raises(UnsupportedError, match=message):
            world.shard(model)
        assert picture(model) == before

    def test_a_sparse_parameter(self, world: OneRank) -> None:
        """A parameter without strides is refused by name."""
        with pytest.raises(UnsupportedError, match=r"'p1' of Unbuilt has layout torch\.sparse_coo"):
            world.shard(sparse())

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "is a TwoTensor, a class of tensors"),
            (lambda: torch.nested.nested_tensor([torch.ones(2)]), "is a nested tensor"),
            (
                lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
                "is a nested tensor",
            ),
            (
                lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
                r"is quantized \(torch\.quint8\)",
            ),
            (lambda: torch.eye(2).to_sparse_csr(), r"has layout torch\.sparse_csr"),
            (lambda: torch.ones(2).to_mkldnn(), r"has layout torch\._mkldnn"),
        ],
    )
    @pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these a prototype
    def test_other_kinds_of_tensors(
        self, world: OneRank, make: Callable[[], torch.Tensor], message: str
    ) -> None:
        """A parameter that is no plain tensor is refused by name, the module stays as it was, and
        the parameter can be left out."""
        parameter = nn.Parameter(make(), requires_grad=False)
        model = Unbuilt(parameter)
        with pytest.raises(UnsupportedError, match=rf"'p1' of Unbuilt {message}.*ignored_params"):
            world.shard(model)
        assert type(model) is Unbuilt
        assert model.p1 is parameter
        world.shard(model, ignored_params=[parameter])
        assert model.p1 is parameter

    def test_a_dtensor(self, world: OneRank, mesh: DeviceMesh) -> None:
        """A parameter that awaits a reduction on another axis is refused by name."""
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with pytest.raises(UnsupportedError, match=r"'p1' of Unbuilt is placed P\(sum\)"):
            world.shard(Unbuilt(nn.Parameter(tensor)))

    def test_a_script_module(self, world: OneRank) -> None:
        """A compiled module is refused, with what to shard instead."""
        with pytest.warns(DeprecationWarning, match="torch.jit"):
            module = torch.jit.script(nn.Linear(2, 2))
        with pytest.raises(UnsupportedError, match="shard the Python module"):
            world.shard(module)

    @pytest.mark.parametrize("value", [None, "model", nn.Linear])
    def test_what_is_no_module(self, world: OneRank, value: Any) -> None:
        """Only modules are taken."""
        with pytest.raises(UnsupportedError, match="fully_shard takes a module, got"):
            world.shard(value)

    def test_a_unit(self, world: OneRank) -> None:
        """A module is given to fully_shard once, and its unit survives the second time."""
        model, reference = twins(make_stack())
        world.shard(*units_in(model))
        with pytest.raises(UnsupportedError, match="this Stack was already given to fully_shard"):
            world.shard(model)
        assert train(model) == pytest.approx(train(reference), rel=1e-5)

    def test_parameters_of_two_units(self, world: OneRank) -> None:
        """A parameter that another unit owns is refused with both its names; the first unit and
        the second module are as they were."""
        model, reference = twins(make_stack())
        for stack in (model, reference):
            stack.blocks[1].widen.weight = stack.blocks[0].widen.weight
        world.shard(model.blocks[0])
        before = picture(model.blocks[1])
        message = "'widen.weight' of Block is 'widen.weight' of unit 'Block' already.*ancestor"
        with pytest.raises(UnsupportedError, match=message):
            world.shard(model.blocks[1])
        assert picture(model.blocks[1]) == before
        assert isinstance(model.blocks[0], polyshard.FsdpModule)

    def test_another_device(self) -> None:
        """A parameter on another device than the mesh is refused with both, and the call that
        helps."""
        with pytest.raises(PlacementError, match=r"'w' of M is on cpu, the mesh on cuda:1.*\.to\("):
            examine_parameter(
                nn.Parameter(torch.ones(1)), [Slot({}, "w", "w")], "M", torch.device("cuda", 1)
            )


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"grad_divisor": 0.0}, ValueError, "grad_divisor must be a positive number, got 0.0"),
            ({"grad_divisor": -1.0}, ValueError, "grad_divisor must be"),
            ({"grad_divisor": float("nan")}, ValueError, "grad_divisor must be"),
            ({"grad_divisor": "2"}, ValueError, "grad_divisor must be a positive number, got '2'"),
            (
                {"mixed_precision_policy": torch.bfloat16},
                ValueError,
                "MixedPrecisionPolicy or None",
            ),
            (
                {"schedule_policy": 3},
                ValueError,
                "schedule_policy must be a SchedulePolicy or None",
            ),
            ({"ignored_params": ["weight"]}, ValueError, "ignored_params must be a collection"),
            ({"use_symm_mem": True}, (BackendError, ValueError), "symm"),
        ],
    )
    def test_bad_ones(
        self, world: OneRank, options: dict[str, Any], error: Any, message: str
    ) -> None:
        """A bad argument is refused by name before anything changes."""
        model = make_stack()
        before = picture(model)
        with pytest.raises(error, match=message):
            world.shard(model, **options)
        assert picture(model) == before

    def test_mesh_and_placements(self, mesh: DeviceMesh) -> None:
        """What is no mesh, no placements, or an axis that the mesh lacks, is told apart."""
        model = make_stack()
        before = picture(model)
        with pytest.raises(PlacementError, match="mesh must be a DeviceMesh, got str"):
            fully_shard(model, "cpu", Placements.ddp("dp"))  # type: ignore[arg-type]
        with pytest.raises(PlacementError, match="placements must be a Placements"):
            fully_shard(model, mesh, "zero3")  # type: ignore[arg-type]
        with pytest.raises(PlacementError, match="the mesh has no axis 'tp'"):
            fully_shard(model, mesh, Placements.zero3("tp"), backend=LoopbackBackend())
        assert picture(model) == before


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError("in the middle")


def fail_after(count: int, original: Callable[..., Any]) -> Callable[..., Any]:
    """Works ``count`` times and fails from then on, after having done its work."""
    calls = 0

    def wrapper(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments, **options)
        if calls > count:
            raise RuntimeError("in the middle")
        return result

    return wrapper


#: Where to interrupt: object, attribute, and how many calls succeed before.
PLACES: dict[str, tuple[Any, str, int]] = {
    "allocation": (polyshard.api.Transport, "allocate", 1),
    "making a group": (ParameterGroup, "__init__", 1),
    "first group's views": (ParameterGroup, "install", 0),
    "second group's views": (ParameterGroup, "install", 1),
    "a parameter's face": (ParameterGroup, "wrap", 2),
    "registration": (polyshard.api, "register_unit", 0),
    "hooks": (polyshard.api, "attach", 0),
    "the class": (polyshard.api, "attach_mixin", 0),
    "showing": (ManagedParameter, "show_sharded", 2),
    "the last step": (Unit, "show_sharded", 0),
}


def half_frozen() -> Stack:
    """Two groups, a gradient that was there before, and attributes."""
    model = make_stack()
    model.first.requires_grad_(False)
    model.last.weight.grad = torch.ones(3, 6)
    model.last.weight.tag = "kept"  # type: ignore[attr-defined]
    with torch.no_grad():
        model.last.weight.mul_(2.0)
    return model


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bf16", [False, True])
def test_interrupted(
    world: OneRank, monkeypatch: pytest.MonkeyPatch, place: str, bf16: bool
) -> None:
    """Wherever fully_shard fails, the module is exactly as it was: it trains plainly, or can be
    given to fully_shard again."""
    holder, name, successes = PLACES[place]
    policy = MixedPrecisionPolicy(compute_dtype=torch.bfloat16) if bf16 else None
    model = half_frozen()
    before = picture(model)
    with monkeypatch.context() as patched:
        patched.setattr(holder, name, fail_after(successes, getattr(holder, name)))
        with pytest.raises(RuntimeError, match="in the middle"):
            world.shard(model, mixed_precision_policy=policy)
    assert picture(model) == before
    reference = half_frozen()
    assert train(model, 2) == train(reference, 2)
    world.shard(model)
    assert train(model) == pytest.approx(train(reference), rel=1e-5)
    assert_same_weights(model, reference)


def test_a_parent_interrupted(world: OneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were made before stay units when their parent fails."""
    model, reference = twins(make_stack())
    world.shard(*model.blocks)
    with monkeypatch.context() as patched:
        patched.setattr(polyshard.api, "attach", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            world.shard(model)
    assert not isinstance(model, polyshard.FsdpModule)
    assert train(model) == pytest.approx(train(reference), rel=1e-5)
    assert_same_weights(model, reference)


def test_gradients_from_before(world: OneRank) -> None:
    """A gradient that a parameter had before it was sharded is gone, and does not come back."""
    model, reference = make_stack(), make_stack()
    model.last.weight.grad = torch.ones(3, 6)
    world.shard(*units_in(model))
    assert model.last.weight.grad is None
    for module in (model, reference):
        module(batch()).sum().backward()
    assert_same_weights(model, reference)
