"""Where the ranks of a group meet before NCCL connects them, and compare who sits where.

What is found here is an error that names ranks; NCCL would hang, or name none. Knows no streams.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from polyshard import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Card:
    """What one rank comes with.

    Args:
        purpose: the role of the lane.
        device: the GPU, the same for two processes that use the same one.
        nccl: the version of the library.
        user_buffers: whether it registers memory, which is collective.
        host: the machine.
    """

    purpose: str
    device: str
    nccl: str
    user_buffers: bool
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Place:
    """Where the ranks met: a part of the group's store that is theirs alone.

    Args:
        store: for this communicator only.
        rank: in the group.
        ranks: the group's ranks in the whole job.
        number: how many communicators the group had, this one included.
    """

    store: Store
    rank: int
    ranks: tuple[int, ...]
    number: int


def meet(group: ProcessGroup, card: Card, timeout: timedelta) -> Place:
    """Wait for every rank of ``group``, each with a card. Collective over that group only.

    Raises:
        BackendError: a rank did not come within ``timeout``, came for something else or with
            another NCCL; or two ranks are on one GPU.
    """
    from torch.distributed import get_process_group_ranks
    from torch.distributed.distributed_c10d import PrefixStore

    rank, ranks = group.rank(), tuple(get_process_group_ranks(group))
    store = group.get_group_store()
    # Every rank counts its own calls, in the store, where no later life of the group can meet
    # keys of an earlier one.
    number = store.add(f"polyshard_nccl/{rank}", 1)
    place = Place(PrefixStore(f"polyshard_nccl/{number}", store), rank, ranks, number)
    _compare(_cards(place, card, timeout), place)
    return place


def _cards(place: Place, own: Card, timeout: timedelta) -> list[Card]:
    place.store.set(f"card/{place.rank}", json.dumps(asdict(own)))
    cards = []
    for peer, name in enumerate(place.ranks):
        try:
            place.store.wait([f"card/{peer}"], timeout)
        except RuntimeError as error:
            raise BackendError(
                f"rank {name} did not connect for {own.purpose!r} within "
                f"{timeout.total_seconds():g} s ({_which(place)}): it hangs, ended, or does not "
                "call fully_shard in the same order."
            ) from error
        cards.append(Card(**json.loads(place.store.get(f"card/{peer}"))))
    return cards


def _compare(cards: Sequence[Card], place: Place) -> None:
    """Raise for the first difference. Every rank has the same cards, so every rank raises."""
    first = cards[0]
    for name, card in zip(place.ranks, cards, strict=True):
        if card.purpose != first.purpose:
            raise BackendError(
                f"rank {place.ranks[0]} connects for {first.purpose!r}, rank {name} for "
                f"{card.purpose!r} ({_which(place)}); every rank must make the same communicators "
                "in the same order."
            )
        if card.nccl != first.nccl:
            raise BackendError(
                f"rank {place.ranks[0]} on {first.host} has NCCL {first.nccl}, rank {name} on "
                f"{card.host} has NCCL {card.nccl}; install the same torch on all machines."
            )
        if card.user_buffers != first.user_buffers:
            raise BackendError(
                f"rank {place.ranks[0]} has user_buffers={first.user_buffers}, rank {name} "
                f"user_buffers={card.user_buffers} ({_which(place)}); give every rank the same."
            )
    # NCCL from 2.30.7 on allows it where it is told to.
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    seated: dict[tuple[str, str], int] = {}
    for name, card in zip(place.ranks, cards, strict=True):
        other = seated.setdefault((card.host, card.device), name)
        if other != name:
            raise BackendError(
                f"ranks {other} and {name} are both on one GPU of {card.host} ({card.device}); "
                "NCCL takes one rank for each GPU. Call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the mesh is made, and "
                "start no more ranks on a machine than it has GPUs."
            )


def _which(place: Place) -> str:
    return f"communicator {place.number} of ranks {list(place.ranks)}"
