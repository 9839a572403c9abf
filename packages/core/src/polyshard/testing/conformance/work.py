"""Tests of backends at rest and of work on lanes (what precedes section 1; clauses 1.1 to 1.4)."""

from __future__ import annotations

import os
import threading
from functools import partial

import torch

from ...spi import Capabilities, Communicator
from .bench import ROLES, Bench, Hold
from .clauses import clause
from .data import Violation, require

_MANY = 100


@clause("0", since=(1, 0), fresh=True, alone=True)
def making_a_backend_costs_nothing(bench: Bench) -> None:
    """Importing a backend's package, making the backend and asking for its capabilities starts
    no thread and initialises no device; its capabilities are one constant."""
    before = _threads()
    first, second = bench.backend.capabilities, bench.backend.capabilities
    require(
        isinstance(first, Capabilities) and first == second,
        "capabilities is not one Capabilities, the same at every access",
    )
    require(
        bench.device.type in first.device_types,
        f"capabilities.device_types {sorted(first.device_types)} lacks {bench.device.type!r}",
    )
    require(
        _threads() == before,
        f"making the backend left {_threads()} threads, there were {before} before",
    )
    require(
        not torch.cuda.is_initialized(), "making the backend initialised a device; do it at use"
    )


@clause("0", since=(1, 0), fresh=True, alone=True)
def asking_whether_it_is_available_never_raises(bench: Bench) -> None:
    """unavailable_reason returns a sentence or None for any device type, a sentence for those it
    does not serve, and initialises nothing."""
    served = bench.backend.capabilities.device_types
    for device_type in (bench.device.type, "cpu", "cuda", "xpu", "mps", "meta", "no such device"):
        try:
            reason = bench.backend.unavailable_reason(device_type)
        except Exception as error:
            raise Violation(
                f"unavailable_reason({device_type!r}) raised {type(error).__name__}: {error}"
            ) from error
        require(
            reason is None or (isinstance(reason, str) and bool(reason.strip())),
            f"unavailable_reason({device_type!r}) is {reason!r}, expected a sentence or None",
        )
        require(
            reason is not None or device_type in served,
            f"unavailable_reason({device_type!r}) is None, but it serves {sorted(served)}",
        )
    require(not torch.cuda.is_initialized(), "unavailable_reason initialised a device")


@clause("1.1", since=(1, 0), alone=True)
def work_runs_in_order(bench: Bench) -> None:
    """A lane runs what it is given in the order of submission, all of it, once."""
    for role in ROLES:
        lane = bench.lane(role)
        value = torch.zeros((), dtype=torch.int64, device=bench.device)
        seen: list[int] = []

        def work(number: int, value: torch.Tensor = value, seen: list[int] = seen) -> None:
            seen.append(number)
            # Any other order gives another number.
            value.mul_(3).add_(number)

        lane.wait(bench.compute.mark())
        for number in range(_MANY):
            lane.submit(partial(work, number), label=f"unit {number}")
        bench.compute.wait(lane.mark())
        expected = torch.zeros((), dtype=torch.int64)
        for number in range(_MANY):
            expected.mul_(3).add_(number)
        require(
            seen == list(range(_MANY)) and value.item() == expected.item(),
            f"lane {role!r} ran its work in the order {seen[:10]}..., expected 0, 1, 2, ...",
        )


@clause("1.1", since=(1, 0), alone=True)
def submit_does_not_wait(bench: Bench) -> None:
    """submit returns before the work ran, whatever the lane is busy with. Where work is put on a
    stream, this is the stream's doing, and the test sees only that nothing hangs."""
    for role in ROLES:
        lane, hold = bench.lane(role), Hold()
        seen: list[int] = []
        lane.submit(hold, label="held back")
        lane.submit(partial(seen.append, 1), label="unit")
        early = list(seen)
        hold.let_go()
        bench.compute.wait(lane.mark())
        if bench.runs_on_host:
            require(
                not hold.ran_inline and early == [],
                f"submit on lane {role!r} ran the work before it returned",
            )
        require(seen == [1], f"work on lane {role!r} did not run once, but {len(seen)} times")


@clause("1.1", since=(1, 0), alone=True)
def one_piece_of_work_at_a_time(bench: Bench) -> None:
    """Work that several threads submit to one lane runs one piece at a time, each thread's in
    its order."""
    lane = bench.lane("gather")
    busy = threading.Lock()
    seen: list[tuple[int, int]] = []
    overlaps: list[int] = []

    def work(thread: int, number: int) -> None:
        if not busy.acquire(blocking=False):
            overlaps.append(number)
            return
        seen.append((thread, number))
        busy.release()

    def submit(thread: int) -> None:
        for number in range(_MANY):
            lane.submit(partial(work, thread, number), label=f"unit {number}")

    threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bench.compute.wait(lane.mark())
    # A lane that runs work in the submitting thread has no say in when threads submit.
    require(not overlaps, f"{len(overlaps)} pieces of work ran while another one was running")
    for thread_number in range(4):
        numbers = [number for thread, number in seen if thread == thread_number]
        require(numbers == list(range(_MANY)), f"work of one thread ran in the order {numbers}")


