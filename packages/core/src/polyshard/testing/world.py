"""A warm world: processes that are started once, joined by gloo, and then sent bodies to run.

Owns the launching process's side of it: sending a body, waiting, judging what came back, and
ending a world that cannot be trusted any more. Knows no tensor and no collective; how processes
start and end is the zygote's business, what happens inside one the worker's.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any, TypeVar

from . import worker
from .rank_failure import RankFailure, RankOutcome, RankReport, without_frames_of
from .worker import SETTLE, Raised, Surroundings
from .zygote import MAX_WORLD_SIZE, Zygote, ZygoteGone, shared_zygote, worker_environment

T = TypeVar("T")

# How long ranks may take to join their process group; they share few cores.
_START_TIMEOUT = 120.0
# What the others get to answer once one rank failed: most wait for it in a collective.
_GRACE = 2.0
# How long a barrier may take at which every rank is known to arrive.
_SETTLE_TIMEOUT = 10.0
# A stack dump counts as complete when nothing was added to it for a while.
_STACK_QUIET, _STACK_TIMEOUT = 0.2, 5.0

# Worlds share the zygote, and with it the stream of exits that it reports.
_calls = threading.RLock()


@contextmanager
def one_call_at_a_time() -> Iterator[None]:
    """Keep other threads from using any world of this process."""
    with _calls:
        yield


@dataclass(frozen=True)
class _Rank:
    """The launching process's view of one rank."""

    number: int
    pid: int
    channel: Connection
    output: IO[bytes]
    stacks: IO[bytes]

    def close(self) -> None:
        for end in (self.channel, self.output, self.stacks):
            end.close()


