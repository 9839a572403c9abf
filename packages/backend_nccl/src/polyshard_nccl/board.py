"""What ranks of one communicator tell each other beside its collectives, by way of the store.

Written when something failed or ended, never in a collective. Knows no devices and no lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_FAILED = "failed"


class Board:
    """Notes under keys of their own.

    A store that is gone (the process that kept it ended) is an empty board.

    Args:
        store: used by this communicator alone.
        rank: in the group.
        ranks: the group's ranks in the whole job.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int]) -> None:
        # A connection of its own: a thread that waits in the store would hold up the others.
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.ranks = rank, tuple(ranks)

    def name(self, rank: int) -> str:
        """What messages call a rank of the group: its rank in the whole job."""
        return f"rank {self.ranks[rank]}"

    def say_failed(self, message: str) -> None:
        """Tell that work failed here."""
        self._put(_FAILED, f"{self.name(self.rank)}: {message}")

    def failure(self) -> str | None:
        """What a rank said that failed."""
        return self._get(_FAILED)

    def say_waiting(self, for_what: str) -> None:
        """Tell what this rank has waited for too long."""
        self._put(f"waits/{self.rank}", for_what)

    def waiting(self) -> dict[int, str]:
        """What each other rank waits for, of those that said so."""
        said = {rank: self._get(f"waits/{rank}") for rank in range(len(self.ranks))}
        return {rank: text for rank, text in said.items() if text is not None and rank != self.rank}

    def say_done(self) -> None:
        """Tell that this rank will use the communicator no more, and its device neither."""
        self._put(f"done/{self.rank}", "")

    def all_are_done(self) -> bool:
        """Every rank said so, or the store is gone."""
        try:
            return bool(self._store.check([f"done/{rank}" for rank in range(len(self.ranks))]))
        except RuntimeError:
            return True

    def _put(self, key: str, text: str) -> None:
        with suppress(RuntimeError):
            self._store.set(key, text)

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError:
            return None
