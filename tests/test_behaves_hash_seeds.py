"""Processes that order their sets differently."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from noted_steps import Seen, take_steps

from polyshard.testing import run_ranks

PROGRAM = Path(__file__).with_name("noted_steps.py")


def start(rank: int, store: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONHASHSEED": str(rank + 1)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    words = [sys.executable, str(PROGRAM), str(store), str(rank), "2"]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.behaviour(28)
def test_hash_seeds_change_nothing(tmp_path: Path) -> None:
    """With a hash seed of its own each rank submits the same work in the same order, though groups,
    outputs, ignored and clipped parameters come in sets; weights are those of equal seeds."""
    seen = []
    for process in [start(rank, tmp_path / "store") for rank in range(2)]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        seen.append(Seen(**json.loads(output)))
    assert seen[0].hashed != seen[1].hashed
    alike = run_ranks(2, take_steps)
    assert alike[0].hashed == alike[1].hashed
    for each in (*seen, *alike):
        assert any("reduce gradients" in label for label in each.labels["reduce"])
        assert each.labels == alike[0].labels
        assert each.weights.keys() == alike[0].weights.keys()
        for name, values in each.weights.items():
            assert values == pytest.approx(alike[0].weights[name], rel=1e-5, abs=1e-7), name
