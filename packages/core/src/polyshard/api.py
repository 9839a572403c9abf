"""The two verbs a user types: ``fully_shard`` and ``microbatch``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .autograd import set_versions
from .backends import choose_backend
from .context import FsdpContext, context_of, register_unit, unit_of
from .conversions import keep_parameters
from .debug import checksum, debugging
from .errors import PlacementError, UnsupportedError
from .examination import (
    examine_distributed,
    examine_module,
    examine_parameter,
    examine_submodules,
)
from .group import ParameterGroup
from .hooks import attach
from .module import attach_mixin, managed_class
from .parameter import ManagedParameter, Slot, find_parameters
from .placements import Placements, resolve_axes
from .precision import MixedPrecisionPolicy
from .preflight import agree
from .schedule import SchedulePolicy
from .spi import CollectiveBackend
from .structure import Structure, own_modules
from .submesh import ranks_along
from .transport import Transport
from .unit import Unit


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    use_symm_mem: bool = False,
    *,
    backend: str | CollectiveBackend | None = None,
    reshard_after_forward: bool = True,
    schedule_policy: SchedulePolicy | None = None,
    grad_divisor: float = 1.0,
    ignored_params: Collection[nn.Parameter] = (),
) -> None:
    """Make ``module`` a unit: shard, in place, its parameters that no nested unit owns.

    Call it bottom-up, on the same modules in the same order on every rank of the mesh, before
    building the optimizer. The module stays the same object, with the same ``state_dict`` keys.

    Parameters may be on meta: each rank then gets memory for its rows only, and forwards are an
    error until they were given values, by ``reset_parameters`` or a load.

    Args:
        module: any module with a ``forward``.
        mesh: the ranks; its device type says where parameters are.
        placements: where parameters, gradients and optimizer state live, e.g.
            ``Placements.zero3("dp")``.
        mixed_precision_policy: dtypes; by default main weights of at least fp32 and gradients of
            the parameters' own dtype.
        use_symm_mem: the same as ``backend="symm_mem"``.
        backend: a backend's name or instance; by default ``POLYSHARD_BACKEND``, else the one that
            serves the mesh's device type best.
        reshard_after_forward: release gathered parameters between forward and backward.
        schedule_policy: how far ahead of compute to gather.
        grad_divisor: divides gradients once more, after averaging.
        ignored_params: parameters to leave as they are.

    Raises:
        PlacementError: axes or placements that do not fit the mesh; models that differ by rank.
        BackendError: no such backend, or it cannot work here, or another rank refused.
        UnsupportedError: a module or parameter that cannot be managed.
        ValueError: a bad argument. Whatever is raised, nothing was changed.
    """
    if not isinstance(mesh, DeviceMesh):
        raise PlacementError(
            f"mesh must be a DeviceMesh, got {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh(...)."
        )
    if not isinstance(placements, Placements):
        raise PlacementError(
            f"placements must be a Placements, e.g. Placements.zero3('dp'), got {placements!r}."
        )
    axes = resolve_axes(placements.dp_axes, mesh.mesh_dim_names, mesh.ndim)
    if mesh.get_coordinate() is None:
        raise PlacementError("this rank is not part of the mesh; call fully_shard on its ranks.")
    for axis, given in zip(axes, placements.dp_axes, strict=True):
        ranks = ranks_along(mesh, axis)
        if list(ranks) != sorted(ranks):
            raise PlacementError(
                f"axis {given!r} of the mesh has the ranks {ranks}; process groups number theirs "
                "in ascending order, and rows would be told by another one. Build the mesh with "
                "ranks that ascend along each axis."
            )
    precision = MixedPrecisionPolicy() if mixed_precision_policy is None else mixed_precision_policy
    policy = SchedulePolicy() if schedule_policy is None else schedule_policy
    request: _Request | None = None
    failure: Exception | None = None
    try:
        _examine_arguments(precision, policy, grad_divisor, ignored_params)
        chosen = choose_backend(backend, device_type=mesh.device_type, use_symm_mem=use_symm_mem)
        request = _examine(module, mesh, axes, chosen, ignored_params)
    except Exception as error:  # whatever it is: the other ranks wait to hear of it
        failure = error
    subject = f"fully_shard({type(module).__name__})"
    description: list[str] = []
    if request is not None:
        description = request.describe(
            f"placements {placements.dp_axes} parameter={placements.parameter} "
            f"gradient={placements.gradient} optimizer={placements.optimizer}",
            f"{precision}",
            f"{policy}",
            f"reshard_after_forward={reshard_after_forward}",
            f"grad_divisor={float(grad_divisor)}",
        )
    everyone = [mesh.get_group(axis) for axis in axes]
    place = None if request is None else (request.backend, mesh, axes, request.device)
    # Held from here on: what one rank has freed, another may still hold.
    in_use = Transport.in_use(*place) if place else None
    vote = in_use.number if in_use else 0
    votes = agree(subject, description, failure, everyone, vote=vote)
    assert request is not None
    assert place is not None
    if debugging():
        # Each rank keeps its own rows: they should be rows of the same values.
        sharded = [axes[position] for position in placements.shard_order]
        groups_of_rows = [mesh.get_group(axis) for axis in sharded]
        agree(subject, request.values(), None, groups_of_rows)

    transport = in_use if in_use and votes == {vote} else None
    transport = transport or Transport.new(*place, number=max(votes) + 1)
    groups = [
        ParameterGroup(
            f"{type(module).__name__} ({str(parameters[0].full.dtype).removeprefix('torch.')})",
            parameters,
            transport,
            placements,
            precision.resolve(parameters[0].full.dtype),
            grad_divisor,
        )
        for parameters in request.grouped()
    ]
    unit = Unit(
        module,
        groups,
        transport=transport,
        precision=precision,
        schedule=policy,
        reshard_after_forward=reshard_after_forward,
        structure=request.structure,
    )
    _install(unit, module, request.owners)


@contextmanager
def microbatch(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Say whether forwards in this scope are for the last microbatch of a step.

    Until the last one, gradients that are ``Partial`` on some axis are accumulated there and not
    reduced. The flag is read at each root forward and travels with it: a backward that covers
    several forwards is final if any of them is last. Without a scope, every backward is final.

    Args:
        module: all units below it, and itself, take the flag.
        is_last: the flag; the previous one comes back at the end of the scope.

    Raises:
        UnsupportedError: no unit in ``module``.
    """
    contexts: list[FsdpContext] = []
    _collect_fsdp_contexts(module, contexts)
    if not contexts:
        raise UnsupportedError(
            f"{type(module).__name__} has no units; call fully_shard before microbatch."
        )
    before = [context.is_last for context in contexts]
    for context in contexts:
        context.is_last = bool(is_last)
    try:
        yield
    finally:
        for context, flag in zip(contexts, before, strict=True):
            context.is_last = flag


