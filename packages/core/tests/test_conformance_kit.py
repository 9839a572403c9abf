"""The conformance kit itself: that it covers the contract, what it refuses, what it reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from polyshard.spi import SPI_VERSION
from polyshard.testing import BackendConformance, LoopbackBackend
from polyshard.testing.__main__ import main
from polyshard.testing.conformance.clauses import TITLES, all_checks

pytest_plugins = ["pytester"]

CONTRACT = Path(__file__).parents[3] / "docs" / "contract.md"
CHECKS = all_checks()


def sub_clauses() -> dict[str, str]:
    """Every sub-clause of the contract by number, with its text."""
    found = re.findall(r"^- \*\*(\d+\.\d+)\*\* (.+)$", CONTRACT.read_text(), re.MULTILINE)
    assert len(found) > 40
    return dict(found)


def core_only() -> set[str]:
    """Sub-clauses that begin with what the core owes; the race checker answers for those."""
    return {number for number, text in sub_clauses().items() if text.startswith("**core**")}


class TestCoverage:
    def test_every_clause_has_a_test(self) -> None:
        """Every sub-clause that binds a backend is cited by a test of the suite."""
        cited = {number for check in CHECKS.values() for number in check.clauses}
        assert set(sub_clauses()) - core_only() - cited == set()

    def test_every_citation_exists(self) -> None:
        """Tests cite sub-clauses that are there; "0" is what the contract says before them."""
        cited = {number for check in CHECKS.values() for number in check.clauses}
        assert cited - {"0"} <= set(sub_clauses())

    def test_every_clause_has_a_title(self) -> None:
        """Reports have a line for every clause that is tested, in the order of the contract."""
        cited = {number for check in CHECKS.values() for number in check.clauses}
        assert set(TITLES) == cited
        numbers = [tuple(map(int, number.split("."))) for number in TITLES]
        assert numbers == sorted(numbers)

    def test_core_only_clauses_are_left_to_the_core(self) -> None:
        """Of clauses that begin with the core, the suite tests only what backends owe in return."""
        cited = {number for check in CHECKS.values() for number in check.clauses}
        assert cited & core_only() == {"3.1", "4.6", "8.2"}

    def test_tests_say_what_they_demand(self) -> None:
        """Every test has a sentence that demands something, and a version that is out."""
        for name, check in CHECKS.items():
            assert check.demand.endswith("."), name
            assert (1, 0) <= check.since <= SPI_VERSION

    def test_the_class_has_every_test(self) -> None:
        """The class for pytest has all of them, with the clauses in their docstrings."""
        for name, check in CHECKS.items():
            documented = getattr(BackendConformance, name).__doc__
            assert all(number in documented for number in check.clauses)


class TestRefusals:
    NAME = "test_gathers_move_every_bit"

    def make(self, **attributes: object) -> type:
        return type(BackendConformance)(
            "TestIt",
            (BackendConformance,),
            {"backend": LoopbackBackend, "world_size": 1, **attributes},
        )

    @pytest.mark.parametrize("other", [None, lambda self: None, property(lambda self: None)])
    def test_standard_tests_cannot_be_replaced(self, other: object) -> None:
        """A subclass that overrides a test, or sets it to None, is refused."""
        with pytest.raises(TypeError, match=f"replaces {self.NAME}.*'expected_failures'"):
            self.make(**{self.NAME: other})

    def test_mixins_cannot_replace_them_either(self) -> None:
        """A test that comes from another base class counts as overridden."""
        mixin = type("Mixin", (), {self.NAME: lambda self: None})
        with pytest.raises(TypeError, match=f"replaces {self.NAME}"):
            type(BackendConformance)(
                "TestIt", (mixin, BackendConformance), {"backend": "gloo", "world_size": 1}
            )

    def test_nor_can_they_be_replaced_later(self) -> None:
        """Nor can an attribute of the finished class be set."""
        made = self.make()
        with pytest.raises(TypeError, match=f"replaces {self.NAME}"):
            setattr(made, self.NAME, None)

    @pytest.mark.parametrize(
        "mark",
        [
            pytest.mark.skip(reason="it has no averages yet"),
            pytest.mark.skipif(True, reason="its device is not here"),
            pytest.mark.xfail(reason="it has no averages yet"),
        ],
        ids=["skip", "skipif", "xfail"],
    )
    def test_marks_that_leave_out(self, mark: pytest.MarkDecorator) -> None:
        """A suite cannot be skipped or expected to fail as a whole, in either way of marking."""
        with pytest.raises(TypeError, match=r"is marked.*'expected_failures'"):
            self.make(pytestmark=[pytest.mark.usefixtures(), mark])
        with pytest.raises(TypeError, match=r"is marked.*'expected_failures'"):
            mark(self.make())

    def test_other_marks(self) -> None:
        """Marks that leave nothing out are allowed."""
        pytest.mark.usefixtures()(self.make(pytestmark=pytest.mark.filterwarnings("ignore")))

    @pytest.mark.parametrize(
        ("failures", "message"),
        [
            ({"test_nothing": "why"}, "names test_nothing, which is no test"),
            ({NAME: ""}, f"no reason for {NAME}"),
            ({NAME: " "}, f"no reason for {NAME}"),
            ({NAME: None}, f"no reason for {NAME}"),
        ],
    )
    def test_expected_failures_must_make_sense(
        self, failures: Mapping[str, str], message: str
    ) -> None:
        """An expected failure is that of a test that exists, and has a reason."""
        with pytest.raises(TypeError, match=message):
            self.make(expected_failures=failures)

    @pytest.mark.parametrize(
        ("attributes", "message"),
        [
            ({"backend": 3}, "backend must be a registered name or a subclass"),
            ({"backend": dict}, "backend must be a registered name or a subclass"),
            ({"backend": LoopbackBackend()}, "backend must be a registered name or a subclass"),
            ({"world_size": 0}, "world_size must be from 1 to"),
            ({"world_size": "4"}, "world_size must be from 1 to"),
            ({"device_type": None}, "device_type must be like 'cpu'"),
            ({"timeout": 0}, "timeout must be above 0"),
        ],
    )
    def test_attributes_must_make_sense(
        self, attributes: Mapping[str, object], message: str
    ) -> None:
        """What a suite says of itself is checked when the class is made."""
        with pytest.raises(TypeError, match=message):
            self.make(**attributes)

    def test_a_backend_must_be_named(self) -> None:
        """A suite without a backend is refused."""
        with pytest.raises(TypeError, match="set 'backend'"):
            type(BackendConformance)("TestIt", (BackendConformance,), {})

    def test_a_local_class(self) -> None:
        """A backend that other processes could not import is refused, with what to do."""

        class Local(LoopbackBackend):
            pass

        with pytest.raises(TypeError, match="move it to the top level of a module"):
            self.make(backend=Local)


SUITE = """
from polyshard.testing import BackendConformance, LoopbackBackend

