"""The symmetric-memory backend as this version has it: found, asked, honest about the rest."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, requires, version
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from polyshard import UnsupportedError
from polyshard.spi import SPI_VERSION, Lifetime
from polyshard_symm_mem import SymmMemBackend

CUDA = torch.device("cuda", 0)


def test_entry_point_names_the_backend() -> None:
    """The entry point `symm_mem` of the group `polyshard.backends` is the backend class."""
    (entry_point,) = entry_points(group="polyshard.backends", name="symm_mem")
    assert entry_point.load() is SymmMemBackend
    assert SymmMemBackend.name == entry_point.name


def test_installed_core_fits() -> None:
    """The core beside it satisfies its requirement and its interface version."""
    (core,) = [
        requirement
        for requirement in map(Requirement, requires("polyshard-symm-mem") or [])
        if requirement.name == "polyshard"
    ]
    assert core.specifier.contains(version("polyshard"))
    major, minor = SymmMemBackend.spi
    assert major == SPI_VERSION[0]
    assert minor <= SPI_VERSION[1]


@pytest.mark.parametrize(("cuda", "cupy"), [("12.6", "cupy-cuda12x"), ("13.0", "cupy-cuda13x")])
def test_extras_bring_the_cupy_of_torchs_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: str, cupy: str
) -> None:
    """Without CuPy the reason names an extra, and that extra exists and installs the right one."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(sys, "path", [])
    extra = f"cuda{cuda.partition('.')[0]}"
    reason = SymmMemBackend().unavailable_reason("cuda")
    monkeypatch.undo()
    assert reason == f'CuPy is missing; pip install "polyshard-symm-mem[{extra}]"'
    brought = {
        requirement.name
        for requirement in map(Requirement, requires("polyshard-symm-mem") or [])
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
    }
    assert brought == {cupy}


@pytest.mark.parametrize("device_type", ["cpu", "xpu", "meta", "no such device"])
def test_serves_cuda_only(device_type: str) -> None:
    """Any other device type is answered with the reason, whatever torch was built with."""
    reason = SymmMemBackend().unavailable_reason(device_type)
    assert reason == f"it serves cuda devices, not {device_type}"


@pytest.mark.parametrize(
    ("cuda", "said"), [(None, "without CUDA"), ("13.0", "no communication yet")]
)
def test_reason_starts_no_device_and_imports_no_cupy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str | None, said: str
) -> None:
    """With a CuPy that cannot be imported and devices that must not be touched, asking answers."""

    def no_device(*_: object) -> None:
        raise AssertionError("a device was initialised")

    (tmp_path / "cupy.py").write_text("raise AssertionError('CuPy was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for question in ("init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, question, no_device)
    reason = SymmMemBackend().unavailable_reason("cuda")
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
    pattern = rf"SymmMemBackend\.{operation}: .*polyshard\[gloo\]"
    with pytest.raises(UnsupportedError, match=pattern):
        getattr(SymmMemBackend(), operation)(*arguments, **keywords)