def _attach_mixin(module: nn.Module) -> None:
    """Give ``module`` a class that is FsdpModule and its own."""
    attach_mixin(module)


def _collect_fsdp_contexts(module: nn.Module, contexts: list[FsdpContext]) -> None:
    """Append the contexts of all units in ``module``, each once, in the order of the modules."""
    known = set(contexts)
    for child in module.modules():
        unit = unit_of(child)
        if unit is not None and context_of(unit) not in known:
            known.add(context_of(unit))
            contexts.append(context_of(unit))


@dataclass(frozen=True)
class _Request:
    """What fully_shard was asked for, examined and found possible on this rank."""

    module: nn.Module
    backend: CollectiveBackend
    device: torch.device
    parameters: list[ManagedParameter]
    owners: list[nn.Module]
    structure: Structure

    def grouped(self) -> list[list[ManagedParameter]]:
        """By dtype and requires_grad, in registration order."""
        groups: dict[tuple[torch.dtype, bool], list[ManagedParameter]] = {}
        for parameter in self.parameters:
            key = (parameter.full.dtype, parameter.full.requires_grad)
            groups.setdefault(key, []).append(parameter)
        return list(groups.values())

    def values(self) -> list[str]:
        """One line per parameter that has values, which differs where they do."""
        return [
            f"parameter {parameter.name!r} with values of checksum {checksum(parameter.local)}"
            for parameter in self.parameters
            if not parameter.local.is_meta
        ]

    def describe(self, *arguments: str) -> list[str]:
        """One line per fact that all ranks must share, the ``arguments`` among them."""
        lines = [
            f"module class {type(self.module).__qualname__}",
            *arguments,
            f"backend {self.backend.name!r}",
        ]
        lines += [
            f"parameter {' = '.join(slot.path for slot in parameter.slots)!r} of shape "
            f"{tuple(parameter.shape)}{parameter.other_placements or ''}, {parameter.full.dtype}, "
            f"requires_grad={parameter.full.requires_grad}"
            f"{', on meta' if parameter.full.is_meta else ''}"
            for parameter in self.parameters
        ]
        return lines


