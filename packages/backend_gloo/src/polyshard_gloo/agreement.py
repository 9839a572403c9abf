"""What ranks tell each other about each collective, so that none can be mistaken for another.

Owns the message that says what a rank is at, which carries the data where there is little.
Knows no reductions.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from polyshard import BackendError

from .connections import Connections, Flight, Tag

# A change of this layout changes the mark, so that ranks with different versions notice.
_MARK = b"polysh-1"
_HEADER = struct.Struct("<8sQ16s")  # mark, position in the order of collectives, fingerprint
# Multiples of 16: what follows a header can be viewed as any dtype.
_HEADER_BYTES = _HEADER.size
_MESSAGE_BYTES = 8192
_DESCRIPTION_BYTES = 1024

#: Data of at most so many bytes travels with the header.
SMALL_BYTES = _MESSAGE_BYTES - _HEADER_BYTES

Payload = Sequence[Tensor]


class Call(NamedTuple):
    """All that must be alike on every rank. ``lengths`` counts elements of this rank's parts."""

    kind: str
    label: str
    dtype: torch.dtype | None
    lengths: tuple[int, ...]
    detail: str = ""

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.lengths[:8])) + (", ..." if len(self.lengths) > 8 else "")
        return (
            f"{self.label!r}: {self.kind}{self.detail} of {len(self.lengths)} tensors, "
            f"{self.dtype}, {sum(self.lengths)} elements [{shown}]"
        )


class Proposal(NamedTuple):
    """A call that the other ranks were told of."""

    agreement: Agreement
    call: Call
    header: bytes
    flight: Flight

    @property
    def data_tag(self) -> int:
        """Under it, and the next number, data of the call may be sent before it is settled."""
        return Tag.FIRST_FOR_DATA | (zlib.crc32(self.header) << 1) & 0x3FFFFFFE

    def settle(self) -> Tensor:
        """Block until every rank proposes this call.

        Returns:
            uint8 of shape (ranks, SMALL_BYTES): what every rank sent here, this rank's own
            included; valid until the next proposal.

        Raises:
            BackendError: a rank is at another call, on all ranks; or it is gone.
        """
        return self.agreement.settle(self)


class Agreement:
    """One message of fixed length from every rank to every other with each collective.

    gloo ends the process where a message is longer than its receiver expects, so nothing may be
    sent that a rank at another collective could take for its own: data travels under a tag that
    only the same call in the same position has.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._position = 0
        size = connections.size
        # Row r of inbox: what rank r sent, and in this rank's own row what it sends to all.
        # Row r of outbox: what goes to rank r only.
        inbox, self._received = _messages(size)
        outbox, self._sent = _messages(size)
        self._payloads = inbox[:, _HEADER_BYTES:]
        self._inbox, self._outbox = list(inbox), list(outbox)
        own, peers = connections.rank, connections.peers
        self._receives = [(peer, self._inbox[peer]) for peer in peers]
        self._sends_to_all = [(peer, self._inbox[own]) for peer in peers]
        self._sends_to_each = [(peer, self._outbox[peer]) for peer in peers]

    def propose(
        self,
        call: Call,
        *,
        to_all: Payload = (),
        to_each: Callable[[int], Payload] | None = None,
    ) -> Proposal:
        """Tell every rank what this one is about to do. Every proposal must be settled before
        the next one.

        Args:
            call: what this rank is about to do.
            to_all: tensors of bytes for every rank, SMALL_BYTES at most together.
            to_each: instead, tensors of bytes for each rank, this one included.
        """
        connections = self._connections
        header = _HEADER.pack(_MARK, self._position, _fingerprint(call))
        own = connections.rank
        _fill(self._received, self._inbox, own, header, to_each(own) if to_each else to_all)
        sends = self._sends_to_all
        if to_each:
            sends = self._sends_to_each
            for peer in connections.peers:
                _fill(self._sent, self._outbox, peer, header, to_each(peer))
        flight = connections.start(Tag.HEADER, self._receives, sends, label=call.label)
        return Proposal(self, call, header, flight)

    def settle(self, proposal: Proposal) -> Tensor:
        """See :meth:`Proposal.settle`."""
        connections, header = self._connections, proposal.header
        connections.finish(proposal.flight, label=proposal.call.label)
        for peer in connections.peers:
            start = peer * _MESSAGE_BYTES
            if self._received[start : start + _HEADER_BYTES] != header:
                self._disagree(proposal.call, peer)
        self._position += 1
        return self._payloads

    def _disagree(self, call: Call, other: int) -> NoReturn:
        """Exchange descriptions and raise. Every rank saw the same headers, so all come here."""
        connections, own = self._connections, self._connections.rank
        descriptions = torch.zeros(connections.size, _DESCRIPTION_BYTES, dtype=torch.uint8)
        text = f"#{self._position} {call}".encode()[:_DESCRIPTION_BYTES]
        descriptions[own, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        flight = connections.start(
            Tag.DESCRIPTION,
            [(peer, descriptions[peer]) for peer in connections.peers],
            [(peer, descriptions[own]) for peer in connections.peers],
            label=call.label,
        )
        connections.finish(flight, label=call.label)
        connections.abort(f"ranks disagreed about {call.label}")
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in descriptions]
        raise BackendError(
            f"{call.label}: {connections.name(own)} is at {texts[own]}, but "
            f"{connections.name(other)} is at {texts[other]}. Every rank must issue the same "
            "collectives in the same order, with the same label, dtype and lengths: look for a "
            "branch that depends on the rank or the data, for models that differ, and for "
            "different versions of polyshard."
        )


def _messages(count: int) -> tuple[Tensor, memoryview]:
    """Messages as rows of a tensor, and the same memory as Python sees it."""
    memory = bytearray(count * _MESSAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, -1), memoryview(memory)


def _fill(
    memory: memoryview, rows: Sequence[Tensor], row: int, header: bytes, payload: Payload
) -> None:
    start = row * _MESSAGE_BYTES
    memory[start : start + _HEADER_BYTES] = header
    position = _HEADER_BYTES
    for tensor in payload:
        rows[row][position : position + tensor.numel()].copy_(tensor)
        position += tensor.numel()


@lru_cache(maxsize=4096)
def _fingerprint(call: Call) -> bytes:
    """Alike in all processes, unlike Python's hash()."""
    fields = (call.kind, call.label, str(call.dtype), call.detail, repr(call.lengths))
    return blake2b("\0".join(fields).encode(), digest_size=16).digest()
