"""What the watcher makes of collectives that hang, peers that failed and communicators that end.

Looks are taken by hand, on a clock of the test's own; where its thread is meant, that runs.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
from recorded_cuda import CPU, FakeGroup, RecordedNccl
from torch.distributed import HashStore

from polyshard import BackendError
from polyshard.spi import Op
from polyshard_nccl.board import Board
from polyshard_nccl.communicator import Connection, NcclCommunicator
from polyshard_nccl.lanes import StreamLane
from polyshard_nccl.watcher import Watcher

TIMEOUT = 100.0


class Rank:
    """One of two ranks in this process, with a watcher that only looks when it is told to."""

    def __init__(
        self, rank: int, store: HashStore, *, shared: bool = False, timeout: float = TIMEOUT
    ) -> None:
        self.backend = RecordedNccl(shared_stream=shared)
        self.cuda, self.domain = self.backend.cuda, self.backend._domain
        self.now = time.monotonic()
        self.watcher = self.domain.watcher = Watcher(self.domain, clock=lambda: self.now)
        self.watcher._start = lambda: None  # type: ignore[method-assign]
        lane = self.backend.lane("reduce", CPU)
        assert isinstance(lane, StreamLane)
        self.lane, self.group = lane, FakeGroup(self.cuda, "reduce")
        self.connection = Connection(
            self.group,
            Board(store, rank, (3, 7)),
            lane,
            timeout=timeout,
            shares_stream=shared,
            user_buffers=None,
        )
        self.communicator = NcclCommunicator(
            self.connection,
            rank=rank,
            size=2,
            device=CPU,
            capability=(9, 0),
            lane=lane,
            domain=self.domain,
            watcher=self.watcher,
        )

    def reduce(self, label: str, *, hangs: bool) -> None:
        self.cuda.holding = hangs
        buffer = torch.zeros(4)
        self.lane.submit(
            lambda: self.communicator.all_reduce([buffer], Op.SUM, label=label), label=label
        )
        self.lane.mark()
        self.cuda.holding = False
        self.now = time.monotonic()

    def look(self, after: float) -> bool:
        self.now += after
        return self.watcher.look()


@pytest.fixture
def ranks() -> tuple[Rank, Rank]:
    store = HashStore()
    return Rank(0, store), Rank(1, store)


def test_what_is_done_in_time_is_left_alone(ranks: tuple[Rank, Rank]) -> None:
    """The device is asked nothing before the timeout is nearly over, and then once."""
    one, _ = ranks
    one.reduce("blocks.0 reduce", hangs=True)
    asked = one.cuda.queries
    one.look(20.0)
    one.look(69.0)
    assert one.cuda.queries == asked
    one.cuda.let_go()
    one.look(2.0)
    assert one.cuda.queries == asked + 1
    assert not one.domain.occurred
    assert not one.look(0.0), "there is nothing left to look at"


def test_both_sides_are_named(ranks: tuple[Rank, Rank], caplog: pytest.LogCaptureFixture) -> None:
    """Ranks that wait for different collectives say so to each other: what each waits for, unit
    and collective, in the error and in the log, before torch's watchdog ends the process."""
    one, two = ranks
    one.reduce("blocks.0 reduce", hangs=True)
    two.reduce("blocks.1 reduce", hangs=True)
    two.connection.board.say_waiting("blocks.1 reduce (all_reduce)")
    with caplog.at_level(logging.ERROR, "polyshard.nccl"):
        one.look(TIMEOUT - 9.0)
    with pytest.raises(BackendError) as raised:
        one.backend.compute_lane(CPU).mark()
    said = str(raised.value)
    assert said.startswith("blocks.0 reduce (all_reduce): rank 3 has waited 91 s on lane 'reduce'.")
    assert "rank 7 waits for blocks.1 reduce (all_reduce)." in said
    for hint in ("POLYSHARD_DEBUG=1", "TORCH_FR_BUFFER_SIZE", "POLYSHARD_NCCL_TIMEOUT"):
        assert hint in said
    assert caplog.messages == [said]


def test_a_rank_that_died(ranks: tuple[Rank, Rank]) -> None:
    """A rank that says nothing is said to have ended or to hang elsewhere."""
    one, _ = ranks
    one.reduce("blocks.0 reduce", hangs=True)
    one.look(TIMEOUT)
    with pytest.raises(BackendError, match="rank 7 waits for nothing here: it ended, or hangs"):
        one.lane.mark()


def test_a_shared_stream_is_mentioned() -> None:
    """With one stream for all lanes the message says what that gives up."""
    one = Rank(0, HashStore(), shared=True)
    one.reduce("blocks.0 reduce", hangs=True)
    one.look(TIMEOUT)
    with pytest.raises(BackendError, match=r"share one stream \(shared_stream=True\)"):
        one.lane.mark()


def test_a_failure_is_told_to_peers(ranks: tuple[Rank, Rank]) -> None:
    """Where work failed on one rank, the others learn it from the store after some seconds, not
    at their timeout, and say whose failure it was."""
    one, two = ranks
    two.lane.submit(lambda: 1 / 0, label="blocks.2 gather")  # type: ignore[arg-type, return-value]
    two.look(0.0)
    one.reduce("blocks.0 reduce", hangs=True)
    one.look(4.0)
    assert not one.domain.occurred
    one.look(2.0)
    with pytest.raises(BackendError) as raised:
        one.lane.mark()
    said = str(raised.value)
    assert said.startswith("blocks.0 reduce (all_reduce): rank 3 waits for a rank that failed.")
    assert "rank 7: blocks.2 gather failed: ZeroDivisionError" in said


