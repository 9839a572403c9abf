"""POLYSHARD_REQUIRE_GPU=1: a test that is skipped has failed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

def test_passes(): pass

def test_is_skipped(): pytest.skip("no GPU here")

@pytest.mark.skipif(True, reason="one GPU only")
def test_is_marked(): pass

@pytest.mark.xfail(strict=True, reason="not yet")
def test_is_expected_to_fail(): assert False
"""


def run(folder: Path, **environment: str) -> tuple[int, str]:
    """The exit code and the output of pytest in a folder with those tests."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "test_them.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, folder],
        cwd=folder,
        env={**os.environ, "POLYSHARD_REQUIRE_GPU": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("value", ["", "0"])
def test_skips_are_skips(tmp_path: Path, value: str) -> None:
    code, said = run(tmp_path, POLYSHARD_REQUIRE_GPU=value)
    assert code == 0, said
    assert "1 passed, 2 skipped, 1 xfailed" in said


def test_skips_are_failures(tmp_path: Path) -> None:
    """With their reasons; what is expected to fail still may."""
    code, said = run(tmp_path, POLYSHARD_REQUIRE_GPU="1")
    assert code == 1, said
    # What a mark skips fails before it begins, which pytest calls an error.
    assert "1 failed, 1 passed, 1 xfailed, 1 error" in said
    assert "allows no skips, but: Skipped: no GPU here" in said
    assert "allows no skips, but: Skipped: one GPU only" in said
