"""Lanes of the gloo backend: order, tickets, errors, lifetime."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from polyshard import BackendError
from polyshard.spi import HostLane, Lane
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")
# Waits that are expected to end at once; generous, because they end a test that hangs.
SOON = 30.0


@pytest.fixture
def backend() -> GlooBackend:
    return GlooBackend()


@pytest.fixture
def gather(backend: GlooBackend) -> Lane:
    return backend.lane("gather", CPU)


@pytest.fixture
def reduce(backend: GlooBackend) -> Lane:
    return backend.lane("reduce", CPU)


@pytest.fixture
def compute(backend: GlooBackend) -> Lane:
    return backend.compute_lane(CPU)


class Gate:
    """Work that waits until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.leave.wait(SOON)


def fail() -> None:
    raise ValueError("broken")


class TestOrder:
    def test_work_is_deferred_and_in_order(self, gather: Lane, compute: Lane) -> None:
        """submit returns before the work ran; work runs in the order of submission."""
        gate, seen = Gate(), []
        gather.submit(gate, label="gate")
        for number in range(100):
            gather.submit(lambda n=number: seen.append(n), label="unit")
        assert gate.entered.wait(SOON)
        assert seen == []
        gate.leave.set()
        compute.wait(gather.mark())
        assert seen == list(range(100))

    def test_lanes_are_independent(self, gather: Lane, reduce: Lane, compute: Lane) -> None:
        """A lane goes on while another one is stuck."""
        gate = Gate()
        gather.submit(gate, label="gate")
        assert gate.entered.wait(SOON)
        reduce.submit(gate.leave.set, label="unit")
        compute.wait(gather.mark())

    def test_a_wait_orders_later_work(self, gather: Lane, reduce: Lane, compute: Lane) -> None:
        """Work submitted after a wait runs after the ticket's work; earlier work does not."""
        gate, seen = Gate(), []
        gather.submit(gate, label="gate")
        gather.submit(lambda: seen.append("gathered"), label="unit")
        reduce.submit(lambda: seen.append("before"), label="unit")
        early = reduce.mark()
        reduce.wait(gather.mark())
        reduce.submit(lambda: seen.append("after"), label="unit")
        compute.wait(early)
        assert seen == ["before"]
        gate.leave.set()
        compute.wait(reduce.mark())
        assert seen == ["before", "gathered", "after"]

    def test_a_mark_after_a_wait_includes_it(
        self, gather: Lane, reduce: Lane, compute: Lane
    ) -> None:
        """A lane that only waited has reached its mark when what it waited for is done."""
        gate, seen = Gate(), []
        gather.submit(gate, label="gate")
        gather.submit(lambda: seen.append("gathered"), label="unit")
        reduce.wait(gather.mark())
        ticket = reduce.mark()
        gate.leave.set()
        compute.wait(ticket)
        assert seen == ["gathered"]

    def test_a_ticket_is_no_later_than_its_mark(self, gather: Lane, compute: Lane) -> None:
        """A wait does not include what was submitted after the mark."""
        gate, seen = Gate(), []
        gather.submit(lambda: seen.append(1), label="unit")
        ticket = gather.mark()
        gather.submit(gate, label="gate")
        compute.wait(ticket)
        assert seen == [1]
        gate.leave.set()

    def test_old_and_own_tickets(self, gather: Lane, compute: Lane) -> None:
        """A ticket can be waited for often, by its own lane too, and before any work."""
        compute.wait(gather.mark())
        gather.submit(lambda: None, label="unit")
        ticket = gather.mark()
        gather.wait(ticket)
        for _ in range(3):
            compute.wait(ticket)
            gather.wait(ticket)
        gather.wait(compute.mark())
        gather.synchronize(SOON)

    def test_many_threads_submit(self, gather: Lane, compute: Lane) -> None:
        """Each thread's work runs in its order and none is lost."""
        seen: list[tuple[int, int]] = []

        def submit(thread: int) -> None:
            for number in range(200):
                gather.submit(lambda n=number: seen.append((thread, n)), label="unit")

        threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        compute.wait(gather.mark())
        for thread in range(4):
            assert [n for t, n in seen if t == thread] == list(range(200))

    @pytest.mark.parametrize("kind", ["gather", "compute"])
    def test_modes_of_the_caller_stay_out(self, backend: GlooBackend, kind: str) -> None:
        """Work runs under no_grad and outside inference mode, whatever the caller is in."""
        lane = backend.compute_lane(CPU) if kind == "compute" else backend.lane("gather", CPU)
        seen = []

        def work() -> None:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

        with torch.inference_mode():
            lane.submit(work, label="unit")
        with torch.enable_grad():
            lane.submit(work, label="unit")
        lane.synchronize(SOON)
        assert seen == [(False, False)] * 2

    def test_compute_runs_in_the_caller(self, compute: Lane) -> None:
        """Work of the compute lane is done when submit returns, on the caller's thread."""
        seen = []
        compute.submit(lambda: seen.append(threading.current_thread()), label="unit")
        assert seen == [threading.current_thread()]
        compute.synchronize(0.0)


