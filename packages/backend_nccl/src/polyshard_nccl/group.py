"""One process group of torch over NCCL, and its collectives on the caller's current stream.

Knows torch's names for them, which differ between versions. Knows no labels and no lanes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from polyshard import BackendError

from .meeting import Place
from .options import Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Transport(Protocol):
    """The part of torch's ProcessGroupNCCL that is used as such."""

    @property
    def mem_allocator(self) -> Any: ...

    def abort(self) -> None: ...

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def register_mem_pool(self, pool: Any) -> None: ...

    def deregister_mem_pool(self, pool: Any) -> None: ...


class Group:
    """Collectives of one process group, all on the caller's current stream.

    None checks anything: tensors are contiguous, not empty, of one dtype that NCCL knows, on the
    device, of fitting lengths. Lists have one member or more.

    Args:
        group: over ``transport``; of no process group that torch.distributed knows, see
            docs/notes/nccl.md for why.
        transport: what is under it.
    """

    def __init__(self, group: ProcessGroup, transport: Transport) -> None:
        from torch._C._distributed_c10d import (
            AllgatherOptions,
            AllreduceCoalescedOptions,
            ReduceScatterOptions,
        )
        from torch.distributed import AllreduceOptions, BroadcastOptions

        self.transport = transport
        self._group = group
        self._gather_options = _on_current_stream(AllgatherOptions())
        self._scatter_options = _on_current_stream(ReduceScatterOptions())
        self._reduce_options = _on_current_stream(AllreduceOptions())
        self._reduce_many_options = _on_current_stream(AllreduceCoalescedOptions())
        self._broadcast_options = _on_current_stream(BroadcastOptions())
        # Renamed in torch 2.13.
        self._gather_one = _method(group, "all_gather_single", "_allgather_base")
        self._gather_many = _method(
            group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        )
        self._scatter_one = _method(group, "reduce_scatter_single", "_reduce_scatter_base")
        self._scatter_many = _method(
            group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        )

    def all_gather(self, outputs: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Output i becomes the ranks' shards i; one launch."""
        if len(outputs) == 1:
            _finish(self._gather_one(outputs[0], shards[0], self._gather_options))
        else:
            _finish(self._gather_many(list(outputs), list(shards), self._gather_options))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, average: bool
    ) -> None:
        """Output i becomes this rank's part of the sum or NCCL's average; one launch."""
        options = self._scatter_options
        options.reduceOp = _op(average)
        if len(outputs) == 1:
            _finish(self._scatter_one(outputs[0], inputs[0], options))
        else:
            _finish(self._scatter_many(list(outputs), list(inputs), options))

    def all_reduce(self, buffers: Sequence[Tensor], *, average: bool) -> None:
        """Each buffer becomes the sum or NCCL's average; one launch."""
        if len(buffers) == 1:
            self._reduce_options.reduceOp = _op(average)
            _finish(self._group.allreduce(list(buffers), self._reduce_options))
        else:
            self._reduce_many_options.reduceOp = _op(average)
            _finish(self._group.allreduce_coalesced(list(buffers), self._reduce_many_options))

    def broadcast(self, buffer: Tensor, source: int) -> None:
        """The buffer becomes that of ``source``, a rank of the group."""
        options = self._broadcast_options
        options.rootRank, options.rootTensor = source, 0
        _finish(self._group.broadcast([buffer], options))


def connect(place: Place, device: torch.device, purpose: str, options: Options) -> Group:
    """A process group over NCCL among the ranks that met. Collective where ``options.eager``.

    Raises:
        BackendError: NCCL could not connect them.
    """
    from torch.distributed import ProcessGroup, ProcessGroupNCCL
    from torch.distributed.distributed_c10d import PrefixStore

    settings = (
        ProcessGroupNCCL.Options()
        if options.pg_options is None
        else copy.deepcopy(options.pg_options)
    )
    assert options.timeout is not None
    settings._timeout = options.timeout
    # In the words of torch's watchdog and flight recorder.
    settings.group_name = f"polyshard {purpose} {place.number} of {_in_short(place.ranks)}"
    settings.global_ranks_in_group = list(place.ranks)
    size = len(place.ranks)
    try:
        nccl = ProcessGroupNCCL(PrefixStore("nccl", place.store), place.rank, size, settings)
        group = wrap(nccl, device, ProcessGroup.BackendType.NCCL, place)
        if options.eager:
            nccl.eager_connect_single_device(device)
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"rank {place.ranks[place.rank]} on {device} could not connect to ranks "
            f"{list(place.ranks)} for {purpose!r}: {error} NCCL_DEBUG=WARN says more; "
            "NCCL_SOCKET_IFNAME chooses the network where a machine has several."
        ) from error
    return group


def wrap(transport: Any, device: torch.device, kind: Any, place: Place) -> Group:
    """The group of torch over ``transport``: only that has the calls for lists."""
    from torch.distributed import ProcessGroup

    group = ProcessGroup(place.store, place.rank, len(place.ranks))
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, transport)
    return Group(group, transport)


def timeout_of(group: ProcessGroup) -> timedelta:
    """That of the job, as its store was given it."""
    timeout: timedelta = group.get_group_store().timeout  # type: ignore[attr-defined]
    return timeout


def _on_current_stream(options: Any) -> Any:
    """NCCL runs on the current stream if the caller does not want to wait for it by itself."""
    options.asyncOp = False
    return options


def _method(group: ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of these that this torch has."""
    for name in names:
        found: Callable[..., Any] | None = getattr(group, name, None)
        if found is not None:
            return found
    raise BackendError(
        f"this torch ({torch.__version__}) has no {' or '.join(names)}; upgrade polyshard-nccl."
    )


def _finish(work: Any) -> None:
    # NCCL gives nothing to wait for: what is on a stream needs no more. Others, as tests use, do.
    if work is not None:
        work.wait()


def _op(average: bool) -> Any:
    from torch.distributed import ReduceOp

    return ReduceOp.AVG if average else ReduceOp.SUM


def _in_short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks [{shown}{', ...' if len(ranks) > 8 else ''}]"
