"""The NCCL backend's communicator: what was validated, put on the current stream.

Knows no layout and no modules: whoever calls it is already inside submitted work.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyshard import BackendError
from polyshard.spi import Communicator, Op

from .board import Board
from .failures import FaultDomain
from .group import Group
from .lanes import StreamLane
from .memory import UserBuffers
from .ops import REDUCE_DTYPES, as_bits, as_numbers, averages_natively
from .watcher import Watcher


class Connection:
    """What a communicator of several ranks holds beside its memory, and how that ends.

    Args:
        group: the process group.
        board: where its ranks leave notes.
        lane: that it is used on.
        timeout: of one collective, in seconds.
        shares_stream: the lane's stream is that of all lanes.
        user_buffers: where its buffers come from, if it registered memory.
    """

    def __init__(
        self,
        group: Group,
        board: Board,
        lane: StreamLane,
        *,
        timeout: float,
        shares_stream: bool,
        user_buffers: UserBuffers | None,
    ) -> None:
        self.board, self.timeout, self.shares_stream = board, timeout, shares_stream
        self.lane, self.outstanding = lane.name, lane.outstanding
        self.user_buffers = user_buffers
        self._group: Group | None = group

    def require_group(self, label: str) -> Group:
        """The process group; raises BackendError once it was let go."""
        if self._group is None:
            raise BackendError(f"{label}: this communicator was closed.")
        return self._group

    def is_done(self) -> bool:
        """The device has done all that was submitted to the lane. Asks events."""
        try:
            return self.outstanding.drop_reached()
        except RuntimeError:
            return True  # A device that failed does nothing more.

    def abort(self) -> None:
        """Let go of NCCL's connections and memory at once. Local; no peer may need them."""
        group, self._group = self._group, None
        if group is None:
            return
        if self.user_buffers is not None:
            self.user_buffers.deregister(group.transport)
        group.transport.abort()


class NcclCommunicator(Communicator):
    """Collectives over a process group of its own; a group of one rank has none, and copies.

    Nothing waits for the device. Everything runs on the current stream of the thread that calls,
    which inside submitted work is the lane's.

    Args:
        connection: None where the group has one rank.
        lane: that it is used on.
        capability: compute capability of the device.
    """

    def __init__(
        self,
        connection: Connection | None,
        *,
        rank: int,
        size: int,
        device: torch.device,
        capability: tuple[int, int],
        lane: StreamLane,
        domain: FaultDomain,
        watcher: Watcher,
    ) -> None:
        super().__init__(rank, size, device, reduce_dtypes=REDUCE_DTYPES)
        self.connection, self._lane, self._capability = connection, lane, capability
        self._domain = domain  # It must live as long as there is something to abort.
        self._closed = False
        if connection is not None:
            domain.add(connection)
            watcher.add(connection)
            self._leave = weakref.finalize(self, watcher.leave, connection)
            # The end of the process is the domain's affair.
            self._leave.atexit = False

    def settle(self) -> None:
        """Nothing to wait for: NCCL's kernels end when this rank's inputs are no longer read."""

    def close(self) -> None:
        """Local: NCCL's connections go when every rank has closed, in the background."""
        self._closed = True
        if self.connection is not None:
            self._leave()

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        group = self._group(label)
        if group is None:
            _copy(outputs, shards)
            return
        wholes, parts = _filled(outputs, as_bits), _filled(shards, as_bits)
        if wholes:
            self._launch("all_gather", lambda: group.all_gather(wholes, parts), label)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        group = self._group(label)
        if group is None:
            _copy(outputs, inputs)
            return
        parts, wholes = _filled(outputs, as_numbers), _filled(inputs, as_numbers)
        if parts:
            native = self._averages_natively(parts, op)
            self._launch(
                "reduce_scatter", lambda: group.reduce_scatter(parts, wholes, average=native), label
            )
            self._divide(parts, op, native)

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        group = self._group(label)
        wholes = _filled(buffers, as_numbers)
        if group is not None and wholes:
            native = self._averages_natively(wholes, op)
            self._launch("all_reduce", lambda: group.all_reduce(wholes, average=native), label)
            self._divide(wholes, op, native)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        group = self._group(label)
        wholes = _filled(buffers, as_bits)
        if group is None or not wholes:
            return
        if len(wholes) == 1:
            self._launch("broadcast", lambda: group.broadcast(wholes[0], source), label)
            return
        # torch has no broadcast of a list: one of a copy is one launch all the same.
        flat = [whole.view(torch.uint8) for whole in wholes]
        together = torch.cat(flat)
        self._launch("broadcast", lambda: group.broadcast(together, source), label)
        if self.rank != source:
            torch._foreach_copy_(flat, together.split([whole.numel() for whole in flat]))

    def _group(self, label: str) -> Group | None:
        if self._closed:
            raise BackendError(f"{label}: this communicator was closed.")
        return None if self.connection is None else self.connection.require_group(label)

    def _launch(self, kind: str, collective: Callable[[], None], label: str) -> None:
        self._lane.launches(f"{label} ({kind})", self.connection)
        try:
            collective()
        except RuntimeError as error:
            raise BackendError(
                f"{label}: NCCL's {kind} failed on rank {self.rank} of {self.size}, on "
                f"{self.device}: {error}"
            ) from error

    def _averages_natively(self, tensors: Sequence[Tensor], op: Op) -> bool:
        return op is Op.AVG and averages_natively(tensors[0].dtype, self.size, self._capability)

    def _divide(self, sums: list[Tensor], op: Op, native: bool) -> None:
        """One launch for all; half precision is divided in fp32 and rounded once."""
        if op is Op.AVG and not native:
            torch._foreach_div_(sums, float(self.size))


def _filled(tensors: Sequence[Tensor], view: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What there is to move. Lengths are alike on every rank, and so is what is left out."""
    return [view(tensor) for tensor in tensors if tensor.numel()]


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Of one rank's tensors. Through .data: a refill must not look like a change."""
    for target, source in zip(targets, sources, strict=True):
        if target.numel() and target.data_ptr() != source.data_ptr():
            target.data.copy_(source)
