"""Runs one test of the suite on its ranks, and words what went wrong for a backend's author.

Owns the choice of worlds. Knows no clause and no collective.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..launcher import run_ranks
from ..rank_failure import RankFailure, RankOutcome
from ..world import World
from .bench import Bench
from .clauses import TITLES, Check
from .data import Violation
from .subject import Subject

#: Seconds that other ranks get to say what they saw, once one rank failed on purpose.
PATIENCE = 20.0


class ConformanceFailure(AssertionError):
    """A backend broke clauses of the contract. ``check`` is the test that found it."""

    def __init__(self, check: Check, subject: Subject, findings: str) -> None:
        self.check, self.subject, self.findings = check, subject, findings
        super().__init__(check, subject, findings)

    def __str__(self) -> str:
        cited = [
            f"clause {number} (interface {self.check.version}): {TITLES[number]}"
            for number in self.check.clauses
        ]
        return "\n".join(
            [*cited, f"demanded: {self.check.demand}", f"of {self.subject}:", self.findings]
        )


class Launch:
    """The ranks of a test, for tests that judge several worlds or what ranks do in the end."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def require_peers(self) -> None:
        """Raise Violation where there is one rank only: of its peers nothing would be shown."""
        if self.subject.world_size == 1:
            raise Violation("one rank has no peers, so this cannot be shown; take two or more")

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        fresh: bool = True,
        patience: float = 2.0,
    ) -> list[Any]:
        """Run ``body(bench, *args)`` on every rank; results by rank. Raises RankFailure.

        Args:
            body: a function at module level.
            ranks: how many; by default those of the subject.
            fresh: in a world that is used for nothing else.
            patience: seconds that other ranks get, in a fresh world, once one failed.
        """
        size = self.subject.world_size if ranks is None else ranks
        call = partial(on_bench, subject=self.subject, body=body, args=args)
        if not fresh:
            return run_ranks(size, call, timeout=self.subject.timeout)
        with World(size) as world:
            return world.run(call, timeout=self.subject.timeout, grace=patience)


def on_bench(rank: int, subject: Subject, body: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What a rank runs: ``body`` with everything at hand."""
    # Complex numbers of half precision are only moved here.
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    with Bench(subject) as bench:
        return body(bench, *args)


def run_check(check: Check, subject: Subject) -> None:
    """Hold ``subject`` to one test. Raises ConformanceFailure where it fails."""
    launch = Launch(subject)
    try:
        if check.drives:
            check.body(launch)
        else:
            launch.run(check.body, ranks=1 if check.alone else None, fresh=check.fresh)
    except Violation as violation:
        raise ConformanceFailure(check, subject, str(violation)) from None
    except RankFailure as failure:
        raise ConformanceFailure(check, subject, describe(failure)) from None


def describe(failure: RankFailure) -> str:
    """What each rank found, a line each; all that is known where a rank did not find but fail."""
    lines = []
    for report in failure.reports:
        _, marker, found = report.summary.partition(f"{Violation.__name__}: ")
        if report.outcome is RankOutcome.RETURNED:
            continue
        lines.append(f"rank {report.rank}: {found if marker else report.summary}")
    first = failure.reports[0]
    if first.outcome is RankOutcome.RAISED and f"{Violation.__name__}: " in first.summary:
        return "\n".join(lines)
    return "\n".join([*lines, "", str(failure)])
