"""Lanes and tickets on recorded streams: order, capture, failure, and what the host waits for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from recorded_cuda import CPU, FakeStream, RecordedCuda, RecordedNccl

from polyshard import BackendError
from polyshard.spi import HostLane, Ticket
from polyshard_nccl.lanes import IDLE, StreamLane


@pytest.fixture
def backend() -> RecordedNccl:
    return RecordedNccl()


@pytest.fixture
def cuda(backend: RecordedNccl) -> RecordedCuda:
    return backend.cuda


@pytest.fixture
def gather(backend: RecordedNccl) -> StreamLane:
    lane = backend.lane("gather", CPU)
    assert isinstance(lane, StreamLane)
    return lane


@pytest.fixture(autouse=True)
def off_inference() -> Iterator[None]:
    yield
    gc.collect()


def fail() -> None:
    raise RuntimeError("out of luck")


class TestOrder:
    def test_work_is_on_the_lanes_stream(self, cuda: RecordedCuda, gather: StreamLane) -> None:
        """Work runs at once on the host, with the lane's stream current, under no_grad and
        outside inference mode."""
        seen: list[object] = []

        def work() -> None:
            seen.append((cuda.current, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

        gather.submit(work, label="unit")
        with torch.inference_mode():
            gather.submit(work, label="unit")
        assert seen == [(gather.stream, False, False)] * 2
        assert cuda.current is cuda.main

    def test_compute_is_whatever_stream_is_current(
        self, backend: RecordedNccl, cuda: RecordedCuda, gather: StreamLane
    ) -> None:
        """Compute is resolved at each call, not when the lane was made."""
        compute, other = backend.compute_lane(CPU), FakeStream(cuda, "mine")
        gather.submit(lambda: None, label="unit")
        ticket = gather.mark()
        with cuda.on(other):
            compute.wait(ticket)
            compute.mark()
        assert cuda.log[-2:] == ["mine waits for stream0@1", "mark mine@1"]

    def test_nothing_new_is_not_marked_again(self, cuda: RecordedCuda, gather: StreamLane) -> None:
        """A lane that had nothing to do since its last mark gives the same ticket, and one that
        never had any gives one that costs no event."""
        assert gather.mark() is IDLE
        gather.submit(lambda: None, label="unit")
        assert gather.mark() is gather.mark()
        assert sum("mark" in line for line in cuda.log) == 1

    def test_a_mark_includes_waits(self, backend: RecordedNccl, gather: StreamLane) -> None:
        """A wait moves the point that the next mark stands for."""
        gather.submit(lambda: None, label="unit")
        first = gather.mark()
        gather.wait(backend.compute_lane(CPU).mark())
        assert gather.mark() is not first

    def test_own_tickets_cost_nothing(self, cuda: RecordedCuda, gather: StreamLane) -> None:
        """A stream is not told to wait for itself."""
        gather.submit(lambda: None, label="unit")
        gather.wait(gather.mark())
        assert not any("waits" in line for line in cuda.log)

    def test_events_are_used_again_with_their_tickets(self, backend: RecordedNccl) -> None:
        """An event serves the next ticket when its own is gone, and never before."""
        compute, lane = backend.compute_lane(CPU), backend.lane("reduce", CPU)
        first = compute.mark()
        second = compute.mark()
        assert first.event is not second.event  # type: ignore[attr-defined]
        event = first.event  # type: ignore[attr-defined]
        lane.wait(first)
        del first
        assert compute.mark().event is event  # type: ignore[attr-defined]

    def test_foreign_tickets(self, backend: RecordedNccl, gather: StreamLane) -> None:
        """A ticket of another backend is refused by every lane."""
        foreign = HostLane().mark()
        for lane in (gather, backend.compute_lane(CPU)):
            with pytest.raises(BackendError, match="cannot wait for a _Done; wait for tickets of"):
                lane.wait(foreign)

    def test_work_is_let_go(self, gather: StreamLane) -> None:
        """What work used is not held by the lane, its ticket or what is outstanding."""
        tensor = torch.zeros(3)
        gone = weakref.ref(tensor)
        gather.submit(lambda tensor=tensor: None, label="unit")  # type: ignore[misc]
        ticket = gather.mark()
        del tensor
        assert gone() is None
        assert ticket is gather.mark()


class TestFailure:
    def test_surfaces_on_every_lane_with_its_label(self, backend: RecordedNccl) -> None:
        """submit keeps the error; waits, marks and synchronizes of all lanes raise it, and what
        is submitted later is dropped."""
        lane, ran = backend.lane("gather", CPU), []
        early = lane.mark()
        lane.submit(fail, label="blocks.0 gather")
        lane.submit(lambda: ran.append(1), label="later")
        compute = backend.compute_lane(CPU)
        compute.submit(lambda: ran.append(2), label="later")
        for each in (lane, backend.lane("reduce", CPU), backend.lane("outer", CPU), compute):
            for call in (each.mark, lambda each=each: each.wait(early)):
                with pytest.raises(BackendError, match=r"^blocks.0 gather failed: .*out of luck"):
                    call()
            with pytest.raises(BackendError, match=r"^blocks.0 gather failed: RuntimeError"):
                each.synchronize(1.0)
        assert ran == []

    def test_interrupts_pass(self, gather: StreamLane) -> None:
        """Ctrl-C while the host enqueues is the user's, not a failure of the work."""

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            gather.submit(interrupt, label="unit")
        gather.mark()


