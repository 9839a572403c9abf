"""Tests of errors: those of work, and those of ranks (clauses 2.1 to 2.6)."""

from __future__ import annotations

import gc
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ...errors import BackendError
from ...spi import Communicator, Lane, Op, Ticket
from ..rank_failure import RankFailure, RankOutcome, RankReport
from .bench import ROLES, Bench, Hold
from .clauses import clause
from .data import Violation, require
from .running import PATIENCE, Launch

#: Seconds in which a transport is told to give up on a rank, where a test waits for that.
_GIVES_UP = 3.0
#: Seconds in which "at once" has surely come, though nowhere near the timeout of the group.
_AT_ONCE = 15.0


@clause("2.1", "2.3", "9.2", since=(1, 0), fresh=True, alone=True)
def errors_surface_on_every_lane(bench: Bench) -> None:
    """submit never raises an error of the work; it surfaces as BackendError with the label of the
    work, chained to its cause, at every later wait, mark and synchronize on any lane, compute
    included."""
    tickets = {name: lane.mark() for name, lane in bench.all_lanes().items()}
    lane = bench.lane("reduce")
    _submit(lane, _fail, "blocks.2 reduce")
    try:
        bench.compute.wait(lane.mark())
    except BackendError as waited:
        require("blocks.2 reduce" in str(waited), f"the error has no label: {waited}")
    else:
        raise Violation("a wait for work that failed raised nothing")
    for name, other in bench.all_lanes().items():
        for what, call in _surfaces(bench, other, tickets[name]).items():
            error = _error_of(call, f"{what} on lane {name!r} after work failed")
            require(
                "blocks.2 reduce" in str(error),
                f"{what} on lane {name!r} does not name the work that failed: {error}",
            )
            require(
                any("broken on purpose" in str(link) for link in _chain(error)[1:]),
                f"{what} on lane {name!r} is not chained to its cause",
            )


@clause("2.1", since=(1, 0), fresh=True, alone=True)
def errors_of_compute_surface_on_lanes(bench: Bench) -> None:
    """Work that fails on the compute lane fails the lanes, without raising in submit."""
    _submit(bench.compute, _fail, "blocks.2 pack")
    for role in ROLES:
        error = _error_of(bench.lane(role).mark, f"mark on lane {role!r} after compute failed")
        require("blocks.2 pack" in str(error), f"the error has no label: {error}")


@clause("2.2", "2.3", since=(1, 0), fresh=True, alone=True)
def later_work_is_dropped(bench: Bench) -> None:
    """Work submitted after an error is dropped on every lane, submit does not raise, and the
    first error is the one that is told, at every later call."""
    lane, hold = bench.lane("gather"), Hold()
    seen: list[str] = []
    lane.submit(hold, label="held back")
    _submit(lane, _fail, "the first error")
    _submit(lane, lambda: seen.append("queued before the error"), "queued")
    _submit(lane, _fail_otherwise, "the second error")
    hold.let_go()
    _error_of(partial(lane.synchronize, bench.subject.timeout), "synchronize after work failed")
    for name, other in bench.all_lanes().items():
        _submit(other, partial(seen.append, name), "too late")
        _submit(other, _fail_otherwise, "the third error")
    for _ in range(3):
        for name, other in bench.all_lanes().items():
            for what, call in _surfaces(bench, other, None).items():
                error = _error_of(call, f"{what} on lane {name!r} after two errors")
                require(
                    "the first error" in str(error),
                    f"{what} on lane {name!r} tells another error than the first: {error}",
                )
    require(seen == [], f"work ran that was submitted after an error: {seen}")


