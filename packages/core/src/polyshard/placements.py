"""Where each kind of buffer lives on each mesh axis: frozen values and the rules they obey.

Knows no mesh, no tensor storage and no collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from .errors import PlacementError

ReduceOp: TypeAlias = Literal["avg", "sum"]


@dataclass(frozen=True)
class Flat:
    """Rows (indices of dim 0) are spread over the axis; each rank holds one run of the buffer."""


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole."""


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds a contribution; the value is their average or their sum."""

    reduce_op: ReduceOp = "avg"

    def __post_init__(self) -> None:
        if self.reduce_op not in ("avg", "sum"):
            raise PlacementError(
                f"Partial reduces by 'avg' or 'sum', got {self.reduce_op!r}; use one of the two."
            )


Placement: TypeAlias = Flat | Replicate | Partial
Axis: TypeAlias = int | str

_KINDS = ("parameter", "gradient", "optimizer")


def as_placement(value: object) -> Placement:
    """Accept our placements and PyTorch's ``Shard(0)``, ``Replicate()`` and ``Partial(...)``.

    PyTorch's bare ``Partial()`` means sum and keeps that meaning; ours means average.
    Raises PlacementError for everything else.
    """
    if isinstance(value, Flat | Replicate | Partial):
        return value
    if isinstance(value, TorchShard):
        if value.dim == 0:
            return Flat()
        raise PlacementError(
            f"Shard({value.dim}) is not supported: parameters are split by rows; use Flat() or "
            "Shard(0)."
        )
    if isinstance(value, TorchReplicate):
        return Replicate()
    if isinstance(value, TorchPartial):
        if value.reduce_op == "avg":
            return Partial("avg")
        if value.reduce_op == "sum":
            return Partial("sum")
        raise PlacementError(
            f"Partial({value.reduce_op!r}) is not supported: gradients reduce by 'avg' or 'sum'."
        )
    raise PlacementError(
        f"expected a placement (Flat, Replicate or Partial, or PyTorch's Shard(0), Replicate, "
        f"Partial), got {value!r}."
    )


@dataclass(frozen=True)
class Placements:
    """One placement per data-parallel axis for parameters, gradients and optimizer state.

    Args:
        dp_axes: mesh axes by name or index (negative counts from the end), outer to inner.
        parameter: where the compute-precision weights rest; ``Flat`` or ``Replicate`` per axis.
        gradient: where gradients rest between microbatches; ``Flat``, ``Replicate`` or
            ``Partial`` per axis.
        optimizer: where main weights, final gradients and optimizer state live; ``Flat`` or
            ``Replicate`` per axis.

    Legal are triples whose sets of sharded axes form a chain: parameter's and gradient's inside
    optimizer's, nested in each other. A gradient that is ``Partial`` on an axis is finished, on
    the last microbatch, to what the optimizer has there.

    Raises:
        PlacementError: naming the axis, what it got and what it would accept.
    """

    dp_axes: Sequence[Axis]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        axes = (self.dp_axes,) if isinstance(self.dp_axes, int | str) else tuple(self.dp_axes)
        for axis in axes:
            if isinstance(axis, bool) or not isinstance(axis, int | str):
                raise PlacementError(f"a mesh axis is a name or an index, got {axis!r}.")
        if not axes:
            raise PlacementError("dp_axes is empty; name at least one mesh axis.")
        _refuse_repeated(axes)
        object.__setattr__(self, "dp_axes", axes)
        for kind in _KINDS:
            given = getattr(self, kind)
            values = tuple(given) if isinstance(given, Sequence) else (given,)
            if len(values) != len(axes):
                raise PlacementError(
                    f"{kind!r} has {len(values)} placements for {len(axes)} dp axes {axes}; give "
                    "one per axis, outer to inner."
                )
            object.__setattr__(self, kind, tuple(as_placement(value) for value in values))
        self._check_axes()
        self._check_nesting()

    @classmethod
    def ddp(cls, axis: Axis) -> Placements:
        """Everything replicated; gradients are averaged on the last microbatch."""
        return cls((axis,), (Replicate(),), (Partial(),), (Replicate(),))

    @classmethod
    def zero1(cls, axis: Axis) -> Placements:
        """Optimizer state sharded."""
        return cls((axis,), (Replicate(),), (Partial(),), (Flat(),))

    @classmethod
    def zero2(cls, axis: Axis) -> Placements:
        """Optimizer state and gradients sharded."""
        return cls((axis,), (Replicate(),), (Flat(),), (Flat(),))

    @classmethod
    def zero3(cls, axis: Axis) -> Placements:
        """Optimizer state, gradients and parameters sharded."""
        return cls((axis,), (Flat(),), (Flat(),), (Flat(),))

    @classmethod
    def hsdp(cls, outer: Axis, inner: Axis) -> Placements:
        """zero3 inside a group of ranks, replicated across groups."""
        replicated = (Replicate(), Flat())
        return cls((outer, inner), replicated, (Partial(), Flat()), replicated)

    @classmethod
    def hfsdp(cls, outer: Axis, inner: Axis) -> Placements:
        """hsdp whose main weights and optimizer state are sharded over the outer axis too."""
        return cls((outer, inner), (Replicate(), Flat()), (Partial(), Flat()), (Flat(), Flat()))

    def _check_axes(self) -> None:
        for axis, parameter, gradient, optimizer in zip(
            self.dp_axes, self.parameter, self.gradient, self.optimizer, strict=True
        ):
            for kind, placement in (("parameter", parameter), ("optimizer", optimizer)):
                if isinstance(placement, Partial):
                    raise PlacementError(
                        f"axis {axis!r} of {kind!r} is {placement}; only a gradient can be "
                        "Partial. Use Flat or Replicate."
                    )
            if isinstance(optimizer, Flat):
                continue
            if isinstance(parameter, Flat):
                raise PlacementError(
                    f"axis {axis!r} of 'parameter' is Flat but 'optimizer' is Replicate; a "
                    "sharded parameter cannot hold a replicated main weight. Use Replicate, or "
                    "shard the optimizer."
                )
            if isinstance(gradient, Flat):
                raise PlacementError(
                    f"axis {axis!r} of 'gradient' is Flat but 'optimizer' is Replicate; a "
                    "sharded gradient cannot feed a replicated optimizer. Use Partial, or shard "
                    "the optimizer."
                )

    def _check_nesting(self) -> None:
        parameter = _sharded(self.parameter)
        gradient = _sharded(self.gradient)
        if parameter <= gradient or gradient <= parameter:
            return
        axis = self.dp_axes[min(parameter - gradient)]
        other = self.dp_axes[min(gradient - parameter)]
        raise PlacementError(
            f"axis {axis!r} is Flat for 'parameter' only and axis {other!r} for 'gradient' only; "
            "the axes one of them shards must contain the other's. Shard "
            f"{axis!r} of 'gradient' too, or make it Replicate in 'parameter'."
        )

    @property
    def shard_order(self) -> tuple[int, ...]:
        """Positions in ``dp_axes`` of the axes the optimizer shards, slowest in the index first.

        Axes that join the chain later vary fastest, so that each gather step yields one
        contiguous run. Axes that join together are ordered inner first: the inner, faster network
        then moves the long runs and the outer one the short ones.
        """
        parameter, gradient = _sharded(self.parameter), _sharded(self.gradient)
        optimizer = _sharded(self.optimizer)

        def joins(position: int) -> tuple[int, int]:
            sets_without = sum(position not in sharded for sharded in (parameter, gradient))
            return (sets_without, -position)

        return tuple(sorted(optimizer, key=joins))

    def __str__(self) -> str:
        presets = (
            (Placements.ddp, Placements.zero1, Placements.zero2, Placements.zero3)
            if len(self.dp_axes) == 1
            else (Placements.hsdp, Placements.hfsdp)
        )
        for preset in presets if len(self.dp_axes) <= 2 else ():
            if self == preset(*self.dp_axes):
                return f"{preset.__name__} over {', '.join(map(str, self.dp_axes))}"
        kinds = ", ".join(f"{kind}={_names(getattr(self, kind))}" for kind in _KINDS)
        return f"Placements({', '.join(map(str, self.dp_axes))}: {kinds})"


def resolve_axes(
    dp_axes: Sequence[Axis], axis_names: Sequence[str] | None, num_axes: int
) -> tuple[int, ...]:
    """Turn names and negative indices into mesh axis indices, in the order given.

    Raises PlacementError for an axis that does not exist or is named twice.
    """
    known = f"its axes are {tuple(axis_names)}" if axis_names else "its axes have no names"
    resolved: list[int] = []
    for axis in dp_axes:
        if isinstance(axis, str):
            if axis not in (axis_names or ()):
                raise PlacementError(
                    f"the mesh has no axis {axis!r}: {known}, indices 0 to {num_axes - 1}."
                )
            index = list(axis_names or ()).index(axis)
        else:
            index = axis + num_axes if axis < 0 else axis
            if not 0 <= index < num_axes:
                raise PlacementError(
                    f"the mesh has no axis {axis}: {known}, indices 0 to {num_axes - 1}."
                )
        if index in resolved:
            first = dp_axes[resolved.index(index)]
            raise PlacementError(
                f"axes {first!r} and {axis!r} are the same mesh axis {index}; name each once."
            )
        resolved.append(index)
    return tuple(resolved)


def _refuse_repeated(axes: tuple[Axis, ...]) -> None:
    for position, axis in enumerate(axes):
        if axis in axes[:position]:
            raise PlacementError(f"axis {axis!r} is named twice in dp_axes {axes}; name it once.")


def _sharded(placements: Sequence[Placement]) -> frozenset[int]:
    return frozenset(i for i, placement in enumerate(placements) if isinstance(placement, Flat))


def _names(placements: Sequence[Placement]) -> str:
    return "/".join(type(placement).__name__ for placement in placements)