class TestSynchronize:
    def test_names_what_still_runs(self, cuda: RecordedCuda, gather: StreamLane) -> None:
        """After the timeout the error has the label of the oldest work that is not done."""
        gather.submit(lambda: None, label="blocks.0 gather")
        gather.mark()
        cuda.holding = True
        for unit in (1, 2):
            gather.submit(lambda: None, label=f"blocks.{unit} gather")
            gather.mark()
        said = r"'gather' is still busy with blocks\.1 gather after 0\.01 s"
        with pytest.raises(BackendError, match=said):
            gather.synchronize(0.01)
        cuda.let_go()
        gather.synchronize(0.01)

    def test_compute(self, backend: RecordedNccl, cuda: RecordedCuda) -> None:
        """The compute lane waits for its stream likewise."""
        compute = backend.compute_lane(CPU)
        compute.synchronize(1.0)
        cuda.holding = True
        with pytest.raises(BackendError, match="'compute' is still busy with compute"):
            compute.synchronize(0.01)

    def test_unused_lane(self, cuda: RecordedCuda, gather: StreamLane) -> None:
        """A lane that was never used is empty, and no stream is made to see that."""
        gather.synchronize(0.0)
        assert cuda.made == []

    def test_not_in_a_capture(
        self, backend: RecordedNccl, cuda: RecordedCuda, gather: StreamLane
    ) -> None:
        """The host cannot wait for what is being captured: an error, before CUDA spoils it."""
        gather.submit(lambda: None, label="unit")
        with cuda.capture():
            for lane in (gather, backend.compute_lane(CPU)):
                with pytest.raises(
                    BackendError, match="cannot wait while a CUDA graph is captured"
                ):
                    lane.synchronize(1.0)


class TestCapture:
    def fork(self, backend: RecordedNccl, lane: StreamLane) -> Ticket:
        lane.wait(backend.compute_lane(CPU).mark())
        lane.submit(lambda: None, label="unit")
        ticket = lane.mark()
        backend.compute_lane(CPU).wait(ticket)
        return ticket

    def test_fork_and_join(
        self, backend: RecordedNccl, cuda: RecordedCuda, gather: StreamLane
    ) -> None:
        """A lane comes into a capture by waiting for compute and leaves it by being waited for;
        no event is asked, and none of the graph's is used again."""
        self.fork(backend, gather)
        queries = cuda.queries
        with cuda.capture():
            captured = self.fork(backend, gather).event  # type: ignore[attr-defined]
            assert gather.stream.captured
            again = self.fork(backend, gather).event  # type: ignore[attr-defined]
            assert again is not captured
        assert cuda.queries == queries
        after = self.fork(backend, gather).event  # type: ignore[attr-defined]
        assert after is not captured
        assert after is not again
        assert gather.outstanding.oldest is None or not gather.outstanding.oldest.captured

    def test_lanes_without_work_stay_outside(
        self, backend: RecordedNccl, cuda: RecordedCuda, gather: StreamLane
    ) -> None:
        """Joining a lane that the capture did not use waits for nothing: what it did before lies
        before the capture; nor does a ticket of the capture reach out of it."""
        self.fork(backend, gather)
        with cuda.capture():
            assert gather.mark() is IDLE
            other = backend.lane("reduce", CPU)
            assert isinstance(other, StreamLane)
            self.fork(backend, other)
        assert other.mark() is IDLE

    def test_tickets_do_not_cross_the_border(
        self, backend: RecordedNccl, cuda: RecordedCuda, gather: StreamLane
    ) -> None:
        """A ticket from before a capture, or from one that ended, is an error that names it."""
        gather.submit(lambda: None, label="blocks.0 gather")
        early, compute = gather.mark(), backend.compute_lane(CPU)
        with cuda.capture():
            with pytest.raises(BackendError, match=r"blocks\.0 gather, marked before the capture"):
                compute.wait(early)
            inside = self.fork(backend, gather)
        with pytest.raises(BackendError, match="marked in a capture that ended"):
            compute.wait(inside)

    def test_the_recorder_notices(self, cuda: RecordedCuda) -> None:
        """What a capture forbids fails in these tests: asking an event, waiting across."""
        event = cuda.new_event()
        event.record(cuda.main)
        with cuda.capture():
            with pytest.raises(AssertionError, match="asked during a capture"):
                event.query()
            with pytest.raises(AssertionError, match="across the border"):
                cuda.main.wait_event(event)
