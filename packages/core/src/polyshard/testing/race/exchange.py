"""How ranks in separate processes pass each other what a collective needs: through a store.

Small and slow, made to be interrupted: the lane that waits for peers lets the scheduler go on.
Knows no reductions and no clocks.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Exchange:
    """Every rank of a group posts a message, and gets those of all.

    Args:
        group: its store carries the messages; None for one rank.
        name: of the communicator, the same on every rank and used once in the group.
        pause: called with a predicate, returns once that is true.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        name: str,
        *,
        rank: int,
        size: int,
        pause: Callable[[Callable[[], bool]], None],
    ) -> None:
        self._store: Any = None if group is None else group.get_group_store()
        self._name, self.rank, self.size, self._pause = f"polyshard race {name}", rank, size, pause
        self._position = 0

    def all(self, call: str, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, which are at the same ``call``.

        Raises:
            BackendError: a rank is at another call, or failed.
        """
        if self._store is None:
            return [payload]
        store, position = self._store, self._position
        self._position += 1
        keys = [self._key(position, rank) for rank in range(self.size)]
        store.set(keys[self.rank], pickle.dumps((call, payload)))
        failed = f"{self._name} failed"
        self._pause(lambda: store.check(keys) or store.check([failed]))
        if not store.check(keys):
            raise BackendError(f"{call}: {store.get(failed).decode()}")
        received = [pickle.loads(store.get(key)) for key in keys]
        if position:
            # Whoever posted this message had read all of the one before.
            store.delete_key(self._key(position - 1, self.rank))
        for rank, (other, _) in enumerate(received):
            if other != call:
                raise BackendError(
                    f"the order of collectives differs between ranks: rank {self.rank} of "
                    f"{self._name!r} is at {call}, but rank {rank} is at {other}."
                )
        return [payload for _, payload in received]

    def fail(self, reason: str) -> None:
        """Let the peers know that this rank does not come any more."""
        if self._store is not None:
            self._store.set(f"{self._name} failed", f"rank {self.rank} failed: {reason}")

    def _key(self, position: int, rank: int) -> str:
        return f"{self._name} {position} {rank}"


def as_bytes(tensors: Sequence[Tensor]) -> bytes:
    """The elements of 1-D contiguous tensors, one after the other."""
    return b"".join(
        ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor.numel()
    )


def as_tensors(data: bytes, like: Sequence[Tensor]) -> list[Tensor]:
    """What :func:`as_bytes` was made of, given the lengths and the dtype."""
    result, position = [], 0
    memory = bytearray(data)
    for tensor in like:
        nbytes = tensor.numel() * tensor.element_size()
        part = memory[position : position + nbytes]
        result.append(torch.frombuffer(part, dtype=tensor.dtype) if nbytes else tensor.new_empty(0))
        position += nbytes
    return result
