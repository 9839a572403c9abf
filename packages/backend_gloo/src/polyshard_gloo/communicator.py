"""The gloo backend's communicator: what is asked of it, agreed on with the other ranks.

Knows no lanes and no layout: whoever calls it is already inside submitted work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polyshard import BackendError
from polyshard.spi import Communicator, Op

from .agreement import SMALL_BYTES, Agreement, Call
from .connections import Connections
from .exchange import Exchange
from .faults import FaultDomain
from .reduction import REDUCE_DTYPES, combine


class GlooCommunicator(Communicator):
    """Collectives over connections of its own; a group of one rank has none, and copies.

    What is small travels in the message in which the ranks agree on the collective, all else
    beside it. Every sum is taken in the order of ranks, so results repeat; that of an
    all-reduce by one rank for all or by all alike, so every rank has the same bits.
    """

    def __init__(
        self,
        connections: Connections | None,
        *,
        rank: int,
        size: int,
        device: torch.device,
        domain: FaultDomain,
    ) -> None:
        super().__init__(rank, size, device, reduce_dtypes=REDUCE_DTYPES)
        self._connections = connections
        if connections is not None:
            self._agreement = Agreement(connections)
            self._exchange = Exchange(connections)
        self._closed = False
        self._domain = domain  # It must live as long as there is something to cut.
        domain.add_communicator(self)

    def settle(self) -> None:
        """Nothing to wait for: a collective returns when the operating system has taken what
        this rank sends, so peers never read its memory."""

    def abort(self) -> None:
        """Cut the connections; see FaultDomain."""
        if self._connections is not None:
            self._connections.abort("other work of this process failed")

    def close(self) -> None:
        self._closed = True
        if self._connections is not None:
            self._connections.close()
            self._exchange.close()

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        call = _call("all_gather", shards, label)
        parts, wholes = _as_bytes(shards), _as_bytes(outputs)
        if self._is_alone(label):
            _copy(parts, wholes)
        elif _is_small(parts):
            rows, position = self._agreement.propose(call, to_all=parts).settle(), 0
            for whole, part in zip(wholes, parts, strict=True):
                if numel := part.numel():
                    whole.view(self.size, numel).copy_(rows[:, position : position + numel])
                position += numel
        else:
            proposal = self._agreement.propose(call)
            self._exchange.gather(_slots(wholes, self.size), parts, proposal)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        call = _call("reduce_scatter", outputs, label, detail=f" {op.value}")
        results = _writable(outputs)
        if self._is_alone(label):
            _copy(inputs, results)
            return
        slots = _slots(inputs, self.size)
        if _is_small(results):
            proposal = self._agreement.propose(call, to_each=lambda rank: _as_bytes(slots[rank]))
            self._combine_rows(proposal.settle(), results, op)
        else:
            self._exchange.reduce(results, slots, op, self._agreement.propose(call))

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        call = _call("all_reduce", buffers, label, detail=f" {op.value}")
        results = _writable(buffers)
        if self._is_alone(label):
            return
        if _is_small(results):
            proposal = self._agreement.propose(call, to_all=_as_bytes(results))
            self._combine_rows(proposal.settle(), results, op)
        else:
            self._exchange.reduce_to_all(results, op, self._agreement.propose(call))

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        call = _call("broadcast", buffers, label, detail=f" from rank {source} of the group")
        parts = _as_bytes(buffers)
        if self._is_alone(label):
            return
        if _is_small(parts):
            payload = parts if self.rank == source else ()
            payloads = self._agreement.propose(call, to_all=payload).settle()
            if self.rank != source:
                _unpack(payloads[source], parts)
        else:
            self._exchange.spread(parts, source, self._agreement.propose(call))

    def _is_alone(self, label: str) -> bool:
        if self._closed:
            raise BackendError(f"{label}: this communicator was closed.")
        return self._connections is None

    def _combine_rows(self, payloads: Tensor, results: Sequence[Tensor], op: Op) -> None:
        """Combine what every rank sent with its header into ``results``."""
        if not any(result.numel() for result in results):
            return
        rows = payloads.view(results[0].dtype)[:, : sum(result.numel() for result in results)]
        out = torch.empty_like(rows[0])
        combine(out, rows.unbind(), op, own=self.rank, take=_new)
        _unpack(out, results)


def _call(kind: str, parts: Sequence[Tensor], label: str, *, detail: str = "") -> Call:
    dtype = parts[0].dtype if parts else None
    return Call(kind, label, dtype, tuple(part.numel() for part in parts), detail)


def _is_small(tensors: Sequence[Tensor]) -> bool:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= SMALL_BYTES


def _writable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory with version counters of its own: a refill must not look like a change of
    what autograd saved."""
    return [tensor.data for tensor in tensors]


def _as_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.data.view(torch.uint8) for tensor in tensors]


def _slots(wholes: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """Each rank's part of each tensor, by rank."""
    parts = [whole.tensor_split(size) for whole in wholes]
    return [[part[rank] for part in parts] for rank in range(size)]


def _unpack(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy what lies one after the other in ``row`` to ``tensors``."""
    position = 0
    for tensor in tensors:
        tensor.copy_(row[position : position + tensor.numel()])
        position += tensor.numel()


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def _new(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)