def _examine_arguments(
    precision: object, policy: object, grad_divisor: object, ignored_params: object
) -> None:
    """What is not what it should be would fail later, and less clearly."""
    for name, value, kind in (
        ("mixed_precision_policy", precision, MixedPrecisionPolicy),
        ("schedule_policy", policy, SchedulePolicy),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__} or None, got {value!r}.")
    if not isinstance(grad_divisor, int | float) or not 0 < grad_divisor < math.inf:
        raise ValueError(f"grad_divisor must be a positive number, got {grad_divisor!r}.")
    if not isinstance(ignored_params, Collection) or not all(
        isinstance(parameter, nn.Parameter) for parameter in ignored_params
    ):
        raise ValueError(
            f"ignored_params must be a collection of parameters, got {ignored_params!r}."
        )


def _examine(
    module: nn.Module,
    mesh: DeviceMesh,
    axes: Sequence[int],
    backend: CollectiveBackend,
    ignored_params: Collection[nn.Parameter],
) -> _Request:
    """Everything that can be refused without asking other ranks."""
    examine_module(module)
    managed_class(type(module))
    named = own_modules(module)
    ignored = frozenset(id(parameter) for parameter in ignored_params)
    found = find_parameters(named, ignored)
    device_type = mesh.device_type
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, torch.get_device_module(device_type).current_device())
    for parameter, slots in found:
        examine_parameter(parameter, slots, type(module).__name__, device)
        if isinstance(parameter, DTensor):
            examine_distributed(parameter, slots[0].path, type(module).__name__, mesh, axes)
    examine_submodules(named, type(module).__name__, ignored)
    parameters = [ManagedParameter(parameter, slots) for parameter, slots in found]
    return _Request(module, backend, device, parameters, _owners(named, found), Structure(named))


def _owners(
    named: list[tuple[str, nn.Module]], found: list[tuple[nn.Parameter, list[Slot]]]
) -> list[nn.Module]:
    holders = {id(slot.holder) for _, slots in found for slot in slots}
    return [module for _, module in named if id(module._parameters) in holders]


def _install(unit: Unit, module: nn.Module, owners: list[nn.Module]) -> None:
    """Change the module; if anything fails, change it back."""
    before = [(p, p.full, p.local, p.full.grad, p.full._version) for p in unit.parameters]
    original = type(module)
    undo: list[Callable[[], object]] = []
    try:
        for group in unit.groups:
            group.install()
        for parameter in unit.parameters:
            parameter.full._polyshard_owner = weakref.ref(unit)  # type: ignore[attr-defined]
        register_unit(module, unit)
        attach(unit, module, owners, undo)
        keep_parameters(owners, undo)
        attach_mixin(module)
        unit.show_sharded()
    except BaseException:
        for step in undo:
            step()
        for group in unit.groups:
            group.uninstall()
        module.__dict__.pop("_polyshard_unit", None)
        if type(module) is not original:
            module.__class__ = original
        for parameter, original_parameter, values, grad, version in before:
            parameter.full = original_parameter
            for slot in parameter.slots:
                slot.holder[slot.name] = parameter.full
            parameter.view(values)
            parameter.full.grad = grad
            set_versions([parameter.full], [version])
            vars(parameter.full).pop("_polyshard_owner", None)
        raise
