"""What the backend says of itself, and what it refuses before anything is made."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from importlib.metadata import entry_points, requires, version

import pytest
import torch
from packaging.requirements import Requirement
from recorded_cuda import CPU, RecordedNccl

from polyshard import BackendError, UnsupportedError
from polyshard.spi import SPI_VERSION, Lifetime
from polyshard_nccl import NcclBackend

CUDA = torch.device("cuda", 0)


class GroupOf:
    """A process group that only knows where this rank stands."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def test_entry_point_names_the_backend() -> None:
    """The entry point `nccl` of the group `polyshard.backends` is the backend class."""
    (entry_point,) = entry_points(group="polyshard.backends", name="nccl")
    assert entry_point.load() is NcclBackend
    assert NcclBackend.name == entry_point.name


def test_installed_core_fits() -> None:
    """The core beside it satisfies its requirement and its interface version."""
    (core,) = [
        requirement
        for requirement in map(Requirement, requires("polyshard-nccl") or [])
        if requirement.name == "polyshard"
    ]
    assert core.specifier.contains(version("polyshard"))
    major, minor = NcclBackend.spi
    assert major == SPI_VERSION[0]
    assert minor <= SPI_VERSION[1]


@pytest.mark.parametrize("device_type", ["cpu", "xpu", "meta", "no such device"])
def test_serves_cuda_only(device_type: str) -> None:
    """Any other device type is answered with the reason, whatever torch was built with."""
    reason = NcclBackend().unavailable_reason(device_type)
    assert reason == f"it serves cuda devices, not {device_type}"


@pytest.mark.parametrize(
    ("cuda", "nccl", "driver", "said"),
    [
        (None, False, False, "this torch was built without CUDA"),
        ("13.0", False, False, "this torch was built without NCCL"),
        ("13.0", True, False, "no NVIDIA driver is installed here"),
        ("13.0", True, True, None),
    ],
)
def test_reason_names_the_first_thing_missing(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, nccl: bool, driver: bool, said: str | None
) -> None:
    """The reason follows how torch was built and whether there is a driver, and asking starts no
    CUDA device."""

    def no_device(*_: object) -> None:
        raise AssertionError("a device was initialised")

    def load(name: str) -> None:
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(ctypes, "CDLL", load)
    for question in ("init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, question, no_device)
    reason = NcclBackend().unavailable_reason("cuda")
    assert reason is None if said is None else (reason is not None and said in reason)


def test_costs_nothing() -> None:
    """Importing, making and asking start no thread and no device."""
    script = (
        "import threading, torch, polyshard_nccl\n"
        "backend = polyshard_nccl.NcclBackend()\n"
        "backend.capabilities, backend.unavailable_reason('cuda')\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("operation", "arguments", "keywords"),
    [
        ("lane", ("gather", CPU), {}),
        ("compute_lane", (CPU,), {}),
        ("communicator", (GroupOf(0, 1), CPU), {"purpose": "gather"}),
        ("allocate", ((), 8, torch.float32, CPU, Lifetime.TRANSIENT), {}),
    ],
)
def test_wrong_device(
    operation: str, arguments: tuple[object, ...], keywords: dict[str, object]
) -> None:
    """A device that is no GPU is refused by everything, with what to do."""
    with pytest.raises(UnsupportedError, match=r"serves cuda devices, not cpu; .*backend='gloo'"):
        getattr(NcclBackend(), operation)(*arguments, **keywords)


@pytest.mark.parametrize(
    ("missing", "count", "device", "said"),
    [
        ("this torch was built without CUDA", 0, CUDA, "cuda:0: this torch was built without CUDA"),
        (None, 8, torch.device("cuda"), "cuda has no index; give the device of this rank"),
        (None, 2, torch.device("cuda", 2), "cuda:2 does not exist: this process sees 2 GPUs"),
        (None, 0, CUDA, r"this process sees 0 GPUs \(CUDA_VISIBLE_DEVICES=''\)"),
    ],
)
def test_no_such_gpu(
    monkeypatch: pytest.MonkeyPatch,
    missing: str | None,
    count: int,
    device: torch.device,
    said: str,
) -> None:
    """What is missing to use the device is said before ranks meet, each with its own words."""
    backend = NcclBackend()
    monkeypatch.setattr(backend._runtime, "missing", lambda: missing)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendError, match=said):
        backend.communicator(GroupOf(0, 2), device, purpose="gather")  # type: ignore[arg-type]


def test_who_is_not_in_the_group() -> None:
    """A rank outside the group, and a purpose that is no lane, are refused."""
    backend = RecordedNccl()
    with pytest.raises(ValueError, match="this process is not in the group given for 'gather'"):
        backend.communicator(GroupOf(-1, 2), CPU, purpose="gather")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'pipe' is not a lane; the lanes are 'gather', 'reduce'"):
        backend.communicator(GroupOf(0, 1), CPU, purpose="pipe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'pipe' is not a lane"):
        backend.lane("pipe", CPU)  # type: ignore[arg-type]


def test_lanes_are_kept() -> None:
    """The same lane at every call, another one for each role; one for compute."""
    backend = RecordedNccl()
    lanes = [backend.lane(role, CPU) for role in ("gather", "reduce", "outer")]
    assert lanes == [backend.lane(role, CPU) for role in ("gather", "reduce", "outer")]
    assert len(set(map(id, lanes))) == 3
    assert backend.compute_lane(CPU) is backend.compute_lane(CPU)
    assert backend.cuda.made == [], "a stream was made before it was used"