@clause("2.2", since=(1, 0), fresh=True, alone=True)
def nobody_waits_for_dropped_work(bench: Bench) -> None:
    """What waits for work that fails or is dropped does not hang but raises, also if it began to
    wait before the error."""
    lane, other, hold = bench.lane("gather"), bench.lane("reduce"), Hold()
    lane.submit(hold, label="held back")
    ticket = lane.mark()
    if not hold.ran_inline:
        _submit(lane, _fail, "blocks.2 gather")
        _submit(lane, lambda: None, "dropped")
        ticket = lane.mark()
        other.wait(ticket)
    _submit(other, lambda: None, "waits")
    raised: list[str] = []

    def wait(wanted: Callable[[], object]) -> None:
        try:
            wanted()
        except BackendError as error:
            raised.append(str(error))

    last = ticket if hold.ran_inline else other.mark()
    waiters = [
        threading.Thread(target=wait, args=(partial(bench.compute.wait, last),), daemon=True),
        threading.Thread(target=wait, args=(partial(bench.compute.wait, ticket),), daemon=True),
    ]
    if hold.ran_inline:
        _submit(lane, _fail, "blocks.2 gather")
    for waiter in waiters:
        waiter.start()
    hold.let_go()
    for waiter in waiters:
        waiter.join(bench.subject.timeout / 2)
        require(not waiter.is_alive(), "a thread waits for work that was dropped")
    require(
        len(raised) == 2 and all("blocks.2 gather" in text for text in raised),
        f"of two threads that waited for work that failed, {len(raised)} raised: {raised}",
    )


@clause("2.6", "1.6", since=(1, 0), fresh=True, alone=True)
def errors_hold_no_buffers(bench: Bench) -> None:
    """A recorded error keeps nothing alive that the work used, neither by its traceback nor by
    its causes'."""
    lane = bench.lane("gather")
    held = [torch.zeros(3), torch.zeros(3)]
    gone = [weakref.ref(tensor) for tensor in held]

    def work(first: torch.Tensor = held[0], second: torch.Tensor = held[1]) -> None:
        kept = first.view(-1)
        try:
            second.view(2, 2)
        except RuntimeError as error:
            raise ValueError(f"broken on purpose, {kept.numel()} elements") from error

    _submit(lane, work, "blocks.2 gather")
    _error_of(partial(lane.synchronize, bench.subject.timeout), "synchronize after work failed")
    held.clear()
    del work
    gc.collect()
    bench.eventually(
        lambda: all(reference() is None for reference in gone),
        lambda: "a recorded error keeps tensors alive that its work used",
    )
    _error_of(lane.mark, "mark after work failed")


def _fail_on_one(bench: Bench) -> str:
    gather = bench.communicator()
    _take_part(bench, gather, "before")
    bench.meet()
    bench.forget(gather)
    lane = bench.lane("gather")

    def work() -> None:
        if bench.rank == 0:
            raise ValueError("broken on purpose")
        _gather(bench, gather, "blocks.5 gather")

    _submit(lane, work, "blocks.5 gather")
    error = _error_of(lambda: bench.compute.wait(lane.mark()), "a wait")
    if bench.rank == 0:
        # It lives on, and so do its connections: that it failed is all there is to notice.
        seconds = min(_AT_ONCE, bench.subject.timeout / 2)
        require(
            _hears_from(bench, range(1, bench.size), seconds),
            f"its work failed, and its peers knew nothing of that after {seconds:g} s",
        )
    _tell(bench)
    return str(error)


@clause("2.5", since=(1, 0), drives=True)
def a_rank_that_fails_lets_its_peers_know(launch: Launch) -> None:
    """When work of one rank fails, peers in a collective with it fail at once and not at their
    timeout, naming their own work."""
    launch.require_peers()
    for report in _reports(launch, _fail_on_one):
        require(
            "blocks.5 gather" in _words(report),
            f"rank {report.rank} {report.summary}, where rank 0 failed; without its own label",
        )


def _die(bench: Bench, numel: int) -> None:
    gather = bench.communicator()
    _take_part(bench, gather, "before")
    bench.meet()
    if bench.rank == bench.size - 1:
        os._exit(17)
    shard = torch.ones(numel, device=bench.device)
    full = torch.ones(numel * bench.size, device=bench.device)
    bench.forget(gather)
    bench.all_gather(gather, [full], [shard], "blocks.7 gather")


@clause("2.4", since=(1, 0), drives=True)
def a_rank_that_died_is_an_error(launch: Launch) -> None:
    """When a process ends in the middle, every other rank gets an error within the timeout that
    names the work it was at; or its process ends, with such a message."""
    launch.require_peers()
    for numel in (3, 400_000):
        for report in _reports(launch, _die, numel):
            if report.rank == launch.subject.world_size - 1:
                continue
            _require_told(report, "blocks.7 gather", f"rank {launch.subject.world_size - 1} died")


