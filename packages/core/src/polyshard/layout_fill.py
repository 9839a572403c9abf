"""Lays tensors into one segment of a given shard length so that no shard boundary cuts a block.

Works on lengths in elements. Knows no other segments and does not choose the shard length; that is
`layout_search`'s part. docs/notes/layout.md says why the order of choices is as it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import neg

# A bound on time, not on correctness: how many block lengths are asked for a clean crossing.
CROSSING_FAMILIES = 32


class Queue:
    """Tensors in the order in which they ask for a place; those of one block length adjoin.

    `numels` and `blocks` hold each tensor's length and how much of it stays together. The caller
    puts coarse blocks first, so that the finest, which cross a boundary almost anywhere, come last.
    """

    def __init__(self, numels: Sequence[int], blocks: Sequence[int]) -> None:
        self.numels = numels
        self.blocks = blocks
        self.by_numel = sorted(range(len(numels)), key=numels.__getitem__)
        self.sorted_numels = [numels[turn] for turn in self.by_numel]
        self.finest: list[tuple[int, int]] = []  # turns [head, end) of one block length
        end = len(blocks)
        while end and len(self.finest) < CROSSING_FAMILIES:
            head = bisect_left(blocks, -blocks[end - 1], key=neg)
            self.finest.insert(0, (head, end))
            end = head

    def fill(self, shard_numel: int, slack: int) -> tuple[list[int], list[int]] | None:
        """Place every tensor, leaving at most `slack` elements of gaps between them.

        Returns turns in this queue in the order of their starts, and the starts; None where this
        order of choices found no such placement.
        """
        # Longer than a shard and not made of blocks that divide it: such a tensor fits across one
        # boundary but not two, so it goes first, while there is a choice of what lies around it.
        delicate = [
            turn
            for turn in self.by_numel[bisect_right(self.sorted_numels, shard_numel) :]
            if shard_numel % self.blocks[turn]
        ]
        for turn in delicate:
            if self.numels[turn] > 2 * shard_numel - shard_numel % self.blocks[turn]:
                return None
        turns = chain(reversed(delicate), range(len(self.numels)))
        return _Attempt(self, shard_numel, slack).run(turns)


class _Attempt:
    """One walk from shard boundary to shard boundary, and what is left to place meanwhile."""

    def __init__(self, queue: Queue, shard_numel: int, slack: int) -> None:
        count = len(queue.numels)
        self.queue = queue
        self.shard_numel = shard_numel
        self.slack = slack  # gaps that may still be left
        self.placed = bytearray(count)
        self.shorter = list(range(-1, count - 1))  # by rank in `by_numel`: the rank to look at next
        self.longer = list(range(1, count + 1))
        self.heads = [head for head, _ in queue.finest]

    def run(self, order: Iterable[int]) -> tuple[list[int], list[int]] | None:
        numels, placed = self.queue.numels, self.placed
        turns: list[int] = []
        starts: list[int] = []
        position = 0
        boundary = self.shard_numel
        for turn in order:
            while not placed[turn]:
                room = boundary - position
                chosen = turn
                if numels[turn] > room:
                    chosen, gap = self._at_boundary(turn, room)
                    if gap > self.slack:
                        return None
                    self.slack -= gap
                    position += gap
                placed[chosen] = 1
                turns.append(chosen)
                starts.append(position)
                position += numels[chosen]
                if position >= boundary:
                    boundary = (position // self.shard_numel + 1) * self.shard_numel
        return turns, starts

    def _at_boundary(self, turn: int, room: int) -> tuple[int, int]:
        """Choose what comes next, and the gap before it, where `turn` is longer than `room`.

        `room` is what is left before the boundary.
        """
        blocks = self.queue.blocks
        if not self._may_cross(turn, room):
            shortest = self._shortest_from(room)  # crosses, and leaves `turn` the most room after
            if shortest is None or not self._may_cross(shortest, room):
                filler = self._longest_within(room)
                if filler is not None:
                    return filler, 0
                return turn, room + self.shard_numel % blocks[turn]  # crosses the next one's end
            turn = shortest
        gap = room % blocks[turn]
        if gap == 0:
            return turn, 0
        other = self._longest_within(gap)
        if other is None:
            other = self._clean_crossing(room)
        if other is None and gap > self.slack:
            other = self._longest_within(room)
        return (turn, gap) if other is None else (other, 0)

    def _may_cross(self, turn: int, room: int) -> bool:
        """Whether a block edge at the next boundary is enough to place `turn` before it."""
        block = self.queue.blocks[turn]
        ends_in_next_shard = self.queue.numels[turn] <= room - room % block + self.shard_numel
        return ends_in_next_shard or self.shard_numel % block == 0

    def _clean_crossing(self, room: int) -> int | None:
        """Find a tensor that reaches the boundary with a block edge on it."""
        numels, blocks = self.queue.numels, self.queue.blocks
        for family, (_, end) in enumerate(self.queue.finest):
            head = self.heads[family]
            while head < end and self.placed[head]:
                head += 1
            self.heads[family] = head
            reaches = head < end and room % blocks[head] == 0 and numels[head] >= room
            if reaches and self._may_cross(head, room):
                return head
        return None

    def _longest_within(self, room: int) -> int | None:
        """Find the longest tensor left to place that fits into `room`."""
        return self._unplaced(bisect_right(self.queue.sorted_numels, room) - 1, self.shorter)

    def _shortest_from(self, room: int) -> int | None:
        """Find the shortest tensor left to place that fills `room`."""
        return self._unplaced(bisect_left(self.queue.sorted_numels, room), self.longer)

    def _unplaced(self, rank: int, following: list[int]) -> int | None:
        """Find the first tensor left to place, from `rank` on in one direction."""
        by_numel, placed = self.queue.by_numel, self.placed
        passed = []
        while 0 <= rank < len(by_numel) and placed[by_numel[rank]]:
            passed.append(rank)
            rank = following[rank]
        for entry in passed:  # what is placed stays placed: the next search skips all of it
            following[entry] = rank
        return by_numel[rank] if 0 <= rank < len(by_numel) else None
