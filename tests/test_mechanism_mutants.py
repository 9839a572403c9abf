"""The tests bite: the core without any one of its mechanisms fails one that the core passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import mechanism_mutants
import pytest
from mechanism_mutants import MUTANTS, Outcome

import polyshard

#: What a slip in a mutant would raise, where a missing mechanism does not.
SLIPS = ("NameError", "UnboundLocalError", "SyntaxError", "ImportError", "ModuleNotFoundError")
SLIPS += ("AttributeError", "TypeError")


def outcomes(*arguments: str) -> list[Outcome]:
    """What the script prints."""
    done = subprocess.run(
        [sys.executable, mechanism_mutants.__file__, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


class TestList:
    def test_source(self) -> None:
        """The mutants are those of the core that is tested here."""
        assert Path(polyshard.__file__).parent.samefile(mechanism_mutants.SOURCE)

    @pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.mechanism)
    def test_in_step_with_the_source(self, mutant: mechanism_mutants.Mutant) -> None:
        """What a mutant replaces is found once in the core, and what results is Python."""
        trial = mechanism_mutants.trial(mutant)
        compile(trial.source, mutant.file, "exec")

    def test_a_mutant_that_no_longer_fits(self) -> None:
        """A mutant of words that the source no longer has is an error that names it."""
        old = mechanism_mutants.Mutant("old mechanism", "unit.py", "gone", "pass", "core::x::y")
        with pytest.raises(ValueError, match=r"'old mechanism': unit\.py has 'gone' 0 times"):
            mechanism_mutants.trial(old)

    def test_each_mechanism_once(self) -> None:
        """No two mutants are alike."""
        assert len({mutant.mechanism for mutant in MUTANTS}) == len(MUTANTS)
        assert len({(mutant.file, mutant.before) for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.timeout(600)
def test_a_sound_core_survives() -> None:
    """What kills the mutants is what they lack: with nothing replaced, all those tests pass."""
    told = outcomes("--sound")
    assert len(told) > 1
    assert not [outcome for outcome in told if outcome.error]


@pytest.mark.timeout(600)
def test_none_survives(capsys: pytest.CaptureFixture[str]) -> None:
    """For every mutant the test that is named for it fails, and by no slip in the mutant."""
    told = outcomes()
    with capsys.disabled():
        print(f"\nmutants of the core's mechanisms: {len(told)}")
        for outcome in told:
            print(f"  {outcome.mechanism} ({outcome.file}): {outcome.test or 'no test failed'}")
            print(f"      {outcome.error[:150] or 'SURVIVED'}")
    assert len(told) == len(MUTANTS)
    assert not [outcome for outcome in told if not outcome.error]
    for outcome in told:
        assert outcome.when == "call", outcome
        assert not any(f"{slip}:" in outcome.error[:100] for slip in SLIPS), outcome
