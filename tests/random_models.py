"""Train small random models sharded and plain, and say where they differ.

    python tests/random_models.py --cases 5000
    python tests/random_models.py --cases 300 --strategy hfsdp --ranks 4 --seed 1000

Each seed is a case: a model, a strategy, and operations on them. A case that fails is made smaller
and written to a script that runs by itself. The exit code is 1 if any failed.

Owns the command line and what is shown.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from random_case import Case, features
from random_draw import STRATEGIES, drawn
from random_run import Failure, chunks, confirmed, outcome, run_cases
from random_script import rendered
from random_shrink import shrunk
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

CHUNK = 20
#: What making one case smaller may take, in seconds.
SHRINKING = 180.0


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options as given or by default."""
    parser = argparse.ArgumentParser(description="Compare random sharded models with plain ones.")
    parser.add_argument("--cases", type=int, default=1000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    parser.add_argument("--ranks", type=int, help="of every case (default: drawn, 2 or 4)")
    parser.add_argument("--strategy", choices=STRATEGIES, help="of every case (default: drawn)")
    parser.add_argument("--backend", default="", help="such as gloo (default: the best there is)")
    parser.add_argument("--minutes", type=float, help="begin no case after this time")
    parser.add_argument(
        "--shrink",
        type=int,
        default=12,
        help="make so many failing cases smaller (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("random-models"),
        help="where scripts of failing cases go (default: %(default)s)",
    )
    options = parser.parse_args(words)
    if options.cases < 1:
        parser.error(f"--cases must be at least 1, got {options.cases}")
    if options.ranks is not None and not 1 <= options.ranks <= 8:
        parser.error(f"--ranks must be from 1 to 8, got {options.ranks}")
    return options


class Tally:
    """What ran, what it covered and what failed."""

    def __init__(self) -> None:
        self.strategies: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.raised: Counter[str] = Counter()
        self.failures: list[tuple[Failure, Path]] = []

    @property
    def cases(self) -> int:
        return self.strategies.total()

    def add(self, cases: Sequence[Case], raised: Counter[str]) -> None:
        """Cases that ran, and the errors that both sides raised in them."""
        self.strategies.update(case.strategy for case in cases)
        for case in cases:
            self.features.update(features(case))
        self.raised.update(raised)


class Display:
    """A progress bar on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, cases: int) -> None:
        self.console, self.cases, self._said = console, cases, 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failures]} failed"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("cases", total=cases, failures=0)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """On the screen inside."""
        with self._progress:
            yield

    def update(self, done: int, failures: int) -> None:
        """So many cases are done."""
        self._progress.update(self._task, completed=done, failures=failures)
        tenth = 10 * done // self.cases
        if not self.console.is_terminal and tenth > self._said:
            self._said = tenth
            self.say(f"{done}/{self.cases} cases, {failures} failed")

    def say(self, line: str) -> None:
        """A line of its own."""
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)


def run(options: argparse.Namespace, console: Console) -> Tally:
    """All cases; scripts of those that fail are in ``options.out``."""
    tally, display = Tally(), Display(console, options.cases)
    start = time.monotonic()
    with display.shown():
        for first in range(0, options.cases, 10 * CHUNK):
            seeds = range(first, min(options.cases, first + 10 * CHUNK))
            cases = [
                drawn(
                    options.seed + seed,
                    strategy=options.strategy,
                    ranks=options.ranks,
                    backend=options.backend,
                )
                for seed in seeds
            ]
            for chunk in chunks(cases, CHUNK):
                if options.minutes and time.monotonic() - start > 60 * options.minutes:
                    return tally
                failures: list[Failure] = []
                tally.add(chunk, run_cases(chunk, failures.append))
                for failure in failures:
                    path = written(
                        failure, options.out, len(tally.failures) < options.shrink, display
                    )
                    tally.failures.append((failure, path))
                display.update(tally.cases, len(tally.failures))
    return tally


def written(failure: Failure, directory: Path, make_smaller: bool, display: Display) -> Path:
    """Confirm a failure, make its case smaller if wanted, and write the script."""
    failure = confirmed(failure)
    case, kind = failure.case, failure.kind
    display.say(f"seed {case.seed} ({case.strategy}, {case.ranks} ranks): {kind}")
    if failure.after is not None:
        before = ", ".join(map(str, failure.after)) or "none"
        display.say(f"  but it does not fail again alone; seeds that ran before it: {before}")
    elif make_smaller:
        deadline = time.monotonic() + SHRINKING

        def fails_alike(candidate: Case) -> bool:
            found = outcome(candidate) if time.monotonic() < deadline else None
            return found is not None and found.kind == kind

        case = shrunk(case, fails_alike)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"seed_{case.seed}_{case.strategy}.py"
    path.write_text(rendered(case, f"Seed {case.seed}: {kind}"))
    path.with_suffix(".txt").write_text(failure.report)
    display.say(f"  python {path}")
    return path


def show(console: Console, tally: Tally) -> None:
    """The summary."""
    groups: dict[str, list[str]] = {}
    for feature, count in sorted(tally.features.items()):
        group, _, word = feature.rpartition(": ")
        groups.setdefault(group, []).append(f"{word} {count}")
    for group, words in groups.items():
        console.print(f"{group or 'other'}: {', '.join(words)}", highlight=False, markup=False)
    summary = Table(title=f"{tally.cases} cases, {len(tally.failures)} failed")
    summary.add_column("strategy")
    summary.add_column("cases", justify="right")
    summary.add_column("failed", justify="right")
    for strategy, count in tally.strategies.items():
        failed = sum(failure.case.strategy == strategy for failure, _ in tally.failures)
        summary.add_row(strategy, str(count), str(failed))
    console.print(summary)
    raised = ", ".join(f"{name} {count}" for name, count in tally.raised.most_common())
    console.print(f"Errors raised on both sides alike: {raised or 'none'}", soft_wrap=True)
    for failure, path in tally.failures:
        line = f"seed {failure.case.seed}: {failure.kind}: python {path}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def main() -> int:
    """Run what the command line asks for; the exit code."""
    options = parse_options()
    console = Console()
    try:
        tally = run(options, console)
    except KeyboardInterrupt:
        return 130
    show(console, tally)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
