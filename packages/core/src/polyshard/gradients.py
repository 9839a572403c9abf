"""One group's gradients: packed early, reduced, accumulated and shown as ``.grad``.

Knows its transport and placements; knows no modules and no order between groups.

A contribution (one backward's gradients of this rank) passes through at most two stages:

- packed into ``input`` and reduced over the axes whose gradient placement is not Partial;
- accumulated until the last microbatch, then reduced over the Partial axes ("late").

What was accumulated is held strongly only while a backward runs; between backwards it belongs to
``.grad`` (accumulated.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from .accumulated import AccumulatedGradients
from .buffer import DBuffer, Spreads
from .gradient_buffers import GradientBuffers
from .parameter import ManagedParameter, part_in_words
from .placements import Partial, Placement, Placements
from .precision import GroupDtypes
from .sharded_tensor import ShardedTensor
from .spi import Communicator, LaneRole, Ticket
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
        spreads: Spreads,
        placements: Placements,
        dtypes: GroupDtypes,
        grad_divisor: float,
    ) -> None:
        self.label, self.parameters, self.transport = label, parameters, transport
        self.placements, self.dtypes = placements, dtypes
        self.layout, self.grid = layout, grid = spreads.layout, spreads.grid
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
        self._buffers = GradientBuffers(
            transport,
            spreads,
            placements,
            dtypes,
            self._inner_communicators,
            self._late_communicators,
        )
        self._input: DBuffer | None = None
        self._staged: DBuffer | None = None  # where the backend keeps such buffers
        if self._buffers.keeps_inputs:
            # Such buffers are allocated in the same order on every rank: not in a backward.
            self._input = self._buffers.input() if self._has_inner else None
            self._staged = self._buffers.staged() if late else None
        self._input_ticket: Ticket | None = None

        self.expected: frozenset[int] = frozenset()
        self._waiting: frozenset[int] = frozenset()  # expected by what waits for a last microbatch
        self._reduced = "reduce gradients"  # in labels
        self._arrived: set[int] = set()
        self._pending: list[tuple[int, Tensor]] = []
        self._pending_numel = 0
        self._target: DBuffer | None = None  # what the current contribution is packed into
        self._overwrite = True  # its regions hold nothing yet

        self._accumulated = AccumulatedGradients(parameters)
        self._accumulator: DBuffer | None = None  # strong only while a backward runs
        self._final: DBuffer | None = None  # likewise
        self._finished: DBuffer | None = None  # what `.grad` held, until a reduction takes it up
        self._adopted = False  # whether this backward has looked at .grad already
        self._used: set[int] = set()  # parameters that this rank used since gradients were cleared
        self._counts: Tensor | None = None  # how many ranks used each, of what is accumulated
        self._late_counts: list[Tensor] = []  # likewise, of what went on over the Partial axes
        # What compute made and lanes still use: dropped only once compute joined them.
        self._in_flight: list[DBuffer | Tensor] = []

    def install(self, show: Callable[[Tensor, int, Sequence[Placement]], ShardedTensor]) -> None:
        """How to show rows of a buffer as a sharded tensor: a bound method."""
        self._accumulated.install(show)

    # -- contributions arrive -------------------------------------------------------------------

    def expect(self, trained: frozenset[int]) -> None:
        """Which parameters are trained. One that was until now may have a sum to be finished."""
        late = range(len(self.parameters)) if self._has_late else ()
        # Waiting, too, is what only other ranks may have used since gradients were final.
        self.expected = trained.union(self._waiting, filter(self._accumulated.unfinished, late))
        # Ranks that compare what they are about to do notice that they froze different ones.
        self._reduced = f"reduce gradients{part_in_words(self.parameters, trained)}"

    @property
    def complete(self) -> bool:
        """Every expected gradient of the current contribution has arrived."""
        return len(self._arrived) >= len(self.expected)

    @property
    def started(self) -> bool:
        """Some gradient of the current contribution has arrived."""
        return bool(self._arrived)

    def add(self, index: int, grad: Tensor) -> None:
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
            self._pack()

    def _pack(self) -> None:
        if self._target is None:
            self._open()
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

    def _open(self) -> None:
        """Choose what this contribution is packed into, and make it ready."""
        if self._has_inner:
            if self._input is None:
                self._input = self._buffers.input()
            self.release_input()
            self._input.storage.acquire()
            self._target, self._overwrite = self._input, True
            return
        # Nothing is reduced before the last microbatch: contributions add up where they will stay.
        self._adopt()
        self._overwrite = self._accumulator is None
        if self._accumulator is None:
            self._accumulator = self._buffers.accumulator()
            self._accumulator.storage.acquire()
        self._target = self._accumulator

    def _adopt(self) -> None:
        """Once per backward: go on from what ``.grad`` holds now."""
        if self._adopted:
            return
        self._adopted = True
        kept = self._accumulated.take(self.expected, self.placements, self._buffers.zeros)
        if kept is None:
            self._used.clear()
            self._counts = None
            return
        # What has a gradient is shown again, wherever that lies from now on.
        self._used = set(self.expected.difference(kept.cleared))
        if self._counts is not None:
            self._counts[list(kept.cleared)] = 0
        if kept.is_final:
            self._finished = kept.buffer
        else:
            self._accumulator = kept.buffer

    def _add_finished(self, final: bool) -> None:
        """What was finished before is added to, or is a contribution to what is finished later.

        Only at a reduction: before, ranks may not know alike whether a last microbatch comes.
        """
        finished, self._finished = self._finished, None
        if finished is None:
            return
        if final or not self._has_late:
            self._final = finished
            return
        contribution = self._buffers.contribution(finished, f"{self.label}: gradients of before")
        if self._accumulator is None:
            self._accumulator = contribution
        else:
            self.transport.backend.ops.accumulate(self._accumulator.flat, contribution.flat, 1.0)

    # -- and are reduced ------------------------------------------------------------------------

    def reduce(self, *, final: bool) -> None:
        """Close the current contribution and submit its reductions. Every rank calls this for the
        same groups in the same order, also when it has nothing to contribute."""
        if self._pending or self._target is None:
            self._pack()
        target = self._target
        assert target is not None
        with torch.no_grad():
            self._zero_the_rest(target)
            self._adopt()
            self._add_finished(final)
            counts = self._count()
        self._target, self._arrived = None, set()
        self._waiting = self.expected if self._has_late and not final else frozenset()
        if self._has_inner:
            self._reduce_inner(target, counts)
        else:
            self._add_counts(counts)
        if final and self._has_late:
            self._reduce_late()

    def _reduce_inner(self, target: DBuffer, counts: Tensor) -> None:
        """Reduce over all axes but the Partial ones, into what is accumulated."""
        label = f"{self.label}: {self._reduced}"
        kept = self._accumulator if self._has_late else self._final
        fresh = kept is None
        if kept is None:
            kept = self._buffers.accumulator() if self._has_late else self._buffers.final()
            kept.storage.acquire()
        if self._has_late:
            self._accumulator = kept
        else:
            self._final = kept
        lane = self.transport.reduce_lane
        lane.wait(self.transport.mark_compute())
        self._submit(target, kept, self._inner_communicators, "reduce", fresh, label, counts)
        self._add_counts(counts, reduced=True)
        self._input_ticket = lane.mark()

    def _reduce_late(self) -> None:
        """Reduce what was accumulated over the Partial axes, into the final gradient."""
        label = f"{self.label}: {self._reduced} over {self._late_purpose} axes"
        accumulator, kept, counts = self._accumulator, self._final, self._counts
        assert accumulator is not None
        assert counts is not None
        # Another contribution in this backward counts anew: the late lane writes these.
        self._counts = None
        self._late_counts.append(counts)
        final = self._buffers.spread(self.placements.optimizer)
        fresh = kept is None
        if kept is None and accumulator.num_shards == final.num_shards:
            # The accumulator becomes the final gradient: reduced in place, or overwritten with
            # what was staged and reduced. The gradients are not held twice.
            kept = DBuffer.over(final, accumulator.storage)
        elif kept is None:
            kept = self._buffers.final()
            kept.storage.acquire()
        self._final = kept
        transport = self.transport
        lane = transport.lane(self._late_purpose)
        lane.wait(transport.mark_compute())
        if lane is not transport.reduce_lane:
            lane.wait(transport.reduce_lane.mark())
        source = accumulator
        if accumulator.dtype != self.dtypes.grad_comm or self._buffers.keeps_inputs:
            staged = self._staged or self._buffers.staged()

            def stage() -> None:
                staged.storage.acquire()
                staged.flat.copy_(accumulator.flat)

            lane.submit(stage, label=label)
            source = staged
        self._submit(
            source, kept, self._late_communicators, self._late_purpose, fresh, label, counts
        )
        if source is not accumulator:
            lane.submit(partial(transport.release, source.storage), label=label)
        self._in_flight.append(accumulator)
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
        landing = None if fresh else self._buffers.landing(kept, source.dtype)
        accumulate, release = self.transport.backend.ops.accumulate, self.transport.release

        def move() -> None:
            if landing is not None:
                landing.storage.acquire()
            target = landing or kept
            lent = source.redistribute(target, communicators, label=label, counts=counts)
            for communicator in communicators.values():
                communicator.settle()
            del lent  # peers may have read it until here
            if landing is not None:
                accumulate(kept.flat, landing.flat, 1.0)
                release(landing.storage)

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
        reduced = list(self._late_counts)
        if self._counts is not None and self._has_inner:
            reduced.append(self._counts)
        if missed and reduced:
            counts = torch.stack(reduced).sum(0)
            seen = (counts.real if counts.is_complex() else counts).tolist()
            used.update(index for index in missed if seen[index] > 0)
        if kept is not None:
            placements = self.placements.optimizer if is_final else self.placements.gradient
            shown = used & self.expected
            self._accumulated.show(kept, shown, placements=placements, is_final=is_final)
        self._close(final)

    def _close(self, final: bool) -> None:
        self._accumulator = self._final = self._finished = None
        self._in_flight.clear()
        self._late_counts.clear()
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
        self._accumulated.restore()
        self._close(final=True)

    def release_input(self) -> None:
        """Give back the reduce input, once nothing reads it any more."""
        if self._target is not None:
            return  # it is being filled again: gradients came after their unit's reduction
        if self._input_ticket is not None:
            self.transport.compute_lane.wait(self._input_ticket)
            self._input_ticket = None
        if self._input is not None:
            self.transport.release(self._input.storage)

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
        self._used |= self._arrived
        number, dtype = len(self.parameters), self.dtypes.grad_comm
        # Nothing here comes from the host: a graph that is captured could not hold the copy.
        counts = torch.ones(number, dtype=dtype, device=self.transport.device)
        for index in set(range(number)) - self._arrived:
            counts[index].zero_()
        return counts

    def _add_counts(self, counts: Tensor, *, reduced: bool = False) -> None:
        if self._counts is None:
            self._counts = counts
            return
        previous = self._counts

        def add() -> None:
            previous.add_(counts)

        if reduced:
            self._in_flight.append(counts)
            self.transport.reduce_lane.submit(add, label=f"{self.label}: use counts")
        else:
            add()
