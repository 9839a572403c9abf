"""Every call of a real NCCL process group of one rank, and how it ends."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from polyshard.spi import Lifetime, Role, Use
from polyshard_nccl.group import Group, connect, wrap
from polyshard_nccl.meeting import Card, Place, meet
from polyshard_nccl.ops import REDUCE_DTYPES, as_bits, as_numbers
from polyshard_nccl.options import Options

from .site import Site, require

_TIMEOUT = timedelta(seconds=30)
_MOVED_ONLY = (torch.bool, torch.int16, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2)
_LENGTHS = ([1000], [1, 257, 4096])


def run(site: Site) -> None:
    """Each dtype is a step, and each of the rest."""
    site.world()
    group, calls = _connected(site, "gather"), 0
    for dtype in sorted({*REDUCE_DTYPES, *_MOVED_ONLY}, key=str):
        with site.step(f"collectives of {str(dtype).removeprefix('torch.')}"):
            for lengths in _LENGTHS:
                calls += _collectives(group, dtype, lengths, site)
            site.synchronize()
    site.figures["collectives"] = calls
    with site.step("they run on the current stream"):
        site.require_cuda("a stream")
        _on_current_stream(group, site.device)
    with site.step("flight recorder"):
        site.require_cuda("NCCL's flight recorder")
        _flight_recorder(site)
    with site.step("abort"):
        site.require_cuda("an NCCL communicator")
        began = time.perf_counter()
        group.transport.abort()
        site.figures["abort, ms"] = round(1e3 * (time.perf_counter() - began), 2)
    with site.step("another group after an abort"):
        again = _connected(site, "reduce")
        _collectives(again, torch.float32, [8], site)
        site.synchronize()
    with site.step("registered memory"):
        site.require_cuda("memory that NCCL registers")
        _user_buffers(site)


def _connected(site: Site, purpose: Any) -> Group:
    assert dist.group.WORLD is not None
    card = Card(purpose, str(site.device), "", False)
    place = meet(dist.group.WORLD, card, _TIMEOUT)
    if site.dry_run:
        return _gloo(place)
    began = time.perf_counter()
    made = connect(place, site.device, purpose, Options(timeout=_TIMEOUT))
    site.figures[f"connecting for {purpose}, ms"] = round(1e3 * (time.perf_counter() - began), 1)
    return made


def _gloo(place: Place) -> Group:
    """The same calls of torch's process group, for a dry run."""
    store = PrefixStore("gloo", place.store)
    gloo = dist.ProcessGroupGloo(store, place.rank, len(place.ranks), _TIMEOUT)
    return wrap(gloo, torch.device("cpu"), ProcessGroup.BackendType.GLOO, place)


def _collectives(group: Group, dtype: torch.dtype, lengths: list[int], site: Site) -> int:
    """All of one dtype, on tensors of these lengths; of one rank, each gives what it was given."""
    given = [_values(numel, dtype, site.device) for numel in lengths]
    reducible = dtype in REDUCE_DTYPES
    bits = [as_bits(each) for each in given]
    outputs = [torch.zeros_like(each) for each in bits]
    group.all_gather(outputs, bits)
    _require_same(outputs, bits, f"all_gather of {dtype}")
    group.broadcast(outputs[0], 0)
    _require_same(outputs, bits, f"broadcast of {dtype}")
    if not reducible:
        return 2
    numbers, calls = [as_numbers(each) for each in given], 2
    averaging = (False, True) if dtype.is_floating_point or dtype.is_complex else (False,)
    for average in averaging:
        what = f"{'AVG' if average else 'SUM'} of {dtype}"
        if site.dry_run and not _gloo_reduces(numbers[0].dtype):
            continue
        parts = [torch.zeros_like(each) for each in numbers]
        group.reduce_scatter(parts, numbers, average=average)
        _require_same(parts, numbers, f"reduce_scatter, {what}")
        wholes = [each.clone() for each in numbers]
        group.all_reduce(wholes, average=average)
        _require_same(wholes, numbers, f"all_reduce, {what}")
        calls += 2
    return calls


def _gloo_reduces(dtype: torch.dtype) -> bool:
    return dtype in (torch.float32, torch.float64, torch.int32, torch.int64)


def _values(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Different in every element as far as the dtype allows."""
    numbers = torch.arange(numel, device=device) % 119
    if dtype is torch.complex32:
        return torch.view_as_complex(torch.stack([numbers, -numbers], -1).half().contiguous())
    return (numbers + 0.5).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def _require_same(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        require(torch.equal(ours, theirs), f"{what} of {theirs.numel()} elements gives other ones")


def _on_current_stream(group: Group, device: torch.device) -> None:
    """Its input is written late on a side stream and its output read there, with nothing between:
    on another stream it would gather what was there before."""
    stream = torch.cuda.Stream(device)
    shard, output = torch.zeros(1 << 20, device=device), torch.zeros(1 << 20, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        shard.fill_(3.0)
        group.all_gather([output], [shard])
        copied = output.clone()
    require(not stream.query(), "the host waited for the collective")
    torch.cuda.synchronize()
    require(bool((copied == 3.0).all()), "the collective did not run on the current stream")


def _flight_recorder(site: Site) -> None:
    """What torch notes of collectives that it does not know from torch.distributed."""
    from torch._C import _distributed_c10d

    torch_calls: Any = _distributed_c10d  # the stubs lack it
    entries = pickle.loads(torch_calls._dump_nccl_trace()).get("entries", [])
    ours = [entry for entry in entries if "polyshard gather" in str(entry.get("process_group"))]
    site.figures["flight recorder entries"] = len(entries)
    site.figures["of them with our group's name"] = len(ours)
    require(bool(entries), "the flight recorder has no entry, though TORCH_FR_BUFFER_SIZE is set")
    require(bool(ours), f"no entry has the group's name; one is {entries[0].get('process_group')}")


def _user_buffers(site: Site) -> None:
    """Buffers in memory that NCCL allocated: acquired, gathered into, released, acquired again."""
    from .connected import ConnectedNccl

    backend = ConnectedNccl(user_buffers=True)
    assert dist.group.WORLD is not None
    communicator = backend.communicator(dist.group.WORLD, site.device, purpose="gather")
    use = Use(communicator, Role.GATHER_OUTPUT)
    buffer = backend.allocate([use], 1 << 20, torch.float32, site.device, Lifetime.TRANSIENT)
    lane, compute = backend.lane("gather", site.device), backend.compute_lane(site.device)
    for turn in range(3):
        shard = torch.full((1 << 20,), float(turn), device=site.device)

        def work(shard: Tensor = shard) -> None:
            buffer.acquire()
            communicator.all_gather([buffer.tensor], [shard], label="unit: gather")

        lane.wait(compute.mark())
        lane.submit(work, label="unit: gather")
        compute.wait(lane.mark())
        require(bool((buffer.tensor == turn).all()), f"turn {turn}: other values were gathered")
        lane.wait(compute.mark())
        lane.submit(buffer.release, label="unit: release")
    lane.synchronize(_TIMEOUT.total_seconds())
    connection = communicator.connection  # type: ignore[attr-defined]
    pool = connection.user_buffers.pool
    snapshot = getattr(pool, "snapshot", None)
    if snapshot is not None:
        held = sum(segment["total_size"] for segment in snapshot())
        site.figures["registered bytes"] = held
        require(held >= 4 << 20, f"the pool has {held} bytes, so buffers came from elsewhere")
    began = time.perf_counter()
    communicator.close()
    site.figures["close, ms"] = round(1e3 * (time.perf_counter() - began), 2)
