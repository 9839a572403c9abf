"""All ranks of a small grid in one process: a thread each, collectives over shared boards.

Knows the collective interface; knows no layout and no buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from polyshard.spi import Communicator, Op

CPU = torch.device("cpu")
Coordinates = tuple[int, ...]


class Board:
    """Where the ranks of one group lay out what they bring to a collective."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What every rank brought, by rank."""
        self._slots[rank] = value
        self.barrier.wait()
        brought = list(self._slots)
        self.barrier.wait()  # nobody lays out the next value before all have seen this one
        return brought


class SimulatedCommunicator(Communicator):
    """Reduces in float64 and rounds once; notes kind and dtype of every call."""

    def __init__(self, rank: int, size: int, board: Board) -> None:
        super().__init__(rank, size, CPU)
        self._board = board
        self.launches: list[tuple[str, torch.dtype]] = []

    def settle(self) -> None:
        """Every collective exchanged copies."""

    def close(self) -> None:
        """It holds nothing."""

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        for output, parts in zip(outputs, self._exchange("all_gather", shards, label), strict=True):
            output.copy_(torch.cat(parts))

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        brought = self._exchange(f"reduce_scatter {op.value}", inputs, label)
        for output, parts in zip(outputs, brought, strict=True):
            length = output.numel()
            output.copy_(_combine(parts, op)[self.rank * length : (self.rank + 1) * length])

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        brought = self._exchange(f"all_reduce {op.value}", buffers, label)
        for buffer, parts in zip(buffers, brought, strict=True):
            buffer.copy_(_combine(parts, op))

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        for buffer, parts in zip(buffers, self._exchange("broadcast", buffers, label), strict=True):
            buffer.copy_(parts[source])

    def _exchange(self, kind: str, tensors: Sequence[Tensor], label: str) -> list[list[Tensor]]:
        """Copies of what all ranks gave, by tensor and rank; all must call alike."""
        self.launches.append((kind.split()[0], tensors[0].dtype))
        copies = [tensor.clone() for tensor in tensors]
        brought = self._board.exchange(self.rank, (kind, label, copies))
        assert len({(other, name) for other, name, _ in brought}) == 1, brought
        return [list(parts) for parts in zip(*(theirs for *_, theirs in brought), strict=True)]


def _combine(parts: Sequence[Tensor], op: Op) -> Tensor:
    total = torch.stack([part.double() for part in parts]).sum(dim=0)
    return total / len(parts) if op is Op.AVG else total


class SimulatedRank:
    """One rank of the grid: where it stands and its communicators by axis."""

    def __init__(
        self, coordinates: Coordinates, communicators: dict[int, SimulatedCommunicator]
    ) -> None:
        self.coordinates, self.communicators = coordinates, communicators


def simulate(sizes: Sequence[int], body: Callable[[SimulatedRank], None]) -> None:
    """Run ``body`` once per rank, all at a time, without autograd; raises what the first raised."""
    boards: dict[tuple[int, Coordinates], Board] = {}
    ranks: list[SimulatedRank] = []
    for coordinates in product(*(range(size) for size in sizes)):
        communicators = {}
        for axis, size in enumerate(sizes):
            line = (*coordinates[:axis], *coordinates[axis + 1 :])
            board = boards.setdefault((axis, line), Board(size))
            communicators[axis] = SimulatedCommunicator(coordinates[axis], size, board)
        ranks.append(SimulatedRank(coordinates, communicators))
    assert len(ranks) == prod(sizes)
    errors: list[BaseException] = []

    def run(rank: SimulatedRank) -> None:
        try:
            with torch.no_grad():
                body(rank)
        except BaseException as error:
            errors.append(error)
            for board in boards.values():
                board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        raise (first or errors)[0]
