"""Tests of ranks that are at different collectives (clauses 3.1, 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...errors import BackendError
from ...spi import Communicator, Op
from ..rank_failure import RankFailure, RankOutcome
from .bench import Bench
from .clauses import clause
from .data import Violation, require
from .running import PATIENCE, Launch

Call = Callable[[Communicator, torch.device], None]

# What a message of one rank must say of itself and of the other is beside each call.
_DIVERGED: dict[str, tuple[Call, Call, str, str]] = {
    "labels": (
        lambda c, d: c.all_reduce([_ones(4, d)], Op.SUM, label="blocks.0 reduce"),
        lambda c, d: c.all_reduce([_ones(4, d)], Op.SUM, label="blocks.1 reduce"),
        "blocks.0 reduce",
        "blocks.1 reduce",
    ),
    "labels of a long one": (
        lambda c, d: c.all_reduce([_ones(300_000, d)], Op.SUM, label="blocks.0 reduce"),
        lambda c, d: c.all_reduce([_ones(300_000, d)], Op.SUM, label="blocks.1 reduce"),
        "blocks.0 reduce",
        "blocks.1 reduce",
    ),
    "collectives": (
        lambda c, d: c.all_gather([_ones(4 * c.size, d)], [_ones(4, d)], label="unit"),
        lambda c, d: c.all_reduce([_ones(4, d)], Op.SUM, label="unit"),
        "all_gather",
        "all_reduce",
    ),
    "dtypes": (
        lambda c, d: c.broadcast([_ones(4, d)], 0, label="unit"),
        lambda c, d: c.broadcast([_ones(4, d).int()], 0, label="unit"),
        "float32",
        "int32",
    ),
    "lengths": (
        lambda c, d: c.broadcast([_ones(40_000, d)], 0, label="unit"),
        lambda c, d: c.broadcast([_ones(40_001, d)], 0, label="unit"),
        "40000",
        "40001",
    ),
    "lengths, far apart": (
        lambda c, d: c.all_gather([_ones(4 * c.size, d)], [_ones(4, d)], label="unit"),
        lambda c, d: c.all_gather([_ones(90_000 * c.size, d)], [_ones(90_000, d)], label="unit"),
        "4",
        "90000",
    ),
    "divisions of a list": (
        lambda c, d: c.all_reduce([_ones(1, d), _ones(3, d)], Op.SUM, label="unit"),
        lambda c, d: c.all_reduce([_ones(2, d), _ones(2, d)], Op.SUM, label="unit"),
        "1, 3",
        "2, 2",
    ),
    "operations": (
        lambda c, d: c.all_reduce([_ones(4, d)], Op.SUM, label="unit"),
        lambda c, d: c.all_reduce([_ones(4, d)], Op.AVG, label="unit"),
        "sum",
        "avg",
    ),
    "sources": (
        lambda c, d: c.broadcast([_ones(4, d)], 0, label="unit"),
        lambda c, d: c.broadcast([_ones(4, d)], 1, label="unit"),
        "0",
        "1",
    ),
}


@clause("3.1", "2.4", since=(1, 0), drives=True)
def ranks_that_diverge_are_told(launch: Launch) -> None:
    """Where ranks call collectives that differ in label, kind, dtype, lengths, operation or
    source, every rank raises BackendError that says what it and another one were at."""
    launch.require_peers()
    names = list(_DIVERGED)
    # As many as the backend bears in one process: it may stay failed after the first.
    while names:
        names = names[_tell(launch, names) :]


def _tell(launch: Launch, names: Sequence[str]) -> int:
    """Have ranks diverge in these ways, one after the other; how many were tried."""
    try:
        by_rank: list[list[str]] = launch.run(_diverge, names, patience=PATIENCE)
    except RankFailure as failure:
        ends = failure.reports
        name = names[0]
        for report in ends:
            _, marker, found = report.summary.partition("Violation: ")
            require(not marker, f"rank {report.rank}: {found}")
            text = "\n".join([report.summary, report.traceback, report.output])
            # A transport whose watchdog ends the process has said why.
            ended_well = report.outcome is RankOutcome.DIED and "unit" in text
            require(ended_well, f"different {name}: rank {report.rank} {report.summary}")
        return 1
    tried = min(len(messages) for messages in by_rank)
    for position, name in enumerate(names[:tried]):
        _, _, one, others = _DIVERGED[name]
        for rank, messages in enumerate(by_rank):
            for said in (one, others):
                require(
                    said in messages[position],
                    f"different {name}: rank {rank} does not say {said!r}: {messages[position]}",
                )
    return tried


def _diverge(bench: Bench, names: Sequence[str]) -> list[str]:
    """Agree, then let the last rank call something else; this rank's messages, until the backend
    makes no more communicators."""
    messages: list[str] = []
    for name in names:
        try:
            apart = bench.communicator()
        except BackendError:
            if not messages:
                raise
            break
        bench.forget(apart)
        for _ in range(2):
            apart.all_reduce([_ones(3, bench.device)], Op.SUM, label="together")
        others, one, _, _ = _DIVERGED[name]
        call = one if bench.rank == bench.size - 1 else others
        try:
            call(apart, bench.device)
            apart.settle()
        except BackendError as error:
            messages.append(str(error))
        else:
            raise Violation(f"different {name}: a rank's collective raised nothing")
        apart.close()
    return messages


@clause("3.1", since=(1, 0), drives=True)
def data_of_two_collectives_never_mixes(launch: Launch) -> None:
    """Ranks that call the same collectives in another order raise, or have the right data; no
    data of one collective ends up in another."""
    launch.require_peers()
    try:
        launch.run(_swap, patience=PATIENCE)
    except RankFailure as failure:
        for report in failure.reports:
            _, marker, found = report.summary.partition("Violation: ")
            require(not marker, f"rank {report.rank}: {found}")
            require(
                report.outcome in (RankOutcome.DIED, RankOutcome.RETURNED)
                or "BackendError" in report.summary,
                f"ranks in another order: rank {report.rank} {report.summary}",
            )


def _swap(bench: Bench) -> None:
    gather = bench.communicator()
    bench.forget(gather)
    outputs = {name: torch.full((4 * bench.size,), -1.0, device=bench.device) for name in "ab"}
    names = "ab" if bench.rank == 0 else "ba"
    for name in names:
        shard = torch.full((4,), float("ab".index(name)), device=bench.device)
        try:
            bench.all_gather(gather, [outputs[name]], [shard], f"unit {name}")
        except BackendError:
            break
    else:
        for name, output in outputs.items():
            expected = float("ab".index(name))
            found = output.unique().tolist()
            require(
                found == [expected],
                f"ranks gathered a and b in another order without an error, and {name!r} has "
                f"{found}, expected [{expected}]",
            )


def _ones(numel: int, device: torch.device) -> Tensor:
    return torch.ones(numel, device=device)
