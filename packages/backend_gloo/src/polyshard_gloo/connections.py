"""Connections of one rank to the other ranks of a group, and bytes over them.

Owns gloo's sockets and says which rank it was when they fail. Knows no collectives.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from polyshard import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.distributed_c10d import Store

#: Messages on their way, each with the rank at the other end.
Flight: TypeAlias = "list[tuple[int, Work]]"


class _PointToPoint(Protocol):
    """What is used of ProcessGroupGloo; torch's own type stubs leave most of it out."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...


class Tag(IntEnum):
    """Messages between two ranks are told apart by a tag, and arrive in order under each."""

    HEADER = 0
    DESCRIPTION = 1
    NEVER_SENT = 2
    FIRST_FOR_DATA = 2**30


class Connections:
    """A socket from this rank to every other rank of one group.

    They are gloo's, but of no process group that torch.distributed knows: see
    docs/notes/gloo-groups.md for why. Sends are done when the operating system has taken the
    bytes, so a peer never reads this rank's memory.
    """

    def __init__(self, gloo: _PointToPoint, ranks: Sequence[int], timeout: timedelta) -> None:
        self.rank, self.size = gloo.rank(), gloo.size()
        self.peers = tuple(peer for peer in range(self.size) if peer != self.rank)
        self._gloo: _PointToPoint | None = gloo
        self._ranks = tuple(ranks)
        self._timeout = timeout.total_seconds()
        self._broken: str | None = None

    @classmethod
    def open(cls, group: ProcessGroup, *, purpose: str, timeout: timedelta) -> Connections:
        """Connect the ranks of ``group``, all of which must call this in the same order.

        Raises:
            BackendError: a rank did not come within ``timeout``, or came for another purpose.
        """
        from torch.distributed import ProcessGroupGloo, get_process_group_ranks
        from torch.distributed.distributed_c10d import PrefixStore

        rank, size, ranks = group.rank(), group.size(), get_process_group_ranks(group)
        store = group.get_group_store()
        # Every rank counts its own calls, in the store, where no later life of the group can
        # meet addresses of an earlier one.
        number = store.add(f"polyshard_gloo/{rank}", 1)
        store = PrefixStore(f"polyshard_gloo/{number}", store)
        _announce(store, purpose, number=number, rank=rank, ranks=ranks, timeout=timeout)
        try:
            gloo = ProcessGroupGloo(PrefixStore("addresses", store), rank, size, timeout)
        except RuntimeError as error:
            raise BackendError(
                f"rank {ranks[rank]} could not connect to ranks {ranks} for {purpose!r} within "
                f"{timeout.total_seconds():g} s: {error}. Check that they reach each other, and "
                "GLOO_SOCKET_IFNAME where a machine has several networks."
            ) from error
        return cls(cast(_PointToPoint, gloo), ranks, timeout)

    def name(self, peer: int) -> str:
        """What messages call a rank of the group: its rank in the whole job."""
        return f"rank {self._ranks[peer]}"

    def start(
        self,
        tag: int,
        receives: Iterable[tuple[int, Tensor]],
        sends: Iterable[tuple[int, Tensor]],
        *,
        label: str,
    ) -> Flight:
        """Start messages of contiguous tensors. Both ends must give messages of a tag the same
        lengths in bytes: gloo ends the process otherwise."""
        gloo = self._require_open(label)
        flight: Flight = []
        peer = self.rank
        try:
            # Receives first: a peer sends only once it knows where the message goes.
            for peer, tensor in receives:
                flight.append((peer, gloo.recv([tensor], peer, tag)))
            for peer, tensor in sends:
                flight.append((peer, gloo.send([tensor], peer, tag)))
        except RuntimeError as error:
            self._fail([peer], error, flight, label=label)
        return flight

    def finish(self, flight: Flight, *, label: str) -> None:
        """Block until all messages have arrived and all memory to send has been read."""
        for position, (peer, work) in enumerate(flight):
            began = time.monotonic()
            try:
                work.wait()
            except RuntimeError as error:
                waited = time.monotonic() - began
                rest = flight[position + 1 :]
                if waited < 0.9 * self._timeout:
                    self._fail([peer], error, rest, label=label)
                self._fail([peer, *_unfinished(rest)], error, [], label=label, waited=waited)

    def abort(self, reason: str) -> None:
        """Cut all connections: what waits on them here fails now, and soon at the peers.

        gloo has no call for that, but a receive that runs out of time does it.
        """
        gloo, self._broken = self._gloo, self._broken or reason
        if gloo is None:
            return
        for peer in self.peers:
            try:
                receive = gloo.recv([torch.empty(1)], peer, Tag.NEVER_SENT)
                receive.wait(timedelta(milliseconds=1))
            except RuntimeError:
                pass  # It ran out of time, or its connection was cut before.

    def close(self) -> None:
        """Give back sockets and threads. Idempotent."""
        self._gloo = None

    def _require_open(self, label: str) -> _PointToPoint:
        if self._gloo is None:
            raise BackendError(f"{label}: this communicator was closed.")
        if self._broken is not None:
            raise BackendError(f"{label}: this communicator cannot be used: {self._broken}.")
        return self._gloo

    def _fail(
        self,
        peers: Sequence[int],
        error: RuntimeError,
        flight: Flight,
        *,
        label: str,
        waited: float | None = None,
    ) -> NoReturn:
        self.abort(f"{label} failed")
        # Nothing may write into the caller's memory once this has raised.
        _unfinished(flight)
        names = ", ".join(self.name(peer) for peer in dict.fromkeys(peers))
        here = self.name(self.rank)
        if waited is None:
            message = (
                f"{label}: {here} lost its connection to {names}, which ended or failed; look "
                "for an earlier error there."
            )
        else:
            message = (
                f"{label}: {here} waited {waited:.0f} s for {names}, which did not come to this "
                "collective: it hangs, is much slower, or took a path through the program "
                "without it. See what it is doing; where it is only slow, raise "
                "POLYSHARD_GLOO_TIMEOUT (seconds)."
            )
        raise BackendError(f"{message} (gloo: {error})") from error


def _unfinished(flight: Flight) -> list[int]:
    """Wait for messages of connections that are cut; the peers of those that did not make it."""
    lost = []
    for peer, work in flight:
        try:
            work.wait()
        except RuntimeError:
            lost.append(peer)
    return lost


def _announce(
    store: Store, purpose: str, *, number: int, rank: int, ranks: Sequence[int], timeout: timedelta
) -> None:
    """Tell the group what this rank connects for, and compare: a mismatch would just hang."""
    store.set(str(rank), purpose)
    for peer, name in enumerate(ranks):
        try:
            store.wait([str(peer)], timeout)
        except RuntimeError as error:
            raise BackendError(
                f"rank {name} did not connect for {purpose!r} within "
                f"{timeout.total_seconds():g} s (communicator {number} of ranks {list(ranks)}): "
                "it hangs, ended, or does not call fully_shard in the same order."
            ) from error
        theirs = store.get(str(peer)).decode()
        if theirs != purpose:
            raise BackendError(
                f"rank {ranks[rank]} connects for {purpose!r}, rank {name} for {theirs!r} "
                f"(communicator {number} of ranks {list(ranks)}); every rank must make the same "
                "communicators in the same order."
            )
