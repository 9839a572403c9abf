"""Sockets from one rank to every other rank of a group, and messages over them.

Knows no tensors and no collectives: a message is a bytearray whose length both ends know.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn, cast

from polyshard import BackendError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

_RANK_BYTES = 4


class Connections:
    """A socket to each peer. ``peers`` are the other ranks of the group, numbered within it."""

    def __init__(
        self, rank: int, ranks: Sequence[int], sockets: Mapping[int, socket.socket], timeout: float
    ) -> None:
        self.rank, self.size = rank, len(ranks)
        self.peers = tuple(sockets)
        self._ranks = tuple(ranks)
        self._sockets = dict(sockets)
        self._timeout = timeout
        self._process = os.getpid()
        self._open = True

    def name(self, peer: int) -> str:
        """What messages call a rank: its number in the whole job."""
        return f"rank {self._ranks[peer]}"

    def deadline(self) -> float:
        """When a collective that starts now has to be over."""
        return time.monotonic() + self._timeout

    def require_open(self, label: str) -> None:
        if not self._open:
            raise BackendError(f"{label}: this communicator was closed.")

    def exchange(
        self,
        outgoing: Mapping[int, bytearray],
        incoming: Mapping[int, bytearray],
        *,
        deadline: float,
        label: str,
    ) -> None:
        """Send ``outgoing[peer]`` to each peer there and fill ``incoming[peer]`` from it.

        All of it at once: ranks that first sent and then received would wait for each other as
        soon as a message is longer than what the operating system takes without a reader.
        Returns when the operating system has taken everything, so no peer reads our memory.
        """
        to_send = {peer: memoryview(message) for peer, message in outgoing.items() if message}
        to_fill = {peer: memoryview(message) for peer, message in incoming.items() if message}
        with selectors.DefaultSelector() as selector:
            for peer, connection in self._sockets.items():
                if events := _events(peer, to_send, to_fill):
                    selector.register(connection, events, peer)
            while to_send or to_fill:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._fail({*to_send, *to_fill}, label, is_late=True)
                lost = set()
                for key, events in ready:
                    peer, connection = key.data, cast(socket.socket, key.fileobj)
                    try:
                        if events & selectors.EVENT_WRITE:
                            _advance(to_send, peer, connection.send(to_send[peer]))
                        if events & selectors.EVENT_READ:
                            count = connection.recv_into(to_fill[peer])
                            if count == 0:
                                raise ConnectionError("the other end was closed")
                            _advance(to_fill, peer, count)
                    except BlockingIOError:
                        continue  # It only looked ready.
                    except OSError:
                        lost.add(peer)
                        continue
                    if wanted := _events(peer, to_send, to_fill):
                        selector.modify(connection, wanted, peer)
                    else:
                        selector.unregister(connection)
                # Only now: of those that are gone at the same time, each may be the cause.
                if lost:
                    self._fail(lost, label, is_late=False)

    def abort(self) -> None:
        """Cut the connections: whoever waits on them, here or at a peer, fails now.

        What was sent before still arrives. Unlike ``close`` it acts on the connection itself, so
        a fork of this process, which shares it, must not.
        """
        if os.getpid() != self._process:
            return
        for connection in self._sockets.values():
            with suppress(OSError):  # It is closed, or the peer was faster.
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the sockets back. Idempotent."""
        self._open = False
        for connection in self._sockets.values():
            connection.close()

    __del__ = close

    def _fail(self, peers: set[int], label: str, *, is_late: bool) -> NoReturn:
        self.require_open(label)
        self.abort()
        names = ", ".join(self.name(peer) for peer in sorted(peers))
        here = self.name(self.rank)
        if is_late:
            raise BackendError(
                f"{label}: {here} waited {self._timeout:g} s for {names}, which did not come to "
                "this collective: it hangs, is much slower, or took a path through the program "
                "without it."
            )
        raise BackendError(
            f"{label}: {here} lost its connection to {names}, which ended or failed; look for an "
            "earlier error there."
        )