def test_work_without_collectives_is_no_hang(ranks: tuple[Rank, Rank]) -> None:
    """A lane that is busy with work of its own is not called late."""
    one, _ = ranks
    one.cuda.holding = True
    one.lane.submit(lambda: None, label="long copy")
    one.lane.mark()
    one.look(10 * TIMEOUT)
    assert not one.domain.occurred


def test_closed_by_all(ranks: tuple[Rank, Rank]) -> None:
    """NCCL's connections go only when every rank has closed and its device is done: a rank that
    is behind may still need what this one sends."""
    one, two = ranks
    one.reduce("blocks.0 reduce", hangs=True)
    one.communicator.close()
    two.communicator.close()
    assert one.look(1.0)
    two.look(1.0)
    assert (one.group.transport.aborted, two.group.transport.aborted) == (0, 0)
    one.cuda.let_go()
    assert not one.look(1.0)
    assert not two.look(1.0)
    assert (one.group.transport.aborted, two.group.transport.aborted) == (1, 1)


def test_dropping_the_last_reference_closes(ranks: tuple[Rank, Rank]) -> None:
    """A communicator that nobody holds is let go likewise, its memory too."""
    one, two = ranks
    gone = weakref.ref(one.communicator)
    transport = one.group.transport
    del one.communicator
    gc.collect()
    assert gone() is None
    two.communicator.close()
    two.look(0.0)
    one.look(0.0)
    assert transport.aborted == 1


@pytest.mark.parametrize("why", ["a peer never closes", "work failed"])
def test_closed_by_one(ranks: tuple[Rank, Rank], why: str) -> None:
    """After the timeout, or once all has failed, nobody waits for the other ranks."""
    one, _ = ranks
    one.communicator.close()
    assert one.look(1.0)
    if why == "work failed":
        one.domain.record("unit", RuntimeError())
    assert not one.look(0.0 if why == "work failed" else TIMEOUT + 1.0)
    assert one.group.transport.aborted == 1


def test_the_thread_comes_and_goes() -> None:
    """One thread serves all communicators of a backend, and ends when there are none."""

    def watchers() -> int:
        return sum(thread.name == "polyshard nccl watcher" for thread in threading.enumerate())

    before, store = watchers(), HashStore()
    one = Rank(0, store)
    del one.watcher._start
    one.watcher.add(one.connection)
    one.watcher.add(one.connection)
    assert watchers() == before + 1
    Rank(1, store).connection.board.say_done()
    one.communicator.close()
    _until(lambda: watchers() == before)
    assert one.group.transport.aborted == 1


def test_the_thread_looks_by_itself() -> None:
    """A collective that hangs becomes an error while the host does something else."""
    one = Rank(0, HashStore(), timeout=0.5)
    del one.watcher._start
    one.watcher._clock = time.monotonic
    one.watcher.add(one.connection)
    one.reduce("blocks.0 reduce", hangs=True)
    _until(lambda: one.domain.occurred)
    with pytest.raises(BackendError, match=r"^blocks.0 reduce \(all_reduce\): rank 3 has waited"):
        one.lane.mark()
    one.domain.shut_down()
    assert one.group.transport.aborted == 1


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _ended(script: str) -> subprocess.CompletedProcess[str]:
    """A process whose first rank has a reduction in flight, and then does this."""
    begin = """
        import sys, threading
        sys.path.insert(0, sys.argv[1])
        import test_nccl_watcher as t
        one = t.Rank(0, t.HashStore())
        del one.watcher._start
        one.watcher.add(one.connection)
        one.reduce("blocks.0 reduce", hangs=True)
        board, abort = one.connection.board, one.group.transport.abort
        one.group.transport.abort = lambda: (abort(), print("aborted:", board.failure()))
    """
    return subprocess.run(
        [
            sys.executable,
            "-c",
            textwrap.dedent(begin) + textwrap.dedent(script),
            os.path.dirname(__file__),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_end_of_a_process_that_failed() -> None:
    """It has its own exit code, tells its peers of the failure, and aborts what it holds before
    torch complains that nobody did."""
    ended = _ended(
        """
        one.lane.submit(lambda: 1 / 0, label="blocks.1 reduce")
        sys.exit(7)
        """
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.startswith("aborted: rank 3: blocks.1 reduce failed: ZeroDivisionError")


def test_the_end_of_a_process_whose_device_is_behind() -> None:
    """What was submitted still runs: peers need it."""
    ended = _ended(
        """
        def catch_up():
            print("reached")
            one.cuda.let_go()
        timer = threading.Timer(0.3, catch_up)
        timer.daemon = True
        timer.start()
        import atexit
        atexit.register(print, "main ended")
        """
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["main ended", "reached", "aborted: None"]


def test_the_end_of_a_process_that_hangs() -> None:
    """Where a peer never comes the process ends all the same."""
    ended = _ended("sys.exit(3)")
    assert ended.returncode == 3, ended.stderr
    assert ended.stdout.splitlines() == ["aborted: None"]
