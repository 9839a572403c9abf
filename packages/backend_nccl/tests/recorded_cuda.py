"""Stand-ins for torch.cuda and NCCL that note, in order, what is asked of them.

Work runs at once on CPU tensors, whatever stream it is put on, so results are right if every rank
does the same in the same order; what the streams were told to wait for is in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from polyshard.spi import Buffer, Capabilities, LaneRole, Lifetime, Use
from polyshard_nccl import NcclBackend, Options
from polyshard_nccl.group import Group, wrap
from polyshard_nccl.meeting import Place
from polyshard_nccl.ops import REDUCE_DTYPES
from polyshard_nccl.runtime import Runtime

CPU = torch.device("cpu")


class FakeStream:
    def __init__(self, cuda: RecordedCuda, name: str, *, high_priority: bool = False) -> None:
        self.cuda, self.name, self.high_priority = cuda, name, high_priority
        self.captured = False

    def wait_event(self, event: FakeEvent) -> None:
        assert event.point is not None, "a stream waits for an event that was never recorded"
        assert event.captured == self.cuda.capturing, "a wait across the border of a capture"
        self.captured = self.captured or event.captured
        self.cuda.log.append(f"{self.name} waits for {event.point}")


class FakeEvent:
    def __init__(self, cuda: RecordedCuda) -> None:
        self.cuda, self.point, self.captured = cuda, None, False
        self.reached = True

    def record(self, stream: FakeStream) -> None:
        self.cuda.points[stream.name] = number = self.cuda.points.get(stream.name, 0) + 1
        self.point: str | None = f"{stream.name}@{number}"
        self.captured = self.cuda.capturing and stream.captured
        self.reached = not self.cuda.holding
        if self.cuda.holding:
            self.cuda.held.append(self)
        self.cuda.log.append(f"mark {self.point}")

    def query(self) -> bool:
        assert not self.cuda.capturing, "an event was asked during a capture"
        assert not self.captured, "an event that a capture recorded was asked"
        self.cuda.queries += 1
        return self.reached


class RecordedCuda(Runtime):
    """See the module's docstring.

    Attributes:
        log: what was asked, in order.
        capturing: as if the current stream were being captured.
        holding: events that are recorded are not reached until ``let_go``.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.points: dict[str, int] = {}
        self.held: list[FakeEvent] = []
        self.made: list[FakeStream] = []
        self.queries = 0
        self.capturing = self.holding = False
        self.main = FakeStream(self, "compute")
        self.current = self.main
        self.identity = f"GPU-{dist.get_rank()}" if dist.is_initialized() else "GPU-0"
        self.version = "2.28.9"
        self.compute_capability = (9, 0)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the current stream, and whatever waits for it."""
        self.capturing = self.current.captured = True
        try:
            yield
        finally:
            self.capturing = False
            for stream in [self.main, *self.made]:
                stream.captured = False

    def let_go(self) -> None:
        """What was held back is reached."""
        self.holding = False
        for event in self.held:
            event.reached = True
        self.held.clear()

    def missing(self) -> str | None:
        return None

    def device_problem(self, device: torch.device) -> str | None:
        return None

    def device_identity(self, device: torch.device) -> str:
        return self.identity

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.compute_capability

    def nccl_version(self) -> str:
        return self.version

    def new_stream(self, device: torch.device, *, high_priority: bool) -> FakeStream:
        stream = FakeStream(self, f"stream{len(self.made)}", high_priority=high_priority)
        self.made.append(stream)
        return stream

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.current

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    def is_capturing(self) -> bool:
        return self.capturing and self.current.captured

    def is_part_of_capture(self, stream: FakeStream) -> bool:
        return stream.captured

    @contextmanager
    def range(self, label: str) -> Iterator[None]:
        self.log.append(f"{self.current.name}: {{ {label}")
        try:
            yield
        finally:
            self.log.append(f"{self.current.name}: }}")

    def new_pool(self, allocator: Any) -> str:
        self.log.append(f"pool from {allocator}")
        return "pool"

    @contextmanager
    def allocating_from(self, pool: Any, device: torch.device) -> Iterator[None]:
        self.log.append(f"{self.current.name}: allocate from {pool}")
        yield


class FakeGroup(Group):
    """Notes launches, and has another group do them if it is given one."""

    def __init__(self, cuda: RecordedCuda, purpose: str, beneath: Group | None = None) -> None:
        self.cuda, self.purpose, self.beneath = cuda, purpose, beneath
        self.transport = FakeTransport(cuda, purpose)
        self.error: Exception | None = None

    def _note(self, kind: str, tensors: Sequence[Tensor], detail: str = "") -> None:
        lengths = "+".join(str(tensor.numel()) for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        where = f"{self.cuda.current.name}: {self.purpose} {kind}{detail}"
        self.cuda.log.append(f"{where} {lengths} {dtype}")
        if self.error is not None:
            raise self.error

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        self._note("all_gather", shards)
        if self.beneath:
            self.beneath.all_gather(outputs, shards)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool
    ) -> None:
        self._note("reduce_scatter", outputs, " avg" if average else " sum")
        if self.beneath:
            self.beneath.reduce_scatter(outputs, inputs, average=average)

    def all_reduce(self, buffers: Sequence[Tensor], *, average: bool) -> None:
        self._note("all_reduce", buffers, " avg" if average else " sum")
        if self.beneath:
            self.beneath.all_reduce(buffers, average=average)

    def broadcast(self, buffer: Tensor, source: int) -> None:
        self._note("broadcast", [buffer], f" from {source}")
        if self.beneath:
            self.beneath.broadcast(buffer, source)


class FakeTransport:
    def __init__(self, cuda: RecordedCuda, purpose: str) -> None:
        self.cuda, self.purpose, self.mem_allocator = cuda, purpose, "NCCL's allocator"
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1
        self.cuda.log.append(f"abort {self.purpose}")

    def eager_connect_single_device(self, device: torch.device) -> None:
        raise AssertionError("nobody connects this")

    def register_mem_pool(self, pool: Any) -> None:
        self.cuda.log.append(f"register {pool} with {self.purpose}")

    def deregister_mem_pool(self, pool: Any) -> None:
        self.cuda.log.append(f"deregister {pool} with {self.purpose}")


def gloo_group(place: Place, timeout: timedelta) -> Group:
    """The same calls of torch, over gloo: what is on CPUs of the way to NCCL."""
    store = dist.PrefixStore("gloo", place.store)
    gloo = dist.ProcessGroupGloo(store, place.rank, len(place.ranks), timeout)
    return wrap(gloo, CPU, ProcessGroup.BackendType.GLOO, place)


class RecordedNccl(NcclBackend):
    """The backend on CPU tensors; everything but the two seams is what runs on a GPU."""

    capabilities = Capabilities(
        device_types=frozenset({"cpu"}),
        reduce_dtypes=REDUCE_DTYPES,
        fp32_accumulation=False,
        graph_capture=True,
    )

    @property
    def cuda(self) -> RecordedCuda:
        assert isinstance(self._runtime, RecordedCuda)
        return self._runtime

    def _make_runtime(self) -> Runtime:
        return RecordedCuda()

    def _connect(
        self, place: Place, device: torch.device, purpose: str, options: Options
    ) -> FakeGroup:
        assert options.timeout is not None
        return FakeGroup(self.cuda, purpose, gloo_group(place, options.timeout))

    def allocate(
        self,
        uses: Sequence[Use],
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        lifetime: Lifetime,
    ) -> Buffer:
        buffer = super().allocate(uses, numel, dtype, device, lifetime)
        if lifetime is Lifetime.TRANSIENT:
            name = f"{numel} {str(dtype).removeprefix('torch.')}"
            buffer.acquire = self._noted(f"acquire {name}", buffer.acquire)  # type: ignore[method-assign]
            buffer.release = self._noted(f"release {name}", buffer.release)  # type: ignore[method-assign]
        return buffer

    def _noted(self, what: str, call: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            self.cuda.log.append(f"{self.cuda.current.name}: {what}")
            call()

        return noted


def lane_names(backend: RecordedNccl) -> dict[LaneRole, str]:
    """Which stream is which lane's."""
    return {role: lane.stream.name for (role, _), lane in backend._lanes.items()}