def _events(peer: int, to_send: Mapping[int, memoryview], to_fill: Mapping[int, memoryview]) -> int:
    """What to wake up for."""
    return selectors.EVENT_WRITE * (peer in to_send) | selectors.EVENT_READ * (peer in to_fill)


def _advance(messages: dict[int, memoryview], peer: int, count: int) -> None:
    """``count`` more bytes of the message are done; a message that is all done is removed."""
    messages[peer] = messages[peer][count:]
    if not messages[peer]:
        del messages[peer]


def connect(group: ProcessGroup, *, purpose: str, timeout: timedelta | None) -> Connections:
    """Connect the ranks of ``group``, all of which call this in the same order (clause 4.1).

    They find each other in the group's store, where each announces a socket that it listens on.
    Every rank connects to those before it and is connected to by those after it.

    Raises:
        BackendError: a rank did not come within ``timeout``, or came for another purpose.
    """
    from torch.distributed import get_process_group_ranks
    from torch.distributed.distributed_c10d import PrefixStore

    rank, ranks = group.rank(), get_process_group_ranks(group)
    here, size, store = f"rank {ranks[rank]}", len(ranks), group.get_group_store()
    if timeout is None:
        timeout = cast(timedelta, store.timeout)  # type: ignore[attr-defined]
    seconds = timeout.total_seconds()
    sockets: dict[int, socket.socket] = {}
    if size == 1:
        return Connections(rank, ranks, sockets, seconds)
    # Each rank counts the communicators it made over this group. All made them in the same
    # order, so those of one number belong together, whatever was made over other groups.
    number = store.add(f"polyshard_sockets/{rank}", 1)
    store = PrefixStore(f"polyshard_sockets/{number}", store)
    with (
        ExitStack() as opened,
        TemporaryDirectory(prefix="polyshard_") as directory,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        try:
            path = f"{directory}/{rank}"
            listener.bind(path)
            listener.listen(size)
            store.set(str(rank), f"{purpose} {path}")
            paths = _announced_paths(store, purpose, ranks, here=here, timeout=timeout)
            for peer in range(rank):
                sockets[peer] = opened.enter_context(socket.socket(socket.AF_UNIX))
                sockets[peer].settimeout(seconds)
                sockets[peer].connect(paths[peer])
                sockets[peer].sendall(rank.to_bytes(_RANK_BYTES, "little"))
            listener.settimeout(seconds)
            while len(sockets) < size - 1:
                accepted = opened.enter_context(listener.accept()[0])
                accepted.settimeout(seconds)
                sockets[int.from_bytes(accepted.recv(_RANK_BYTES), "little")] = accepted
        except OSError as error:
            raise BackendError(
                f"{here} could not connect to ranks {ranks} for {purpose!r} within {seconds:g} s: "
                f"{error}. The sockets backend connects processes of one machine that share a "
                "directory for temporary files; look for an earlier error on another rank."
            ) from error
        for connection in sockets.values():
            connection.setblocking(False)
        opened.pop_all()  # Nothing failed: they stay open.
    return Connections(rank, ranks, sockets, seconds)


def _announced_paths(
    store: Store, purpose: str, ranks: Sequence[int], *, here: str, timeout: timedelta
) -> list[str]:
    """Where each rank listens, if all of them came for the same: a mismatch would just hang."""
    paths = []
    deadline = time.monotonic() + timeout.total_seconds()
    for peer, name in enumerate(ranks):
        try:
            left = max(0.001, deadline - time.monotonic())
            store.wait([str(peer)], timedelta(seconds=left))
        except RuntimeError as error:
            raise BackendError(
                f"rank {name} did not come to connect for {purpose!r} within "
                f"{timeout.total_seconds():g} s: it hangs, ended, or does not call fully_shard in "
                "the same order."
            ) from error
        theirs, path = store.get(str(peer)).decode().split(" ", 1)
        if theirs != purpose:
            raise BackendError(
                f"{here} connects for {purpose!r}, rank {name} for {theirs!r}; every rank must "
                "make the same communicators in the same order."
            )
        paths.append(path)
    return paths
