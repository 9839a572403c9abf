"""The gloo backend itself: what it says of itself, options, buffers, closing."""

from __future__ import annotations

import gc
import os
import tomllib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

import polyshard_gloo
from polyshard import BackendError, UnsupportedError
from polyshard.backends import choose_backend
from polyshard.spi import BufferOps, Communicator, Lifetime, Op, Role, StorageBuffer, Use
from polyshard.testing import run_ranks
from polyshard_gloo import GlooBackend

CPU = torch.device("cpu")


def alone(purpose: str = "gather", **options: object) -> Communicator:
    """A communicator of one rank, which needs no peers and no process."""
    return GlooBackend().communicator(ProcessGroup(0, 1), CPU, purpose=purpose, options=options)


class TestItself:
    def test_the_core_chooses_it_for_cpus(self) -> None:
        """An installed gloo backend is what CPU meshes get, and passes the core's checks."""
        assert isinstance(choose_backend(None, device_type="cpu"), GlooBackend)

    def test_version(self) -> None:
        """The version that is imported is the one that is packaged."""
        project = Path(__file__).parents[1] / "pyproject.toml"
        declared = tomllib.loads(project.read_text())["project"]["version"]
        assert polyshard_gloo.__version__ == declared

    def test_capabilities(self) -> None:
        """It serves CPUs, by choice CUDA too, accumulates in fp32 and wants no buffers kept."""
        capabilities = GlooBackend.capabilities
        assert capabilities.device_types == {"cpu", "cuda"}
        assert capabilities.fp32_accumulation
        assert capabilities.persistent_roles == frozenset()
        assert not capabilities.graph_capture
        assert isinstance(GlooBackend().ops, BufferOps)

    def test_unavailable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another device, or a torch without gloo, is a reason and not an error."""
        backend = GlooBackend()
        assert backend.unavailable_reason("cpu") is None
        assert "'xpu'" in str(backend.unavailable_reason("xpu"))
        assert backend.unavailable_reason("cuda") is not None
        monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
        assert "no gloo" in str(backend.unavailable_reason("cpu"))
        monkeypatch.setattr(dist, "is_available", lambda: False)
        assert "no torch.distributed" in str(backend.unavailable_reason("cpu"))

    @pytest.mark.parametrize(
        "call",
        [
            lambda b, device: b.lane("gather", device),
            lambda b, device: b.compute_lane(device),
            lambda b, device: b.communicator(ProcessGroup(0, 1), device, purpose="gather"),
            lambda b, device: b.allocate([], 1, torch.float32, device, Lifetime.TRANSIENT),
        ],
        ids=["lane", "compute_lane", "communicator", "allocate"],
    )
    def test_other_devices(self, call: Callable[[GlooBackend, torch.device], object]) -> None:
        """Everything for another device than a CPU is refused, naming the device."""
        with pytest.raises(UnsupportedError, match="meta"):
            call(GlooBackend(), torch.device("meta"))

    def test_unknown_roles(self) -> None:
        """A lane or purpose that does not exist is a ValueError that lists those that do."""
        with pytest.raises(ValueError, match=r"'sideways'.*'gather', 'reduce', 'outer'"):
            GlooBackend().lane("sideways", CPU)
        with pytest.raises(ValueError, match=r"'sideways'.*'gather', 'reduce', 'outer'"):
            alone("sideways")

    @pytest.mark.parametrize("lifetime", Lifetime)
    def test_allocate(self, lifetime: Lifetime) -> None:
        """Buffers are ordinary memory of the asked length and dtype, whatever they are for."""
        uses = [Use(alone(), role) for role in Role]
        buffer = GlooBackend().allocate(uses, 5, torch.bfloat16, torch.device("cpu", 0), lifetime)
        assert isinstance(buffer, StorageBuffer)
        buffer.acquire()
        assert (buffer.tensor.numel(), buffer.tensor.dtype) == (5, torch.bfloat16)
        assert buffer.tensor.device == CPU


def timeout_of(group: ProcessGroup, **options: object) -> timedelta:
    seen = GlooBackend().communicator(group, CPU, purpose="gather", options=options)
    timeout: float = seen._connections._timeout
    seen.close()
    return timedelta(seconds=timeout)


def check_timeouts(rank: int) -> None:
    os.environ.pop("POLYSHARD_GLOO_TIMEOUT", None)
    world = dist.group.WORLD
    assert timeout_of(world) == world.get_group_store().timeout
    os.environ["POLYSHARD_GLOO_TIMEOUT"] = "17.5"
    assert timeout_of(world) == timedelta(seconds=17.5)
    assert timeout_of(world, timeout=timedelta(minutes=2)) == timedelta(minutes=2)


class TestOptions:
    def test_timeout_sources(self) -> None:
        """The timeout is the option, else the environment variable, else the store's."""
        run_ranks(2, check_timeouts)

    def test_store_timeout_is_that_of_the_job(self) -> None:
        """A group's store hands on the timeout that the job's store was given."""
        store = dist.HashStore()
        store.set_timeout(timedelta(seconds=77))
        assert dist.PrefixStore("a", dist.PrefixStore("b", store)).timeout.seconds == 77

    def test_unknown(self) -> None:
        """An option that does not exist is a ValueError that names those that do."""
        with pytest.raises(ValueError, match=r"\['retries'\].*'timeout'"):
            alone(retries=3)

    @pytest.mark.parametrize("timeout", [10, "10", None, timedelta(0), timedelta(seconds=-1)])
    def test_bad_timeout(self, timeout: object) -> None:
        """A timeout that is not a positive timedelta is refused."""
        with pytest.raises(ValueError, match="'timeout' must be a positive timedelta"):
            alone(timeout=timeout)

    @pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf"])
    def test_bad_environment(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """An environment variable that is not a positive number is refused, and quoted."""
        monkeypatch.setenv("POLYSHARD_GLOO_TIMEOUT", text)
        with pytest.raises(BackendError, match=f"POLYSHARD_GLOO_TIMEOUT='{text}'"):
            alone()

    def test_a_group_without_this_rank(self) -> None:
        """A group that this process is not in is refused."""
        with pytest.raises(ValueError, match="not in the group"):
            GlooBackend().communicator(ProcessGroup(-1, 2), CPU, purpose="gather")


class TestRefusals:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn, torch.uint16])
    def test_dtypes_that_are_not_claimed(self, dtype: torch.dtype) -> None:
        """Reductions refuse a dtype that is not among the capabilities, naming it."""
        buffer = torch.zeros(2).to(dtype)
        with pytest.raises(UnsupportedError, match=str(dtype)):
            alone().all_reduce([buffer], Op.SUM, label="unit")

    def test_averages_of_integers(self) -> None:
        """Integers have no average."""
        with pytest.raises(UnsupportedError, match=r"torch\.int64 has no average"):
            alone().reduce_scatter(
                [torch.zeros(2).long()], [torch.zeros(2).long()], Op.AVG, label="u"
            )

    def test_wrong_calls_are_not_sent(self) -> None:
        """The base class's checks come first, for a group of one as well."""
        with pytest.raises(ValueError, match="unit: 3 elements is not 1 times 2"):
            alone().all_gather([torch.zeros(3)], [torch.zeros(2)], label="unit")


