"""Collectives over more data than fits into one message: cut into chunks that overlap.

Knows who sends what to whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import TypeAlias

from torch import Tensor

from polyshard.spi import Op

from .agreement import Proposal
from .chunks import Chunk, Room, Staging, cut
from .connections import Connections
from .reduction import combine

# A message is long enough that its fixed costs vanish, and short enough to be in a cache still
# when it is used; with many ranks it is shorter, so that what all of them send has a bound.
_MESSAGE_BYTES = 2 * 2**20
_STAGING_BYTES = 48 * 2**20

#: A list of tensors for each rank of the group.
Slots: TypeAlias = Sequence[Sequence[Tensor]]


class Exchange:
    """Every rank sends straight to every other; what needs no arithmetic needs no copy either.

    All methods block until this rank has its results and gloo has taken what it sends. The
    first data is under way before the ranks have agreed on the call; no later data is.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._staging = Staging(_STAGING_BYTES)

    def gather(self, slots: Slots, parts: Sequence[Tensor], proposal: Proposal) -> None:
        """``slots[rank]`` becomes that rank's ``parts``; its own slot may be the same memory."""
        connections = self._connections
        tag, label = proposal.data_tag, proposal.call.label

        def move(chunk: Chunk, room: Room) -> Iterator[None]:
            receives = [(peer, chunk.run(slots[peer], room)) for peer in connections.peers]
            own = chunk.loaded(parts, room)
            sends = [(peer, own) for peer in connections.peers]
            flight = connections.start(tag, receives, sends, label=label)
            chunk.copy(parts, slots[connections.rank])
            yield
            connections.finish(flight, label=label)
            for peer, run in receives:
                chunk.store(slots[peer], run)

        self._overlap(parts, move, proposal)

    def reduce(self, outputs: Sequence[Tensor], slots: Slots, op: Op, proposal: Proposal) -> None:
        """``outputs`` become the ranks' combined ``slots[this rank]``; they may be the same
        memory."""
        connections, own = self._connections, self._connections.rank
        tag, label = proposal.data_tag, proposal.call.label

        def move(chunk: Chunk, room: Room) -> Iterator[None]:
            dtype = outputs[0].dtype
            contributions = [
                chunk.loaded(slot, room) if rank == own else room.take(chunk.numel, dtype)
                for rank, slot in enumerate(slots)
            ]
            receives = [(peer, contributions[peer]) for peer in connections.peers]
            sends = [(peer, chunk.loaded(slots[peer], room)) for peer in connections.peers]
            flight = connections.start(tag, receives, sends, label=label)
            yield
            connections.finish(flight, label=label)
            output = chunk.run(outputs, room)
            combine(output, contributions, op, own=own, take=room.take)
            chunk.store(outputs, output)

        self._overlap(outputs, move, proposal)

    def reduce_to_all(self, buffers: Sequence[Tensor], op: Op, proposal: Proposal) -> None:
        """``buffers`` become the ranks' combined ones: every rank combines a part of each chunk
        and sends it to all."""
        connections, own = self._connections, self._connections.rank
        tag, label = proposal.data_tag, proposal.call.label

        def move(chunk: Chunk, room: Room) -> Iterator[None]:
            whole = chunk.loaded(buffers, room)
            bounds = [chunk.numel * rank // connections.size for rank in range(connections.size)]
            parts = whole.tensor_split(bounds[1:])
            contributions = [
                part if rank == own else room.take(parts[own].numel(), whole.dtype)
                for rank, part in enumerate(parts)
            ]
            receives = [(peer, contributions[peer]) for peer in connections.peers]
            sends = [(peer, parts[peer]) for peer in connections.peers]
            flight = connections.start(tag, receives, sends, label=label)
            yield
            connections.finish(flight, label=label)
            combine(parts[own], contributions, op, own=own, take=room.take)
            receives = [(peer, parts[peer]) for peer in connections.peers]
            sends = [(peer, parts[own]) for peer in connections.peers]
            flight = connections.start(tag + 1, receives, sends, label=label)
            connections.finish(flight, label=label)
            chunk.store(buffers, whole)

        self._overlap(buffers, move, proposal, share=connections.size)

    def spread(self, buffers: Sequence[Tensor], source: int, proposal: Proposal) -> None:
        """Every rank's ``buffers`` become those of ``source``."""
        connections = self._connections
        tag, label = proposal.data_tag, proposal.call.label

        def move(chunk: Chunk, room: Room) -> Iterator[None]:
            if connections.rank == source:
                own = chunk.loaded(buffers, room)
                sends = [(peer, own) for peer in connections.peers]
                flight = connections.start(tag, [], sends, label=label)
                yield
                connections.finish(flight, label=label)
            else:
                run = chunk.run(buffers, room)
                flight = connections.start(tag, [(source, run)], [], label=label)
                yield
                connections.finish(flight, label=label)
                chunk.store(buffers, run)

        self._overlap(buffers, move, proposal)

    def close(self) -> None:
        """Give staging memory back."""
        self._staging.clear()

    def _overlap(
        self,
        tensors: Sequence[Tensor],
        move: Callable[[Chunk, Room], Iterator[None]],
        proposal: Proposal,
        *,
        share: int = 1,
    ) -> None:
        """Move all chunks of ``tensors``: a move runs to its ``yield``, then the move before it
        to its end. ``share``: how many messages a chunk is divided into."""
        dtype = tensors[0].dtype
        # Room for what arrives from all, what leaves to all, and a sum of twice the width.
        takes = 2 * self._connections.size + 2
        message = min(_MESSAGE_BYTES, _STAGING_BYTES // (2 * takes)) // dtype.itemsize
        chunks = cut(tuple(tensor.numel() for tensor in tensors), message * share)
        longest = max(chunk.numel for chunk in chunks)
        rooms = self._staging.rooms(takes, -(-longest // share), dtype)
        older: Iterator[None] = iter(())
        for chunk, room in zip(chunks, cycle(rooms), strict=False):
            room.clear()
            newer = move(chunk, room)
            next(newer)
            if chunk is chunks[0]:
                proposal.settle()
            _run_to_end(older)
            older = newer
        _run_to_end(older)


def _run_to_end(move: Iterator[None]) -> None:
    for _ in move:
        pass