class TestIt(BackendConformance):
    backend = {backend}
    world_size = 1
    expected_failures = {failures}
"""


class TestSuite:
    @pytest.mark.parametrize(
        ("failures", "selected", "outcomes", "said"),
        [
            ({}, "submit_does_not_wait", {"failed": 1}, "clause 1.1 (interface 1.0)"),
            ({"test_submit_does_not_wait": "alone"}, "submit_does_not_wait", {"xfailed": 1}, ""),
            ({"test_empty_calls_do_nothing": "alone"}, "empty_calls", {"failed": 1}, "it passes"),
            ({}, "empty_calls", {"passed": 1}, ""),
        ],
    )
    def test_expected_failures_are_strict(
        self,
        pytester: pytest.Pytester,
        failures: dict[str, str],
        selected: str,
        outcomes: dict[str, int],
        said: str,
    ) -> None:
        """A failure that is expected is reported as such, and a pass that was not fails."""
        pytester.makepyfile(SUITE.format(backend="LoopbackBackend", failures=failures))
        result = pytester.runpytest_inprocess("-k", selected, "-p", "no:cacheprovider")
        result.assert_outcomes(**outcomes)
        text = result.stdout.str()
        assert said.replace("it passes", "passes, but TestIt expects it to fail") in text
        assert "Traceback" not in text

    def test_a_backend_that_cannot_be_had(self, pytester: pytest.Pytester) -> None:
        """Every test of a backend that is not there fails with the reason in a line or two."""
        pytester.makepyfile(SUITE.format(backend="'no-such-backend'", failures={}))
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-q")
        result.assert_outcomes(failed=len(CHECKS))
        text = result.stdout.str()
        assert "No backend named 'no-such-backend' is installed" in text
        assert "Traceback" not in text
        assert len(text.splitlines()) < 5 * len(CHECKS)


LOOPBACK = "polyshard.testing.loopback:LoopbackBackend"


class TestCommand:
    def test_what_passes(self, tmp_path: Path) -> None:
        """Tests that pass are reported by test and by clause, and the exit code is 0; settings
        and a conftest of the directory it is started in are not read."""
        (tmp_path / "conftest.py").write_text("raise SystemExit('conftest')")
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
        arguments = ["--backend", LOOPBACK, "--world-size", "1", "-k", "versions or traffic"]
        ended = subprocess.run(
            [sys.executable, "-m", "polyshard.testing", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        output = ended.stdout
        assert "test_versions_stay (7.2) passed, " in output
        assert re.search(r"^ 7\.3  passed +1 test, .* traffic counts", output, re.MULTILINE)
        assert "2 tests passed (these are 2 of " in output.splitlines()[-1]
        assert sorted(os.listdir(tmp_path)) == ["conftest.py", "pytest.ini"]

    def test_what_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A failure has the clause, what it demands and what was seen; the exit code is not 0,
        unless the failure was expected."""
        arguments = ["--backend", LOOPBACK, "--world-size", "1", "-k", "submit_does_not_wait"]
        assert main(arguments) == 1
        output = capsys.readouterr().out
        assert re.search(r"^ 1\.1  FAILED ", output, re.MULTILINE)
        assert "clause 1.1 (interface 1.0): a lane runs work in order" in output
        assert "rank 0: submit on lane 'gather' ran the work before it returned" in output
        assert "1 of 1 tests failed" in output.splitlines()[-1]
        assert "does not keep clauses 1.1 of the contract" in output.splitlines()[-1]
        expected = "test_submit_does_not_wait=one rank waits for nobody"
        assert main([*arguments, "--expect-failure", expected]) == 0
        output = capsys.readouterr().out
        assert "expected failure, " in output
        assert "one rank waits for nobody" in output

    def test_nothing_ran(self, capsys: pytest.CaptureFixture[str]) -> None:
        """A run without a test is a failure, and a selection that makes no sense an error."""
        arguments = ["--backend", LOOPBACK, "--world-size", "1", "-k"]
        assert main([*arguments, "no_such_test"]) != 0
        assert "No test ran" in capsys.readouterr().out
        assert main([*arguments, "not a selection ("]) != 0
        assert "'-k'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--backend", "nosuch"), "No backend named 'nosuch' is installed"),
            (("--backend", "no.such:Backend"), "cannot be made: ModuleNotFoundError"),
            (("--backend", LOOPBACK, "--device-type", "cuda"), "unavailable for device type"),
            (("--backend", LOOPBACK, "--world-size", "0"), "from 1 to 64 ranks, not '0'"),
            (("--backend", LOOPBACK, "--world-size", "two"), "from 1 to 64 ranks, not 'two'"),
            (("--backend", LOOPBACK, "--timeout", "-1"), "seconds above 0, not '-1'"),
            (("--backend", LOOPBACK, "--expect-failure", "x"), "test_name=reason, not 'x'"),
            (("--backend", LOOPBACK, "--expect-failure", "x=y"), "x, which is no test"),
            ((), "--backend"),
        ],
        ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
    )
    def test_what_cannot_begin(
        self,
        arguments: tuple[str, ...],
        said: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """A backend or an argument that cannot be is an error of one line, with exit code 2."""
        try:
            code = main(arguments)
        except SystemExit as stopped:
            code = stopped.code
        assert code == 2
        assert said in capsys.readouterr().err.splitlines()[-1]

    def test_without_pytest(self, tmp_path: Path) -> None:
        """Where pytest is missing, the extra is named; the launcher works without it."""
        (tmp_path / "pytest.py").write_text(
            "raise ModuleNotFoundError(\"No module named 'pytest'\", name='pytest')"
        )
        program = (
            "import sys; sys.path.insert(0, '.')\n"
            "import polyshard.testing\n"
            "from polyshard.testing.__main__ import main\n"
            "print(polyshard.testing.run_ranks.__name__)\n"
            "try: polyshard.testing.BackendConformance\n"
            "except ImportError as error: print(error)\n"
            "sys.exit(main(['--backend', 'any']))\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
        )
        assert ended.stdout.splitlines()[0] == "run_ranks"
        assert "polyshard[testing]" in ended.stdout
        assert "polyshard[testing]" in ended.stderr
        assert ended.returncode == 2
