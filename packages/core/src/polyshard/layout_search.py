"""Decides which tensors share a segment, and how long that segment's shards are.

Works on plain integers: lengths in elements, and the block each tensor may be cut into. Knows no
shapes, rows or ranks; `layout` gives the result its meaning. The reasoning, the guarantees with
their proofs, and what was rejected are in docs/notes/layout.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from .layout_fill import Queue

# Bounds on time. They can cost a segment more on unusual inputs, never one of the rules.
NEAR_SPLITS = 8  # how many of the families with the longest tensors may leave the pool one by one
EFFORT = 200_000  # tensors that may be put up for placement in tries that no rule needs
EFFORT_PER_TRY = 100


class Family(NamedTuple):
    """The tensors that are cut into blocks of one length."""

    block: int
    places: range  # in the search's order, which puts the longest first
    numel: int
    longest: int
    blocks: int  # a tensor's last block may be short and counts as one
    padding: int  # of a segment that holds this family alone


class Packing(NamedTuple):
    """One segment: its shard length, and where its tensors start within it."""

    families: Sequence[Family]
    shard_numel: int
    padding: int
    tensors: Sequence[int]  # in ascending order of start
    starts: Sequence[int]  # one per entry of `tensors`


def pack(numels: Sequence[int], blocks: Sequence[int], num_shards: int) -> list[Packing]:
    """Pack tensors of at least one element into segments whose shards are cut between blocks only.

    `blocks[i]` is how many elements of tensor i stay together, from 1 to `numels[i]`. The padding
    never exceeds what it takes to give every shard equally many blocks of each tensor. Below that,
    up to one per cent of the sum is spent on having fewer segments, and more only where nothing
    was found within it.
    """
    # Sorts are stable: of equal tensors the first stays first, whatever lies between them.
    order = sorted(range(len(numels)), key=numels.__getitem__, reverse=True)
    order.sort(key=blocks.__getitem__, reverse=True)
    search = _Search(order, [numels[tensor] for tensor in order], num_shards)
    families = search.families(Counter(blocks))
    total = sum(numels)
    ceiling = -total
    for numel, block in zip(numels, blocks, strict=True):
        ceiling -= numel // -(block * num_shards) * (block * num_shards)
    percent = 1
    while True:
        limit = min(ceiling, total * percent // 100)
        packings = search.within(families, limit)
        if packings is not None:
            # Coarse blocks first: what follows them starts at multiples of long rows.
            return sorted(packings, key=lambda packing: -packing.families[0].block)
        assert limit < ceiling, "a family alone never pads more than its tensors one by one"
        percent += (percent + 1) // 2


class _Search:
    """Looks for few segments whose padding together stays within a limit.

    Families and lengths go by places in `order`: coarse blocks first, longest tensors next.
    """

    def __init__(self, order: Sequence[int], numels: Sequence[int], num_shards: int) -> None:
        self.order = order
        self.numels = numels
        self.num_shards = num_shards
        self.effort = EFFORT

    def families(self, sizes: Mapping[int, int]) -> list[Family]:
        """Return the families, those with the longest tensors first, from the size by block."""
        families = []
        first = 0
        for block in sorted(sizes, reverse=True):
            places = range(first, first + sizes[block])
            numel = blocks = 0
            for place in places:
                numel += self.numels[place]
                blocks -= self.numels[place] // -block
            padding = -(blocks // -self.num_shards) * self.num_shards * block - numel
            families.append(Family(block, places, numel, self.numels[first], blocks, padding))
            first = places.stop
        families.sort(key=attrgetter("longest"), reverse=True)
        return families

    def within(self, families: Sequence[Family], limit: int) -> list[Packing] | None:
        """Return segments for all `families` with at most `limit` elements of padding, or None."""
        for apart, pool in self._splits(families):
            spare = limit - sum(map(attrgetter("padding"), apart))
            if not pool:
                return self._joined([], apart, spare)
            if spare < 0:
                continue
            shared = self._together(pool, spare)
            if shared is not None:
                return self._joined([shared], apart, spare - shared.padding)
        return None

    def _splits(
        self, families: Sequence[Family]
    ) -> Iterator[tuple[Sequence[Family], Sequence[Family]]]:
        """Yield ways to give some families a segment each and pool the others.

        Families with the longest tensors leave the pool first: a tensor that spans two boundaries
        ties the shard length to its block, a shorter one does not.
        """
        for apart in range(min(NEAR_SPLITS, len(families))):
            if apart and self.effort < len(self.numels):
                break
            yield families[:apart], families[apart:]
        rest = sum(map(attrgetter("numel"), families))
        for apart, family in enumerate(families):
            if family.longest * self.num_shards <= rest:
                yield families[:apart], families[apart:]  # no tensor of the pool exceeds a shard
                break
            rest -= family.numel
        # What pads little by itself may be apart, whatever the length of its tensors.
        yield (
            [family for family in families if family.padding * 100 <= family.numel],
            [family for family in families if family.padding * 100 > family.numel],
        )
        yield families, []

    def _joined(
        self, packings: list[Packing], apart: Sequence[Family], spare: int
    ) -> list[Packing] | None:
        """Add each family of `apart` to a segment if `spare` allows it, else give it its own.

        A `spare` below zero is padding that joining has to save; None if it does not.
        """
        for family in apart:
            joined = None
            for place, host in enumerate(packings):
                if self.effort < EFFORT_PER_TRY:
                    break
                self.effort -= EFFORT_PER_TRY
                if len(host.tensors) + len(family.places) > self.effort:
                    continue
                separate = host.padding + family.padding
                joined = self._together([*host.families, family], separate + max(spare, -1))
                if joined is not None:
                    packings[place] = joined
                    spare += separate - joined.padding
                    break
            if joined is None:
                packings.append(self._alone(family))
        return packings if spare >= 0 else None

    def _alone(self, family: Family) -> Packing:
        """Give a family a segment of its own: whole blocks in a row, as many on every shard."""
        starts = [0]
        for place in family.places[:-1]:
            starts.append(starts[-1] - self.numels[place] // -family.block * family.block)
        shard_numel = -(family.blocks // -self.num_shards) * family.block
        tensors = self.order[family.places.start : family.places.stop]
        return Packing((family,), shard_numel, family.padding, tensors, starts)

    def _together(self, families: Sequence[Family], spare: int) -> Packing | None:
        """Put `families` into one segment with as little padding as is found, at most `spare`."""
        numel = sum(map(attrgetter("numel"), families))
        shortest = -(numel // -self.num_shards)
        longest = (numel + spare) // self.num_shards
        shard_numels = self._shard_numels(families, shortest, longest)
        if not shard_numels:
            return None
        families = sorted(families, key=attrgetter("block"), reverse=True)
        places = [place for family in families for place in family.places]
        self.effort -= len(places)
        queue = Queue(
            [self.numels[place] for place in places],
            [family.block for family in families for _ in family.places],
        )
        for shard_numel in shard_numels:
            padding = shard_numel * self.num_shards - numel
            placed = queue.fill(shard_numel, padding)
            if placed is not None:
                turns, starts = placed
                tensors = [self.order[places[turn]] for turn in turns]
                return Packing(families, shard_numel, padding, tensors, starts)
        return None

    def _shard_numels(self, families: Sequence[Family], shortest: int, longest: int) -> list[int]:
        """Return the shard lengths worth trying for one segment, in ascending order."""
        if longest < shortest:
            return []
        tied = 1  # divides every length worth trying: the blocks of what spans two boundaries
        for family in families:
            if family.longest > 2 * longest:
                tied = math.lcm(tied, family.block)
                if tied > longest:
                    return []
        blocks = sorted(map(attrgetter("block"), families), reverse=True)
        lengths = {shortest, longest // tied * tied}
        step = tied
        for block in blocks:  # at multiples of its block, a tensor crosses any boundary cleanly
            step = math.lcm(step, block)
            if step > longest:
                break
            lengths.add(-(shortest // -step) * step)
        # Or with room for gaps, which at worst are one element less than a block at each boundary.
        gaps = (self.num_shards - 1) * (blocks[0] - 1)
        room = min(-(gaps // -self.num_shards), longest - shortest)
        lengths.update(shortest - room // -part for part in (16, 4, 1))
        lengths = {-(length // -tied) * tied for length in lengths}
        return sorted(length for length in lengths if shortest <= length <= longest)
