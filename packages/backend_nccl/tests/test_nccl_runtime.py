"""What is asked of torch.cuda, as far as that shows without a device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from polyshard_nccl.runtime import Runtime, is_profiling


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ranges of NVTX as they are opened and closed; torch for CPUs has none."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("}"))
    return seen


def test_ranges(nvtx: list[str]) -> None:
    """Work is a range of NVTX, closed also where it raises, and of torch.profiler only while that
    runs."""
    runtime = Runtime()
    assert not is_profiling()
    with pytest.raises(RuntimeError, match="work"), runtime.range("before"):
        raise RuntimeError("work")
    with torch.profiler.profile() as profile:
        assert is_profiling()
        with runtime.range("blocks.0: gather for forward"):
            torch.ones(3).add_(1)
    assert not is_profiling()
    names = [event.name for event in profile.events()]
    assert "blocks.0: gather for forward" in names
    assert "before" not in names
    assert nvtx == ["before", "}", "blocks.0: gather for forward", "}"]


def test_calls_exist() -> None:
    """Everything that is called of torch.cuda is there, in a torch without CUDA too."""
    for name in (
        "Stream",
        "Event",
        "MemPool",
        "current_stream",
        "stream",
        "use_mem_pool",
        "is_current_stream_capturing",
        "get_device_capability",
        "get_device_properties",
        "device_count",
    ):
        assert callable(getattr(torch.cuda, name)), name


@pytest.mark.skipif(
    not dist.is_nccl_available(),
    reason="needs a build of torch for CUDA: this one has no ProcessGroupNCCL to look at",
)
def test_methods_of_process_groups() -> None:
    """torch's process group over NCCL has what is called of it."""
    for name in (
        "abort",
        "deregister_mem_pool",
        "eager_connect_single_device",
        "mem_allocator",
        "register_mem_pool",
    ):
        assert hasattr(dist.ProcessGroupNCCL, name), name
    assert torch.cuda.nccl.version() >= (2, 28)
