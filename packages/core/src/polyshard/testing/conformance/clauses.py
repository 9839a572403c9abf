"""What the contract promises, in a line each, and the tests that hold a backend to it.

Owns the registry of tests. Knows neither pytest nor processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Body = TypeVar("Body", bound=Callable[..., Any])

#: Every sub-clause of docs/contract.md that binds the backend, in short; "0" is what the contract
#: says before its first section. 3.1 and 4.6 begin with what the core owes, and go on with what
#: the backend owes in return.
TITLES = {
    "0": "importing, making and asking a backend touches no device and starts no thread",
    "1.1": "a lane runs work in order, one piece at a time; submit does not wait",
    "1.2": "work runs under no_grad and outside inference mode",
    "1.3": "three lanes, the same at every call, independent of each other",
    "1.4": "the compute lane is the caller's",
    "1.5": "a ticket is a point on a lane; a wait orders what comes later",
    "1.6": "a lane keeps nothing of work that has run or was dropped",
    "1.7": "synchronize empties the lane or names what still runs",
    "1.9": "a lane never keeps the process alive",
    "2.1": "an error of work surfaces with its label at wait, mark and synchronize",
    "2.2": "work after an error is dropped, and nobody hangs",
    "2.3": "the first error is told, at every later call",
    "2.4": "a rank that died, diverged or did not come is an error on the others",
    "2.5": "peers of a rank whose work failed fail at once",
    "2.6": "a recorded error holds no buffers",
    "3.1": "ranks at different collectives are told so, and no data mixes",
    "3.2": "communicators of different purposes and axes are independent",
    "3.3": "one lane for everything is an option and not the default",
    "4.1": "communicator() is collective over its group only",
    "4.2": "PERSISTENT memory is zeros and lasts",
    "4.3": "TRANSIENT buffers are local; memory from acquire to release",
    "4.4": "a buffer's tensor has one storage for life",
    "4.5": "acquire and release are idempotent; PERSISTENT is never released",
    "4.6": "the memory of a REDUCE_OUTPUT goes with the last tensor that views it",
    "4.7": "persistent roles, and buffers with several uses",
    "4.8": "close gives everything back",
    "5.1": "all_gather: outputs are the ranks' shards, rank-major",
    "5.2": "reduce_scatter: this rank's slot of the combined inputs",
    "5.3": "all_reduce works in place, with the same bits on every rank",
    "5.4": "broadcast gives every rank what the source has",
    "5.5": "SUM sums, AVG divides by the number of ranks; integers have no average",
    "5.6": "half precision accumulates in fp32 where claimed",
    "5.7": "lists of any lengths, one dtype to a call",
    "5.8": "gathers take every dtype; reductions take those claimed and refuse others",
    "5.9": "the same inputs give the same bits at every call",
    "5.10": "views at any offset; nothing around them is written",
    "5.11": "ops.pack and ops.accumulate give what torch gives",
    "6.1": "a ticket covers outputs",
    "6.2": "inputs are free after settle",
    "7.1": "wrong calls are refused before anything is launched, naming the label",
    "7.2": "no collective touches the autograd version of a tensor",
    "7.3": "traffic counts calls and the least bytes, once",
    "8.2": "graph_capture is claimed only where graphs can be captured",
    "9.2": "the label is in every error of its work or collective",
}

_SECTIONS = (
    "work",
    "tickets",
    "failing",
    "divergence",
    "making",
    "memory",
    "closing",
    "moves",
    "reductions",
    "lists",
    "operations",
    "flight",
    "validation",
    "training",
)


@dataclass(frozen=True)
class Check:
    """One test of the suite.

    Args:
        name: what pytest calls it.
        body: called with a ``Bench`` on every rank; or, where it ``drives``, with a ``Launch``
            in the process that runs the tests.
        clauses: the sub-clauses of the contract that it tests.
        since: the version of the interface that demands it.
        fresh: it leaves the backend of its processes in doubt, so they are used for nothing else.
        alone: it needs no peers, and runs in a world of one rank.
    """

    name: str
    body: Callable[..., None]
    clauses: tuple[str, ...]
    since: tuple[int, int]
    fresh: bool = False
    alone: bool = False
    drives: bool = False

    @property
    def demand(self) -> str:
        """What it demands, in a sentence."""
        return " ".join((self.body.__doc__ or "").split())

    @property
    def version(self) -> str:
        """``since`` as it is written."""
        return ".".join(map(str, self.since))


_checks: dict[str, Check] = {}


def clause(
    *clauses: str,
    since: tuple[int, int],
    fresh: bool = False,
    alone: bool = False,
    drives: bool = False,
) -> Callable[[Body], Body]:
    """Make a function a test of these clauses; its docstring says what is demanded.

    Arguments are those of :class:`Check`.
    """

    def register(body: Body) -> Body:
        name = f"test_{body.__name__}"
        assert name not in _checks, f"two tests are called {name}"
        assert set(clauses) <= set(TITLES), f"{name} cites {clauses}"
        assert body.__doc__, f"{name} does not say what it demands"
        _checks[name] = Check(name, body, clauses, since, fresh, alone, drives)
        return body

    return register


def all_checks() -> dict[str, Check]:
    """Every test of the suite by name, in the order of the contract's sections."""
    for section in _SECTIONS:
        importlib.import_module(f"{__package__}.{section}")
    return dict(_checks)
