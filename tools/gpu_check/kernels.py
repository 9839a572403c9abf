"""Kernels, copies and synchronisations of a warm step, and the names in its trace."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .models import Size, batches, transformer
from .sharding import BACKENDS, backend_for, shard, train_step
from .site import Site, require

_SIZE = Size(blocks=6, width=128)
_TINY = Size(blocks=2, width=16, tokens=8, batch=2, vocabulary=19)
_WARM_UP = 4
_STEP = "gpu_check: one step"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_PHASES = ("gather for forward", "gather for backward", "reduce gradients", "release")


def run(site: Site) -> None:
    """Counts, waits and names, each a step for each contender."""
    mesh = site.world()
    size = _TINY if site.dry_run else _SIZE
    for kind in ("plain", *BACKENDS):
        _examine(site, mesh, kind, size)


def _examine(site: Site, mesh: Any, kind: str, size: Size) -> None:
    with site.step(f"{kind}: counted"):
        model, optimizer = _trained(site, mesh, kind, size)
        tokens = batches(size, site.device)(_WARM_UP)
        events = _trace(site, model, optimizer, tokens)
        _count(site, kind, events, size.blocks + 1)
    if site.steps[f"{kind}: counted"] != "passed":
        return
    if kind != "plain":
        with site.step(f"{kind}: labels"):
            _require_labels(_submitted(site, model, optimizer, tokens), size)
    with site.step(f"{kind}: nothing waits for the device"):
        site.require_cuda("a trace of the CUDA runtime")
        waits = Counter(event["name"] for event in events if event["name"] in _WAITS)
        require(not waits, f"in a warm step there are {dict(waits)}")
    with site.step(f"{kind}: torch knows of no wait either"):
        site.require_cuda("torch's look-out for waits")
        _step_without_waits(model, optimizer, tokens)
    if kind != "plain":
        with site.step(f"{kind}: ranges in the trace"):
            site.require_cuda("a trace of CUDA lanes")
            _require_ranges(events, size)
        with site.step(f"{kind}: NVTX ranges"):
            site.require_cuda("NVTX")
            _require_nvtx(model, optimizer, tokens, size)


def _count(site: Site, kind: str, events: list[dict[str, Any]], units: int) -> None:
    counts = _counts(events)
    site.figures[f"{kind}: step"] = counts
    site.figures[f"{kind}: per unit"] = {
        what: round(number / units, 1) for what, number in counts.items()
    }
    expected = "operations" if site.dry_run else "kernels"
    require(counts[expected] > 0, f"the trace has no {expected}")


def _trained(
    site: Site, mesh: Any, kind: str, size: Size
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a few steps, so that nothing in the next one happens for the first time."""
    model = transformer(size, site.device)
    if kind != "plain":
        shard(model, mesh, backend_for(site, kind))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = batches(size, site.device)
    for number in range(_WARM_UP):
        train_step(model, optimizer, batch(number))
    site.synchronize()
    return model, optimizer


def _trace(
    site: Site, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> list[dict[str, Any]]:
    """The events of a step: those of the host that began in it, and those of the device."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not site.dry_run:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function(_STEP):
            train_step(model, optimizer, tokens)
        # The profiler waits for the device when it ends; here, that is not in the step.
        site.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = [each for each in json.loads(path.read_text())["traceEvents"] if "dur" in each]
    (step,) = [
        each for each in events if each["name"] == _STEP and each.get("cat") == "user_annotation"
    ]
    begin, end = step["ts"], step["ts"] + step["dur"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        each
        for each in events
        if each.get("cat") in on_device or (begin <= each["ts"] <= end and each is not step)
    ]


def _counts(events: list[dict[str, Any]]) -> dict[str, int]:
    """By kind: on the device, launches by the host, operations of torch, ranges."""
    kinds = Counter(event.get("cat", "") for event in events)
    launches = sum(
        event["name"].startswith(("cudaLaunchKernel", "cuLaunchKernel")) for event in events
    )
    return {
        "kernels": kinds["kernel"],
        "copies": kinds["gpu_memcpy"],
        "memsets": kinds["gpu_memset"],
        "launches": launches,
        "event records": sum(event["name"] == "cudaEventRecord" for event in events),
        "stream waits": sum(event["name"] == "cudaStreamWaitEvent" for event in events),
        "operations": kinds["cpu_op"],
        "ranges": kinds["user_annotation"],
    }


def _step_without_waits(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, optimizer, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _require_ranges(events: list[dict[str, Any]], size: Size) -> None:
    found = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    _require_labels(found, size)


def _submitted(
    site: Site, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> list[str]:
    """The labels of what a step gives to the lanes."""
    found: list[str] = []
    context: Any = model.fsdp_context
    transport = context.units[0].transport
    lanes = [transport.gather_lane, transport.reduce_lane]
    for lane in lanes:
        lane.submit = partial(_note, found, lane.submit)
    try:
        train_step(model, optimizer, tokens)
    finally:
        for lane in lanes:
            del lane.submit
    return found


def _note(found: list[str], submit: Any, work: Any, *, label: str) -> None:
    found.append(label)
    submit(work, label=label)


def _require_nvtx(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, size: Size
) -> None:
    """What the lanes hand to NVTX, which only tools outside of this process can read."""
    found: list[str] = []
    with _noted(found):
        train_step(model, optimizer, tokens)
    _require_labels(found, size)


@contextmanager
def _noted(found: list[str]) -> Iterator[None]:
    push = torch.cuda.nvtx.range_push

    def noting(message: str) -> Any:
        found.append(message)
        return push(message)

    torch.cuda.nvtx.range_push = noting
    try:
        yield
    finally:
        torch.cuda.nvtx.range_push = push


def _require_labels(found: list[str], size: Size) -> None:
    """Every unit with every phase."""
    for phase in _PHASES:
        told = [label for label in found if phase in label]
        for number in range(size.blocks):
            require(
                any(f"blocks.{number} " in label for label in told),
                f"no range has blocks.{number} and {phase!r}; there are {sorted(set(found))[:12]}",
            )
