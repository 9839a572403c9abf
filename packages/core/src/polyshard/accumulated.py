"""What ``.grad`` shows of one group between backwards, and what the user made of it since.

Knows buffers and the faces of parameters; knows no lanes and starts no collectives.

What was accumulated lives exactly as long as the ``.grad`` tensors that show it: it is held weakly
here, so ``zero_grad(set_to_none=True)`` frees it at once and nothing stale can come back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from .buffer import DBuffer, narrow
from .errors import UnsupportedError
from .parameter import ManagedParameter
from .placements import Flat, Partial, Placement, Placements, Replicate
from .sharded_tensor import ShardedTensor

Zeros = Callable[[Sequence[Placement]], DBuffer]


@dataclass(frozen=True)
class Kept:
    """Gradients that were accumulated, and the parameters whose ``.grad`` was cleared since."""

    buffer: DBuffer
    is_final: bool  # reduced over every axis; else a contribution, Partial on some
    cleared: tuple[int, ...]


class AccumulatedGradients:
    """The buffer behind the ``.grad`` tensors of a group."""

    def __init__(self, parameters: Sequence[ManagedParameter]) -> None:
        self._parameters = parameters
        self._shown: list[weakref.ref[ShardedTensor] | None] = [None] * len(parameters)
        self._kept: weakref.ref[DBuffer] | None = None
        self._is_final = True
        self._taken: dict[int, Tensor] = {}  # what `.grad` was before the backward that runs

    def install(self, show: Callable[[Tensor, int, Sequence[Placement]], ShardedTensor]) -> None:
        """How to show rows of a buffer: a bound method, held weakly to close no cycle."""
        self._show = weakref.WeakMethod(show)

    def _make(self, buffer: DBuffer, index: int, placements: Sequence[Placement]) -> ShardedTensor:
        make = self._show()
        assert make is not None
        return make(buffer.view(index), index, placements)

    def unfinished(self, index: int) -> bool:
        """Whether ``.grad`` is a sum that waits for its reduction, whoever put it there."""
        grad = self._parameters[index].sharded.grad
        return isinstance(grad, ShardedTensor) and any(
            placement.is_partial() for placement in grad.placements
        )

    def take(self, expected: Collection[int], placements: Placements, zeros: Zeros) -> Kept | None:
        """What ``.grad`` holds now, whoever put it there; None if there is nothing.

        Until :meth:`show` it is out of autograd's reach: lanes write it, while a penalty on the
        weights at rest adds to ``.grad``.

        Args:
            expected: the parameters that are to have gradients.
            placements: of contributions as gradient, of finished gradients as optimizer.
            zeros: makes a buffer for gradients that the user supplied.
        """
        kept = None if self._kept is None else self._kept()
        is_final = self._is_final
        foreign, cleared = [], []
        for index in expected:
            grad = self._parameters[index].sharded.grad
            shown = self._shown[index]
            if grad is None:
                cleared.append(index)
            elif kept is None or shown is None or shown() is not grad:
                foreign.append((index, grad))
        if len(cleared) == len(expected) and (is_final or kept is None):
            return None
        if kept is None:
            is_final = not any(self.unfinished(index) for index, _ in foreign)
            kept = zeros(placements.optimizer if is_final else placements.gradient)
        copies = [(self._place(grad, index, kept), grad) for index, grad in foreign]
        for index in cleared:
            reference = self._shown[index]
            taken = None if reference is None else reference()
            if taken is not None and taken._owner is kept:
                # Someone keeps the gradient that was taken out of `.grad`: it keeps its values.
                taken._local_tensor, taken._owner = taken._local_tensor.clone(), None
                self._shown[index] = None
            kept.view(index).zero_()
        for place, grad in copies:
            place.copy_(local_of(grad))
        for index in expected:
            sharded = self._parameters[index].sharded
            if sharded.grad is not None:
                self._taken[index], sharded.grad = sharded.grad, None
        return Kept(kept, is_final, tuple(cleared))

    def _place(self, grad: Tensor, index: int, kept: DBuffer) -> Tensor:
        """The rows of ``kept`` that a gradient which came from elsewhere belongs to."""
        wanted = self._make(kept, index, kept.placements)
        if not isinstance(grad, ShardedTensor) or grad._geometry is not wanted._geometry:
            raise UnsupportedError(
                f"the .grad given to {self._parameters[index].name!r} does not lie as its gradient "
                f"does: {getattr(grad, 'placements', 'a plain tensor')}, not {wanted.placements}. "
                "Between microbatches give it a tensor made from the .grad that it replaces, else "
                "one made from the parameter."
            )
        return wanted.to_local()

    def show(
        self,
        buffer: DBuffer,
        used: Collection[int],
        *,
        placements: Sequence[Placement],
        is_final: bool,
    ) -> None:
        """Make ``.grad`` of the parameters ``used`` show ``buffer``; those that did do again."""
        for index in sorted(used):
            sharded, reference = self._parameters[index].sharded, self._shown[index]
            added = sharded.grad
            if added is not None:
                self._place(added, index, buffer).add_(local_of(added))
            shown = None if reference is None else reference()
            if shown is None or self._taken.get(index) is not shown or shown._owner is not buffer:
                shown = self._make(buffer, index, placements)
                shown._owner = buffer
                self._shown[index] = weakref.ref(shown)
            sharded.grad = shown
        self._taken.clear()
        self._kept, self._is_final = weakref.ref(buffer), is_final

    def restore(self) -> None:
        """The backward that runs has failed: ``.grad`` is what it was."""
        for index, grad in self._taken.items():
            self._parameters[index].sharded.grad = grad
        self._taken.clear()


def local_of(grad: Tensor) -> Tensor:
    """This rank's rows of a gradient."""
    assert isinstance(grad, ShardedTensor)
    return grad.to_local()


def as_contribution(buffer: DBuffer, gradient: tuple[Placement, ...], zeros: Zeros) -> DBuffer:
    """A finished gradient as a contribution: what its later reduction turns into it again.

    Args:
        buffer: a finished gradient, as it lies or whole; used up where it is as long as the result.
        gradient: placements to return it in, Partial on the axes that are still to be reduced.
    """
    grid, layout, optimizer = buffer.grid, buffer.layout, buffer.placements
    if buffer.num_shards == grid.shard(gradient)[0]:
        contribution = DBuffer(layout, grid, gradient, buffer.storage)
    else:
        contribution = zeros(gradient)
        pieces, values = contribution.pieces, buffer.pieces
        for axis in grid.order:
            size, coordinate = grid.sizes[axis], grid.coordinates[axis]
            if isinstance(optimizer[axis], Flat) and isinstance(gradient[axis], Partial):
                pieces = narrow(pieces, size, coordinate)
            elif isinstance(optimizer[axis], Replicate) and isinstance(gradient[axis], Flat):
                values = narrow(values, size, coordinate)
        for piece, value in zip(pieces, values, strict=True):
            piece.copy_(value)
    factor = 1.0
    for axis, placement in enumerate(gradient):
        if not isinstance(placement, Partial):
            continue
        split = isinstance(optimizer[axis], Flat)
        if placement.reduce_op == "avg" and split:
            factor *= grid.sizes[axis]  # one rank alone contributes each element
        elif placement.reduce_op == "sum" and not split and grid.coordinates[axis] > 0:
            factor = 0.0  # every rank has it, and one of them contributes
    if factor != 1.0:
        contribution.flat.mul_(factor)
    return contribution
