"""Tests of what is checked and counted before anything is sent (clauses 7.1, 7.2, 7.3, 9.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...spi import Communicator, Op
from .bench import Bench
from .clauses import clause
from .data import Violation, require

_LABEL = "blocks.4 gather"
Call: TypeAlias = "Callable[[], None]"


@clause("7.1", "9.2", since=(1, 0))
def wrong_calls_are_refused(bench: Bench) -> None:
    """A call of the wrong number, dtype, device, shape, contiguity, length, operation or source
    raises ValueError or UnsupportedError that begins with the label, on the rank that made it,
    before anything is sent or counted."""
    communicator = bench.communicator()
    for what, call in _wrong_calls(bench, communicator).items():
        try:
            call()
        except (ValueError, UnsupportedError) as error:
            require(
                str(error).startswith(_LABEL),
                f"{what}: the message does not begin with the label {_LABEL!r}: {error}",
            )
        except Exception as error:
            raise Violation(f"{what} raised {type(error).__name__}: {error}") from error
        else:
            raise Violation(f"{what} raised nothing, expected ValueError")
    require(
        communicator.traffic.total_calls == 0 and communicator.traffic.total_bytes == 0,
        f"refused calls were counted: {dict(communicator.traffic.calls)}",
    )
    # Nothing was sent: what follows is in step.
    total = torch.ones(3, device=bench.device)
    bench.all_reduce(communicator, [total], Op.SUM)
    require(
        total.tolist() == [float(bench.size)] * 3,
        f"after refused calls a sum of ones is {total.tolist()}",
    )


def _wrong_calls(bench: Bench, c: Communicator) -> dict[str, Call]:
    n, other = c.size, torch.device("meta")

    def f32(*shape: int) -> Tensor:
        return torch.ones(*shape, device=bench.device)

    def gather(outputs: list[Tensor], shards: list[Tensor]) -> Call:
        return lambda: c.all_gather(outputs, shards, label=_LABEL)

    def scatter(outputs: list[Tensor], inputs: list[Tensor], op: Any = Op.SUM) -> Call:
        return lambda: c.reduce_scatter(outputs, inputs, op, label=_LABEL)

    def reduce(buffers: list[Tensor], op: Any = Op.SUM) -> Call:
        return lambda: c.all_reduce(buffers, op, label=_LABEL)

    def broadcast(buffers: list[Tensor], source: int = 0) -> Call:
        return lambda: c.broadcast(buffers, source, label=_LABEL)

    halves = f32(6)[::2]
    return {
        "all_gather of two outputs for one shard": gather([f32(n), f32(n)], [f32(1)]),
        "all_gather into an output of another length": gather([f32(n * 3 + 1)], [f32(3)]),
        "all_gather into an output of another dtype": gather([f32(n * 3).double()], [f32(3)]),
        "all_gather of a list of two dtypes": gather(
            [f32(n), f32(n).double()], [f32(1), f32(1).double()]
        ),
        "all_gather of a 2-D shard": gather([f32(n * 4)], [f32(2, 2)]),
        "all_gather of a shard with gaps": gather([f32(n * 3)], [halves]),
        "all_gather of a shard on another device": gather(
            [f32(n * 3)], [torch.ones(3, device=other)]
        ),
        "reduce_scatter of an input of another length": scatter([f32(3)], [f32(3 * n + 1)]),
        "reduce_scatter of no input": scatter([f32(3)], []),
        "reduce_scatter by an operation that is a string": scatter([f32(3)], [f32(3 * n)], "avg"),
        "reduce_scatter to another dtype": scatter([f32(3).double()], [f32(3 * n)]),
        "all_reduce of a tensor with gaps": reduce([halves]),
        "all_reduce of a 0-D tensor": reduce([f32(1)[0]]),
        "all_reduce by no operation": reduce([f32(3)], None),
        "all_reduce on another device": reduce([torch.ones(3, device=other)]),
        "broadcast from a rank above the group": broadcast([f32(3)], n),
        "broadcast from rank -1": broadcast([f32(3)], -1),
        "broadcast of two dtypes": broadcast([f32(3), f32(3).int()]),
        "broadcast of a 2-D tensor": broadcast([f32(2, 3)]),
    }


@clause("7.2", since=(1, 0))
def versions_stay(bench: Bench) -> None:
    """No collective touches the autograd version of the tensors it writes, nor of other views of
    their storage, in any grad mode, and what autograd saved may be refilled."""
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for numel in (5, 60_001):
        full = torch.zeros(bench.size * numel, device=bench.device)
        shard = torch.ones(numel, device=bench.device)
        view, other = full[:1], shard.view(-1)
        tensors = [full, shard, view, other]

        def versions(tensors: list[Tensor] = tensors) -> list[int]:
            return [tensor._version for tensor in tensors]

        before = versions()
        calls: dict[str, Call] = {
            "all_gather": partial(bench.all_gather, gather, [full], [shard]),
            "reduce_scatter": partial(bench.reduce_scatter, reduce, [shard], [full], Op.AVG),
            "all_reduce": partial(bench.all_reduce, reduce, [full, shard.view(-1)], Op.AVG),
            "broadcast": partial(bench.broadcast, gather, [full, shard.view(-1)], 0),
        }
        for name, call in calls.items():
            for mode in (torch.no_grad, torch.enable_grad):
                with mode():
                    call()
                require(
                    versions() == before,
                    f"{name} of {numel} elements changed versions from {before} to {versions()}",
                )
    gathered = torch.full((2 * bench.size,), 3.0, device=bench.device)
    weight = gathered.view(bench.size, 2).requires_grad_()
    loss = (weight * weight).sum()
    bench.all_gather(gather, [gathered], [torch.full((2,), 5.0, device=bench.device)])
    loss.backward()
    assert weight.grad is not None
    require(
        weight.grad.unique().tolist() == [10.0],
        f"a gradient of refilled weights is {weight.grad.unique().tolist()}, expected [10.0]",
    )


@clause("7.3", since=(1, 0))
def traffic_counts_the_least(bench: Bench) -> None:
    """traffic has one call for each list, empty ones too, by kind, and the bytes that any
    algorithm must make a rank send; none with one rank, and nothing of the backend's own."""
    n = bench.size
    gather, reduce = bench.communicator(), bench.communicator("reduce")
    for communicator in (gather, reduce):
        require(
            communicator.traffic.total_calls == 0,
            f"a new communicator counts {dict(communicator.traffic.calls)}",
        )

    def f32(numel: int) -> Tensor:
        return torch.ones(numel, device=bench.device)

    for numel in (4, 60_000):
        bench.all_gather(gather, [f32(n * numel), f32(0)], [f32(numel), f32(0)])
        bench.broadcast(gather, [f32(n * numel)], n - 1)
        bench.reduce_scatter(reduce, [f32(numel)] * 2, [f32(n * numel) for _ in range(2)], Op.AVG)
        bench.all_reduce(reduce, [f32(n * numel)], Op.SUM)
    bench.all_gather(gather, [], [])
    bench.settle_on(gather)
    shards = 4 * (4 + 60_000)
    _require_traffic(gather, "all_gather", 3, (n - 1) * shards)
    _require_traffic(gather, "broadcast", 2, (n - 1) * shards)
    _require_traffic(reduce, "reduce_scatter", 2, 2 * (n - 1) * shards)
    _require_traffic(reduce, "all_reduce", 2, 2 * (n - 1) * shards)
    for communicator, calls in ((gather, 5), (reduce, 4)):
        require(
            communicator.traffic.total_calls == calls,
            f"traffic counts {dict(communicator.traffic.calls)}, {calls} calls were made",
        )


def _require_traffic(communicator: Communicator, kind: str, calls: int, nbytes: int) -> None:
    traffic = communicator.traffic
    require(
        traffic.calls[kind] == calls,
        f"traffic.calls[{kind!r}] is {traffic.calls[kind]}, expected {calls}",
    )
    require(
        traffic.bytes[kind] == nbytes,
        f"traffic.bytes[{kind!r}] is {traffic.bytes[kind]} of {communicator.size} ranks, "
        f"expected {nbytes}",
    )
