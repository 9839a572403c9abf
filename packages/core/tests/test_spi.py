"""The base classes that backends build on: checks before launch, lanes, buffers and traffic."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from polyshard import BackendError, UnsupportedError
from polyshard.spi import (
    Communicator,
    HostLane,
    LaneFailure,
    Lifetime,
    Op,
    StorageBuffer,
    Ticket,
    Traffic,
)

CPU = torch.device("cpu")


class RecordingCommunicator(Communicator):
    """Notes what reaches the transport."""

    def __init__(self, size: int, **options: object) -> None:
        super().__init__(0, size, CPU, **options)
        self.launched: list[tuple[str, str]] = []

    def settle(self) -> None: ...

    def close(self) -> None: ...

    def _all_gather(
        self, outputs: Sequence[Tensor], shards: Sequence[Tensor], *, label: str
    ) -> None:
        self.launched.append(("all_gather", label))

    def _reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Op, *, label: str
    ) -> None:
        self.launched.append(("reduce_scatter", label))

    def _all_reduce(self, buffers: Sequence[Tensor], op: Op, *, label: str) -> None:
        self.launched.append(("all_reduce", label))

    def _broadcast(self, buffers: Sequence[Tensor], source: int, *, label: str) -> None:
        self.launched.append(("broadcast", label))


def f32(numel: int) -> Tensor:
    return torch.zeros(numel)


Collective = Callable[[Communicator], None]

REFUSED: dict[str, tuple[Collective, str]] = {
    "as many outputs as shards": (
        lambda c: c.all_gather([f32(4)], [], label="unit"),
        "1 .* 0",
    ),
    "one dtype in a list": (
        lambda c: c.all_gather([f32(4), f32(4).double()], [f32(2), f32(2)], label="unit"),
        "float64 .*float32",
    ),
    "one dtype in a pair": (
        lambda c: c.all_gather([f32(4)], [f32(2).half()], label="unit"),
        "float16 .*float32",
    ),
    "flat tensors": (
        lambda c: c.all_gather([f32(4).view(2, 2)], [f32(2)], label="unit"),
        r"1-D .* \(2, 2\)",
    ),
    "contiguous tensors": (
        lambda c: c.all_reduce([f32(8)[::2]], Op.SUM, label="unit"),
        r"contiguous.*\(2,\)",
    ),
    "tensors on the communicator's device": (
        lambda c: c.broadcast([torch.zeros(2, device="meta")], 0, label="unit"),
        "meta.* cpu",
    ),
    "gathered lengths": (
        lambda c: c.all_gather([f32(5)], [f32(2)], label="unit"),
        "5 .* 2",
    ),
    "scattered lengths": (
        lambda c: c.reduce_scatter([f32(4)], [f32(2)], Op.SUM, label="unit"),
        "2 .* 4",
    ),
    "lengths late in a list": (
        lambda c: c.all_gather([f32(4), f32(4)], [f32(2), f32(3)], label="unit"),
        "4 .* 3",
    ),
    "a source in the group": (
        lambda c: c.broadcast([f32(2)], 2, label="unit"),
        "source 2 .* 2",
    ),
    "a source that is not negative": (
        lambda c: c.broadcast([f32(2)], -1, label="unit"),
        "source -1",
    ),
    "an Op to scatter": (
        lambda c: c.reduce_scatter([f32(2)], [f32(4)], "avg", label="unit"),  # type: ignore[arg-type]
        "op .*'avg'",
    ),
    "an Op even for an empty list": (
        lambda c: c.all_reduce([], "sum", label="unit"),  # type: ignore[arg-type]
        "op .*'sum'",
    ),
}

UNSUPPORTED: dict[str, tuple[Collective, str]] = {
    "a dtype the backend does not reduce": (
        lambda c: c.all_reduce([f32(2).double()], Op.SUM, label="unit"),
        "float64.*float32.*int32",
    ),
    "a scattered dtype the backend does not reduce": (
        lambda c: c.reduce_scatter([f32(2).half()], [f32(4).half()], Op.SUM, label="unit"),
        "float16",
    ),
    "an average of integers": (
        lambda c: c.all_reduce([f32(2).int()], Op.AVG, label="unit"),
        "int32 .*SUM",
    ),
}


class TestChecks:
    @pytest.mark.parametrize("name", REFUSED)
    def test_wrong_arguments(self, name: str) -> None:
        """A malformed call raises ValueError with its label before anything is launched."""
        call, expected = REFUSED[name]
        communicator = RecordingCommunicator(2)
        with pytest.raises(ValueError, match=f"^unit: .*{expected}"):
            call(communicator)
        assert communicator.launched == []
        assert communicator.traffic.total_calls == 0

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_unsupported_reductions(self, name: str) -> None:
        """A reduction that the backend does not offer raises UnsupportedError, unlaunched."""
        call, expected = UNSUPPORTED[name]
        communicator = RecordingCommunicator(
            2, reduce_dtypes=frozenset({torch.float32, torch.int32})
        )
        with pytest.raises(UnsupportedError, match=f"^unit: .*{expected}"):
            call(communicator)
        assert communicator.launched == []
        assert communicator.traffic.total_calls == 0

    def test_gathers_take_any_dtype(self) -> None:
        """What a backend reduces does not limit what it moves."""
        communicator = RecordingCommunicator(2, reduce_dtypes=frozenset({torch.float32}))
        communicator.all_gather([f32(4).bool()], [f32(2).bool()], label="a")
        communicator.broadcast([f32(4).bool()], 1, label="b")
        assert communicator.launched == [("all_gather", "a"), ("broadcast", "b")]

    def test_lists_are_one_launch(self) -> None:
        """A list reaches the transport, and is counted, once; empty lists and tensors too."""
        communicator = RecordingCommunicator(2)
        communicator.all_gather([f32(4), f32(0), f32(6)], [f32(2), f32(0), f32(3)], label="a")
        communicator.reduce_scatter([], [], Op.AVG, label="b")
        communicator.all_reduce([f32(0)], Op.AVG, label="c")
        assert communicator.launched == [
            ("all_gather", "a"),
            ("reduce_scatter", "b"),
            ("all_reduce", "c"),
        ]
        assert communicator.traffic.total_calls == 3


class TestTraffic:
    def test_counts_by_kind(self) -> None:
        """Bytes are what a rank of the group has to send at least, on average."""
        communicator = RecordingCommunicator(4)
        communicator.all_gather([f32(40)], [f32(10)], label="a")
        communicator.all_gather([f32(4).half()], [f32(1).half()], label="a")
        communicator.reduce_scatter([f32(10), f32(1)], [f32(40), f32(4)], Op.SUM, label="b")
        communicator.all_reduce([f32(40)], Op.AVG, label="c")
        communicator.broadcast([f32(40)], 3, label="d")
        assert communicator.traffic.calls == {
            "all_gather": 2,
            "reduce_scatter": 1,
            "all_reduce": 1,
            "broadcast": 1,
        }
        assert communicator.traffic.bytes == {
            "all_gather": 3 * 40 + 3 * 2,
            "reduce_scatter": 3 * 44,
            "all_reduce": 2 * 160 * 3 // 4,
            "broadcast": 160 * 3 // 4,
        }
        assert communicator.traffic.total_bytes == 126 + 132 + 240 + 120
        assert communicator.traffic.total_calls == 5

    def test_one_rank_sends_nothing(self) -> None:
        """Calls of a group of one are counted, with no bytes."""
        communicator = RecordingCommunicator(1)
        communicator.all_gather([f32(4)], [f32(4)], label="a")
        communicator.all_reduce([f32(4)], Op.SUM, label="b")
        assert (communicator.traffic.total_calls, communicator.traffic.total_bytes) == (2, 0)

    def test_an_empty_one_is_zero(self) -> None:
        """Nothing moved is zero calls and zero bytes."""
        assert (Traffic().total_calls, Traffic().total_bytes) == (0, 0)


class TestLaneFailure:
    def test_the_first_error_stays(self) -> None:
        """What is raised is the first failure, with its label, caused by the original error."""
        failure, cause = LaneFailure(), KeyError("weights")
        failure.raise_if_any()
        failure.record("unit gather", cause)
        failure.record("unit reduce", ValueError("later"))
        for _ in range(2):
            with pytest.raises(BackendError, match="unit gather failed: KeyError: 'weights'") as e:
                failure.raise_if_any()
            assert e.value.__cause__ is cause

    def test_a_label_is_not_said_twice(self) -> None:
        """An error that opens with the label of its work is passed on as it is."""
        failure = LaneFailure()
        failure.record("unit gather", BackendError("unit gather: rank 3 is gone."))
        with pytest.raises(BackendError, match=r"^unit gather: rank 3 is gone\.$"):
            failure.raise_if_any()

    def test_concurrent_failures_do_not_mix(self) -> None:
        """When lanes fail at the same time, message and cause belong to the same failure."""
        for _ in range(50):
            failure, start = LaneFailure(), threading.Barrier(4)

            def fail(number: int, failure=failure, start=start) -> None:  # type: ignore[no-untyped-def]
                start.wait()
                failure.record(f"lane {number}", ValueError(str(number)))

            threads = [threading.Thread(target=fail, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            with pytest.raises(BackendError) as e:
                failure.raise_if_any()
            number = str(e.value.__cause__)
            assert str(e.value) == f"lane {number} failed: ValueError: {number}"

    def test_holds_no_buffers(self) -> None:
        """A recorded failure keeps neither the tensors of the work that failed nor those of the
        errors behind it."""
        held = torch.zeros(3)
        gone = weakref.ref(held)

        def inner(tensor: Tensor) -> None:
            raise KeyError("inner")

        def work(tensor: Tensor) -> None:
            try:
                inner(tensor)
            except KeyError as error:
                raise ValueError("outer") from error

        lane = HostLane()
        lane.submit(lambda tensor=held: work(tensor), label="unit")
        del held
        gc.collect()
        assert gone() is None
        with pytest.raises(BackendError, match="unit failed: ValueError: outer") as e:
            lane.mark()
        assert isinstance(e.value.__cause__.__cause__, KeyError)
        shown = "".join(traceback.format_exception(e.value))
        assert "in inner" in shown
        assert "raise KeyError" in shown


class TestHostLane:
    def test_runs_at_once_and_in_order(self) -> None:
        """Work is done when submit returns; its tickets can be waited for by any host lane."""
        lane, other, seen = HostLane(), HostLane(), []
        for number in range(3):
            lane.submit(lambda n=number: seen.append(n), label="unit")
            assert seen == list(range(number + 1))
        other.wait(lane.mark())
        lane.synchronize(0.0)

    def test_work_sees_neither_grad_nor_inference_mode(self) -> None:
        """Work runs under no_grad and outside inference mode, whatever the caller is in."""
        seen = []

        def work() -> None:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

        with torch.inference_mode():
            HostLane().submit(work, label="unit")
        with torch.enable_grad():
            HostLane().submit(work, label="unit")
        assert seen == [(False, False)] * 2

    def test_an_error_surfaces_on_every_lane(self) -> None:
        """submit does not raise; the next mark, wait and synchronize of any lane do, and what is
        submitted later is dropped."""
        failure = LaneFailure()
        lane, other = HostLane(failure), HostLane(failure)
        before, seen = other.mark(), []

        def fail() -> None:
            raise ValueError("broken")

        lane.submit(fail, label="unit gather")
        other.submit(lambda: seen.append(1), label="later")
        for surface in (other.mark, lambda: other.wait(before), lambda: lane.synchronize(1.0)):
            with pytest.raises(BackendError, match="unit gather failed: ValueError: broken"):
                surface()
        assert seen == []

    def test_an_interrupt_is_not_swallowed(self) -> None:
        """Ctrl-C during work reaches the caller and is no failure of the lane."""
        lane = HostLane()

        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            lane.submit(interrupt, label="unit")
        lane.mark()

    def test_refuses_foreign_tickets(self) -> None:
        """A ticket of another kind of lane is an error that names it, not a wait forever."""

        class StreamTicket(Ticket):
            pass

        with pytest.raises(BackendError, match="StreamTicket"):
            HostLane().wait(StreamTicket())


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


class TestStorageBuffer:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_transient_life(self, dtype: torch.dtype) -> None:
        """A transient buffer has its length always, and memory from acquire to release."""
        buffer = StorageBuffer(6, dtype, CPU, Lifetime.TRANSIENT)
        storage = buffer.tensor.untyped_storage()
        assert buffer.tensor.shape == (6,)
        assert buffer.tensor.is_contiguous()
        assert (buffer.tensor.dtype, storage.nbytes()) == (dtype, 0)
        for _ in range(2):
            buffer.acquire()
            assert storage.nbytes() == 6 * dtype.itemsize
            buffer.tensor.fill_(1)
            assert buffer.tensor.tolist() == torch.ones(6, dtype=dtype).tolist()
            buffer.release()
            buffer.release()
            assert storage.nbytes() == 0

    def test_storage_is_one_object_for_life(self) -> None:
        """Views share the storage and follow its address through release and acquire."""
        buffer = StorageBuffer(8, torch.float32, CPU, Lifetime.TRANSIENT)
        identity = buffer.tensor.untyped_storage()._cdata
        buffer.acquire()
        view = buffer.tensor[2:5].view(3, 1)
        buffer.tensor.copy_(torch.arange(8))
        assert view.tolist() == [[2], [3], [4]]
        buffer.release()
        assert view.data_ptr() == 2 * 4  # An offset into no memory.
        buffer.acquire()
        buffer.tensor.copy_(torch.arange(8) * 10)
        assert view.tolist() == [[20], [30], [40]]
        assert view.data_ptr() == buffer.tensor.data_ptr() + 2 * 4
        assert buffer.tensor.untyped_storage()._cdata == identity
        assert view.untyped_storage()._cdata == identity

    def test_acquire_twice_keeps_contents(self) -> None:
        """Acquiring what is acquired changes nothing."""
        buffer = StorageBuffer(3, torch.float32, CPU, Lifetime.TRANSIENT)
        buffer.acquire()
        buffer.tensor.fill_(7)
        address = buffer.tensor.data_ptr()
        buffer.acquire()
        assert buffer.tensor.data_ptr() == address
        assert buffer.tensor.tolist() == [7, 7, 7]

    def test_autograd_reads_what_was_refilled(self) -> None:
        """A view that autograd saved sees the contents that are there at backward."""
        buffer = StorageBuffer(2, torch.float32, CPU, Lifetime.TRANSIENT)
        buffer.acquire()
        weight = torch.nn.Parameter(torch.empty(0))
        weight.data = buffer.tensor.view(2)
        weight.data.copy_(torch.tensor([2.0, 3.0]))
        x = torch.ones(2, requires_grad=True)
        product = (x * weight).sum()
        buffer.release()
        buffer.acquire()
        buffer.tensor.data.copy_(torch.tensor([2.0, 3.0]))
        product.backward()
        assert x.grad.tolist() == [2.0, 3.0]

    def test_persistent_life(self) -> None:
        """A persistent buffer starts with zeros, survives acquire and refuses release."""
        buffer = StorageBuffer(4, torch.float32, CPU, Lifetime.PERSISTENT)
        assert buffer.tensor.tolist() == [0.0] * 4
        buffer.tensor.fill_(5)
        buffer.acquire()
        with pytest.raises(BackendError, match="persistent"):
            buffer.release()
        assert buffer.tensor.tolist() == [5.0] * 4

    @pytest.mark.parametrize("lifetime", Lifetime)
    def test_empty(self, lifetime: Lifetime) -> None:
        """A buffer of no elements is legal through all of its life."""
        buffer = StorageBuffer(0, torch.float32, CPU, lifetime)
        buffer.acquire()
        assert buffer.tensor.shape == (0,)
        if lifetime is Lifetime.TRANSIENT:
            buffer.release()

    @pytest.mark.parametrize("lifetime", Lifetime)
    def test_made_in_inference_mode(self, lifetime: Lifetime) -> None:
        """A buffer first needed inside inference mode can be trained on later."""
        with torch.inference_mode():
            buffer = StorageBuffer(2, torch.float32, CPU, lifetime)
            buffer.acquire()
        assert not buffer.tensor.is_inference()
        buffer.tensor.fill_(3)
        x = torch.ones(2, requires_grad=True)
        (x * buffer.tensor).sum().backward()
        assert x.grad.tolist() == [3.0, 3.0]

    def test_last_reference_frees(self) -> None:
        """Dropping a buffer and its views frees its memory, with no release."""
        buffer = StorageBuffer(4, torch.float32, CPU, Lifetime.TRANSIENT)
        buffer.acquire()
        gone = weakref.ref(buffer.tensor.untyped_storage())
        del buffer
        assert gone() is None