@clause("1.2", since=(1, 0), alone=True)
def modes_of_the_submitter_stay_out(bench: Bench) -> None:
    """Work runs under no_grad and outside inference mode, whatever mode the submitter is in, on
    every lane and on the compute lane; the submitter's modes are its own afterwards."""
    lanes = bench.all_lanes()
    weight = torch.ones(2, device=bench.device, requires_grad=True)
    for name, lane in lanes.items():
        seen: list[tuple[bool, bool, bool, bool]] = []

        def work(seen: list[tuple[bool, bool, bool, bool]] = seen) -> None:
            made = torch.zeros(2, device=bench.device)
            seen.append(
                (
                    torch.is_grad_enabled(),
                    torch.is_inference_mode_enabled(),
                    made.is_inference(),
                    (weight * 2).requires_grad,
                )
            )

        with torch.inference_mode():
            lane.submit(work, label="in inference mode")
            bench.compute.wait(lane.mark())
            require(torch.is_inference_mode_enabled(), f"lane {name!r} ended the submitter's mode")
        with torch.enable_grad():
            lane.submit(work, label="with gradients")
            bench.compute.wait(lane.mark())
            require(torch.is_grad_enabled(), f"lane {name!r} ended the submitter's mode")
        with torch.no_grad():
            lane.submit(work, label="without gradients")
        bench.compute.wait(lane.mark())
        expected = [(False, False, False, False)] * 3
        require(
            seen == expected,
            f"lane {name!r}: (grad enabled, inference mode, tensors made are inference tensors, "
            f"results require grad), submitted in inference mode, enable_grad and no_grad: {seen}",
        )


@clause("1.3", since=(1, 0), alone=True)
def lanes_are_the_same_at_every_call(bench: Bench) -> None:
    """lane(role, device) gives the same lane at every call, for equal devices."""
    for role in ROLES:
        lane = bench.lane(role)
        other_device = torch.device(str(bench.device))
        require(
            bench.lane(role) is lane and bench.backend.lane(role, other_device) is lane,
            f"lane({role!r}) is another object at the second call",
        )


@clause("1.3", since=(1, 0), alone=True)
def a_lane_goes_on_while_others_are_stuck(bench: Bench) -> None:
    """A lane makes progress whatever the others wait for."""
    for free in ROLES:
        holds = [Hold() for _ in ROLES[1:]]
        for hold, role in zip(holds, (role for role in ROLES if role != free), strict=True):
            bench.lane(role).submit(hold, label=f"{role} is stuck")
        done: list[bool] = []
        lane = bench.lane(free)
        for _ in range(3):
            lane.submit(partial(done.append, True), label="unit")
        bench.compute.wait(lane.mark())
        require(len(done) == 3, f"lane {free!r} did not run its work while the others were stuck")
        for hold in holds:
            hold.let_go()
        for role in ROLES:
            bench.compute.wait(bench.lane(role).mark())


@clause("1.4", since=(1, 0), alone=True)
def compute_is_the_callers(bench: Bench) -> None:
    """On a CPU, work on the compute lane is done in the caller when submit returns and its marks
    lie in the past; a lane that waits for one goes on, and the lane is resolved anew each time."""
    seen: list[int] = []
    if bench.runs_on_host:
        bench.compute.submit(lambda: seen.append(threading.get_ident()), label="unit")
        require(
            seen == [threading.get_ident()],
            "work on the compute lane of a CPU did not run in the caller before submit returned",
        )
        bench.compute.synchronize(0.0)
    mark = bench.compute.mark()
    for role in ROLES:
        bench.lane(role).wait(mark)
        bench.lane(role).submit(lambda: seen.append(0), label="unit")
        bench.compute.wait(bench.lane(role).mark())
    require(seen.count(0) == 3, "work that waits for a mark of compute did not run")


@clause("1.4", since=(1, 0), alone=True)
def waiting_does_not_hold_the_interpreter(bench: Bench) -> None:
    """While the compute lane of a CPU waits for a lane, other threads of the program run."""
    hold = Hold()
    lane = bench.lane("gather")
    lane.submit(hold, label="held back")
    helper = threading.Timer(0.05, hold.let_go)
    helper.start()
    bench.compute.wait(lane.mark())
    helper.join()
    require(
        hold.ran_inline or hold.entered.is_set() or not bench.runs_on_host,
        "compute.wait returned before the work it waited for",
    )


@clause("8.2", since=(1, 0), alone=True)
def capture_is_claimed_where_graphs_are(bench: Bench) -> None:
    """capabilities.graph_capture is claimed only by a backend of devices with graphs; there a
    collective on its lane can be captured and replayed."""
    if not bench.backend.capabilities.graph_capture:
        return
    served = sorted(bench.backend.capabilities.device_types)
    require(
        any(_has_graphs(device_type) for device_type in served),
        f"graph_capture is claimed, but no device type of {served} has graphs",
    )
    if _has_graphs(bench.device.type):
        _capture(bench, bench.communicator())


def _has_graphs(device_type: str) -> bool:
    return hasattr(getattr(torch, device_type, None), "CUDAGraph")


def _capture(bench: Bench, gather: Communicator) -> None:
    """Capture a gather of one rank, and replay it on other data."""
    shard = torch.ones(1000, device=bench.device)
    output = torch.zeros(bench.size * 1000, device=bench.device)
    # What is made at first use is made before the capture.
    bench.all_gather(gather, [output], [shard])
    torch.cuda.synchronize(bench.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.all_gather(gather, [output], [shard])
    shard.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize(bench.device)
    require(output.unique().tolist() == [2.0], "a captured all_gather did not gather at replay")


def _threads() -> int:
    """Threads of this process, those that Python does not know included."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else threading.active_count()