def resources() -> tuple[int, int, int]:
    """Threads of this process, open files, and process groups known to torch."""
    gc.collect()
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(distributed_c10d._world.pg_map),
    )


def check_close(rank: int) -> None:
    backend = GlooBackend()
    lane = backend.lane("gather", CPU)
    lane.submit(lambda: None, label="unit")
    lane.synchronize(30.0)
    before = resources()
    for numel in (3, 2_000_000):
        made = [backend.communicator(dist.group.WORLD, CPU, purpose="gather") for _ in range(3)]
        for one in made:
            one.all_reduce([torch.ones(numel)], Op.AVG, label="unit")
        assert resources() > before
        # Nobody leaves before all have what they need.
        dist.barrier()
        for one in made:
            one.close()
            one.close()
            with pytest.raises(BackendError, match="unit: this communicator was closed"):
                one.all_reduce([torch.ones(numel)], Op.AVG, label="unit")
        assert resources() == before
    # Dropping one is as good as closing it.
    dropped = backend.communicator(dist.group.WORLD, CPU, purpose="gather")
    dropped.all_reduce([torch.ones(3)], Op.AVG, label="unit")
    dist.barrier()
    del dropped
    assert resources() == before


class TestClose:
    def test_gives_everything_back(self) -> None:
        """Closing, or dropping, a communicator frees threads and sockets, leaves torch's
        process groups alone, and lets new ones be made."""
        run_ranks(2, check_close)

    def test_of_one_rank(self) -> None:
        """A closed communicator of one rank refuses work like any other."""
        closed = alone()
        closed.settle()
        closed.close()
        closed.close()
        with pytest.raises(BackendError, match="unit: this communicator was closed"):
            closed.broadcast([torch.zeros(1)], 0, label="unit")
