"""The backend for groups of one rank: identity collectives, buffers and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from polyshard import BackendError, UnsupportedError
from polyshard.backends import choose_backend
from polyshard.spi import Communicator, Lifetime, Op, Role, Use
from polyshard.testing import LoopbackBackend

CPU = torch.device("cpu")


@pytest.fixture
def communicator() -> Communicator:
    return LoopbackBackend().communicator(ProcessGroup(0, 1), CPU, purpose="gather")


def test_the_core_accepts_it() -> None:
    """An instance passes the checks that installed backends pass."""
    backend = LoopbackBackend()
    assert choose_backend(backend, device_type="cpu") is backend


DTYPES = sorted(LoopbackBackend.capabilities.reduce_dtypes, key=str)
REDUCTIONS = [
    (op, dtype)
    for op in Op
    for dtype in DTYPES
    if op is Op.SUM or dtype.is_floating_point or dtype.is_complex
]


class TestCollectives:
    @pytest.mark.parametrize("dtype", [*DTYPES, torch.bool])
    def test_gather_copies(self, communicator: Communicator, dtype: torch.dtype) -> None:
        """Each output of a list becomes its shard, at any length, and the shard is untouched."""
        shards = [torch.arange(1, n + 1).to(dtype) for n in (5, 0, 1)]
        expected = [shard.tolist() for shard in shards]
        outputs = [torch.zeros_like(shard) for shard in shards]
        communicator.all_gather(outputs, shards, label="test")
        assert [output.tolist() for output in outputs] == expected
        assert [shard.tolist() for shard in shards] == expected

    @pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
    def test_reduce_scatter_copies(
        self, communicator: Communicator, op: Op, dtype: torch.dtype
    ) -> None:
        """The sum and the average over one rank are its input, unscaled."""
        inputs = [torch.arange(1, n + 1).to(dtype) for n in (5, 0, 1)]
        outputs = [torch.zeros_like(tensor) for tensor in inputs]
        communicator.reduce_scatter(outputs, inputs, op, label="test")
        for output, tensor, n in zip(outputs, inputs, (5, 0, 1), strict=True):
            assert output.tolist() == tensor.tolist() == list(range(1, n + 1))

    @pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
    def test_in_place_collectives_change_nothing(
        self, communicator: Communicator, op: Op, dtype: torch.dtype
    ) -> None:
        """An all-reduce and a broadcast of one rank leave its buffers as they were."""
        buffers = [torch.arange(1, n + 1).to(dtype) for n in (5, 0)]
        communicator.all_reduce(buffers, op, label="test")
        communicator.broadcast(buffers, 0, label="test")
        assert [buffer.tolist() for buffer in buffers] == [[1, 2, 3, 4, 5], []]

    @pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
    def test_aliases(self, communicator: Communicator, op: Op, dtype: torch.dtype) -> None:
        """A shard that is its slot in the whole keeps its values, gathering and reducing."""
        whole = torch.arange(1, 5).to(dtype)
        communicator.all_gather([whole], [whole[:]], label="test")
        communicator.reduce_scatter([whole[:]], [whole], op, label="test")
        assert whole.tolist() == [1, 2, 3, 4]


def test_a_refill_is_invisible_to_autograd(communicator: Communicator) -> None:
    """Gathering into a buffer between a forward that saved it and its backward is not an error."""
    gathered = torch.tensor([2.0, 3.0])
    weight = gathered.view(2).requires_grad_()
    loss = (weight * weight).sum()
    communicator.all_gather([gathered], [torch.tensor([5.0, 7.0])], label="test")
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [10.0, 14.0]


def test_one_rank_sends_nothing(communicator: Communicator) -> None:
    """Calls are counted, and no bytes had to be sent."""
    tensor = torch.ones(4)
    communicator.all_gather([tensor], [torch.ones(4)], label="test")
    communicator.all_reduce([tensor], Op.AVG, label="test")
    communicator.settle()
    communicator.close()
    communicator.close()
    assert communicator.traffic.calls == {"all_gather": 1, "all_reduce": 1}
    assert communicator.traffic.total_bytes == 0


def test_lanes_share_one_failure() -> None:
    """Failed work surfaces, with its label, on every lane, and later work is dropped."""
    backend = LoopbackBackend()
    gather, compute = backend.lane("gather", CPU), backend.compute_lane(CPU)
    assert backend.lane("gather", CPU) is gather
    ran = []
    gather.submit(lambda: ran.append("first"), label="first")
    compute.wait(gather.mark())
    gather.submit(lambda: ran.append(str(1 // 0)), label="layer 3, gather")
    backend.lane("reduce", CPU).submit(lambda: ran.append("later"), label="later")
    with pytest.raises(BackendError, match="layer 3, gather failed: ZeroDivisionError"):
        compute.mark()
    assert ran == ["first"]


def test_buffers_are_ordinary_storage(communicator: Communicator) -> None:
    """A transient buffer has memory while acquired and one storage for life."""
    uses = [Use(communicator, Role.GATHER_OUTPUT)]
    buffer = LoopbackBackend().allocate(uses, 6, torch.float32, CPU, Lifetime.TRANSIENT)
    storage = buffer.tensor.untyped_storage()
    assert storage.nbytes() == 0
    buffer.acquire()
    communicator.all_gather([buffer.tensor], [torch.arange(6.0)], label="test")
    assert buffer.tensor.tolist() == [0, 1, 2, 3, 4, 5]
    assert storage.nbytes() == 24
    buffer.release()
    assert storage.nbytes() == 0


class TestRefusals:
    def test_a_group_of_two(self) -> None:
        """A group of more than one rank is refused, with its size."""
        with pytest.raises(UnsupportedError, match="groups of one rank, got one of 2"):
            LoopbackBackend().communicator(ProcessGroup(0, 2), CPU, purpose="reduce")

    def test_options(self) -> None:
        """Options are refused rather than ignored."""
        with pytest.raises(ValueError, match="no options, got \\['zero_copy'\\]"):
            LoopbackBackend().communicator(
                ProcessGroup(0, 1), CPU, purpose="reduce", options={"zero_copy": True}
            )

    def test_a_dtype_it_does_not_reduce(self, communicator: Communicator) -> None:
        """Reductions accept what the capabilities promise and nothing else."""
        flags = torch.tensor([True, False])
        with pytest.raises(UnsupportedError, match=r"does not reduce torch\.bool"):
            communicator.all_reduce([flags], Op.SUM, label="test")

    def test_another_device(self) -> None:
        """It serves the CPU and says so."""
        backend, meta = LoopbackBackend(), torch.device("meta")
        assert backend.unavailable_reason("cuda") is not None
        with pytest.raises(UnsupportedError, match="serves the CPU, not meta"):
            backend.lane("gather", meta)
        with pytest.raises(UnsupportedError, match="serves the CPU, not meta"):
            backend.compute_lane(meta)
        with pytest.raises(UnsupportedError, match="serves the CPU, not meta"):
            backend.communicator(ProcessGroup(0, 1), meta, purpose="gather")
        with pytest.raises(UnsupportedError, match="serves the CPU, not meta"):
            backend.allocate([], 1, torch.float32, meta, Lifetime.PERSISTENT)
