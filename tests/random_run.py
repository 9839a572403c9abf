"""Runs cases on ranks and says how they failed. Owns worlds' time limits; knows no drawing."""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from random_case import Case
from random_ranks import run_scripts
from random_script import rendered

from polyshard.testing import RankFailure, RankOutcome, RankReport, World

#: What a rank waits for others, in seconds: a hang becomes an error then.
BACKEND_TIMEOUT = 10
CASE_TIMEOUT = 60.0
#: What the other ranks get to answer once one failed, in seconds.
GRACE = 0.7
#: What says only that another rank failed before.
_SECONDARY = ("lost its connection", "did not come to this collective", "look for an earlier error")


@dataclass(frozen=True)
class Failure:
    """How a case failed: ``kind`` in a few words without names and numbers, and all about it."""

    case: Case
    kind: str
    report: str
    #: Seeds that ran before it in the same processes; None where it ran alone.
    after: tuple[int, ...] | None = None


def outcome(case: Case, *, fault: str = "", timeout: float = CASE_TIMEOUT) -> Failure | None:
    """Run one case; None where the sharded model did as the plain one."""
    failures: list[Failure] = []
    run_cases([case], failures.append, fault=fault, timeout=timeout)
    return failures[0] if failures else None


def run_cases(
    cases: Sequence[Case],
    on_failure: Callable[[Failure], None],
    *,
    fault: str = "",
    timeout: float = CASE_TIMEOUT,
) -> Counter[str]:
    """Run cases of one number of ranks in the same processes, one after the other.

    Returns the names of the errors that were raised on both sides, counted.
    """
    os.environ.setdefault("POLYSHARD_GLOO_TIMEOUT", str(BACKEND_TIMEOUT))
    raised: Counter[str] = Counter()
    left = list(cases)
    with tempfile.TemporaryDirectory() as directory:
        progress = Path(directory, "seed")
        while left:
            progress.unlink(missing_ok=True)
            scripts = [(case.seed, rendered(case)) for case in left]
            limit = timeout + 2.0 * len(left)
            try:
                results = _world(left[0].ranks).run(
                    run_scripts, scripts, str(progress), fault, timeout=limit, grace=GRACE
                )
            except RankFailure as failure:
                seed = int(progress.read_text()) if progress.exists() else left[0].seed
                position = [case.seed for case in left].index(seed)
                before = tuple(case.seed for case in left[:position])
                alone = None if len(cases) == 1 else before
                case = left[position]
                on_failure(Failure(case, kind_of(failure), str(failure), alone))
                left = left[position + 1 :]
            else:
                raised.update(results[0])
                break
    return raised


@cache
def _world(ranks: int) -> World:
    """Warm, for the life of this process; one that failed starts anew at its next call."""
    world = World(ranks)
    atexit.register(world.let_go)
    return world


def kind_of(failure: RankFailure) -> str:
    """The kind of a failure, by the rank that tells most."""
    raised = [r for r in failure.reports if r.outcome is RankOutcome.RAISED]
    primary = [r for r in raised if not any(word in r.summary for word in _SECONDARY)]
    if not raised or failure.reports[0].outcome is RankOutcome.DIED:
        return failure.reports[0].outcome.value
    return _kind_of_report((primary or raised)[0])


def _kind_of_report(report: RankReport) -> str:
    name, _, message = report.summary.removeprefix("raised ").partition(": ")
    name = name.rpartition(".")[2]
    if name != "Difference":
        return f"raised {name} outside of any operation"
    _, _, said = message.partition(": ")
    error = re.match(r"raised (\w+)", said)
    if error:
        return f"raised {error[1]} where the plain process does not"
    if said.startswith("did not raise"):
        return "did not raise where the plain process does"
    subject = said.split(" ")[0]
    verb = next((verb for verb in ("is None", "is there", "shape") if verb in said[:80]), "differs")
    return f"{subject} {verb}"


def confirmed(failure: Failure) -> Failure:
    """The failure of its case alone, if it fails alone; else as it was, with the cases before."""
    alone = outcome(failure.case)
    return failure if alone is None else alone


def chunks(cases: Sequence[Case], size: int) -> Iterator[list[Case]]:
    """Cases of the same number of ranks together, at most ``size`` at a time."""
    for ranks in sorted({case.ranks for case in cases}):
        alike = [case for case in cases if case.ranks == ranks]
        for start in range(0, len(alike), size):
            yield alike[start : start + size]
