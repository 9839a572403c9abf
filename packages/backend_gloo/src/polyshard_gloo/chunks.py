"""How lists of tensors are cut into messages, and the memory that messages are put together in.

Knows no connections and no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# What is taken from a room starts at a multiple of this: the largest element, and more.
_ALIGNMENT = 64


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of tensor ``index`` of a list."""

    index: int
    start: int
    stop: int


class Room:
    """Memory for one chunk on its way: taken bit by bit, given back all at once."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, contents undefined, until :meth:`clear`."""
        start, nbytes = self._taken, numel * dtype.itemsize
        self._taken += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        assert self._taken <= self._memory.numel(), "a chunk needs more room than was planned"
        return self._memory[start : start + nbytes].view(dtype)

    def clear(self) -> None:
        """Everything that was taken may be taken again."""
        self._taken = 0


class Staging:
    """Two rooms, so that one chunk is worked on while the next travels; kept between calls."""

    def __init__(self, bytes_kept: int) -> None:
        self._bytes_kept = bytes_kept
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def bytes_held(self) -> int:
        """What is kept now."""
        return self._memory.numel()

    def rooms(self, takes: int, numel: int, dtype: torch.dtype) -> tuple[Room, Room]:
        """Rooms for ``takes`` times ``numel`` elements each; those of earlier calls are void."""
        nbytes = takes * (numel * dtype.itemsize + _ALIGNMENT)
        memory = self._memory
        if memory.numel() < 2 * nbytes:
            # Pages that nobody writes to cost nothing, so what is planned may be generous.
            memory = torch.empty(2 * nbytes, dtype=torch.uint8)
            if memory.numel() <= self._bytes_kept:
                self._memory = memory
        return Room(memory[:nbytes]), Room(memory[nbytes : 2 * nbytes])

    def clear(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Chunk:
    """Pieces of a list that travel as one message of ``numel`` elements."""

    pieces: tuple[Piece, ...]
    numel: int

    def run(self, tensors: Sequence[Tensor], room: Room) -> Tensor:
        """Memory for the chunk in one run: a lone piece where it lies, else some of ``room``."""
        if len(self.pieces) == 1:
            (piece,) = self.pieces
            return tensors[piece.index][piece.start : piece.stop]
        return room.take(self.numel, tensors[0].dtype)

    def loaded(self, tensors: Sequence[Tensor], room: Room) -> Tensor:
        """A :meth:`run` that holds the pieces."""
        run = self.run(tensors, room)
        if len(self.pieces) > 1:
            torch.cat([tensors[p.index][p.start : p.stop] for p in self.pieces], out=run)
        return run

    def store(self, tensors: Sequence[Tensor], run: Tensor) -> None:
        """Bring what is in a :meth:`run` of these tensors to the pieces."""
        if len(self.pieces) > 1:
            position = 0
            for piece in self.pieces:
                target = tensors[piece.index][piece.start : piece.stop]
                target.copy_(run[position : position + target.numel()])
                position += target.numel()

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy the pieces between lists of the same lengths, unless they are the same memory."""
        for piece in self.pieces:
            source = sources[piece.index][piece.start : piece.stop]
            target = targets[piece.index][piece.start : piece.stop]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)


@lru_cache(maxsize=1024)
def cut(lengths: tuple[int, ...], limit: int) -> tuple[Chunk, ...]:
    """Cut a list of tensors into chunks of at most ``limit`` elements, in order, none empty.

    A tensor of at least a quarter of the limit has chunks of its own, which travel without a
    copy; shorter ones share.
    """
    chunks: list[Chunk] = []
    shared: list[Piece] = []
    filled = 0
    for index, length in enumerate(lengths):
        has_own = 4 * length >= limit
        if shared and (has_own or filled + length > limit):
            chunks.append(Chunk(tuple(shared), filled))
            shared, filled = [], 0
        if has_own:
            for start in range(0, length, limit):
                stop = min(start + limit, length)
                chunks.append(Chunk((Piece(index, start, stop),), stop - start))
        elif length:
            shared.append(Piece(index, 0, length))
            filled += length
    if shared:
        chunks.append(Chunk(tuple(shared), filled))
    return tuple(chunks)
