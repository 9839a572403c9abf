"""What the command prints: a line for each test as it ends, one for each clause, and a verdict.

Owns the wording and how pytest is started. Knows no test.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TextIO

import pytest

from ...spi import SPI_VERSION
from .clauses import TITLES, all_checks
from .subject import Subject
from .suite import BackendConformance, subject_of, suite_for

PASSED, FAILED, EXPECTED = "passed", "FAILED", "expected failure"
#: What pytest is told by its environment is meant for the tests of a project, not for these.
_PYTEST_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")


class Report:
    """A pytest plugin that says what happens and judges it in the end."""

    def __init__(self, suite: type[BackendConformance], stream: TextIO) -> None:
        self._suite, self._stream = suite, stream
        self.subject = subject_of(suite)
        self._total = 0
        self._outcomes: dict[str, tuple[str, float]] = {}
        self._failures: list[tuple[str, str]] = []

    @property
    def ran(self) -> int:
        """Tests that have run."""
        return len(self._outcomes)

    @property
    def failed(self) -> int:
        """Tests that failed otherwise than expected, and errors around tests."""
        return len(self._failures)

    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module:
        # pytest wants a file to collect, and gets this one; what it finds there is the suite.
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path)
        module.obj = ModuleType(self._suite.__name__)
        module.obj.TestBackend = self._suite
        return module

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._total = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = _name(nodeid)
        cited = ", ".join(all_checks()[name].clauses)
        self._say(f"[{self.ran + 1:>3}/{self._total}] {name} ({cited}) ", end="")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = _name(report.nodeid)
        if report.failed:
            outcome = FAILED
            self._failures.append((name, report.longreprtext))
        elif report.skipped and not hasattr(report, "wasxfail"):
            outcome = FAILED
            self._failures.append((name, "it was skipped, which is neither kept nor broken"))
        else:
            outcome = EXPECTED if report.skipped else PASSED
        self._outcomes[name] = outcome, report.duration
        reason = getattr(report, "wasxfail", "")
        self._say(f"{outcome}, {report.duration:.1f} s{reason and f': {reason}'}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failures.append((report.nodeid, report.longreprtext))

    def finish(self) -> None:
        """Print the clauses, the failures and the verdict."""
        self._say("")
        checks = [(name, check) for name, check in all_checks().items() if name in self._outcomes]
        width = max(map(len, TITLES))
        for number, title in TITLES.items():
            cited = [self._outcomes[name] for name, check in checks if number in check.clauses]
            outcomes = Counter(outcome for outcome, _ in cited)
            if not cited:
                continue
            worst = next(outcome for outcome in (FAILED, EXPECTED, PASSED) if outcomes[outcome])
            seconds = sum(duration for _, duration in cited)
            count = f"{len(cited)} test{'s' if len(cited) != 1 else ''}, {seconds:.1f} s"
            self._say(f"{number:>{width}}  {worst:<16}  {count:<18}  {title}")
        for name, text in self._failures:
            self._say(f"\n---- {name} ----\n{text.strip()}")
        self._say(f"\n{self._verdict(len(all_checks()))}")

    def _verdict(self, of: int) -> str:
        if not self._outcomes:
            return f"No test ran, so nothing is known of {self.subject}."
        part = "" if self.ran == of else f" (these are {self.ran} of {of} tests)"
        if self.failed:
            clauses = sorted(
                {
                    number
                    for name, _ in self._failures
                    if name in all_checks()
                    for number in all_checks()[name].clauses
                },
                key=list(TITLES).index,
            )
            return (
                f"{self.failed} of {self.ran} tests failed{part}: {self.subject} does not keep "
                f"clauses {', '.join(clauses)} of the contract."
            )
        version = ".".join(map(str, SPI_VERSION))
        expected = sum(outcome == EXPECTED for outcome, _ in self._outcomes.values())
        but = f", {expected} failed as expected" if expected else ""
        passed = f"{self.ran - expected} tests passed{but}{part}"
        if part or expected:
            return f"{passed}: {self.subject}."
        return f"{passed}: {self.subject} keeps the contract of interface {version}."

    def _say(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self._stream, flush=True)


def run_suite(
    subject: Subject, *, expression: str, expected_failures: Mapping[str, str], stream: TextIO
) -> int:
    """Run the suite, or the tests that ``expression`` selects as pytest's -k does.

    Returns:
        0 where a test ran and none failed; else pytest's exit code, which is not 0.

    Raises:
        TypeError: ``expected_failures`` names a test that does not exist.
    """
    report = Report(suite_for(subject, expected_failures), stream)
    here = Path(__file__)
    arguments = [
        str(here),
        # Nothing of the directory that it is started in: no settings, no conftest, no cache.
        *("-c", os.devnull, "--rootdir", str(here.parent), "--noconftest"),
        *("-p", "no:cacheprovider", "-p", "no:terminal", "--capture=sys"),
    ]
    if expression:
        arguments += ["-k", expression]
    with _without_settings():
        code = int(pytest.main(arguments, plugins=[report]))
    if code == pytest.ExitCode.USAGE_ERROR:
        return code
    report.finish()
    if code == pytest.ExitCode.OK and (report.failed or not report.ran):
        return int(pytest.ExitCode.TESTS_FAILED)
    return code


@contextmanager
def _without_settings() -> Iterator[None]:
    """Take pytest's own variables out of the environment, and plug-ins of other packages out of
    pytest."""
    kept = {name: os.environ.pop(name) for name in _PYTEST_VARIABLES if name in os.environ}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        os.environ.update(kept)


def _name(nodeid: str) -> str:
    return nodeid.rpartition("::")[2]
