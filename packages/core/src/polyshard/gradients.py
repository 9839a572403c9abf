"""One group's gradients: packed early, reduced, accumulated and shown as ``.grad``.

Knows its transport and placements; knows no modules and no order between groups.

A contribution (one backward's gradients of this rank) passes through at most two stages:

- packed into ``input`` and reduced over the axes whose gradient placement is not Partial;
- accumulated until the last microbatch, then reduced over the Partial axes ("late").

What was accumulated lives exactly as long as the ``.grad`` tensors that show it: the group holds
it weakly, so ``zero_grad(set_to_none=True)`` frees it at once and nothing stale can come back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from .buffer import DBuffer, ShardGrid
from .layout import GlobalLayout
from .parameter import ManagedParameter
from .placements import Flat, Partial, Placement, Placements
from .precision import GroupDtypes
from .sharded_tensor import ShardedTensor
from .spi import Communicator, LaneRole, Role, Ticket
from .transport import Transport

#: Completed gradients are packed once they hold this part of the group, or the group is complete.
PACK_FRACTION = 4


class GroupGradients:
    """Gradients of one group of parameters. See the module's docstring for the two stages."""

    def __init__(
        self,
        label: str,
        parameters: Sequence[ManagedParameter],
        transport: Transport,
        layout: GlobalLayout,
        grid: ShardGrid,
        placements: Placements,
        dtypes: GroupDtypes,
        grad_divisor: float,
    ) -> None:
        self.label, self.parameters, self.transport = label, parameters, transport
        self.layout, self.grid, self.placements, self.dtypes = layout, grid, placements, dtypes
        self._scale = 1.0 / grad_divisor
        self._numels = [prod(shape) for shape in layout.shapes]
        self._pack_threshold = max(1, sum(self._numels) // PACK_FRACTION)
        axes = range(len(grid.sizes))
        late = [axis for axis in axes if isinstance(placements.gradient[axis], Partial)]
        self._has_late, self._has_inner = bool(late), len(late) < len(grid.sizes)
        self._late_purpose: LaneRole = "outer" if self._has_inner else "reduce"
        self._late_communicators = transport.communicators(self._late_purpose, late) if late else {}
        inner = [axis for axis in axes if axis not in late]
        self._inner_communicators = transport.communicators("reduce", inner) if inner else {}
        # What nothing was reduced over yet: Flat and Replicate axes average, Partial ones say how.
        self._unreduced = tuple(
            placement if isinstance(placement, Partial) else Partial("avg")
            for placement in placements.gradient
        )
        self._input: DBuffer | None = None
        self._input_ticket: Ticket | None = None

        self.expected: frozenset[int] = frozenset()
        self._arrived: set[int] = set()
        self._pending: list[tuple[int, Tensor]] = []
        self._pending_numel = 0
        self._target: DBuffer | None = None  # what the current contribution is packed into
        self._overwrite = True  # its regions hold nothing yet

        self._shown: list[weakref.ref[ShardedTensor] | None] = [None] * len(parameters)
        self._kept: weakref.ref[DBuffer] | None = None  # what the shown gradients are views of
        self._kept_is_final = True
        self._accumulator: DBuffer | None = None  # strong only while a backward runs
        self._final: DBuffer | None = None  # likewise
        self._adopted = False  # whether this backward has looked at .grad already
        self._used: set[int] = set()  # parameters that this rank used since gradients were cleared
        self._counts: Tensor | None = None  # how many ranks used each, once reduced
        # Buffers that compute made and lanes still read: dropped only once compute joined them.
        self._in_flight: list[DBuffer] = []

    def install(self, show: Callable[[Tensor, int, Sequence[Placement]], ShardedTensor]) -> None:
        """How to show rows of a buffer: a bound method, held weakly to close no cycle."""
        self._show = weakref.WeakMethod(show)

    # -- contributions arrive -------------------------------------------------------------------

    def expect(self, indices: Iterable[int]) -> None:
        """Which parameters are to have gradients."""
        self.expected = frozenset(indices)

    @property
    def complete(self) -> bool:
        """Every expected gradient of the current contribution has arrived."""
        return len(self._arrived) >= len(self.expected)

    @property
    def started(self) -> bool:
        """Some gradient of the current contribution has arrived."""
        return bool(self._arrived)

    def add(self, index: int, grad: Tensor, *, final: bool) -> None:
        """Take over one full gradient. Packed, and its memory dropped, with the next batch."""
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if index in self._arrived and not any(index == known for known, _ in self._pending):
            self._accumulate_region(index, grad)
            return
        self._arrived.add(index)
        self._pending.append((index, grad))
        self._pending_numel += self._numels[index]
        if self._pending_numel >= self._pack_threshold or self.complete:
            self._pack(final)

    def _pack(self, final: bool) -> None:
        if self._target is None:
            self._open(final)
        target = self._target
        assert target is not None
        merged: dict[int, Tensor] = {}
        for index, grad in self._pending:
            merged[index] = merged[index] + grad if index in merged else grad
        self._pending.clear()
        self._pending_numel = 0
        with torch.no_grad():
            if self._overwrite:
                pieces = [(self.layout.offset(i), grad) for i, grad in merged.items()]
                self.transport.backend.ops.pack(target.flat, pieces, self._scale)
            else:
                for index, grad in merged.items():
                    self._accumulate_region(index, grad)

    def _accumulate_region(self, index: int, grad: Tensor) -> None:
        assert self._target is not None
        start = self.layout.offset(index)
        region = self._target.flat[start : start + self._numels[index]]
        with torch.no_grad():
            self.transport.backend.ops.accumulate(region, grad.reshape(-1), self._scale)

    def _open(self, final: bool) -> None:
        """Choose what this contribution is packed into, and make it ready."""
        if self._has_inner:
            if self._input is None:
                self._input = self._allocate(
                    self._unreduced, self.dtypes.grad_comm, Role.REDUCE_INPUT
                )
            self.release_input()
            self._input.storage.acquire()
            self._target, self._overwrite = self._input, True
            return
        # Nothing is reduced before the last microbatch: contributions add up where they will stay.
        self._adopt(final)
        self._overwrite = self._accumulator is None
        if self._accumulator is None:
            self._accumulator = self._allocate(
                self.placements.gradient, self.dtypes.main_grad, Role.REDUCE_INPUT
            )
            self._accumulator.storage.acquire()
        self._target = self._accumulator

    # -- and are reduced ------------------------------------------------------------------------

    def reduce(self, *, final: bool) -> None:
        """Close the current contribution and submit its reductions. Every rank calls this for the
        same groups in the same order, also when it has nothing to contribute."""
        if self._pending or self._target is None:
            self._pack(final)
        target = self._target
        assert target is not None
        with torch.no_grad():
            self._zero_the_rest(target)
            self._adopt(final)
            counts = self._count()
        self._target, self._arrived = None, set()
        transport = self.transport
        transport.reduce_lane.wait(transport.mark_compute())
        if self._has_inner:
            self._reduce_inner(target, counts)
        else:
            self._add_counts(counts)
        if final and self._has_late:
            self._reduce_late()

    def _reduce_inner(self, target: DBuffer, counts: Tensor) -> None:
        """Reduce over all axes but the Partial ones, into what is accumulated."""
        label = f"{self.label}: reduce gradients"
        if self._has_late:
            placements, kept = self.placements.gradient, self._accumulator
        else:
            placements, kept = self.placements.optimizer, self._final
        fresh = kept is None
        if kept is None:
            kept = self._allocate(placements, self.dtypes.main_grad, Role.REDUCE_OUTPUT)
            kept.storage.acquire()
        if self._has_late:
            self._accumulator = kept
        else:
            self._final = kept
        lane = self.transport.reduce_lane
        self._submit(target, kept, self._inner_communicators, "reduce", fresh, label, counts)
        self._add_counts(counts, reduced=True)
        self._input_ticket = lane.mark()

    def _reduce_late(self) -> None:
        """Reduce what was accumulated over the Partial axes, into the final gradient."""
        label = f"{self.label}: reduce gradients over {self._late_purpose} axes"
        source, kept, counts = self._accumulator, self._final, self._counts
        assert source is not None
        assert counts is not None
        transport = self.transport
        lane = transport.lane(self._late_purpose)
        if lane is not transport.reduce_lane:
            lane.wait(transport.reduce_lane.mark())
        if source.dtype != self.dtypes.grad_comm:
            staged = self._allocate(
                self.placements.gradient, self.dtypes.grad_comm, Role.REDUCE_INPUT
            )
            accumulated = source

            def stage() -> None:
                staged.storage.acquire()
                staged.flat.copy_(accumulated.flat)

            lane.submit(stage, label=label)
            source = staged
        same_split = source.num_shards == self.grid.shard(self.placements.optimizer)[0]
        fresh = kept is None
        if kept is None and same_split and source.dtype == self.dtypes.main_grad:
            # Reduced in place: the accumulator becomes the final gradient.
            kept = DBuffer(self.layout, self.grid, self.placements.optimizer, source.storage)
        elif kept is None:
            kept = self._allocate(
                self.placements.optimizer, self.dtypes.main_grad, Role.REDUCE_OUTPUT
            )
            kept.storage.acquire()
        self._final = kept
        self._submit(
            source, kept, self._late_communicators, self._late_purpose, fresh, label, counts
        )
        assert self._accumulator is not None
        if source is not self._accumulator:
            lane.submit(source.storage.release, label=label)
        self._in_flight.append(self._accumulator)
        self._accumulator = None

    def _submit(
        self,
        source: DBuffer,
        kept: DBuffer,
        communicators: Mapping[int, Communicator],
        purpose: LaneRole,
        fresh: bool,
        label: str,
        counts: Tensor,
    ) -> None:
        """Redistribute ``source`` into ``kept``, or add it there."""
        lane = self.transport.lane(purpose)
        landing = (
            None if fresh else self._allocate(kept.placements, source.dtype, Role.REDUCE_OUTPUT)
        )
        accumulate = self.transport.backend.ops.accumulate

        def move() -> None:
            if landing is None:
                source.redistribute(kept, communicators, label=label, counts=counts)
                return
            landing.storage.acquire()
            source.redistribute(landing, communicators, label=label, counts=counts)
            accumulate(kept.flat, landing.flat, 1.0)
            landing.storage.release()

        lane.submit(move, label=label)

    # -- and shown ------------------------------------------------------------------------------

    def collect(self, *, final: bool) -> None:
        """Show what was reduced as ``.grad``. Compute has joined the lanes.

        A parameter that no rank used keeps ``grad`` None; one that only others used is shown, with
        this rank's part counted as zero.
        """
        self.release_input()
        kept = self._final if final or not self._has_late else self._accumulator
        is_final = kept is self._final
        used = set(self._used)
        missed = self.expected - used
        if missed and self._counts is not None and (is_final or self._has_inner):
            seen = self._counts.tolist()
            used.update(index for index in missed if seen[index] > 0)
        if kept is not None:
            placements = self.placements.optimizer if is_final else self.placements.gradient
            for index in sorted(used & self.expected):
                reference = self._shown[index]
                shown = None if reference is None else reference()
                sharded = self.parameters[index].sharded
                if shown is not None and sharded.grad is shown and shown._owner is kept:
                    continue
                show = self._show()
                assert show is not None
                shown = show(kept.view(index), index, placements)
                shown._owner = kept
                sharded.grad = shown
                self._shown[index] = weakref.ref(shown)
            self._kept, self._kept_is_final = weakref.ref(kept), is_final
        self._close(final)

    def _close(self, final: bool) -> None:
        self._accumulator = self._final = None
        self._in_flight.clear()
        self._adopted = False
        if final:
            self._used.clear()
            self._counts = None

    def abandon(self) -> None:
        """Forget a backward that did not finish; what was accumulated before it stays."""
        self._pending.clear()
        self._pending_numel = 0
        self._arrived.clear()
        self._target = None
        self.release_input()
        self._close(final=True)

    def release_input(self) -> None:
        """Give back the reduce input, once nothing reads it any more."""
        if self._input_ticket is not None:
            self.transport.compute_lane.wait(self._input_ticket)
            self._input_ticket = None
        if self._input is not None and not self.transport.keeps(Role.REDUCE_INPUT):
            self._input.storage.release()

    # -- what the user did to .grad in between --------------------------------------------------

    def _adopt(self, final: bool) -> None:
        """Once per backward: take up what ``.grad`` holds now, whoever put it there."""
        if self._adopted:
            return
        self._adopted = True
        kept = None if self._kept is None else self._kept()
        is_final = self._kept_is_final
        foreign: list[int] = []
        cleared: list[int] = []
        for index in self.expected:
            grad = self.parameters[index].sharded.grad
            reference = self._shown[index]
            if grad is None:
                cleared.append(index)
            elif kept is None or reference is None or reference() is not grad:
                foreign.append(index)
        if len(cleared) == len(self.expected) and (is_final or kept is None):
            self._used.clear()
            self._counts = None
            return
        if kept is None:
            kept, is_final = self._zeros(self.placements.optimizer), True
        for index in cleared:
            kept.view(index).zero_()
            self._used.discard(index)
            if self._counts is not None:
                self._counts[index] = 0
        for index in foreign:
            grad = self.parameters[index].sharded.grad
            assert isinstance(grad, ShardedTensor)
            kept.view(index).copy_(grad.to_local())
        if not is_final:
            self._accumulator = kept
        elif final or not self._has_late:
            self._final = kept
        else:
            self._accumulator = self._unreduce(kept)

    def _unreduce(self, kept: DBuffer) -> DBuffer:
        """A final gradient as a contribution: a value whose later reduction gives it back."""
        if kept.num_shards == self.grid.shard(self.placements.gradient)[0]:
            accumulator = DBuffer(self.layout, self.grid, self.placements.gradient, kept.storage)
            pieces = accumulator.pieces
        else:
            accumulator = self._zeros(self.placements.gradient)
            pieces = accumulator.pieces
            for axis in self.grid.split_axes(self.placements.optimizer):
                if isinstance(self.placements.gradient[axis], Partial):
                    size, coordinate = self.grid.sizes[axis], self.grid.coordinates[axis]
                    pieces = tuple(
                        piece.view(size, -1)[coordinate] if piece.numel() else piece
                        for piece in pieces
                    )
            for piece, value in zip(pieces, kept.pieces, strict=True):
                piece.copy_(value)
        factor = 1.0
        for axis, placement in enumerate(self.placements.gradient):
            if not isinstance(placement, Partial):
                continue
            split = isinstance(self.placements.optimizer[axis], Flat)
            if placement.reduce_op == "avg" and split:
                factor *= self.grid.sizes[axis]
            elif placement.reduce_op == "sum" and not split and self.grid.coordinates[axis] > 0:
                factor = 0.0
        if factor != 1.0:
            accumulator.flat.mul_(factor)
        return accumulator

    # -- helpers --------------------------------------------------------------------------------

    def _zero_the_rest(self, target: DBuffer) -> None:
        """Missing gradients count as zero, and no uninitialised byte travels."""
        if not self._overwrite:
            return
        for start, stop in target.gaps():
            target.flat[start:stop].zero_()
        for index in range(len(self.parameters)):
            if index not in self._arrived:
                target.view(index).zero_()

    def _count(self) -> Tensor:
        counts = [1.0 if index in self._arrived else 0.0 for index in range(len(self.parameters))]
        self._used |= self._arrived
        return torch.tensor(counts, dtype=self.dtypes.grad_comm, device=self.transport.device)

    def _add_counts(self, counts: Tensor, *, reduced: bool = False) -> None:
        if self._counts is None:
            self._counts = counts
            return
        previous = self._counts

        def add() -> None:
            previous.add_(counts)

        if reduced:
            self.transport.reduce_lane.submit(add, label=f"{self.label}: use counts")
        else:
            add()

    def _zeros(self, placements: Sequence[Placement]) -> DBuffer:
        buffer = self._allocate(placements, self.dtypes.main_grad, Role.REDUCE_OUTPUT)
        buffer.storage.acquire()
        buffer.flat.zero_()
        return buffer

    def _allocate(self, placements: Sequence[Placement], dtype: torch.dtype, role: Role) -> DBuffer:
        count, _ = self.grid.shard(placements)
        communicators = [*self._inner_communicators.values(), *self._late_communicators.values()]
        storage = self.transport.allocate(
            {role: communicators}, self.layout.local_numel(num_shards=count), dtype
        )
        return DBuffer(self.layout, self.grid, placements, storage)
