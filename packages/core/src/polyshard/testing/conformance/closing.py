"""Tests of the end: of communicators, of lanes and of the process (clauses 1.9, 4.8, 9.2)."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...errors import BackendError
from ...spi import Communicator, Op
from ..rank_failure import RankFailure, RankOutcome
from .bench import ROLES, Bench
from .clauses import clause
from .data import Violation, require
from .resources import require_no_growth
from .running import PATIENCE, Launch

_EXIT_CODES = (5, 6)


@clause("4.8", "9.2", since=(1, 0))
def closed_communicators_refuse(bench: Bench) -> None:
    """close can be called again, and a collective on a closed communicator raises BackendError
    that has its label."""
    closed = bench.communicator()
    _use(bench, closed, 3)
    bench.meet()
    bench.forget(closed)
    for _ in range(3):
        closed.close()
    part = torch.ones(3, device=bench.device)
    whole = torch.ones(3 * bench.size, device=bench.device)
    label = "blocks.6 gather"
    calls: dict[str, Callable[[], None]] = {
        "all_gather": lambda: closed.all_gather([whole], [part], label=label),
        "reduce_scatter": lambda: closed.reduce_scatter([part], [whole], Op.SUM, label=label),
        "all_reduce": lambda: closed.all_reduce([part], Op.SUM, label=label),
        "broadcast": lambda: closed.broadcast([part], 0, label=label),
    }
    for name, call in calls.items():
        try:
            call()
        except BackendError as error:
            require(label in str(error), f"{name} after close raised without its label: {error}")
        except Exception as error:
            raise Violation(f"{name} after close raised {type(error).__name__}: {error}") from error
        else:
            raise Violation(f"{name} after close raised nothing, expected BackendError")
    closed.close()


@clause("4.8", since=(1, 0))
def close_is_local(bench: Bench) -> None:
    """close needs no peer: ranks may close at different times and in different orders, and use
    other communicators of the same group meanwhile."""
    first, second, kept = (bench.communicator() for _ in range(3))
    for one in (first, second, kept):
        _use(bench, one, 5)
    bench.meet()
    for one in (first, second) if bench.rank % 2 else (second, first):
        bench.forget(one)
        if bench.rank == 0:
            one.close()
        _use(bench, kept, 5)
        one.close()


@clause("4.8", since=(1, 0))
def close_gives_everything_back(bench: Bench) -> None:
    """close gives back what the communicator holds: threads, sockets, processes, shared memory
    and staging; dropping the last reference does the same."""
    numel = max(1, bench.subject.largest_numel // 2)

    def make_and_close() -> None:
        for purpose in ROLES[:2]:
            one = bench.communicator(purpose)
            _use(bench, one, 3)
            _use(bench, one, numel)
            bench.meet()
            bench.forget(one)
            one.close()

    def make_and_drop() -> None:
        one = bench.communicator("gather")
        _use(bench, one, 3)
        bench.meet()
        bench.forget(one)

    require_no_growth(bench, make_and_close, "making, using and closing communicators")
    require_no_growth(bench, make_and_drop, "making, using and dropping communicators")


@clause("1.9", "4.8", since=(1, 0), drives=True)
def a_process_ends_whatever_it_does(launch: Launch) -> None:
    """A process ends with its own exit code, with lanes stuck, a collective in flight and
    communicators open, before or after the process group was destroyed; also where peers ended
    before."""
    try:
        launch.run(_end, patience=PATIENCE)
    except RankFailure as failure:
        for report in failure.reports:
            code = _EXIT_CODES[min(report.rank, 1)]
            require(
                report.outcome is RankOutcome.DIED and report.summary.endswith(f"code {code}"),
                f"rank {report.rank} wanted to end with code {code}: {report.summary}; "
                f"{report.output.strip()[-500:]}",
            )
    else:
        raise Violation("processes that ended themselves returned")


def _end(bench: Bench) -> None:
    gather, closed = bench.communicator(), bench.communicator("reduce")
    _use(bench, gather, 1000)
    _use(bench, closed, 1000)
    processes = bench.everyones(os.getpid())
    bench.meet()
    closed.close()
    runs_inline = _thread_of(bench) == threading.get_ident()
    if bench.rank == 0 and not runs_inline and bench.size > 1:
        shard = torch.ones(1000, device=bench.device)
        full = torch.ones(1000 * bench.size, device=bench.device)
        # No other rank ever comes to this one.
        bench.submit(
            gather,
            lambda: gather.all_gather([full], [shard], label="unit gather"),
            label="unit gather",
        )
    elif not runs_inline:
        bench.lane("outer").submit(_never_end, label="stuck")
    if bench.rank > 0:
        while _runs(processes[0]):
            time.sleep(0.01)
        dist.destroy_process_group()
        gather.close()
    # The end of a program, as it comes after its last line: what is to run at exit runs.
    ctypes.pythonapi.Py_Exit(_EXIT_CODES[min(bench.rank, 1)])


def _never_end() -> None:
    threading.Event().wait()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _thread_of(bench: Bench) -> int:
    """The thread that a lane's work runs on."""
    seen: list[int] = []
    lane = bench.lane("gather")
    lane.submit(lambda: seen.append(threading.get_ident()), label="unit")
    bench.compute.wait(lane.mark())
    return seen[0]


def _use(bench: Bench, communicator: Communicator, numel: int) -> None:
    total = torch.ones(numel, device=bench.device)
    bench.all_reduce(communicator, [total], Op.SUM)
    require(
        total.unique().tolist() == [float(bench.size)],
        f"a sum of ones over {bench.size} ranks is {total.unique().tolist()}",
    )
