"""The race checks bite: the core without any one of its waits and releases fails one of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import race_mutants

import polyshard

SCRIPT = Path(race_mutants.__file__)


def killers(pattern: str = "") -> dict[str, str]:
    """By mutant, what killed it; an empty string where nothing did."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), pattern], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry["mutant"]: entry["killer"] for entry in told}


class TestList:
    def test_source(self) -> None:
        """The mutants are those of the core that is tested here."""
        assert Path(polyshard.__file__).parent.samefile(race_mutants.SOURCE)

    def test_every_wait_is_on_it(self) -> None:
        """Each statement of the core that calls `wait`, `settle` or `join`, or releases a buffer,
        is left out by one mutant, and nothing else is changed."""
        listed = {(mutant.module, mutant.line) for mutant in race_mutants.mutants()}
        pattern = re.compile(r"\.(wait|settle|join|release)\((?!.*\bfor\b)")
        for path in race_mutants.sources():
            for number, line in enumerate(path.read_text().splitlines(), start=1):
                if pattern.search(line) and not re.search(r"['\"]\S*\.join\(|def |\"\"\"", line):
                    assert (f"polyshard.{path.stem}", number) in listed, f"{path.name}:{number}"

    def test_what_is_left(self) -> None:
        """A mutant is the module without the one statement; what it was called on is still
        evaluated, and every other line is where it was."""
        for mutant in race_mutants.mutants():
            path = race_mutants.SOURCE / f"{mutant.module.rpartition('.')[2]}.py"
            before, after = path.read_text().splitlines(), mutant.source.splitlines()
            assert len(before) == len(after)
            changed = [
                i + 1
                for i, pair in enumerate(zip(before, after, strict=True))
                if len(set(pair)) > 1
            ]
            assert mutant.line in changed
            assert changed == list(range(mutant.line, mutant.line + len(changed)))
            compile(mutant.source, str(path), "exec")


def test_a_sound_core_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kills the mutants is what was taken out: with nothing taken out, all checks pass."""
    path = race_mutants.SOURCE / "group.py"
    sound = race_mutants.Mutant("polyshard.group", 1, "nothing", path.read_text())
    import torch

    torch.set_num_threads(1)
    assert [killer for _, killer in race_mutants.try_all([sound])] == [""]


@pytest.mark.timeout(900)
def test_none_survives(capsys: pytest.CaptureFixture[str]) -> None:
    """At least one check fails for every mutant."""
    told = killers()
    survivors = [mutant for mutant, killer in told.items() if not killer]
    races = sum("RaceError" in killer for killer in told.values())
    with capsys.disabled():
        print(
            f"\nmutants of the core's scheduling: {len(told)}, killed: "
            f"{len(told) - len(survivors)} ({races} as a race), survivors: {len(survivors)}"
        )
        for mutant in survivors:
            print(f"  survived: {mutant}")
    assert len(told) == len(list(race_mutants.mutants())) > 50
    assert not survivors