def _stay_away(bench: Bench) -> None:
    # The time that a job gives its ranks is known from its group, or from the store behind it.
    timeout = timedelta(seconds=_GIVES_UP)
    group = dist.new_group(timeout=timeout)
    group.get_group_store().set_timeout(timeout)
    gather = bench.communicator("gather", group)
    _take_part(bench, gather, "before")
    bench.meet()
    bench.forget(gather)
    if bench.rank == bench.size - 1:
        # Not gone, which a peer could notice: just never there.
        _hears_from(bench, range(bench.size - 1), PATIENCE)
        return
    full = torch.ones(3 * bench.size, device=bench.device)
    try:
        bench.all_gather(gather, [full], [torch.ones(3, device=bench.device)], "blocks.8 gather")
    finally:
        _tell(bench)


def _tell(bench: Bench) -> None:
    """Let other ranks hear that this one has its error."""
    bench.world.get_group_store().set(f"told {bench.rank}", "")


def _hears_from(bench: Bench, ranks: Iterable[int], seconds: float) -> bool:
    """Whether ``ranks`` have their error within ``seconds``."""
    told = [f"told {rank}" for rank in ranks]
    try:
        bench.world.get_group_store().wait(told, timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


@clause("2.4", since=(1, 0), drives=True)
def a_rank_that_does_not_come_is_an_error(launch: Launch) -> None:
    """When a rank is not at a collective within the timeout of its group, every other rank gets
    an error that names the work, or its process ends with such a message."""
    launch.require_peers()
    for report in _reports(launch, _stay_away):
        if report.rank != launch.subject.world_size - 1:
            _require_told(report, "blocks.8 gather", "another rank did not come")


def _reports(launch: Launch, body: Callable[..., object], *args: object) -> list[RankReport]:
    """How every rank ended, by rank; none may have been stuck."""
    try:
        results = launch.run(body, *args, patience=PATIENCE)
    except RankFailure as failure:
        for report in failure.reports:
            require(
                report.outcome is not RankOutcome.STUCK,
                f"rank {report.rank} hangs ({report.summary}): {_innermost(report.stack)}",
            )
            _, marker, found = report.summary.partition("Violation: ")
            require(not marker, f"rank {report.rank}: {found}")
        return sorted(failure.reports, key=lambda report: report.rank)
    return [
        RankReport(rank, RankOutcome.RETURNED, f"returned {result!r}", 0.0)
        for rank, result in enumerate(results)
    ]


def _innermost(stack: str) -> str:
    """Where the thread is that a dump shows last: the one that the test runs on."""
    frames = stack.rpartition("(most recent call first):")[2].strip().splitlines()
    return frames[0].strip() if frames else "no stack"


def _require_told(report: RankReport, label: str, event: str) -> None:
    is_error = report.outcome is RankOutcome.RAISED and "BackendError" in report.summary
    require(
        is_error or report.outcome is RankOutcome.DIED,
        f"rank {report.rank} {report.summary}, where {event}; expected a BackendError",
    )
    require(
        label in _words(report),
        f"rank {report.rank} {report.summary}, where {event}; without the label {label!r}",
    )


def _words(report: RankReport) -> str:
    return "\n".join([report.summary, report.traceback, report.output])


def _take_part(bench: Bench, gather: Communicator, label: str) -> None:
    bench.perform(gather, partial(_gather, bench, gather, label), label=label)


def _gather(bench: Bench, gather: Communicator, label: str) -> None:
    full = torch.ones(5 * bench.size, device=bench.device)
    gather.all_gather([full], [torch.ones(5, device=bench.device)], label=label)
    gather.all_reduce([full], Op.SUM, label=label)


def _surfaces(bench: Bench, lane: Lane, ticket: Ticket | None) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {
        "mark": lane.mark,
        "synchronize": partial(lane.synchronize, bench.subject.timeout),
    }
    if ticket is not None:
        calls["wait"] = partial(lane.wait, ticket)
    return calls


def _submit(lane: Lane, work: Callable[[], None], label: str) -> None:
    try:
        lane.submit(work, label=label)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        raise Violation(f"submit of {label!r} raised {text}") from error


def _error_of(call: Callable[[], object], what: str) -> BackendError:
    try:
        call()
    except BackendError as error:
        return error
    except Exception as error:
        raise Violation(f"{what} raised {type(error).__name__}: {error}") from error
    raise Violation(f"{what} raised nothing, expected BackendError")


def _chain(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def _fail() -> None:
    raise ValueError("broken on purpose")


def _fail_otherwise() -> None:
    raise KeyError("another error")
