"""What run_ranks raises when ranks fail: one report that starts with the root cause.

Owns the wording and the order. Knows no processes: it is given what was seen of each rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

_SHOWN_CHARACTERS = 20_000


class RankOutcome(Enum):
    """How a rank ended a call; in the order in which outcomes can cause one another."""

    DIED = "died"
    RAISED = "raised"
    STUCK = "stuck"
    RETURNED = "returned"


@dataclass(frozen=True)
class RankReport:
    """What was seen of one rank.

    ``summary`` is one line ("raised ValueError: ..."), ``moment`` the monotonic time in seconds
    at which it happened, ``traceback`` that of the exception the rank raised, ``stack`` the
    Python stacks of its threads where it hung or crashed, ``output`` what it printed.
    """

    rank: int
    outcome: RankOutcome
    summary: str
    moment: float
    traceback: str = ""
    stack: str = ""
    output: str = ""


class RankFailure(RuntimeError):
    """Ranks raised, died or hung in ``name``. ``reports`` holds every rank's, the cause first."""

    def __init__(self, name: str, reports: Sequence[RankReport]) -> None:
        self.name = name
        self.reports = tuple(sorted(reports, key=_causal_order))
        super().__init__(name, self.reports)

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  rank {report.rank}: {report.summary}" for report in self.reports]
        for report in self.reports:
            for title in ("traceback", "stack", "output"):
                text = getattr(report, title).strip("\n")
                if text:
                    lines += ["", f"---- rank {report.rank}: {title} ----", _shortened(text)]
        return "\n".join(lines)

    def _headline(self) -> str:
        first, ranks = self.reports[0], len(self.reports)
        if first.outcome is not RankOutcome.STUCK:
            return f"rank {first.rank} of {ranks} failed first in {self.name}: {first.summary}"
        stuck = [str(r.rank) for r in self.reports if r.outcome is RankOutcome.STUCK]
        return f"{len(stuck)} of {ranks} ranks did not return from {self.name}: {', '.join(stuck)}"


def without_frames_of(files: Collection[str], dump: str) -> str:
    """A faulthandler dump, each thread cut where it was called from one of ``files``.

    Threads and lines that are then of no use to the reader are left out.
    """
    threads = []
    for block in dump.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("Extension modules:")]
        for position, line in enumerate(lines):
            if any(f'File "{file}"' in line for file in files):
                del lines[position:]
                break
        is_thread = "(most recent call first)" in block
        if len(lines) > 1 or (lines and not is_thread):
            threads.append("\n".join(lines))
    return "\n\n".join(threads)


def _causal_order(report: RankReport) -> tuple[int, float, int]:
    # A death comes first whatever the clock says: its peers see the connection break, and may
    # report that, before the kernel has told anyone about the exit.
    return (list(RankOutcome).index(report.outcome), report.moment, report.rank)


def _shortened(text: str) -> str:
    """``text``, or its two ends where it is long."""
    left_out = len(text) - _SHOWN_CHARACTERS
    if left_out <= 0:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]}\n... {left_out} characters left out ...\n{text[-half:]}"
