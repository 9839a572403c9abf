"""What all tests of the repository share: nothing is passed over where a GPU has to be there."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

VARIABLE = "POLYSHARD_REQUIRE_GPU"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a failure of every skip, where the environment says so."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(VARIABLE) == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{VARIABLE}=1 allows no skips, but: {reason}"
    return report
