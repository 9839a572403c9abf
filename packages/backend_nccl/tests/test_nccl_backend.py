"""The NCCL backend as this version has it: found, asked, and honest about what is missing."""

from __future__ import annotations

from importlib.metadata import entry_points, requires, version

import pytest
import torch
from packaging.requirements import Requirement

from polyshard import UnsupportedError
from polyshard.spi import SPI_VERSION, Lifetime
from polyshard_nccl import NcclBackend

CUDA = torch.device("cuda", 0)


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
    ("cuda", "nccl", "said"),
    [
        (None, False, "without CUDA"),
        ("13.0", False, "without NCCL"),
        ("13.0", True, "no communication yet"),
    ],
)
def test_reason_names_the_first_thing_missing(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, nccl: bool, said: str
) -> None:
    """The reason follows how torch was built, and asking starts no CUDA device."""

    def no_device(*_: object) -> None:
        raise AssertionError("a device was initialised")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    for question in ("init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, question, no_device)
    reason = NcclBackend().unavailable_reason("cuda")
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize(
    ("operation", "arguments", "keywords"),
    [
        ("lane", ("gather", CUDA), {}),
        ("compute_lane", (CUDA,), {}),
        ("communicator", (None, CUDA), {"purpose": "gather"}),
        ("allocate", ((), 8, torch.float32, CUDA, Lifetime.TRANSIENT), {}),
    ],
)
def test_operations_refuse(
    operation: str, arguments: tuple[object, ...], keywords: dict[str, object]
) -> None:
    """Every operation raises UnsupportedError that names it, instead of pretending."""
    with pytest.raises(UnsupportedError, match=rf"NcclBackend\.{operation}: .*polyshard\[gloo\]"):
        getattr(NcclBackend(), operation)(*arguments, **keywords)
