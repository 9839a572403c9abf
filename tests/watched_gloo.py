"""Gloo, watched and disturbed: backends that count memory, note the order of work, or delay it.

Knows the collective interface only; what the core does with it is for the tests to judge.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from polyshard.spi import Buffer, Lane, LaneRole, Lifetime, Role, StorageBuffer, Ticket, Use
from polyshard_gloo import GlooBackend

#: What a TRANSIENT buffer is for, by its first use. The PERSISTENT ones are main weights.
KINDS = {
    Role.GATHER_INPUT: "copies",
    Role.GATHER_OUTPUT: "gathered",
    Role.REDUCE_INPUT: "reduce input",
    Role.REDUCE_OUTPUT: "reduce output",
}
#: The same, where submitted work acquires it: for the length of that work.
KINDS_IN_WORK = {"reduce input": "staged", "reduce output": "landing"}
LONGEST_DELAY_SECONDS = 0.002

Work = Callable[[], None]


class Ledger:
    """Bytes that buffers hold, by kind: now, and the most since ``restart``."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Inside, this thread runs submitted work."""
        self._thread.works = True
        try:
            yield
        finally:
            self._thread.works = False

    def kind_here(self, kind: str) -> str:
        """The kind of what this thread acquires now."""
        works = getattr(self._thread, "works", False)
        return KINDS_IN_WORK.get(kind, kind) if works else kind

    def add(self, kind: str, nbytes: int) -> None:
        with self._lock:
            self.now[kind] += nbytes
            self.most[kind] = max(self.most[kind], self.now[kind])

    def restart(self) -> None:
        """Forget what was held before."""
        with self._lock:
            self.most = Counter(self.now)


class _NotedGloo(GlooBackend):
    """Sees all work on its way to the lanes, and notes its labels, lane by lane."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[LaneRole, list[str]] = {role: [] for role in self._lanes}
        self._noted = {
            role: _NotedLane(lane, partial(self._pass_on, role))
            for role, lane in self._lanes.items()
        }

    def lane(self, role: LaneRole, device: torch.device) -> Lane:
        return self._noted[role]

    def _pass_on(self, role: LaneRole, work: Work, label: str) -> Work:
        self.labels[role].append(label)
        return work


class WatchedGloo(_NotedGloo):
    """Counts what its buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def _pass_on(self, role: LaneRole, work: Work, label: str) -> Work:
        work, ledger = super()._pass_on(role, work, label), self.ledger

        def watched() -> None:
            with ledger.working():
                work()

        return watched

    def allocate(self, uses: Sequence[Use], *args: Any) -> Buffer:
        return _CountedBuffer(self.ledger, KINDS[uses[0].role], *args)


class RestlessGloo(_NotedGloo):
    """Delays all submitted work by random times, and fills memory that holds nothing with NaN.

    Released memory is not given back but filled as well, so that a read that comes too late, or
    too early, shows in the numbers.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generators = {role: random.Random(f"{seed} {role}") for role in self._lanes}

    def _pass_on(self, role: LaneRole, work: Work, label: str) -> Work:
        work = super()._pass_on(role, work, label)
        seconds = self._generators[role].uniform(0, LONGEST_DELAY_SECONDS)

        def late() -> None:
            time.sleep(seconds)
            work()

        return late

    def allocate(self, uses: Sequence[Use], *args: Any) -> Buffer:
        return _PoisonedBuffer(*args)


class _NotedLane(Lane):
    """A lane that has work changed on its way to another."""

    def __init__(self, lane: Lane, pass_on: Callable[[Work, str], Work]) -> None:
        self._lane, self._pass_on = lane, pass_on

    def submit(self, work: Work, *, label: str) -> None:
        self._lane.submit(self._pass_on(work, label), label=label)

    def mark(self) -> Ticket:
        return self._lane.mark()

    def wait(self, ticket: Ticket) -> None:
        self._lane.wait(ticket)

    def synchronize(self, timeout: float) -> None:
        self._lane.synchronize(timeout)


class _CountedBuffer(StorageBuffer):
    def __init__(self, ledger: Ledger, kind: str, *args: Any) -> None:
        super().__init__(*args)
        self._ledger = ledger
        self._kind = "main" if self.lifetime is Lifetime.PERSISTENT else kind
        self._held: Counter[str] = Counter()  # one kind at a time
        self._count()
        weakref.finalize(self, _forget, ledger, self._held).atexit = False

    def acquire(self) -> None:
        super().acquire()
        self._count()

    def release(self) -> None:
        super().release()
        self._count()

    def _count(self) -> None:
        nbytes = self.tensor.untyped_storage().nbytes()
        if nbytes == self._held.total():
            return
        _forget(self._ledger, self._held)
        kind = self._ledger.kind_here(self._kind)
        self._held[kind] = nbytes
        self._ledger.add(kind, nbytes)


def _forget(ledger: Ledger, held: Counter[str]) -> None:
    for kind, nbytes in held.items():
        ledger.add(kind, -nbytes)
    held.clear()


class _PoisonedBuffer(StorageBuffer):
    def acquire(self) -> None:
        super().acquire()
        self._poison()

    def release(self) -> None:
        if self.lifetime is Lifetime.PERSISTENT:
            super().release()
        elif self.tensor.untyped_storage().nbytes():
            self._poison()

    def _poison(self) -> None:
        # Through `.data`, which has a version of its own: autograd is not to notice.
        self.tensor.data.fill_(float("nan"))
