"""The command `polyshard`: what it prints about which backends, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_site import Site, isolated_site, register_twice

from polyshard import BackendError
from polyshard.backends import choose_backend, explain_choice
from polyshard.cli import main
from polyshard.spi import SPI_VERSION

INTERFACE = ".".join(map(str, SPI_VERSION))
NO_CUDA = "Backend.unavailable_reason = lambda self, kind: {'cuda': 'no device'}.get(kind)"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("COLUMNS", "300")
    with isolated_site(tmp_path, monkeypatch) as site:
        yield site


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What ``polyshard backends`` prints, when it succeeds."""
    assert main(["backends", *words]) == 0
    return capsys.readouterr().out.splitlines()


def line_of(name: str, lines: list[str]) -> str:
    """The one line that begins with this word, with single spaces."""
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return " ".join(line.split())


class TestTable:
    def test_a_usable_backend(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        """Its row has name, package and version, interface version, devices, and yes."""
        site.add_backend("poly", distribution="poly-mine", version="2.5", device_types=("cpu", "x"))
        row = line_of("poly", lines_of(capsys))
        assert row == f"poly poly-mine 2.5 {INTERFACE} cpu, x yes"

    def test_one_that_cannot_work_here(
        self, site: Site, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The row has the reason, one by one where it serves several device types."""
        site.add_backend("gpu", device_types=("cuda",), body=NO_CUDA)
        site.add_backend("half", device_types=("cuda", "cpu"), body=NO_CUDA)
        lines = lines_of(capsys)
        reason = "no, it is unavailable for device type 'cuda' here: no device."
        assert line_of("gpu", lines) == f"gpu fake-gpu 1.0 {INTERFACE} cuda {reason}"
        assert line_of("half", lines).endswith(f"cpu, cuda cpu: yes. cuda: {reason}")

    def test_those_that_cannot_be_loaded(
        self, site: Site, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A broken, an incompatible and a doubly registered one have one row each, and why."""
        site.add_backend("bad", body="raise ImportError('no libbad')")
        site.add_backend("old", requires=["polyshard>=99"])
        register_twice(site)
        lines = lines_of(capsys)
        broken = "no, it is broken: importing 'fake_bad:Backend' raised ImportError: no libbad."
        assert line_of("bad", lines).startswith(f"bad fake-bad 1.0 ? ? {broken}")
        assert "it is incompatible: it requires polyshard >=99" in line_of("old", lines)
        row = line_of("twin", lines)
        assert row.startswith("twin one-backend 1.0, two-backend 1.0 ? ? no, it is registered more")

    @pytest.mark.parametrize("width", [80, 132])
    def test_long_reasons_are_wrapped(
        self,
        site: Site,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        width: int,
    ) -> None:
        """No line is longer than the terminal is wide, and no word is lost."""
        reason = "word " * 60 + "the-end"
        site.add_backend("poly", body=f"raise ImportError({reason!r})")
        monkeypatch.setenv("COLUMNS", str(width))
        lines = lines_of(capsys)
        assert max(map(len, lines)) <= width
        assert " ".join("\n".join(lines).split()).count("word word") == 30
        assert "the-end" in "\n".join(lines)

    def test_nothing_installed(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        """Without backends it says so, and what to install for each usual device."""
        lines = lines_of(capsys)
        assert lines[0] == "No backend is installed."
        for device_type, extra in (("cpu", "gloo"), ("cuda", "nccl")):
            command = f'Install one that does: pip install "polyshard[{extra}]"'
            assert line_of(device_type, lines) == f"{device_type} none {command}"


class TestChoices:
    def test_every_device_type_has_a_line(
        self, site: Site, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """cpu and cuda always, others where something serves them; each with the reason."""
        for name in ("another", "gloo"):
            site.add_backend(name, device_types=("cpu", "xpu"))
        site.add_backend("nccl", device_types=("cuda",), body="raise OSError('no driver')")
        lines = lines_of(capsys)
        assert line_of("cpu", lines) == "cpu gloo preferred on cpu"
        assert line_of("cuda", lines) == "cuda none nothing that is installed can serve it"
        reason = "the first in order of name that can serve xpu"
        assert line_of("xpu", lines) == f"xpu another {reason}"

    def test_a_defect_that_was_passed_over_is_told(self, site: Site) -> None:
        """Where a broken backend stood before the one taken, the reason says what is broken."""
        site.add_backend("gloo", body="raise OSError('no libgloo')")
        site.add_backend("other")
        choice = explain_choice("cpu")
        assert choice.name == "other"
        assert "; 'gloo' (fake-gloo 1.0) is broken: " in choice.reason
        assert "no libgloo" in choice.reason

    @pytest.mark.parametrize("named", ["", "other", "pigeon"])
    @pytest.mark.parametrize("device_type", ["cpu", "cuda"])
    def test_it_tells_what_happens(
        self, site: Site, monkeypatch: pytest.MonkeyPatch, named: str, device_type: str
    ) -> None:
        """The backend it names is the one that is taken; none where none is, with the message."""
        for name in ("gloo", "other"):
            site.add_backend(name)
        monkeypatch.setenv("POLYSHARD_BACKEND", named)
        choice = explain_choice(device_type)
        if choice.name is None:
            with pytest.raises(BackendError) as caught:
                choose_backend(None, device_type=device_type)
            assert choice.reason in str(caught.value)
            return
        assert choose_backend(None, device_type=device_type).name == choice.name
        why = "POLYSHARD_BACKEND names it" if named else f"preferred on {device_type}"
        assert choice.reason == why

    def test_the_exit_code_answers_for_one_device_type(
        self, site: Site, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """--device-type chooses for that one only, and ends with 1 where nothing can serve it."""
        site.add_backend("gloo")
        assert main(["backends", "--device-type", "cpu"]) == 0
        assert main(["backends"]) == 0
        capsys.readouterr()
        assert main(["backends", "--device-type", "cuda"]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert line_of("cuda", lines).startswith("cuda none ")
        assert not [line for line in lines if line.startswith("cpu ")]


class TestJson:
    def test_everything_is_there(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        """Programs get what the table shows, with reasons by device type."""
        site.add_backend("gloo", device_types=("cpu", "cuda"), version="3.0", body=NO_CUDA)
        answer = self.read(capsys)
        assert answer["polyshard"] == "1.4.0"
        assert answer["interface"] == list(SPI_VERSION)
        (row,) = answer["backends"]
        reasons = row.pop("reasons")
        assert list(reasons) == ["cuda"]
        assert "no device" in reasons["cuda"]
        assert row == {
            "name": "gloo",
            "package": "fake-gloo",
            "version": "3.0",
            "interface": list(SPI_VERSION),
            "device_types": ["cpu", "cuda"],
            "usable_device_types": ["cpu"],
        }
        cpu, cuda = answer["choices"]
        assert cpu == {"device_type": "cpu", "backend": "gloo", "reason": "preferred on cpu"}
        assert (cuda["device_type"], cuda["backend"]) == ("cuda", None)

    def test_a_talkative_backend_does_not_spoil_it(
        self, site: Site, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What a backend prints while it is imported goes to standard error."""
        site.add_backend("poly", body="print('hello from poly')")
        assert self.read(capsys)["backends"][0]["name"] == "poly"

    def read(self, capsys: pytest.CaptureFixture[str]) -> Any:
        assert main(["backends", "--json"]) == 0
        return json.loads(capsys.readouterr().out)


class TestCommand:
    def test_alone_it_shows_its_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a command it prints what there is, and succeeds."""
        assert main([]) == 0
        assert "backends" in capsys.readouterr().out

    def test_version(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        """--version has the package's version and that of the collective interface."""
        with pytest.raises(SystemExit) as ended:
            main(["--version"])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert said == f"polyshard 1.4.0, collective interface {INTERFACE}\n"

    @pytest.mark.parametrize("words", [["pigeons"], ["backends", "--colour"]])
    def test_what_it_does_not_understand(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        """An unknown command or option ends with 2, with the word in the message."""
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert words[-1] in capsys.readouterr().err
