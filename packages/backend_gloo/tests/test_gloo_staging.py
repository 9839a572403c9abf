"""CUDA tensors by way of host memory, as far as it shows without a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from staged_on_host import RecordedStreams, StagedOnHost
from torch.distributed import ProcessGroup

from polyshard import BackendError
from polyshard.spi import Op
from polyshard.testing import BackendConformance
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")
SOON = 10.0


class TestStagedOnHost(BackendConformance):
    """It keeps the contract: what is copied, and who waits for whom on the host."""

    backend = "staged_on_host:StagedOnHost"
    device_type = "cpu"
    world_size = 2


class TestStreams:
    def test_who_waits_for_whom(self) -> None:
        """Work runs on its lane's stream after what it was told to wait for, compute goes on after
        that; between points of one stream nothing waits."""
        backend = StagedOnHost()
        streams = backend._streams
        assert isinstance(streams, RecordedStreams)
        gather, compute = backend.lane("gather", CPU), backend.compute_lane(CPU)
        streams.log.clear()
        gather.wait(compute.mark())
        gather.submit(
            lambda: streams.log.append(f"{streams.current_stream(CPU).name} works"), label="unit"
        )
        ticket = gather.mark()
        gather.wait(ticket)
        compute.wait(ticket)
        assert streams.log == [
            "main records",
            "stream 1 waits for main",
            "stream 1 records",
            "stream 1 works",
            "stream 1 records",
            "main waits for stream 1",
        ]

    def test_a_lane_waits_for_another_lanes_work_to_be_enqueued(self) -> None:
        """An event that is not recorded yet would be no wait at all."""
        backend = StagedOnHost()
        gather, reduce = backend.lane("gather", CPU), backend.lane("reduce", CPU)
        gate, done = threading.Event(), []
        gather.submit(lambda: gate.wait(SOON) or None, label="slow")  # type: ignore[func-returns-value]
        reduce.wait(gather.mark())
        reduce.submit(lambda: done.append("after"), label="next")
        assert not done
        gate.set()
        reduce.synchronize(SOON)
        assert done == ["after"]

    def test_tickets_of_cpu_lanes_are_refused(self) -> None:
        staged, plain = StagedOnHost(), GlooBackend()
        with pytest.raises(BackendError, match="same backend and device"):
            staged.lane("gather", CPU).wait(plain.compute_lane(CPU).mark())


class TestCopies:
    def test_inputs_outputs_and_versions(self) -> None:
        """What is around the tensors stays, and to autograd they are unchanged."""
        communicator = StagedOnHost().communicator(ProcessGroup(0, 1), CPU, purpose="reduce")
        memory = torch.arange(6.0)
        before = memory._version
        communicator.reduce_scatter([memory[1:3]], [torch.tensor([7.0, 8.0])], Op.SUM, label="unit")
        assert memory.tolist() == [0.0, 7.0, 8.0, 3.0, 4.0, 5.0]
        assert memory._version == before
        communicator.close()
        with pytest.raises(BackendError, match="unit: this communicator was closed"):
            communicator.all_reduce([memory], Op.SUM, label="unit")


class TestChoice:
    def test_nobody_gets_it_unasked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slow way through the host is taken where the environment says so, and not as what is
        left when nothing else serves GPUs."""
        backend = GlooBackend()
        monkeypatch.delenv("POLYSHARD_GLOO_STAGING", raising=False)
        assert "without CUDA" in str(backend.unavailable_reason("cuda")) or torch.version.cuda
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        assert "POLYSHARD_GLOO_STAGING=1" in str(backend.unavailable_reason("cuda"))
        monkeypatch.setenv("POLYSHARD_GLOO_STAGING", "1")
        assert backend.unavailable_reason("cuda") is None

    def test_devices_have_an_index(self) -> None:
        with pytest.raises(ValueError, match="cuda has no index"):
            GlooBackend().lane("gather", torch.device("cuda"))
