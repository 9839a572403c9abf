"""When work runs: as late as possible, as early as possible, or at random, within what waits allow.

Owns a thread per lane, of which at most one runs at a time, and only while the thread that trains
lets it: runs repeat. Knows no clocks, no memory and no collectives.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum

import torch

from ...errors import BackendError
from ...spi import LaneFailure
from .clock import LANES, Event

#: A lane that waits for peers this long (seconds) lets other lanes go on: they may be what the
#: peers wait for.
PATIENCE = 0.02


class Policy(Enum):
    """When a lane runs what it was given."""

    EARLY = "early"  # at once, as far as waits allow
    LATE = "late"  # only when compute waits for it
    RANDOM = "random"  # now and then, in an order drawn from a seed


@dataclass(eq=False)
class Item:
    """One piece of submitted work."""

    work: Callable[[], None] | None
    event: Event
    after: list[Item] = field(default_factory=list)  # on other lanes
    done: bool = False


class Worker:
    """The thread of one lane. It runs one item, or up to where that waits for peers, at a time."""

    def __init__(
        self, lane: int, failure: LaneFailure, around: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.queue: deque[Item] = deque()
        self.waits_for: Callable[[], bool] | None = None  # in the middle of an item, for peers
        self._lane, self._failure, self._around = lane, failure, around
        self._stopping = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def can_run(self) -> bool:
        """Whether there is an item, all it waits for is done, and peers have come."""
        if self.waits_for is not None:
            return self.waits_for()
        return bool(self.queue) and all(item.done for item in self.queue[0].after)

    def run(self) -> None:
        """Let the thread go on until it ends the item or waits for peers."""
        if self._thread is None:
            name = f"polyshard race {LANES[self._lane]}"
            self._thread = threading.Thread(target=self._live, name=name, daemon=True)
            self._thread.start()
        self._go.release()
        self._back.acquire()

    def pause(self, until: Callable[[], bool]) -> None:
        """Inside work: hand control back until ``until()``."""
        while not until():
            self.waits_for = until
            self._back.release()
            self._go.acquire()
            self.waits_for = None
            if self._stopping:
                raise BackendError("the race checker was stopped before peers came.")

    def is_current(self) -> bool:
        """Whether the caller is the work that runs."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread, also in the middle of an item."""
        if self._thread is not None:
            self._stopping = True
            self._go.release()
            if self.waits_for is not None:
                self._go.release()  # once to end the item, once to end the thread
            self._thread.join()
            self._thread = None
        self.queue.clear()

    def _live(self) -> None:
        with torch.inference_mode(False), torch.no_grad(), self._around():
            while self._may_go_on():
                item = self.queue[0]
                self._run(item)
                item.work, item.done = None, True
                item.after.clear()
                self.queue.popleft()
                del item
                self._back.release()

    def _may_go_on(self) -> bool:
        self._go.acquire()
        return not self._stopping

    def _run(self, item: Item) -> None:
        if item.work is None or self._failure.occurred:
            return
        try:
            item.work()
        except BaseException as error:
            self._failure.record(item.event.label, error)


class Scheduler:
    """Decides which lane goes on whenever the thread that trains comes by."""

    def __init__(
        self,
        policy: Policy,
        seed: int,
        failure: LaneFailure,
        timeout: float,
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.policy, self._failure, self._timeout = policy, failure, timeout
        self._random = random.Random(seed)
        self.workers = [Worker(lane, failure, around) for lane in range(1, len(LANES))]

    def worker_of_caller(self) -> Worker | None:
        """The lane whose work calls, or None for the thread that trains."""
        return next((worker for worker in self.workers if worker.is_current()), None)

    def add(self, lane: int, item: Item) -> None:
        """Queue work."""
        self.workers[lane - 1].queue.append(item)
        self.come_by(chance=0.5)

    def come_by(self, *, chance: float) -> None:
        """Let lanes go on where the policy says so; ``chance`` is for the random one."""
        if self.policy is Policy.EARLY:
            while any([self._step(worker) for worker in self.workers]):
                pass
        elif self.policy is Policy.RANDOM:
            while self._random.random() < chance:
                self._step(self._random.choice(self.workers))

    def run_until(self, item: Item | None) -> None:
        """Block until ``item`` is done; other work runs as the policy says.

        Raises:
            BackendError: peers did not come within the timeout.
        """
        idle_since: float | None = None
        while item is not None and not item.done:
            now = time.monotonic()
            impatient = idle_since is not None and now - idle_since > PATIENCE
            if any(self._step(worker) for worker in self._candidates(item, all_=impatient)):
                idle_since = None
                continue
            idle_since = now if idle_since is None else idle_since
            if now - idle_since > self._timeout:
                message = f"{item.event.label}: peers did not come within {self._timeout:g} s."
                self._failure.record(item.event.label, BackendError(message))
                self._failure.raise_if_any()
            time.sleep(0.0002)

    def drain(self) -> None:
        """Run everything that was submitted."""
        for worker in self.workers:
            while worker.queue and not self._failure.occurred:
                self.run_until(worker.queue[-1])

    def stop(self) -> None:
        """End the threads."""
        for worker in self.workers:
            worker.stop()

    def _step(self, worker: Worker) -> bool:
        if not worker.can_run():
            return False
        worker.run()
        return True

    def _candidates(self, item: Item, *, all_: bool) -> list[Worker]:
        if self.policy is Policy.RANDOM:
            return self._random.sample(self.workers, len(self.workers))
        if self.policy is Policy.EARLY or all_:
            return self.workers
        return [self._needed(item)]

    def _needed(self, item: Item) -> Worker:
        """The lane that has to go on for ``item`` to get done."""
        worker = self.workers[item.event.lane - 1]
        if worker.waits_for is None:
            for dependency in worker.queue[0].after:
                if not dependency.done:
                    return self._needed(dependency)
        return worker