class TestErrors:
    def test_surface_everywhere(self, gather: Lane, reduce: Lane, compute: Lane) -> None:
        """After an error in work, mark, wait and synchronize of every lane raise with its label
        and cause; work that came later is dropped."""
        gate, seen = Gate(), []
        ticket = reduce.mark()
        gather.submit(gate, label="gate")
        gather.submit(fail, label="unit gather")
        gather.submit(lambda: seen.append("dropped"), label="unit")
        failed = gather.mark()
        gate.leave.set()
        with pytest.raises(BackendError, match="unit gather failed: ValueError: broken") as e:
            compute.wait(failed)
        assert isinstance(e.value.__cause__, ValueError)
        reduce.submit(lambda: seen.append("dropped"), label="unit")
        for lane in (gather, reduce, compute):
            for surface in (
                lane.mark,
                lambda lane=lane: lane.wait(ticket),
                lambda lane=lane: lane.synchronize(SOON),
            ):
                with pytest.raises(BackendError, match="unit gather failed"):
                    surface()
        assert seen == []

    def test_of_compute_surface_on_lanes(self, gather: Lane, compute: Lane) -> None:
        """Work that fails on the compute lane fails the others, without raising in submit."""
        compute.submit(fail, label="unit pack")
        with pytest.raises(BackendError, match="unit pack failed"):
            gather.mark()

    def test_do_not_leave_waiters_behind(self, gather: Lane, reduce: Lane, compute: Lane) -> None:
        """A lane and a thread that wait for work which fails or is dropped go on, and raise."""
        gate = Gate()
        gather.submit(gate, label="gate")
        gather.submit(fail, label="unit gather")
        gather.submit(lambda: None, label="unit")
        reduce.wait(gather.mark())
        reduce.submit(lambda: None, label="unit")
        ticket = reduce.mark()
        raised = []

        def wait() -> None:
            try:
                compute.wait(ticket)
            except BackendError as error:
                raised.append(str(error))

        waiter = threading.Thread(target=wait)
        waiter.start()
        gate.leave.set()
        waiter.join(SOON)
        assert raised == ["unit gather failed: ValueError: broken"]

    def test_of_one_backend_stay_there(self, gather: Lane) -> None:
        """Lanes of another backend object go on."""
        gather.submit(fail, label="unit")
        with pytest.raises(BackendError, match="unit"):
            gather.synchronize(SOON)
        GlooBackend().lane("gather", CPU).synchronize(SOON)

    def test_synchronize_names_what_runs(self, gather: Lane) -> None:
        """A lane that is not empty in time is an error with the label of the running work."""
        gate = Gate()
        gather.submit(gate, label="blocks.3 gather")
        assert gate.entered.wait(SOON)
        with pytest.raises(BackendError, match=r"'gather'.*'blocks\.3 gather'.*0\.01 s"):
            gather.synchronize(0.01)
        gate.leave.set()
        gather.synchronize(SOON)

    def test_foreign_tickets(self, gather: Lane, compute: Lane) -> None:
        """A ticket of another backend is refused by every lane."""
        ticket = HostLane().mark()
        for lane in (gather, compute):
            with pytest.raises(BackendError, match="_Done"):
                lane.wait(ticket)


class TestLifetime:
    def test_finished_work_is_dropped(self, gather: Lane, compute: Lane) -> None:
        """When a wait returns, nothing holds what the work used, though the lane lives on."""
        held = torch.zeros(3)
        gone = weakref.ref(held)
        gather.submit(lambda tensor=held: tensor.add_(1), label="unit")
        del held
        ticket = gather.mark()
        compute.wait(ticket)
        assert gone() is None

    def test_failed_and_dropped_work_is_dropped(self, gather: Lane, compute: Lane) -> None:
        """An error keeps neither its own work's tensors alive nor those of later work."""
        tensors = [torch.zeros(3), torch.zeros(3)]
        gone = [weakref.ref(tensor) for tensor in tensors]
        gate = Gate()
        gather.submit(gate, label="gate")
        gather.submit(lambda tensor=tensors[0]: tensor.view(2), label="wrong")
        gather.submit(lambda tensor=tensors[1]: tensor.add_(1), label="later")
        ticket = gather.mark()
        del tensors
        gate.leave.set()
        with pytest.raises(BackendError, match="wrong failed"):
            compute.wait(ticket)
        gc.collect()
        assert [reference() for reference in gone] == [None, None]

    def test_threads_start_late_and_end_with_the_backend(self) -> None:
        """A lane has a thread from its first work on, until nobody holds the lane."""
        before = set(threading.enumerate())
        backend = GlooBackend()
        lane = backend.lane("outer", CPU)
        assert lane is backend.lane("outer", torch.device("cpu", 0))
        assert set(threading.enumerate()) == before
        lane.submit(lambda: None, label="unit")
        lane.synchronize(SOON)
        (thread,) = set(threading.enumerate()) - before
        del backend, lane
        gc.collect()
        thread.join(SOON)
        assert not thread.is_alive()

    @pytest.mark.parametrize(
        "work",
        ["threading.Event().wait()", "time.sleep(0.3)", "None"],
        ids=["stuck", "busy", "idle"],
    )
    def test_the_process_can_end(self, work: str) -> None:
        """A program ends, with its own exit code and in silence, whatever its lanes do."""
        program = (
            "import threading, time, torch; from polyshard_gloo import GlooBackend\n"
            "backend = GlooBackend(); cpu = torch.device('cpu')\n"
            f"for role in ('gather', 'reduce'):\n"
            f"    backend.lane(role, cpu).submit(lambda: {work}, label='unit')\n"
            "raise SystemExit(3)"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")

    def test_a_forked_child_is_told(self) -> None:
        """A lane used in a child of fork is an error there, not a wait forever."""
        program = (
            "import os, torch; from polyshard_gloo import GlooBackend\n"
            "lane = GlooBackend().lane('gather', torch.device('cpu'))\n"
            "lane.submit(lambda: None, label='unit'); lane.synchronize(30)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    try: lane.submit(lambda: None, label='unit')\n"
            "    except RuntimeError as error: print(error)\n"
            "else: os.waitpid(child, 0)\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
        )
        assert ended.returncode == 0
        assert "unit: lane 'gather' has stopped" in ended.stdout
        assert "forked" in ended.stdout
