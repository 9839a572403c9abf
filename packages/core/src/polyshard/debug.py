"""What ``POLYSHARD_DEBUG=1`` adds: ranks compare every collective before they start it, and the
values that sharded models start from.

For backends that do not compare by themselves, and for whoever looks for the first difference.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .errors import BackendError
from .spi import Communicator, Op

VARIABLE = "POLYSHARD_DEBUG"
#: How long ranks wait for each other, in seconds; by default what ``torch.distributed`` takes.
TIMEOUT_VARIABLE = "POLYSHARD_DEBUG_TIMEOUT"


def debugging() -> bool:
    """Whether the variable is set, to anything but 0."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def checksum(values: Tensor) -> str:
    """CRC-32 of a tensor's bytes as eight hex digits; equal values have equal ones."""
    plain = values.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return f"{zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes()):08x}"


class CheckedCommunicator(Communicator):
    """A communicator whose ranks tell each other what they are about to do.

    Args:
        bare: what moves the data, and counts it.
        group: of the same ranks; they make a side group of their own on CPUs.
    """

    def __init__(self, bare: Communicator, group: ProcessGroup) -> None:
        super().__init__(bare.rank, bare.size, bare.device, reduce_dtypes=bare.reduce_dtypes)
        self.bare, self.traffic = bare, bare.traffic
        self._ranks = dist.get_process_group_ranks(group)
        wanted = os.environ.get(TIMEOUT_VARIABLE)
        # Given to each barrier: it does not ask its group.
        self._timeout = timeout = None if wanted is None else timedelta(seconds=float(wanted))
        self._side = dist.new_group(
            self._ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
        )
        self._position = 0

    def all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        self._compare("all_gather", shards, label)
        self.bare.all_gather(outputs, shards, label=label)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        self._compare(f"reduce_scatter ({op.value})", outputs, label)
        self.bare.reduce_scatter(outputs, inputs, op, label=label)

    def all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        self._compare(f"all_reduce ({op.value})", buffers, label)
        self.bare.all_reduce(buffers, op, label=label)

    def broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        self._compare(f"broadcast (from {source})", buffers, label)
        self.bare.broadcast(buffers, source, label=label)

    def settle(self) -> None:
        self.bare.settle()

    def close(self) -> None:
        # The side group stays: the next one with its name would find its addresses in the store.
        self.bare.close()

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        self.bare._all_gather(outputs, shards, label=label)

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        self.bare._reduce_scatter(outputs, inputs, op, label=label)

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        self.bare._all_reduce(buffers, op, label=label)

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        self.bare._broadcast(buffers, source, label=label)

    def _compare(self, kind: str, tensors: Sequence[Tensor], label: str) -> None:
        """Raise BackendError on every rank where one is at another collective, or does not come."""
        dtype = tensors[0].dtype if tensors else None
        lengths = [tensor.numel() for tensor in tensors]
        mine = f"#{self._position} {label!r}: {kind}, {dtype}, elements {lengths}"
        found: list[str | None] = [None] * self.size
        try:
            # The first rank names those that are missing.
            dist.monitored_barrier(self._side, self._timeout, wait_all_ranks=True)
            dist.all_gather_object(found, mine, group=self._side)
        except Exception as error:
            raise BackendError(
                f"{label}: rank {self._ranks[self.rank]} of the ranks {self._ranks} is at {mine} "
                f"and another one did not come there: {error}"
            ) from error
        self._position += 1
        for rank, other in zip(self._ranks, found, strict=True):
            if other != mine:
                raise BackendError(
                    f"{label}: rank {self._ranks[self.rank]} is at {mine}, but rank {rank} is at "
                    f"{other}. Every rank must enter the same units in the same order: look for a "
                    "branch that depends on the rank or the data, and for models that differ."
                )
