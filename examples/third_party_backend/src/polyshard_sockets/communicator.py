"""Collectives: what travels to whom in each, and that all ranks are at the same one.

Every rank sends to every other, and adds up what arrives in the order of ranks. Knows no lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from polyshard import BackendError
from polyshard.spi import Communicator, Op

from .connections import Connections

_HALF_PRECISION = frozenset({torch.float16, torch.bfloat16})

#: What can be added up here.
REDUCE_DTYPES = _HALF_PRECISION | {
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}

# A header is a fingerprint, by which ranks compare, and a description, for people.
_FINGERPRINT_BYTES, _HEADER_BYTES = 16, 1024


class SocketsCommunicator(Communicator):
    """Collectives that are over when they return; with one rank, copies."""

    def __init__(self, connections: Connections, device: torch.device) -> None:
        super().__init__(connections.rank, connections.size, device, reduce_dtypes=REDUCE_DTYPES)
        self._connections = connections
        self._position = 0

    def settle(self) -> None:
        """Nothing to do: messages are copies, so peers never read a caller's tensor (clause 6)."""

    def close(self) -> None:
        self._connections.close()

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        own = _message(shards)
        messages = self._trade("all_gather", shards, [own] * self.size, label=label)
        for rank, message in enumerate(messages):
            _store(message, _slots(outputs, rank, self.size))

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        each = [_message(_slots(inputs, rank, self.size)) for rank in range(self.size)]
        messages = self._trade(f"reduce_scatter {op.value}", outputs, each, label=label)
        _store_combined(messages, outputs, op)

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        own = _message(buffers)
        messages = self._trade(f"all_reduce {op.value}", buffers, [own] * self.size, label=label)
        _store_combined(messages, buffers, op)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        own = _message(buffers) if self.rank == source else bytearray()
        call = f"broadcast from rank {source} of the group"
        messages = self._trade(call, buffers, [own] * self.size, label=label, sources=[source])
        _store(messages[source], buffers)

    def _trade(
        self,
        call: str,
        parts: Sequence[Tensor],
        outgoing: Sequence[bytearray],
        *,
        label: str,
        sources: Sequence[int] | None = None,
    ) -> list[bytearray]:
        """Agree with all ranks on the call, then send ``outgoing[rank]`` to each of them.

        Args:
            call: the kind of collective and what else of it must be alike on every rank.
            parts: tensors of the length and dtype of what one rank sends to another.
            outgoing: a message for every rank, this one's own included; none is changed.
            sources: the ranks that send, if not all do.

        Returns:
            What each rank sent to this one; empty for those that send nothing.
        """
        connections, own = self._connections, self.rank
        connections.require_open(label)
        deadline = connections.deadline()
        self._agree(call, parts, label=label, deadline=deadline)
        senders = range(self.size) if sources is None else sources
        nbytes = sum(part.nbytes for part in parts)
        messages = [bytearray(nbytes if rank in senders else 0) for rank in range(self.size)]
        messages[own] = outgoing[own]
        connections.exchange(
            {peer: outgoing[peer] for peer in connections.peers},
            {peer: messages[peer] for peer in connections.peers},
            deadline=deadline,
            label=label,
        )
        return messages

    def _agree(self, call: str, parts: Sequence[Tensor], *, label: str, deadline: float) -> None:
        """Raise on every rank if any is at another collective (clause 3.1).

        No data is sent before: what has arrived could not be told from that of another
        collective of the same length.
        """
        connections = self._connections
        header = _header(f"#{self._position} {label!r}: {call}", parts)
        theirs = {peer: bytearray(_HEADER_BYTES) for peer in connections.peers}
        headers = dict.fromkeys(connections.peers, header)
        connections.exchange(headers, theirs, deadline=deadline, label=label)
        for peer, other in theirs.items():
            # Equality is transitive: where two ranks differ, every rank differs from one of them.
            if other[:_FINGERPRINT_BYTES] != header[:_FINGERPRINT_BYTES]:
                connections.abort()
                raise BackendError(
                    f"{label}: {connections.name(self.rank)} is at {_described(header)}, but "
                    f"{connections.name(peer)} is at {_described(other)}. Every rank must issue "
                    "the same collectives in the same order, with the same label, dtype and "
                    "lengths: look for a branch that depends on the rank or on the data."
                )
        self._position += 1


def _header(call: str, parts: Sequence[Tensor]) -> bytearray:
    lengths = [part.numel() for part in parts]
    dtype = parts[0].dtype if parts else None
    text = f"{call} of {len(parts)} tensors, {dtype}, {sum(lengths)} elements {lengths}".encode()
    fingerprint = blake2b(text, digest_size=_FINGERPRINT_BYTES).digest()
    return bytearray((fingerprint + text)[:_HEADER_BYTES].ljust(_HEADER_BYTES, b"\0"))


def _described(header: bytearray) -> str:
    return header[_FINGERPRINT_BYTES:].rstrip(b"\0").decode(errors="replace")


def _slots(wholes: Sequence[Tensor], rank: int, size: int) -> list[Tensor]:
    """That rank's part of each tensor."""
    return [whole.tensor_split(size)[rank] for whole in wholes]


def _flat(message: bytearray, dtype: torch.dtype) -> Tensor:
    """The memory of a message, as a tensor."""
    if not message:  # torch refuses to look at no memory.
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(message, dtype=torch.uint8).view(dtype)


def _message(tensors: Sequence[Tensor]) -> bytearray:
    """One message with all tensors, bit by bit: a list travels as one launch (clause 5.7)."""
    message = bytearray(sum(tensor.nbytes for tensor in tensors))
    if tensors:
        torch.cat([tensor.view(torch.uint8) for tensor in tensors], out=_flat(message, torch.uint8))
    return message


def _store(message: bytearray, tensors: Sequence[Tensor]) -> None:
    """Copy what :func:`_message` made of such tensors into them."""
    if tensors:
        _copy(_flat(message, tensors[0].dtype), tensors)


def _store_combined(messages: Sequence[bytearray], results: Sequence[Tensor], op: Op) -> None:
    """Copy the sum or average of all messages into tensors, added in the order of ranks.

    The order makes results repeat (clause 5.9), and those of an all-reduce alike on every rank
    (clause 5.3). Half precision is added in fp32 and rounded once (clause 5.6).
    """
    if not results:
        return
    first, *others = [_flat(message, results[0].dtype) for message in messages]
    if not others:  # One rank's sum is what it has, to the last bit.
        _copy(first, results)
        return
    total = first.float() if first.dtype in _HALF_PRECISION else first.clone()
    for contribution in others:
        total += contribution
    if op is Op.AVG:
        total /= len(messages)
    _copy(total, results)


def _copy(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Cut ``flat`` into the tensors' lengths."""
    lengths = [tensor.numel() for tensor in tensors]
    for source, target in zip(torch.split(flat, lengths), tensors, strict=True):
        # Through .data, which has a version of its own: autograd must not take a refilled
        # buffer for a changed one (clause 7.2).
        target.data.copy_(source)
