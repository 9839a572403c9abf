"""``tools/gpu_check.sh``: owns the arguments and the exit code."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import packages, report
from .registry import CHECKS, Check
from .runner import Outcome, Runner

_STRICT = "POLYSHARD_REQUIRE_GPU"
_CANNOT_START = 2


def main(arguments: Sequence[str] | None = None, checks: Sequence[Check] = CHECKS) -> int:
    """Run the checks. Returns 0, 1 where one failed, 2 where none could be started."""
    given = _parser().parse_args(arguments)
    strict = os.environ.get(_STRICT) == "1"
    if strict and given.dry_run_on_cpu:
        return _refuse(f"{_STRICT}=1 asks for a GPU, --dry-run-on-cpu for none.")
    names = [check.name for check in checks]
    if unknown := [name for name in given.only if not any(n.startswith(name) for n in names)]:
        return _refuse(f"no check begins with {', '.join(unknown)}; there are {', '.join(names)}.")
    chosen = [c for c in checks if not given.only or c.name.startswith(tuple(given.only))]
    commit, began = given.commit or _commit(), time.monotonic()
    machine: dict[str, Any] = {}
    outcomes = {check.name: Outcome(check.name, "failed", "it was not over") for check in chosen}

    def save() -> None:
        seconds = time.monotonic() - began
        order = [outcomes[check.name] for check in chosen]
        report.write(
            given.out, machine, order, commit=commit, dry_run=given.dry_run_on_cpu, seconds=seconds
        )

    def note(outcome: Outcome) -> None:
        if strict and outcome.status == "skipped":
            outcome.status, outcome.reason = "failed", f"skipped: {outcome.reason} ({_STRICT}=1)"
        outcomes[outcome.name] = outcome
        reason = f": {outcome.reason}" if outcome.reason else ""
        print(f"{outcome.name}: {outcome.status} after {outcome.seconds:.1f} s{reason}", flush=True)
        save()  # Whatever ends this process, what was found by then is there.

    # Ended from outside, it still ends what it started and removes its folder.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="polyshard-gpu-") as temporary:
        importable, scratch = Path(temporary, "packages"), Path(temporary, "scratch")
        importable.mkdir()
        scratch.mkdir()
        try:
            paths = (
                packages.from_wheels(importable, given.wheels)
                if given.wheels
                else packages.from_checkout(importable)
            )
        except (OSError, ValueError) as error:
            return _refuse(str(error))
        runner = Runner(
            scratch,
            [*paths, str(Path(__file__).parents[1])],
            dry_run=given.dry_run_on_cpu,
            seconds=given.seconds,
            jobs=given.jobs,
            note=note,
        )
        machine.update(runner.probe())
        problem = machine["problem"]
        if problem and not given.dry_run_on_cpu:
            for check in chosen:
                note(Outcome(check.name, "skipped", problem))
        else:
            runner.run(chosen)
    save()
    print((given.out / "gpu_check.md").read_text(), flush=True)
    return int(any(outcome.status == "failed" for outcome in outcomes.values()))


def _refuse(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return _CANNOT_START


def _commit() -> str | None:
    """Of the checkout, with ``+changes`` where files differ from it; None where git knows none."""
    git = ["git", "-C", str(packages.ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/gpu_check.sh",
        description="Show of polyshard what one GPU can show. See docs/gpu-check.md.",
    )
    parser.add_argument(
        "wheels", nargs="*", type=Path, help="of the packages; by default those of the checkout"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="checks that begin so"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or packages.ROOT / "build" / "gpu"),
        help="folder for the report (default: $OUT, else build/gpu)",
    )
    parser.add_argument(
        "--seconds", type=float, default=345.0, help="for all checks (default: %(default)g)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, min(6, (os.cpu_count() or 1) // 2)),
        help="checks at a time, but for those that measure (default: %(default)s)",
    )
    parser.add_argument("--commit", help="to name in the report where there is no git")
    parser.add_argument(
        "--dry-run-on-cpu",
        action="store_true",
        help="tiny models over gloo, to see that the checks themselves run; shows nothing of a GPU",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
