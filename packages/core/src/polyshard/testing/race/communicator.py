"""The race checker's communicator: collectives whose inputs stay lent to peers until `settle`.

Knows no schedule: whoever calls it is inside submitted work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ...errors import BackendError
from ...spi import Communicator, Op
from ..conformance.data import added_in_order
from ..loopback import REDUCE_DTYPES
from .clock import Event
from .exchange import Exchange, as_bytes, as_tensors
from .memory import Loan
from .watch import Memories, extent


class RaceCommunicator(Communicator):
    """Collectives that say what they read and write.

    Args:
        name: purpose and number, for messages.
        exchange: with the other ranks.
        memories: where accesses are recorded.
        now: what happens at the moment.
        paused: a scope in which operations are not recorded a second time.
    """

    def __init__(
        self,
        name: str,
        exchange: Exchange,
        device: torch.device,
        *,
        memories: Memories,
        now: Callable[[str], Event],
        paused: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(exchange.rank, exchange.size, device, reduce_dtypes=REDUCE_DTYPES)
        self.name = name
        self.loans: list[Loan] = []  # since the last settle
        self._exchange, self._memories = exchange, memories
        self._now, self._paused = now, paused
        self._closed = False

    def settle(self) -> None:
        """Peers are done with what was lent before this point of the lane."""
        event = self._now(f"settle {self.name}")
        for loan in self.loans:
            loan.settled = event
        self.loans.clear()

    def close(self) -> None:
        self._closed = True

    def fail(self, reason: str) -> None:
        """Let the peers know that this rank failed."""
        if not self._closed:
            self._exchange.fail(reason)

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        call = self._describe("all_gather", shards, label)
        for shard in shards:
            self._lend(shard, label)
        with self._paused():
            received = self._receive(call, shards)
        for output, shard in zip(outputs, shards, strict=True):
            # A shard that is its own slot in the output is not written.
            for slot in output.tensor_split(self.size):
                if slot.data_ptr() != shard.data_ptr():
                    self._memories.write(slot, label)
        with self._paused():
            for index, output in enumerate(outputs):
                output.data.copy_(torch.cat([parts[index] for parts in received]))

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        call = self._describe(f"reduce_scatter {op.value}", inputs, label)
        for tensor in inputs:
            for rank, slot in enumerate(tensor.tensor_split(self.size)):
                if rank == self.rank:
                    self._memories.read(slot, label)
                else:
                    self._lend(slot, label)
        with self._paused():
            received = self._receive(call, inputs)
        for output in outputs:
            self._memories.write(output, label)
        with self._paused():
            for index, output in enumerate(outputs):
                slots = [parts[index].tensor_split(self.size)[self.rank] for parts in received]
                output.data.copy_(added_in_order(slots, op))

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        call = self._describe(f"all_reduce {op.value}", buffers, label)
        with self._paused():
            received = self._receive(call, buffers)
        for buffer in buffers:
            self._memories.write(buffer, label)
        with self._paused():
            for index, buffer in enumerate(buffers):
                buffer.data.copy_(added_in_order([parts[index] for parts in received], op))
        for buffer in buffers:
            self._lend(buffer, label)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        call = self._describe(f"broadcast from {source}", buffers, label)
        with self._paused():
            received = self._receive(call, buffers)
        for buffer in buffers:
            if self.rank == source:
                self._lend(buffer, label)
            else:
                self._memories.write(buffer, label)
        with self._paused():
            for index, buffer in enumerate(buffers):
                buffer.data.copy_(received[source][index])

    def _lend(self, tensor: Tensor, label: str) -> None:
        """Read it, and let peers read it until the next settle."""
        if tensor.numel():
            self._memories.read(tensor, label)
            memory = self._memories.of(tensor)
            loan = memory.lend(*extent(tensor), self.name, self._now(label))
            self.loans.append(loan)

    def _receive(self, call: str, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        if self._closed:
            raise BackendError(f"{call}: this communicator was closed.")
        payloads = self._exchange.all(call, as_bytes(tensors))
        return [as_tensors(payload, tensors) for payload in payloads]

    @staticmethod
    def _describe(kind: str, tensors: Sequence[Tensor], label: str) -> str:
        lengths = ", ".join(str(tensor.numel()) for tensor in tensors)
        dtype = tensors[0].dtype if tensors else None
        return f"{label!r}: {kind} of {dtype} [{lengths}]"