class World:
    """``world_size`` processes joined by a gloo process group; also a context manager.

    ``run_ranks`` keeps worlds in a pool; make one yourself to decide when it starts and ends.
    """

    def __init__(self, world_size: int) -> None:
        if not isinstance(world_size, int) or not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(
                f"world_size is {world_size!r}; a world has from 1 to {MAX_WORLD_SIZE} ranks"
            )
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._zygote: Zygote | None = None

    @property
    def pids(self) -> list[int]:
        """Process numbers by rank; empty where the world does not run."""
        return [rank.pid for rank in self._ranks]

    def __enter__(self) -> World:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until they have met. Without effect where they run.

        Raises RuntimeError with what the processes said where that fails.
        """
        with one_call_at_a_time():
            if self._ranks and not self._intact():
                self.close()
            if self._ranks:
                return
            self._fork()
            try:
                self._collect("the start of a world", _START_TIMEOUT)
                for rank in self._ranks:
                    _empty(rank.output)  # gloo's greetings
            except BaseException:
                self.close()
                raise

    def run(
        self,
        body: Callable[..., T],
        /,
        *args: Any,
        timeout: float = 60.0,
        grace: float = _GRACE,
        **kwargs: Any,
    ) -> list[T]:
        """Like ``run_ranks``, in this world, which is started where it does not run.

        ``grace``: seconds that the other ranks get to answer once one failed.
        """
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}; give a number of seconds above 0")
        name = _name_of(body)
        payload = _packed(name, body, args, kwargs)
        around = pickle.dumps(_surroundings(body))
        with one_call_at_a_time():
            self.start()
            try:
                self._send(around, payload)
                answers = self._collect(name, timeout, grace, with_results=True)
                self._send(pickle.dumps(SETTLE))
                # Fails where the ranks are out of step: some issued a collective, others not.
                settled = self._collect(f"the barrier after {name}", _SETTLE_TIMEOUT)
                self._show_output()
            except BaseException:
                self.close()
                raise
            if any(answer.spent is not None for answer in settled):
                self.close()
        return [_unpacked(name, rank, answer) for rank, answer in enumerate(answers)]

    def close(self) -> None:
        """End the processes; they are gone when this returns. Idempotent."""
        with one_call_at_a_time():
            ranks, self._ranks = self._ranks, []
            try:
                if ranks and self._zygote is not None:
                    self._zygote.kill([rank.pid for rank in ranks])
            finally:
                for rank in ranks:
                    rank.close()

    def let_go(self) -> None:
        """Close the channels to the processes, which end once they notice; without waiting."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()

    def _fork(self) -> None:
        self._zygote = shared_zygote()
        with ExitStack() as opened, ExitStack() as handed_over:
            ends = []
            for _ in range(self.world_size):
                here, there = Pipe()
                opened.enter_context(here)
                handed_over.enter_context(there)
                # They have no name, so nothing is left behind however this process ends.
                output = opened.enter_context(tempfile.TemporaryFile(buffering=0))
                stacks = opened.enter_context(tempfile.TemporaryFile(buffering=0))
                ends.append((here, there, output, stacks))
            pids = self._zygote.fork_world(
                [
                    (there.fileno(), output.fileno(), stacks.fileno())
                    for _, there, output, stacks in ends
                ]
            )
            self._ranks = [
                _Rank(number, pid, here, output, stacks)
                for number, (pid, (here, _, output, stacks)) in enumerate(
                    zip(pids, ends, strict=True)
                )
            ]
            opened.pop_all()

    def _intact(self) -> bool:
        """Whether all processes survived since the last call."""
        assert self._zygote is not None
        try:
            self._zygote.collect_exits()
        except ZygoteGone:
            return False
        # Nothing is due from an idle rank: what can be read there is the end of its channel,
        # which closes before the zygote learns of its exit.
        closed = any(rank.channel.poll() for rank in self._ranks)
        return not closed and self._zygote.exits.keys().isdisjoint(self.pids)

    def _send(self, *frames: bytes) -> None:
        for rank in self._ranks:
            try:
                for frame in frames:
                    rank.channel.send_bytes(frame)
            except OSError:
                pass  # it died: its exit is about to be reported

    def _collect(
        self, name: str, timeout: float, grace: float = _GRACE, *, with_results: bool = False
    ) -> list[Any]:
        """Wait for every rank's answer, or its pickled result; by rank. Raises RankFailure."""
        assert self._zygote is not None
        zygote = self._zygote
        began = time.monotonic()
        deadline = began + timeout
        answers: dict[int, Any] = {}
        failures: dict[int, RankReport] = {}
        listening = {rank.channel: rank for rank in self._ranks}
        while True:
            for rank in self._ranks:
                ended = zygote.exits.get(rank.pid)
                known = rank.number in answers or rank.number in failures
                # What a rank said before it died counts: read its channel to the end first.
                if ended is None or known or (rank.channel in listening and rank.channel.poll()):
                    continue
                failures[rank.number] = RankReport(
                    rank.number, RankOutcome.DIED, str(ended), ended.moment
                )
            if len(answers) + len(failures) == self.world_size:
                break
            if failures:
                deadline = min(deadline, time.monotonic() + grace)
            ready = wait([*listening, zygote.reports], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [listening[channel] for channel in listening if channel in ready]:
                try:
                    answer = pickle.loads(rank.channel.recv_bytes())
                    if isinstance(answer, Raised):
                        failures[rank.number] = RankReport(
                            rank.number,
                            RankOutcome.RAISED,
                            f"raised {answer.summary}",
                            answer.moment,
                            traceback=answer.traceback,
                        )
                    else:
                        answers[rank.number] = rank.channel.recv_bytes() if with_results else answer
                except (EOFError, OSError):
                    del listening[rank.channel]  # its exit is about to be reported
            zygote.collect_exits()
        if len(answers) < self.world_size:
            raise self._failure(name, began, answers.keys(), failures)
        return [answers[number] for number in range(self.world_size)]

    def _failure(
        self, name: str, began: float, returned: Collection[int], failures: dict[int, RankReport]
    ) -> RankFailure:
        """The report on a failed call: what ranks said, and where the silent ones are."""
        now = time.monotonic()
        silent = [r for r in self._ranks if r.number not in failures and r.number not in returned]
        self._dump_stacks(silent)
        reports = []
        for rank in self._ranks:
            if rank in silent:
                summary = f"still running after {now - began:.1f} s"
                report = RankReport(rank.number, RankOutcome.STUCK, summary, now)
            elif rank.number in failures:
                report = failures[rank.number]
            else:
                report = RankReport(rank.number, RankOutcome.RETURNED, "returned", now)
            stack = without_frames_of([worker.__file__], _text(rank.stacks))
            reports.append(replace(report, stack=stack, output=_text(rank.output)))
        return RankFailure(name, reports)

    def _dump_stacks(self, silent: list[_Rank]) -> None:
        """Have ranks write their stacks. They do so in a signal handler, which cannot answer."""
        if not silent:
            return
        assert self._zygote is not None
        self._zygote.signal([rank.pid for rank in silent], signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_TIMEOUT
        written: list[str] = []
        while time.monotonic() < deadline:
            time.sleep(_STACK_QUIET)
            before, written = written, [_text(rank.stacks) for rank in silent]
            if written == before and all(written):
                return

    def _show_output(self) -> None:
        """Print what the ranks printed, each line with its rank, and forget it."""
        for rank in self._ranks:
            text = _text(rank.output)
            if text:
                _empty(rank.output)
                lines = text.splitlines()
                sys.stdout.write("".join(f"[rank {rank.number}] {line}\n" for line in lines))


def _text(file: IO[bytes]) -> str:
    # The worker writes through the same open file: leave its position alone.
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _empty(file: IO[bytes]) -> None:
    # For the same reason this moves the worker's position to the start, too.
    os.ftruncate(file.fileno(), 0)
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def _function_of(body: Callable[..., Any]) -> Any:
    while isinstance(body, partial):
        body = body.func
    return body


def _name_of(body: Callable[..., Any]) -> str:
    function = _function_of(body)
    described = function if hasattr(function, "__qualname__") else type(function)
    return f"{function.__module__}.{described.__qualname__}"


def _packed(name: str, body: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    if _function_of(body).__module__ == "__main__":
        raise ValueError(
            f"the body {name} is defined in the script that runs, which other processes cannot "
            "import; move it to a module of its own"
        )
    try:
        return pickle.dumps((body, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ValueError(
            f"the body {name} or an argument cannot be sent to other processes: {error}; use a "
            "function at module level, and plain values or tensors as arguments"
        ) from error


def _surroundings(body: Callable[..., Any]) -> Surroundings:
    home_name = _function_of(body).__module__
    home_file = getattr(sys.modules.get(home_name), "__file__", None)
    return Surroundings(
        import_paths=[path for path in sys.path if isinstance(path, str)],
        directory=os.getcwd(),
        environment=worker_environment(),
        home_name=home_name,
        home_file=home_file and os.path.abspath(home_file),
    )


def _unpacked(name: str, rank: int, result: bytes) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise RuntimeError(
            f"rank {rank} returned from {name} with a result that this process cannot load: "
            f"{type(error).__name__}: {error}"
        ) from error
