"""Tests of tickets, of what lanes keep, and of synchronize (clauses 1.5, 1.6, 1.7)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from ...errors import BackendError
from ...spi import Lane, Ticket
from .bench import ROLES, Bench, Hold
from .clauses import clause
from .data import Violation, require


@clause("1.5", since=(1, 0), alone=True)
def a_wait_orders_later_work(bench: Bench) -> None:
    """lane.wait(ticket) holds back what is submitted to the lane later, and nothing that was
    submitted earlier; a mark includes the waits before it."""
    first, second = bench.lane("gather"), bench.lane("reduce")
    hold, seen = Hold(), []
    first.submit(hold, label="held back")
    first.submit(lambda: seen.append("gathered"), label="unit gather")
    second.submit(lambda: seen.append("before"), label="unit")
    early = second.mark()
    second.wait(first.mark())
    waited = second.mark()
    second.submit(lambda: seen.append("after"), label="unit")
    bench.compute.wait(early)
    if bench.runs_on_host and not hold.ran_inline:
        require(seen == ["before"], f"before what a lane waits for was done, {seen} had run")
    hold.let_go()
    bench.compute.wait(waited)
    require("gathered" in seen, "a mark after a wait was reached before what the wait was for")
    bench.compute.wait(second.mark())
    require(
        seen.index("gathered") < seen.index("after"),
        f"work submitted after a wait ran before it: {seen}",
    )


@clause("1.5", since=(1, 0), alone=True)
def a_ticket_is_not_later_than_its_mark(bench: Bench) -> None:
    """A wait for a ticket does not wait for what was submitted after the mark."""
    lane, hold, seen = bench.lane("gather"), Hold(), []
    lane.submit(lambda: seen.append(1), label="unit")
    ticket = lane.mark()
    lane.submit(hold, label="held back")
    bench.compute.wait(ticket)
    require(seen == [1], "work before the mark had not run when the wait returned")
    require(
        hold.ran_inline or not hold.released,
        "the wait for a ticket waited for work after it",
    )
    hold.let_go()
    bench.compute.wait(lane.mark())


@clause("1.5", since=(1, 0), alone=True)
def tickets_may_be_waited_for_again(bench: Bench) -> None:
    """A ticket can be waited for any number of times, by any lane of the backend, its own
    included, also one made before any work or long ago."""
    lanes: list[Lane] = [*(bench.lane(role) for role in ROLES), bench.compute]
    tickets: list[Ticket] = [lane.mark() for lane in lanes]
    seen: list[int] = []
    for number, lane in enumerate(lanes):
        lane.submit(partial(seen.append, number), label="unit")
        tickets.append(lane.mark())
    for _ in range(3):
        for ticket in tickets:
            for lane in lanes:
                lane.wait(ticket)
    for lane in lanes:
        lane.submit(lambda: seen.append(9), label="unit")
        bench.compute.wait(lane.mark())
    require(
        sorted(seen) == [0, 1, 2, 3, 9, 9, 9, 9], f"after waits in every direction {seen} had run"
    )


class _ForeignTicket(Ticket):
    """A point on a lane of nobody."""


@clause("1.5", since=(1, 0), fresh=True, alone=True)
def foreign_tickets_are_refused(bench: Bench) -> None:
    """A ticket of another backend is refused with BackendError, by every lane."""
    for name, lane in bench.all_lanes().items():
        _require_backend_error(partial(lane.wait, _ForeignTicket()), name)


@clause("1.6", since=(1, 0), alone=True)
def lanes_let_go_of_work_that_ran(bench: Bench) -> None:
    """When a wait returns, nothing holds what the work it waited for used, though the lane and
    the ticket live on."""
    if not bench.runs_on_host:
        _require_gone_after_synchronize(bench)
        return
    for name, lane in bench.all_lanes().items():
        held = torch.zeros(3)
        gone = weakref.ref(held)
        lane.submit(partial(_add_to, held), label="unit")
        del held
        ticket = lane.mark()
        bench.compute.wait(ticket)
        require(gone() is None, f"lane {name!r} holds a tensor of work that has run")


@clause("1.6", since=(1, 0), fresh=True, alone=True)
def lanes_let_go_of_work_that_was_dropped(bench: Bench) -> None:
    """Work that was dropped after an error leaves nothing behind either."""
    lane, other, hold = bench.lane("gather"), bench.lane("reduce"), Hold()
    held = [torch.zeros(3) for _ in range(3)]
    gone = [weakref.ref(tensor) for tensor in held]
    lane.submit(hold, label="held back")
    lane.submit(_fail, label="unit gather")
    lane.submit(partial(_add_to, held[0]), label="dropped")
    if not hold.ran_inline:
        other.wait(lane.mark())
    other.submit(partial(_add_to, held[1]), label="dropped")
    hold.let_go()
    _require_backend_error(lambda: bench.compute.wait(lane.mark()), "gather")
    _require_backend_error(lambda: other.synchronize(bench.subject.timeout), "reduce")
    lane.submit(partial(_add_to, held[2]), label="too late")
    held.clear()
    # The lanes have run dry, but the last reference may go a moment after that.
    bench.eventually(
        lambda: all(reference() is None for reference in gone),
        lambda: f"of three tensors of dropped work, {sum(r() is not None for r in gone)} are held",
    )


@clause("1.7", since=(1, 0), alone=True)
def synchronize_empties_the_lane(bench: Bench) -> None:
    """After synchronize everything that was submitted has run."""
    for name, lane in bench.all_lanes().items():
        seen: list[int] = []
        for number in range(20):
            lane.submit(partial(seen.append, number), label="unit")
        lane.synchronize(bench.subject.timeout)
        require(seen == list(range(20)), f"after synchronize of {name!r} only {seen} had run")


@clause("1.7", "9.2", since=(1, 0), fresh=True, alone=True)
def synchronize_names_what_still_runs(bench: Bench) -> None:
    """synchronize raises BackendError with the label of the work still running once its timeout
    is over. This is seen only where work runs on the host, after submit returned."""
    lane, hold = bench.lane("gather"), Hold()
    lane.submit(hold, label="blocks.3 gather")
    if bench.runs_on_host and not hold.ran_inline:
        hold.entered.wait(bench.subject.timeout)
        _require_backend_error(lambda: lane.synchronize(0.05), "gather", "blocks.3 gather")
    hold.let_go()


def _require_gone_after_synchronize(bench: Bench) -> None:
    lane = bench.lane("gather")
    held = torch.zeros(3, device=bench.device)
    gone = weakref.ref(held)
    lane.wait(bench.compute.mark())
    lane.submit(partial(_add_to, held), label="unit")
    del held
    lane.synchronize(bench.subject.timeout)
    require(gone() is None, "a lane holds a tensor of work that has run")


def _add_to(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def _fail() -> None:
    raise ValueError("broken on purpose")


def _require_backend_error(call: Callable[[], object], name: str, label: str = "") -> None:
    try:
        call()
    except BackendError as error:
        require(label in str(error), f"lane {name!r} raised without the label {label!r}: {error}")
    except Exception as error:
        raise Violation(f"lane {name!r} raised {type(error).__name__}: {error}") from error
    else:
        raise Violation(f"lane {name!r} raised nothing, expected BackendError")
